//! A plan step: what it reports, stores and shows.

use std::fs;

use integration_tests::process::Stream;
use integration_tests::{Repository, job};
use job_contract::status::JobStatus;
use job_contract::{JobData, StepType, Tool, env};
use serde_json::json;

use crate::machine;

with_both_tools! {
    a_plan_without_changes_completes_the_job,
    a_plan_with_changes_waits_for_its_apply,
    the_log_at_rest_is_the_log_as_it_ran,
    a_plan_leaves_its_changes_in_the_job_context,
    init_stays_quiet_for_command_line_runs_unless_it_fails,
    a_user_backend_is_replaced_by_the_stores,
    a_backend_that_would_win_over_the_stores_ends_the_step_before_init,
    a_backend_that_a_script_sets_up_ends_the_step_before_the_plan,
    what_an_init_of_somebody_has_left_in_the_source_is_not_used,
}

fn a_plan_without_changes_completes_the_job(tool: Tool) {
    let (machine, repository) = (machine(), Repository::module("locals { nothing = true }\n"));
    let plan = job::plan_by(tool, &repository);
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);

    let outcome = machine.run(&plan).expect_code(0);

    assert_eq!(
        machine.statuses(&plan),
        ("completed".into(), "completed".into())
    );
    assert!(!machine.record(&plan).plan_changes);
    assert_eq!(machine.statuses(&apply).1, "notExecuted");
    assert!(
        machine
            .step_output(&plan)
            .contains("No changes. Your infrastructure matches the configuration."),
        "{outcome}"
    );
    assert!(
        outcome
            .report()
            .changes
            .is_some_and(|changes| changes.is_empty())
    );
}

fn a_plan_with_changes_waits_for_its_apply(tool: Tool) {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan_by(tool, &repository);
    machine.queue(&[&plan, &job::apply_after(&plan)]);

    let outcome = machine.run(&plan).expect_code(0);

    let record = machine.record(&plan);
    assert_eq!(
        machine.statuses(&plan),
        ("pending".into(), "completed".into())
    );
    assert!(record.plan_changes);
    assert_eq!(record.commit_id, Some(repository.head()));
    assert_eq!(
        record.terraform_plan.as_deref(),
        machine.plan_file(&plan).to_str()
    );
    assert!(machine.plan_file(&plan).metadata().unwrap().len() > 0);
    assert_eq!(outcome.report().changes.unwrap().add, 1);
    assert_eq!(outcome.report().commit_id, record.commit_id);
}

#[test]
fn the_only_step_of_a_template_completes_the_job_with_changes() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    machine.run(&plan).expect_code(0);
    assert_eq!(
        machine.statuses(&plan),
        ("completed".into(), "completed".into())
    );
    assert!(machine.record(&plan).plan_changes);
}

fn the_log_at_rest_is_the_log_as_it_ran(tool: Tool) {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan_by(tool, &repository);
    machine.queue(&[&plan]);

    let outcome = machine.run(&plan).expect_code(0);

    let stored = machine.step_output(&plan);
    assert_eq!(stored, outcome.log());
    let step = format!("Initializing Terrakube Job 412 Step {}", plan.step_id);
    let init = format!("Running {} Init: ", tool.banner());
    let planning = format!("Running {} PLAN", tool.banner());
    let mut rest = stored.as_str();
    for line in [
        step.as_str(),
        init.as_str(),
        planning.as_str(),
        "terraform_data.greeting[0]: Plan to create",
        "Plan: 1 to add, 0 to change, 0 to destroy.",
    ] {
        let at = rest
            .find(line)
            .unwrap_or_else(|| panic!("{line:?} is not there, or not in order\n{outcome}"));
        rest = &rest[at + line.len()..];
    }
    // The plan for people follows the events.
    assert!(
        rest.contains(r#"+ resource "terraform_data" "greeting""#),
        "{outcome}"
    );
}

fn a_plan_leaves_its_changes_in_the_job_context(tool: Tool) {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan_by(tool, &repository);
    machine.queue(&[&plan]);
    machine.run(&plan).expect_code(0);

    let context = machine.context(&plan);
    let change = &context["planStructuredOutput"][&plan.step_id][0];
    assert_eq!(change["address"], "terraform_data.greeting[0]");
    assert_eq!(change["action"], "create");
    assert_eq!(change["resourceType"], "terraform_data");
    assert_eq!(change["after"]["input"], "hello 0");
    assert_eq!(
        context["terrakubeUI"][&plan.step_id],
        json!(r#"<div data-terrakube-structured-plan="true"></div>"#)
    );
}

#[test]
fn a_folder_a_tag_and_a_pinned_commit_are_honoured() {
    let repository = Repository::fixture();
    let first = repository.head();
    repository.commit(&[
        ("main.tf", "this is not a configuration"),
        ("stacks/app/main.tf", "neither is this"),
    ]);
    let in_folder = JobData {
        folder: Some("/stacks/app,/elsewhere".into()),
        branch: "v1.2.0".into(),
        ..job::plan(&repository)
    };
    let pinned = JobData {
        commit_id: Some(first.clone()),
        ..job::plan(&repository)
    };
    for plan in [in_folder, pinned] {
        let machine = machine();
        machine.queue(&[&plan]);
        machine.run(&plan).expect_code(0);
        assert_eq!(
            machine.record(&plan).commit_id.as_deref(),
            Some(first.as_str())
        );
    }
}

fn init_stays_quiet_for_command_line_runs_unless_it_fails(tool: Tool) {
    let quiet = |repository: &Repository| JobData {
        show_header: false,
        ..job::plan_by(tool, repository)
    };
    let fine = Repository::fixture();
    let ran = machine();
    ran.queue(&[&quiet(&fine)]);
    let outcome = ran.run(&quiet(&fine)).expect_code(0);
    assert!(!outcome.log().contains(" Init: "), "{outcome}");
    assert!(
        !outcome.log().contains("Initializing the backend"),
        "{outcome}"
    );
    assert!(outcome.log().contains(" PLAN"), "{outcome}");

    let broken = Repository::module("module \"m\" {\n  source = \"./missing\"\n}\n");
    let failed = machine();
    failed.queue(&[&quiet(&broken)]);
    let outcome = failed.run(&quiet(&broken)).expect_code(1);
    assert!(
        outcome.log().contains("Unreadable module directory"),
        "{outcome}"
    );
}

fn a_user_backend_is_replaced_by_the_stores(tool: Tool) {
    let (machine, repository) = (
        machine(),
        Repository::module(
            "terraform {\n  backend \"local\" {\n    path = \"elsewhere.tfstate\"\n  }\n}\nresource \"terraform_data\" \"a\" {}\n",
        ),
    );
    let apply = job::step_by(tool, StepType::Apply, &repository);
    machine.queue(&[&apply]);
    machine.run(&apply).expect_code(0);
    assert_eq!(machine.resources(&apply), ["terraform_data.a"]);
}

fn a_backend_that_would_win_over_the_stores_ends_the_step_before_init(tool: Tool) {
    let elsewhere =
        "terraform {\n  backend \"local\" {\n    path = \"elsewhere.tfstate\"\n  }\n}\n";
    let state = r#"{"version":4,"serial":1,"lineage":"l","outputs":{},"resources":[{}]}"#;
    let mut cases = vec![
        (Some(("zz_override.tf", elsewhere)), None),
        (Some(("terraform.tfstate", state)), None),
        (None, Some(("TF_WORKSPACE", "prod"))),
        (None, Some(("TF_CLI_ARGS_init", "-backend-config=path=x"))),
    ];
    if tool == Tool::OpenTofu {
        cases.push((Some(("terrakube_override.tofu", elsewhere)), None));
    }
    for (file, variable) in cases {
        let (machine, repository) = (machine(), Repository::fixture());
        repository.commit(file.as_slice());
        let mut apply = job::step_by(tool, StepType::Apply, &repository);
        let added = variable.map(|(name, value)| (name.to_owned(), value.to_owned()));
        apply.environment_variables.extend(added);
        machine.queue(&[&apply]);
        let outcome = machine.run(&apply).expect_code(1);
        let name = file.or(variable).unwrap().0;
        assert!(outcome.error().contains(&format!("`{name}`")), "{outcome}");
        assert!(outcome.report().hint.is_some(), "{outcome}");
        assert!(!outcome.log().contains("Initializing"), "{outcome}");
        assert_eq!(machine.state(&apply), None, "{outcome}");
    }
}

fn a_backend_that_a_script_sets_up_ends_the_step_before_the_plan(tool: Tool) {
    let (machine, repository) = (machine(), Repository::fixture());
    let binary = tool.binary();
    let script = format!("{binary} workspace new prod");
    let plan = JobData {
        command_list: vec![job::before(job::bash(1, &script))],
        ..job::plan_by(tool, &repository)
    };
    machine.queue(&[&plan]);
    let outcome = machine.run(&plan).expect_code(1);
    assert!(outcome.error().contains("`prod`"), "{outcome}");
    assert!(!outcome.log().contains(" PLAN"), "{outcome}");
}

fn what_an_init_of_somebody_has_left_in_the_source_is_not_used(tool: Tool) {
    let (machine, repository) = (machine(), Repository::fixture());
    let note =
        r#"{"version":3,"backend":{"type":"s3","config":{"bucket":"of-somebody"},"hash":1}}"#;
    repository.commit(&[
        (".terraform/terraform.tfstate", note),
        (".terraform/environment", "prod"),
    ]);
    let apply = job::step_by(tool, StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let outcome = machine.run(&apply).expect_code(0);
    for name in ["terraform.tfstate", "environment"] {
        let text = format!("Not used: `.terraform/{name}`");
        assert!(outcome.log().contains(&text), "{outcome}");
    }
    assert_eq!(machine.resources(&apply), ["terraform_data.greeting"]);
}

#[test]
fn a_plan_that_is_dispatched_again_after_its_end_is_not_made_again() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    machine.queue(&[&plan, &job::apply_after(&plan)]);
    machine.run(&plan).expect_code(0);
    let reviewed = fs::read(machine.plan_file(&plan)).unwrap();

    // The job waits for its apply, whose dispatch is on record.
    machine.set_status(&plan, JobStatus::Queue);
    let again = machine.run(&plan).expect_code(0);
    assert!(again.error().contains("has already ended"), "{again}");
    let under_stock = machine
        .executor(&plan)
        .without(env::OUTCOME_EXIT_CODE)
        .run();
    let under_stock = under_stock.expect_code(0);
    for outcome in [again, under_stock] {
        assert!(!outcome.log().contains("PLAN"), "{outcome}");
    }
    assert_eq!(
        machine.statuses(&plan),
        ("queue".into(), "completed".into())
    );
    assert!(fs::read(machine.plan_file(&plan)).unwrap() == reviewed);
}

#[test]
fn of_two_plans_at_once_the_first_to_be_reported_is_the_one_that_is_kept() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    machine.queue(&[&plan, &job::apply_after(&plan)]);
    let gate = machine.gate();
    let slow = JobData {
        command_list: vec![job::before(job::bash(1, &gate.words()))],
        ..plan.clone()
    };
    let slow = machine.executor(&slow).start();
    slow.running.wait_for(Stream::Stdout, "at-the-gate");
    machine.run(&plan).expect_code(0);
    let reviewed = fs::read(machine.plan_file(&plan)).unwrap();
    gate.open_blocking();
    slow.wait().expect_code(0);
    assert!(fs::read(machine.plan_file(&plan)).unwrap() == reviewed);
    assert_eq!(
        machine.statuses(&plan),
        ("pending".into(), "completed".into())
    );
}
