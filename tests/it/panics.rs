//! A panic in a phase after the claim. The tool ends by itself, its state is stored, and the outcome is reported.

use integration_tests::panic_at::PANIC_AT;
use integration_tests::{FakeTool, Machine, Outcome, Repository, job};
use job_contract::keys::local_backend_state;
use job_contract::report::StateStatus;
use job_contract::{Exit, JobData, StepType};

use crate::machine;

/// Runs a step whose executor panics where it says this.
#[track_caller]
fn run_until(said: &str, machine: &Machine, step: &JobData, tool: Option<&FakeTool>) -> Outcome {
    let executor = machine.executor(step).env(PANIC_AT, said);
    let executor = match tool {
        Some(tool) => executor.env("PATH", tool.path()),
        None => executor,
    };
    let outcome = executor.run().expect_code(i32::from(Exit::Defect.code()));
    assert!(outcome.error().contains("panicked"), "{said}: {outcome}");
    outcome
}

#[track_caller]
fn assert_reported(said: &str, machine: &Machine, step: &JobData, outcome: &Outcome) {
    assert_eq!(
        machine.statuses(step),
        ("failed".into(), "failed".into()),
        "{said}: {outcome}"
    );
    assert!(!outcome.report().unreported, "{said}: {outcome}");
    assert!(machine.output_if_any(step).is_some(), "{said}: {outcome}");
    assert!(outcome.left_behind.is_empty(), "{said}: {outcome}");
}

#[test]
fn a_panic_before_the_tool_changes_something_is_reported() {
    let repository = Repository::fixture();
    let apply = job::step(StepType::Apply, &repository);
    for said in [
        "claim finished",
        "init started",
        "init finished",
        "apply started",
    ] {
        let (machine, tool) = (machine(), FakeTool::new());
        machine.queue(&[&apply]);
        let outcome = run_until(said, &machine, &apply, Some(&tool));
        assert_reported(said, &machine, &apply, &outcome);
        assert!(!tool.was_called("apply"), "{said}: {outcome}");
    }
}

#[test]
fn a_panic_of_a_plan_is_reported_and_leaves_nothing_to_apply() {
    let repository = Repository::fixture();
    let plan = job::plan(&repository);
    let apply = job::apply_after(&plan);
    for said in [
        "plan started",
        "plan finished",
        "store finished",
        "show finished",
    ] {
        let (machine, tool) = (machine(), FakeTool::new());
        machine.queue(&[&plan, &apply]);
        let outcome = run_until(said, &machine, &plan, Some(&tool));
        assert_reported(said, &machine, &plan, &outcome);
        let recorded = machine.record(&plan).terraform_plan;
        assert_eq!(recorded.unwrap_or_default(), "", "{said}: {outcome}");
    }
}

#[test]
fn a_panic_after_the_tool_has_ended_loses_no_state() {
    let repository = Repository::fixture();
    let apply = job::step(StepType::Apply, &repository);
    for (said, state, records) in [
        ("apply finished", Some(StateStatus::Stored), 1),
        ("state started", None, 0),
        ("state finished", None, 0),
    ] {
        let machine = machine();
        machine.queue(&[&apply]);
        let outcome = run_until(said, &machine, &apply, None);
        assert_reported(said, &machine, &apply, &outcome);
        let resources = machine.resources(&apply);
        assert_eq!(resources, ["terraform_data.greeting"], "{said}: {outcome}");
        assert_eq!(outcome.report().state, state, "{said}: {outcome}");
        let history = machine.record(&apply).history;
        assert_eq!(history.len(), records, "{said}: {outcome}");
    }
}

/// The real tool renders every state.
#[test]
fn a_panic_while_a_state_is_published_loses_nothing_of_it() {
    let said = "the tool could not render the state as JSON; only the raw state is stored";
    let (machine, repository) = (machine(), Repository::fixture());
    let stored = local_backend_state(job::ORGANIZATION, job::WORKSPACE);
    let stored = machine.data_dir().join(stored).display().to_string();
    let state = r#"{"version":4,"serial":3,"lineage":"l","outputs":{},"resources":[{"type":"terraform_data","name":"made"}]}"#;
    let tool = FakeTool::new()
        .on("apply", &format!("echo '{state}' > '{stored}'"))
        .on("state", &format!("cat '{stored}'"))
        .on("show", "exit 1");
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let outcome = run_until(said, &machine, &apply, Some(&tool));
    assert_reported(said, &machine, &apply, &outcome);
    assert_eq!(machine.resources(&apply), ["terraform_data.made"]);
    let status = outcome.report().state;
    assert_eq!(status, Some(StateStatus::Unknown), "{outcome}");
}

/// The launcher reports it: the final report says that the executor has not.
#[test]
fn a_panic_before_the_report_leaves_the_outcome_to_the_launcher() {
    let (machine, repository) = (machine(), Repository::fixture());
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let outcome = run_until("report started", &machine, &apply, None);
    assert!(outcome.report().unreported, "{outcome}");
    assert_eq!(machine.resources(&apply), ["terraform_data.greeting"]);
}
