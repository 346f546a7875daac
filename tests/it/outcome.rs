//! The rows of contract 4.6 that a real tool cannot be made to show, and what the exit code says.

use std::net::TcpListener;

use integration_tests::{FakeTool, Machine, Outcome, Repository, job};
use job_contract::keys::ObjectKey;
use job_contract::report::StateStatus;
use job_contract::{JobData, StepType, env};
use nix::sys::signal::Signal;

use crate::machine;

fn run_with(machine: &Machine, tool: &FakeTool, job: &JobData) -> Outcome {
    machine.executor(job).env("PATH", tool.path()).run()
}

#[test]
fn a_plan_that_ends_in_any_odd_way_has_failed() {
    let repository = Repository::fixture();
    for ending in [
        "exit 1",
        "exit 3",
        "exit 127",
        "exit 137",
        "kill -KILL $$",
        "kill -SEGV $$",
    ] {
        let (machine, tool) = (machine(), FakeTool::new().on("plan", ending));
        let plan = job::plan(&repository);
        machine.queue(&[&plan, &job::apply_after(&plan)]);

        let outcome = run_with(&machine, &tool, &plan).expect_code(1);

        let record = machine.record(&plan);
        assert_eq!(
            machine.statuses(&plan),
            ("failed".into(), "failed".into()),
            "{ending}: {outcome}"
        );
        assert!(record.plan_changes, "{ending}");
        assert_eq!(record.terraform_plan.unwrap_or_default(), "", "{ending}");
        assert!(!machine.plan_file(&plan).exists(), "{ending}");
    }
}

#[test]
fn changes_without_a_plan_file_are_no_plan() {
    let (machine, tool, repository) = (
        machine(),
        FakeTool::new().on("plan", "exit 2"),
        Repository::fixture(),
    );
    let plan = job::plan(&repository);
    machine.queue(&[&plan, &job::apply_after(&plan)]);
    let outcome = run_with(&machine, &tool, &plan);
    assert_ne!(outcome.code(), 0, "{outcome}");
    assert_eq!(machine.statuses(&plan).0, "failed");
}

#[test]
fn ignored_errors_follow_the_table() {
    let repository = Repository::fixture();
    let rows = [
        (StepType::Plan, "plan", "completed", "failed"),
        // The local platform completes a job whose last step leaves it pending.
        (StepType::Apply, "apply", "completed", "completed"),
        (StepType::Destroy, "destroy", "failed", "failed"),
    ];
    for (step_type, subcommand, step, status) in rows {
        let (machine, tool) = (machine(), FakeTool::new().on(subcommand, "exit 1"));
        let job = JobData {
            ignore_error: true,
            on_failure_list: vec![job::bash(1, "echo on-failure-ran")],
            command_list: vec![job::after(job::bash(1, "echo after-ran"))],
            ..job::step(step_type, &repository)
        };
        machine.queue(&[&job]);
        let outcome = run_with(&machine, &tool, &job);
        assert_eq!(
            machine.statuses(&job),
            (status.into(), step.into()),
            "{subcommand}: {outcome}"
        );
        assert_eq!(
            outcome.log().contains("on-failure-ran"),
            step_type != StepType::Plan,
            "{outcome}"
        );
        assert_eq!(
            outcome.log().contains("after-ran"),
            step_type != StepType::Destroy,
            "{outcome}"
        );
    }
}

#[test]
fn a_reported_failure_exits_0_unless_the_outcome_is_asked_for() {
    let (machine, tool, repository) = (
        machine(),
        FakeTool::new().on("plan", "exit 1"),
        Repository::fixture(),
    );
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    let outcome = machine
        .executor(&plan)
        .without(job_contract::env::OUTCOME_EXIT_CODE)
        .env("PATH", tool.path())
        .run()
        .expect_code(0);
    assert_eq!(machine.statuses(&plan), ("failed".into(), "failed".into()));
    assert_eq!(outcome.report().outcome, 1);
}

#[test]
fn nothing_is_left_in_the_work_folder_whatever_happened() {
    let repository = Repository::fixture();
    for ending in ["exit 1", "echo plan > \"$out\"; exit 2"] {
        let (machine, tool) = (machine(), FakeTool::new().on("plan", ending));
        let plan = JobData {
            command_list: vec![job::before(job::bash(
                1,
                "mkdir -p deep/er; touch deep/er/file; chmod 000 deep/er/file",
            ))],
            ..job::plan(&repository)
        };
        machine.queue(&[&plan]);
        let outcome = run_with(&machine, &tool, &plan);
        assert_eq!(
            outcome.left_behind,
            <[std::path::PathBuf; 0]>::default(),
            "{outcome}"
        );
    }
}

#[test]
fn phases_are_announced_and_timed() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    let outcome = machine.run(&plan).expect_code(0);
    let names: Vec<_> = outcome
        .report()
        .phases
        .iter()
        .map(|timing| {
            serde_json::to_value(timing.phase)
                .unwrap()
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    for phase in ["workspace", "tool", "init", "plan", "store"] {
        assert!(names.iter().any(|name| name == phase), "{names:?}");
    }
    let finished = outcome
        .diagnostics()
        .into_iter()
        .filter(|line| line.event == Some(job_contract::progress::Progress::PhaseFinished))
        .count();
    assert!(finished >= names.len() - 1, "{outcome}");
}

#[test]
fn an_outcome_is_reported_even_when_the_log_cannot_be_stored() {
    let (machine, repository) = (machine(), Repository::fixture());
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    // A file where the folder of step outputs would be: storing fails as it would on a full disk.
    let outputs = machine.object(&ObjectKey::step_output(
        &apply.organization_id,
        &apply.job_id,
        &apply.step_id,
    ));
    let organization = outputs.parent().unwrap().parent().unwrap();
    std::fs::create_dir_all(organization.parent().unwrap()).unwrap();
    std::fs::write(organization, "in the way").unwrap();

    let outcome = machine.run(&apply).expect_code(1);

    assert!(
        outcome
            .error()
            .contains("could not write the stored object"),
        "{outcome}"
    );
    assert_eq!(
        machine.statuses(&apply),
        ("completed".into(), "completed".into()),
        "{outcome}"
    );
    assert!(
        !machine.resources(&apply).is_empty(),
        "the state is kept: {outcome}"
    );
}

/// What may come before the report must not take its time away.
#[test]
fn an_outcome_is_reported_although_the_store_never_answers() {
    // Long enough for what is left of it for the report to be enough on a busy machine.
    let grace = "40";
    let (machine, repository) = (machine(), Repository::fixture());
    let scripts = job::scripts(&repository, vec![job::bash(1, "echo the-work-is-done")]);
    machine.queue(&[&scripts]);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let running = machine
        .executor(&scripts)
        .env(env::STATE_TYPE, "AwsTerraformStateImpl")
        .env(env::AWS_BUCKET, "bucket")
        .env(env::AWS_REGION, "eu-central-1")
        .env(
            env::AWS_ENDPOINT,
            format!("http://{}", silent.local_addr().unwrap()),
        )
        .env(env::AWS_ACCESS_KEY, "key")
        .env(env::AWS_SECRET_KEY, "secret")
        .env(env::GRACE_PERIOD_SECONDS, grace)
        .start();
    let connection = silent.accept().unwrap();
    running.running.signal(Signal::SIGTERM);
    let outcome = running.wait();
    drop(connection);
    // Without a report before the end of the grace period, it would be killed and report nothing.
    assert_eq!(
        machine.statuses(&scripts).1,
        "completed",
        "the work was done: {outcome}"
    );
    assert!(outcome.error().contains("in time"), "{outcome}");
}

#[test]
fn an_apply_whose_state_could_not_be_copied_is_still_an_apply() {
    let (machine, repository) = (machine(), Repository::fixture());
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let copy = ObjectKey::state_json(&apply.organization_id, &apply.workspace_id, "any");
    let folder = machine.object(&copy).parent().unwrap().to_owned();
    std::fs::create_dir_all(folder.parent().unwrap()).unwrap();
    std::fs::write(&folder, "in the way").unwrap();

    let outcome = machine.run(&apply).expect_code(0);

    assert_eq!(
        machine.statuses(&apply),
        ("completed".into(), "completed".into()),
        "{outcome}"
    );
    assert_eq!(machine.resources(&apply), ["terraform_data.greeting"]);
    assert!(outcome.error().contains("could not"), "{outcome}");
    let log = machine.step_output(&apply);
    assert!(log.contains("Only the copy"), "{log}");
}

/// No real tool can be made to do this: the backends that lead elsewhere are refused before.
#[test]
fn an_apply_whose_state_the_store_does_not_have_has_failed_and_its_state_is_kept() {
    let (machine, repository) = (machine(), Repository::fixture());
    let state = r#"{"version":4,"serial":3,"lineage":"of-the-tool","outputs":{},"resources":[{}]}"#;
    let tool = FakeTool::new().on("state", &format!("echo '{state}'"));
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let outcome = run_with(&machine, &tool, &apply).expect_code(1);
    assert_eq!(machine.statuses(&apply), ("failed".into(), "failed".into()));
    for words in [
        "serial 3",
        "`of-the-tool`",
        "not where the platform reads it",
    ] {
        assert!(outcome.error().contains(words), "{outcome}");
    }
    assert_eq!(outcome.report().state, Some(StateStatus::Kept), "{outcome}");
    assert!(machine.record(&apply).history.is_empty(), "{outcome}");
    let kept = ObjectKey::errored_state(
        &apply.organization_id,
        &apply.workspace_id,
        &apply.job_id,
        &apply.step_id,
    );
    let kept = std::fs::read_to_string(machine.object(&kept)).unwrap();
    assert_eq!(kept.trim_end(), state);
}
