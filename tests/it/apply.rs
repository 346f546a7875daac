//! Plan, apply and destroy as separate processes that share only the stores, as pods do.

use std::fs;
use std::path::{Path, PathBuf};

use integration_tests::machine::files_below;
use integration_tests::process::Stream;
use integration_tests::{Machine, Repository, job};
use job_contract::keys::ObjectKey;
use job_contract::status::JobStatus;
use job_contract::{JobData, StepType, Tool, env};
use nix::sys::signal::Signal;
use serde_json::json;
use test_peers::repository::git;

use crate::machine;

with_both_tools! {
    what_was_planned_is_applied_and_published,
    an_apply_leaves_changes_and_outputs_in_the_job_context,
    a_second_plan_has_no_changes_and_a_destroy_removes_everything,
    a_planned_destroy_is_applied,
    a_template_without_a_plan_is_applied_directly,
    an_apply_that_requires_a_plan_is_never_direct,
    an_apply_without_its_reviewed_plan_never_runs,
    the_plan_of_another_run_is_not_applied_in_its_place,
    a_failed_apply_still_publishes_the_state_it_left,
    an_apply_finds_the_files_of_its_plan,
    an_apply_takes_the_commit_of_its_plan,
}

/// A module that leaves a marker when it is really applied.
fn marked(machine: &Machine) -> (Repository, std::path::PathBuf) {
    let marker = machine.scratch("applied");
    let module = format!(
        "resource \"terraform_data\" \"marked\" {{\n  provisioner \"local-exec\" {{\n    command = \"touch {}\"\n  }}\n}}\n",
        marker.display()
    );
    (Repository::module(&module), marker)
}

fn planned(tool: Tool, machine: &Machine, repository: &Repository) -> (JobData, JobData) {
    let plan = job::plan_by(tool, repository);
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);
    machine.run(&plan).expect_code(0);
    (plan, apply)
}

fn what_was_planned_is_applied_and_published(tool: Tool) {
    let (machine, repository) = (machine(), Repository::fixture());
    let (_, apply) = planned(tool, &machine, &repository);

    let outcome = machine.run(&apply).expect_code(0);

    assert_eq!(
        machine.statuses(&apply),
        ("completed".into(), "completed".into())
    );
    assert_eq!(machine.resources(&apply), ["terraform_data.greeting"]);
    let output = machine.step_output(&apply);
    assert!(
        output.contains("Apply complete! Resources: 1 added, 0 changed, 0 destroyed."),
        "{outcome}"
    );
    assert!(output.contains("greeting = \"hello\""), "{outcome}");
    assert_eq!(outcome.report().changes.unwrap().add, 1);

    let history = machine.record(&apply).history;
    assert_eq!(history.len(), 1, "{history:?}");
    let state = machine.state(&apply).unwrap();
    assert_eq!(json!(history[0].serial), state["serial"]);
    assert_eq!(json!(history[0].lineage), state["lineage"]);
    let published = files_below(&machine.data_dir().join(format!(
        "local/state/{}/{}/state",
        apply.organization_id, apply.workspace_id
    )));
    assert_eq!(published.len(), 2, "{published:?}");
    let raw = published
        .iter()
        .find(|path| path.to_string_lossy().ends_with(".raw.json"))
        .unwrap();
    let raw: serde_json::Value = serde_json::from_slice(&fs::read(raw).unwrap()).unwrap();
    assert_eq!(raw, state);
}

fn an_apply_leaves_changes_and_outputs_in_the_job_context(tool: Tool) {
    let (machine, repository) = (
        machine(),
        Repository::module(
            "resource \"terraform_data\" \"a\" {\n  input = 1\n}\noutput \"open\" {\n  value = [1]\n}\noutput \"closed\" {\n  value = \"hidden-value\"\n  sensitive = true\n}\n",
        ),
    );
    let (_, apply) = planned(tool, &machine, &repository);
    machine.run(&apply).expect_code(0);

    let context = machine.context(&apply);
    let change = &context["applyStructuredOutput"][&apply.step_id][0];
    assert_eq!(change["address"], "terraform_data.a");
    assert_eq!(change["status"], "applied");
    let outputs = &context["terraformOutputs"][&apply.step_id];
    assert_eq!(outputs[0]["name"], "closed");
    assert_eq!(outputs[0]["sensitive"], true);
    assert!(outputs[0]["value"].is_null());
    assert_eq!(outputs[1]["value"], json!([1]));
    assert!(
        !serde_json::to_string(&context)
            .unwrap()
            .contains("hidden-value")
    );
    assert!(machine.step_output(&apply).contains("closed = <sensitive>"));
}

fn a_second_plan_has_no_changes_and_a_destroy_removes_everything(tool: Tool) {
    let (machine, repository) = (machine(), Repository::fixture());
    let (plan, apply) = planned(tool, &machine, &repository);
    machine.run(&apply).expect_code(0);

    let again = job::in_job(&plan, "413");
    machine.queue(&[&again]);
    machine.run(&again).expect_code(0);
    assert!(!machine.record(&again).plan_changes);

    let destroy = job::in_job(&job::step_by(tool, StepType::Destroy, &repository), "414");
    machine.queue(&[&destroy]);
    let outcome = machine.run(&destroy).expect_code(0);
    assert!(
        outcome
            .log()
            .contains("Destroy complete! Resources: 1 destroyed."),
        "{outcome}"
    );
    assert!(
        outcome
            .log()
            .contains(&format!("Running {} DESTROY", tool.banner())),
        "{outcome}"
    );
    assert_eq!(machine.resources(&destroy), <[String; 0]>::default());
}

fn a_planned_destroy_is_applied(tool: Tool) {
    let (machine, repository) = (machine(), Repository::fixture());
    let (_, apply) = planned(tool, &machine, &repository);
    machine.run(&apply).expect_code(0);

    let plan = job::in_job(
        &job::step_by(tool, StepType::PlanDestroy, &repository),
        "413",
    );
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);
    let outcome = machine.run(&plan).expect_code(0);
    assert!(
        outcome
            .log()
            .contains("0 to add, 0 to change, 1 to destroy"),
        "{outcome}"
    );
    machine.run(&apply).expect_code(0);
    assert_eq!(machine.resources(&apply), <[String; 0]>::default());
}

fn a_template_without_a_plan_is_applied_directly(tool: Tool) {
    let (machine, repository) = (machine(), Repository::fixture());
    let apply = JobData {
        variables: [("greeting".to_owned(), "direct".into())].into(),
        ..job::step_by(tool, StepType::Apply, &repository)
    };
    machine.queue(&[&apply]);
    machine.run(&apply).expect_code(0);
    assert_eq!(machine.output(&apply, "greeting"), "direct");
}

fn an_apply_that_requires_a_plan_is_never_direct(tool: Tool) {
    for ignore_error in [false, true] {
        let machine = machine();
        let (repository, marker) = marked(&machine);
        let apply = JobData {
            require_saved_plan: true,
            ignore_error,
            ..job::step_by(tool, StepType::Apply, &repository)
        };
        machine.queue(&[&apply]);
        let outcome = machine.run(&apply);
        assert_ne!(outcome.code(), 0, "{outcome}");
        assert!(
            outcome.error().contains("requires a saved plan"),
            "{outcome}"
        );
        assert!(!marker.exists(), "it was applied\n{outcome}");

        let plan = JobData {
            require_saved_plan: true,
            ..job::in_job(&job::plan_by(tool, &repository), "413")
        };
        let apply = job::apply_after(&plan);
        machine.queue(&[&plan, &apply]);
        machine.run(&plan).expect_code(0);
        machine.run(&apply).expect_code(0);
        assert!(marker.exists(), "{ignore_error}");
    }
}

fn an_apply_without_its_reviewed_plan_never_runs(tool: Tool) {
    type Spoil = fn(&Machine, &JobData);
    let spoilers: [(&str, Spoil); 4] = [
        ("missing", |machine, plan| {
            fs::remove_file(machine.plan_file(plan)).unwrap();
        }),
        ("empty", |machine, plan| {
            fs::write(machine.plan_file(plan), "").unwrap();
        }),
        ("altered", |machine, plan| {
            let mut bytes = fs::read(machine.plan_file(plan)).unwrap();
            bytes.extend_from_slice(b"more");
            fs::write(machine.plan_file(plan), bytes).unwrap();
        }),
        ("forgotten", |machine, plan| machine.set_plan(plan, None)),
    ];
    for (name, spoil) in spoilers {
        let machine = machine();
        let (repository, marker) = marked(&machine);
        let (plan, apply) = planned(tool, &machine, &repository);
        spoil(&machine, &plan);

        let outcome = machine.run(&apply);

        assert_ne!(outcome.code(), 0, "{name}: {outcome}");
        assert!(outcome.error().contains("plan"), "{name}: {outcome}");
        assert!(!marker.exists(), "{name}: it was applied\n{outcome}");
        assert_eq!(
            machine.statuses(&apply),
            ("failed".into(), "failed".into()),
            "{name}"
        );
    }
}

fn the_plan_of_another_run_is_not_applied_in_its_place(tool: Tool) {
    let machine = machine();
    let (repository, marker) = marked(&machine);
    let (plan, apply) = planned(tool, &machine, &repository);
    repository.commit(&[("more.tf", "resource \"terraform_data\" \"more\" {}\n")]);
    let other = job::in_job(&plan, "499");
    machine.queue(&[&other, &job::apply_after(&other)]);
    machine.run(&other).expect_code(0);
    fs::copy(machine.plan_file(&other), machine.plan_file(&plan)).unwrap();

    let outcome = machine.run(&apply);

    assert_ne!(outcome.code(), 0, "{outcome}");
    assert!(!marker.exists(), "{outcome}");
}

#[test]
fn a_second_executor_leaves_a_claimed_apply_alone() {
    let machine = machine();
    let gate = machine.gate();
    let repository = gate.repository();
    let (_, apply) = planned(Tool::Terraform, &machine, &repository);
    let first = machine.executor(&apply).start();
    first.running.wait_for(Stream::Stdout, "at-the-gate");

    let second = machine.run(&apply).expect_code(76);

    assert!(second.error().contains("already"), "{second}");
    assert_eq!(machine.statuses(&apply).0, "running");
    gate.open_blocking();
    first.wait().expect_code(0);
    assert_eq!(
        machine.statuses(&apply),
        ("completed".into(), "completed".into())
    );
    let third = machine.run(&apply);
    assert!(
        !third.log().contains("Running Terraform APPLY"),
        "a finished apply is not repeated\n{third}"
    );
    assert_eq!(
        machine.statuses(&apply),
        ("completed".into(), "completed".into())
    );
}

/// Somebody pushes to the branch after the review.
fn an_apply_takes_the_commit_of_its_plan(tool: Tool) {
    let machine = machine();
    let module = r#"resource "terraform_data" "deployed" {
  provisioner "local-exec" {
    command = "sh ./deploy.sh"
  }
}
"#;
    let script = "echo deploying the reviewed\n";
    let repository = Repository::with(&[("main.tf", module), ("deploy.sh", script)]);
    let (_, apply) = planned(tool, &machine, &repository);
    let reviewed = repository.head();
    let newest = repository.commit(&[
        ("deploy.sh", "echo deploying the newest\n"),
        ("more.tf", "module \"new\" {\n  source = \"./new\"\n}\n"),
        ("new/main.tf", "\n"),
    ]);

    let outcome = machine.run(&apply).expect_code(0);

    assert!(
        outcome.log().contains("deploying the reviewed"),
        "{outcome}"
    );
    assert!(!outcome.log().contains("deploying the newest"), "{outcome}");
    for text in [
        format!("Taking commit {reviewed}, of which the plan was made."),
        format!("The branch `main` has moved to {newest} since"),
    ] {
        assert!(outcome.log().contains(&text), "{outcome}");
    }
    assert_eq!(machine.record(&apply).commit_id, Some(reviewed));

    // Without a reviewed plan, the branch counts.
    let direct = job::in_job(&job::step_by(tool, StepType::Destroy, &repository), "413");
    machine.queue(&[&direct]);
    machine.run(&direct).expect_code(0);
    assert_eq!(machine.record(&direct).commit_id, Some(newest));
}

#[test]
fn an_apply_does_not_start_without_the_commit_of_its_plan() {
    let machine = machine();
    let (repository, marker) = marked(&machine);
    repository.commit(&[("notes.txt", "a\n")]);
    let (_, apply) = planned(Tool::Terraform, &machine, &repository);
    let reviewed = repository.head();
    let path = repository.path();
    git(path, &["commit", "--quiet", "--amend", "--message=forced"]);
    git(path, &["reflog", "expire", "--expire=now", "--all"]);
    git(path, &["gc", "--quiet", "--prune=now"]);

    let outcome = machine.run(&apply).expect_code(1);

    for part in [reviewed.as_str(), "the branch `main`"] {
        assert!(outcome.error().contains(part), "{outcome}");
    }
    assert!(outcome.log().contains("plan again"), "{outcome}");
    assert!(!marker.exists(), "{outcome}");
    assert_eq!(machine.statuses(&apply), ("failed".into(), "failed".into()));
}

#[test]
fn an_apply_that_names_another_commit_than_its_plan_does_not_start() {
    let machine = machine();
    let (repository, marker) = marked(&machine);
    let (_, apply) = planned(Tool::Terraform, &machine, &repository);
    let reviewed = repository.head();
    let newest = repository.commit(&[("notes.txt", "a\n")]);
    let other = JobData {
        commit_id: Some(newest.clone()),
        ..apply
    };
    let outcome = machine.run(&other).expect_code(1);
    for part in [&reviewed, &newest] {
        assert!(outcome.error().contains(part.as_str()), "{outcome}");
    }
    assert!(!marker.exists(), "{outcome}");
}

/// As under a platform's own Jobs, which start any number of pods and read no exit codes.
#[test]
fn an_executor_that_fails_before_its_claim_does_not_end_the_apply_of_another() {
    let machine = machine();
    let gate = machine.gate();
    let repository = gate.repository();
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let first = machine.executor(&apply).start();
    first.running.wait_for(Stream::Stdout, "at-the-gate");

    let without_source = JobData {
        source: Some("file:///not/there.git".into()),
        ..apply.clone()
    };
    for second in [
        machine.executor(&without_source),
        machine.executor(&apply).env(env::STATE_TYPE, "NoSuchState"),
    ] {
        let second = second.without(env::OUTCOME_EXIT_CODE).run().expect_code(76);
        assert!(second.error().contains("already taken"), "{second}");
        assert_eq!(
            machine.statuses(&apply),
            ("running".into(), "running".into())
        );
    }

    gate.open_blocking();
    first.wait().expect_code(0);
    assert_eq!(
        machine.statuses(&apply),
        ("completed".into(), "completed".into())
    );
}

fn a_failed_apply_still_publishes_the_state_it_left(tool: Tool) {
    let (machine, repository) = (
        machine(),
        Repository::module(
            "resource \"terraform_data\" \"made\" {}\nresource \"terraform_data\" \"broken\" {\n  depends_on = [terraform_data.made]\n  provisioner \"local-exec\" {\n    command = \"exit 9\"\n  }\n}\n",
        ),
    );
    let (_, apply) = planned(tool, &machine, &repository);
    let outcome = machine.run(&apply).expect_code(1);
    assert_eq!(machine.statuses(&apply), ("failed".into(), "failed".into()));
    assert!(
        machine
            .resources(&apply)
            .contains(&"terraform_data.made".to_owned()),
        "{outcome}"
    );
    assert_eq!(machine.record(&apply).history.len(), 1, "{outcome}");
    let diagnostics = &machine.context(&apply)["jobDiagnostics"][&apply.step_id];
    let changes = &machine.context(&apply)["applyStructuredOutput"][&apply.step_id];
    assert!(
        diagnostics.to_string().contains("exit status 9")
            || changes.to_string().contains("exit status 9"),
        "{diagnostics} {changes}"
    );
}

#[test]
fn a_rejected_job_runs_only_the_scripts_of_its_rejection() {
    let machine = machine();
    let (repository, marker) = marked(&machine);
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    machine.set_status(&apply, JobStatus::Rejected);
    let outcome = machine.run(&apply).expect_code(0);
    assert!(!marker.exists(), "nothing may be applied: {outcome}");
    assert!(
        outcome.log().contains("the job is already rejected"),
        "{outcome}"
    );
}

/// Plan and apply are processes of their own. What the plan said about the module's path must still be so: in pods, which
/// have a work folder at one path, and on one machine, where runs have folders of their own.
fn applied_at_the_place_of_the_plan(shared: &str) {
    let machine = machine();
    let repository = Repository::module(
        "resource \"terraform_data\" \"where\" {\n  input = abspath(path.module)\n}\n\
         output \"where\" {\n  value = terraform_data.where.output\n}\n",
    );
    let plan = job::plan(&repository);
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);
    let folder = machine.scratch("shared");
    for step in [&plan, &apply] {
        machine
            .executor(step)
            .env(shared, &folder)
            .run()
            .expect_code(0);
    }
    let place = machine.output(&apply, "where");
    let folder = folder.canonicalize().unwrap();
    assert!(
        Path::new(place.as_str().unwrap()).starts_with(&folder),
        "{place}"
    );
    assert_eq!(files_below(&folder), <[PathBuf; 0]>::default());
}

#[test]
fn the_absolute_path_of_a_module_is_the_same_in_two_pods() {
    applied_at_the_place_of_the_plan(env::WORK_DIR);
}

#[test]
fn the_absolute_path_of_a_module_is_the_same_in_two_executors_of_one_machine() {
    applied_at_the_place_of_the_plan(env::CHECKOUT_DIR);
}

#[test]
fn steps_of_one_workspace_take_turns_on_one_machine() {
    let machine = machine();
    let gate = machine.gate();
    let repository = Repository::fixture();
    let first = JobData {
        command_list: vec![job::before_init(job::bash(10, &gate.words()))],
        ..job::plan(&repository)
    };
    let second = job::in_job(&job::plan(&repository), "413");
    machine.queue(&[&first]);
    machine.queue(&[&second]);
    let checkouts = machine.scratch("checkouts");
    let start = |step: &JobData| {
        machine
            .executor(step)
            .env(env::CHECKOUT_DIR, &checkouts)
            .start()
    };
    let holder = start(&first);
    holder.running.wait_for(Stream::Stdout, "at-the-gate");

    let told = format!(
        "Waiting for another step of this workspace (job {}, step {})",
        first.job_id, first.step_id
    );
    let stopped = start(&second);
    stopped.running.wait_for(Stream::Stdout, &told);
    stopped.running.signal(Signal::SIGTERM);
    stopped.wait().expect_code(75);
    assert_eq!(machine.statuses(&second).0, "queue");

    // A crash ends the turn, but not the script, which keeps its folder. The next one removes what was left there.
    let next = start(&second);
    next.running.wait_for(Stream::Stdout, &told);
    holder.running.signal(Signal::SIGKILL);
    holder.wait();
    let told = format!(
        "(job {}, step {}) has left running in `",
        first.job_id, first.step_id
    );
    next.running.wait_for(Stream::Stdout, &told);
    assert!(
        files_below(&checkouts)
            .iter()
            .any(|file| file.ends_with("main.tf"))
    );
    gate.open_blocking();
    next.wait().expect_code(0);
    assert_eq!(files_below(&checkouts), <[PathBuf; 0]>::default());
}

#[test]
fn what_a_run_writes_beside_its_tree_reaches_no_other_run() {
    let machine = machine();
    let checkouts = machine.scratch("checkouts");
    let module = r#"resource "terraform_data" "beside" {
  triggers_replace = timestamp()
  provisioner "local-exec" {
    command = "ls -A .. | tr a-z A-Z; echo text > ../shared.txt"
  }
}
"#;
    let repository = Repository::module(module);
    let first = job::step(StepType::Apply, &repository);
    let same = job::in_job(&first, "413");
    let other = JobData {
        workspace_id: "another".to_owned(),
        ..job::in_job(&first, "414")
    };
    for step in [&first, &same, &other] {
        machine.queue(&[step]);
        let executor = machine.executor(step).env(env::CHECKOUT_DIR, &checkouts);
        let outcome = executor.run().expect_code(0);
        assert!(outcome.log().contains("TREE"), "{outcome}");
        assert!(!outcome.log().contains("SHARED.TXT"), "{outcome}");
        assert_eq!(files_below(&checkouts), <[PathBuf; 0]>::default());
    }
}

/// A module that needs what the scripts of its plan step have built, also while it is applied.
fn needs_files(machine: &Machine) -> (Repository, PathBuf) {
    let marker = machine.scratch("applied");
    let module = format!(
        r#"resource "terraform_data" "built" {{
  triggers_replace = filesha256("${{path.module}}/build/lambda.txt")
  provisioner "local-exec" {{
    command = "cat build/link notes.txt > {}"
  }}
}}
"#,
        marker.display()
    );
    (Repository::module(&module), marker)
}

const BUILD: &str = "mkdir build; echo built > build/lambda.txt; ln -s lambda.txt build/link; echo x > build/debug.log";

fn with_build(tool: Tool, repository: &Repository) -> (JobData, JobData) {
    let mut plan = JobData {
        command_list: vec![
            job::before(job::bash(1, BUILD)),
            job::after(job::bash(2, "echo late > notes.txt")),
        ],
        ..job::plan_by(tool, repository)
    };
    plan.environment_variables
        .insert(env::PLAN_FILES_EXCLUDE.to_owned(), "*.log".to_owned());
    let apply = JobData {
        command_list: Vec::new(),
        ..job::apply_after(&plan)
    };
    (plan, apply)
}

fn an_apply_finds_the_files_of_its_plan(tool: Tool) {
    let machine = machine();
    let (repository, marker) = needs_files(&machine);
    let (plan, apply) = with_build(tool, &repository);
    machine.queue(&[&plan, &apply]);
    let planned = machine.run(&plan).expect_code(0);
    let left = "Left to the apply: 3 files, 11 bytes: build/lambda.txt, build/link, notes.txt";
    assert!(planned.log().contains(left), "{planned}");
    let applied = machine.run(&apply).expect_code(0);
    assert_eq!(fs::read_to_string(&marker).unwrap(), "built\nlate\n");
    assert!(
        applied.log().contains("Taken over from the plan:"),
        "{applied}"
    );
}

#[test]
fn an_apply_uses_no_files_that_differ_from_those_of_its_plan() {
    type Change = fn(Vec<u8>) -> Option<Vec<u8>>;
    let changes: [(Change, &str); 3] = [
        (|archive| Some([&archive[..], b"x"].concat()), "was altered"),
        (|archive| Some(archive[1..].to_vec()), "was altered"),
        (|_| None, "cannot be fetched"),
    ];
    for (change, why) in changes {
        let machine = machine();
        let (repository, marker) = needs_files(&machine);
        let (plan, apply) = with_build(Tool::Terraform, &repository);
        machine.queue(&[&plan, &apply]);
        machine.run(&plan).expect_code(0);
        let (organization, workspace) = (&plan.organization_id, &plan.workspace_id);
        let key = ObjectKey::plan_files(organization, workspace, &plan.job_id, &plan.step_id);
        let stored = machine.object(&key);
        match change(fs::read(&stored).unwrap()) {
            Some(content) => fs::write(&stored, content).unwrap(),
            None => fs::remove_file(&stored).unwrap(),
        }
        let refused = machine.run(&apply).expect_code(1);
        assert!(refused.error().contains(why), "{refused}");
        assert!(!marker.exists());
    }
}

#[test]
fn files_that_are_too_large_or_switched_off_are_not_left_and_the_logs_say_so() {
    for (name, value, said) in [
        (env::PLAN_FILES_MAX_BYTES, "3", "have more than 3 bytes"),
        (env::PLAN_FILES, "false", ""),
    ] {
        let machine = machine();
        let (repository, marker) = needs_files(&machine);
        let (plan, apply) = with_build(Tool::Terraform, &repository);
        machine.queue(&[&plan, &apply]);
        let planned = machine.executor(&plan).env(name, value).run();
        let planned = planned.expect_code(0);
        assert!(planned.log().contains(said), "{planned}");
        assert!(!planned.log().contains("Left to the apply"), "{planned}");
        let applied = machine.run(&apply).expect_code(1);
        assert!(applied.log().contains(said), "{applied}");
        assert!(!marker.exists() || fs::read(&marker).unwrap().is_empty());
    }
}
