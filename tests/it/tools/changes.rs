//! What a plan may do besides creating: import, move, forget, replace, leave out, refresh. And an apply of which a part fails.

use std::fs;
use std::path::PathBuf;

use integration_tests::Repository;
use job_contract::report::ChangeCounts;
use job_contract::{JobData, Tool};
use serde_json::json;

use super::{Mirrored, module};

with_both_tools! {
    an_imported_resource_is_counted_and_kept,
    a_moved_resource_keeps_its_identity,
    a_removed_resource_is_forgotten_and_not_destroyed,
    what_changed_outside_is_planned_unless_refreshing_is_off,
    a_refresh_only_run_takes_what_changed_outside_into_the_state,
    only_targets_are_made,
    a_replacement_is_counted_as_both,
    what_was_made_before_a_failure_is_kept_and_the_next_run_makes_the_rest,
}

/// The same step, with options of the tool's own.
fn with_options(step: &JobData, options: &str) -> JobData {
    let mut step = step.clone();
    let name = "TF_CLI_ARGS_plan".to_owned();
    step.environment_variables.insert(name, options.to_owned());
    step
}

/// A file outside the work tree that job 21 has made, and its module.
fn with_note(it: &Mirrored) -> (PathBuf, Repository) {
    let note = it.file("note");
    let repository = module(&format!(
        "resource \"local_file\" \"note\" {{\n  filename = \"{}\"\n  content  = \"kept\"\n}}\n",
        note.display()
    ));
    it.apply(&repository, "21");
    (note, repository)
}

fn an_imported_resource_is_counted_and_kept(tool: Tool) {
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    let id = "2020-02-12T06:36:13Z";
    let repository = module(&format!(
        "import {{\n  to = time_static.known\n  id = \"{id}\"\n}}\nresource \"time_static\" \"known\" {{\n  triggers = {{}}\n}}\noutput \"id\" {{\n  \
         value = time_static.known.id\n}}\n"
    ));
    let (plan, apply) = it.steps(&repository, "21");
    let (planned, applied) = (it.run(&plan), it.run(&apply));
    let changes = planned.report().changes.unwrap();
    assert_eq!((changes.import, changes.add), (1, 0), "{planned}");
    let context = it.machine.context(&apply);
    let change = &context["planStructuredOutput"][&plan.step_id][0];
    assert_eq!(change["action"], "import", "{change}");
    assert_eq!(change["importing"]["id"], id, "{change}");
    let changes = applied.report().changes.unwrap();
    assert_eq!((changes.import, changes.add), (1, 0), "{applied}");
    assert_eq!(it.machine.output(&apply, "id"), id);
}

fn a_moved_resource_keeps_its_identity(tool: Tool) {
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    let output = |name: &str| format!("output \"id\" {{\n  value = random_pet.{name}.id\n}}\n");
    let repository = module(&format!(
        "resource \"random_pet\" \"old\" {{}}\n{}",
        output("old")
    ));
    let (_, _, first) = it.apply(&repository, "21");
    let id = it.machine.output(&first, "id");
    let moved = format!(
        "resource \"random_pet\" \"new\" {{}}\nmoved {{\n  from = random_pet.old\n  to   = random_pet.new\n}}\n{}",
        output("new")
    );
    repository.commit(&[("main.tf", &moved)]);

    let (plan, apply) = it.steps(&repository, "22");
    let planned = it.run(&plan);
    assert!(planned.report().changes.unwrap().is_empty(), "{planned}");
    assert!(
        planned.log().contains("has moved to random_pet.new"),
        "{planned}"
    );
    // The job waits for the apply: only that moves it in the state.
    assert!(it.machine.record(&plan).plan_changes, "{planned}");
    it.run(&apply);
    assert_eq!(it.machine.resources(&apply), ["random_pet.new"]);
    assert_eq!(it.machine.output(&apply, "id"), id);
}

fn a_removed_resource_is_forgotten_and_not_destroyed(tool: Tool) {
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    let (note, repository) = with_note(&it);
    let removed =
        "removed {\n  from = local_file.note\n  lifecycle {\n    destroy = false\n  }\n}\n";
    repository.commit(&[("main.tf", removed)]);

    let (plan, apply) = it.steps(&repository, "22");
    let (planned, applied) = (it.run(&plan), it.run(&apply));
    let expected = ChangeCounts {
        // Terraform does not count them.
        forget: (tool == Tool::OpenTofu).into(),
        ..ChangeCounts::default()
    };
    for outcome in [&planned, &applied] {
        assert_eq!(outcome.report().changes, Some(expected), "{outcome}");
    }
    assert!(it.machine.resources(&apply).is_empty(), "{applied}");
    assert_eq!(fs::read_to_string(&note).unwrap(), "kept");
    let context = it.machine.context(&apply);
    for (key, step, status) in [
        ("planStructuredOutput", &plan, "planned"),
        ("applyStructuredOutput", &apply, "applied"),
    ] {
        let change = &context[key][&step.step_id][0];
        assert_eq!(change["address"], "local_file.note", "{key}: {change}");
        assert_eq!(change["action"], "unknown", "{key}: {change}");
        assert_eq!(change["actions"], json!(["forget"]), "{key}: {change}");
        assert_eq!(change["status"], status, "{key}: {change}");
    }
}

fn what_changed_outside_is_planned_unless_refreshing_is_off(tool: Tool) {
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    let (note, repository) = with_note(&it);
    fs::remove_file(&note).unwrap();
    for (job_id, refresh, planned) in [("22", false, 0), ("23", true, 1)] {
        let (plan, _) = it.steps(&repository, job_id);
        let outcome = it.run(&JobData { refresh, ..plan });
        assert_eq!(outcome.report().changes.unwrap().add, planned, "{outcome}");
    }
}

fn a_refresh_only_run_takes_what_changed_outside_into_the_state(tool: Tool) {
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    let note = it.file("note");
    let repository = module(&format!(
        "resource \"local_file\" \"note\" {{\n  filename = \"{}\"\n  content  = \"kept\"\n}}\n",
        note.display()
    ));
    let refresh_only = |step: &JobData| JobData {
        refresh_only: true,
        ..step.clone()
    };
    it.apply(&repository, "21");

    let (plan, _) = it.steps(&repository, "22");
    let outcome = it.run(&refresh_only(&plan));
    assert!(!it.machine.record(&plan).plan_changes, "{outcome}");

    fs::remove_file(&note).unwrap();
    let (plan, apply) = it.steps(&repository, "23");
    let outcome = it.run(&refresh_only(&plan));
    assert!(it.machine.record(&plan).plan_changes, "{outcome}");
    assert!(outcome.report().changes.unwrap().is_empty(), "{outcome}");
    it.run(&refresh_only(&apply));
    assert!(it.machine.resources(&apply).is_empty(), "{outcome}");
    assert!(!note.exists());
}

const TWO_PETS: &str =
    "resource \"random_pet\" \"first\" {}\nresource \"random_pet\" \"second\" {}\n";

fn only_targets_are_made(tool: Tool) {
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    let repository = module(TWO_PETS);
    let (plan, apply) = it.steps(&repository, "21");
    let outcome = it.run(&with_options(&plan, "-target=random_pet.first"));
    assert_eq!(outcome.report().changes.unwrap().add, 1, "{outcome}");
    it.run(&apply);
    assert_eq!(it.machine.resources(&apply), ["random_pet.first"]);
}

fn a_replacement_is_counted_as_both(tool: Tool) {
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    let repository = module(TWO_PETS);
    let (_, _, first) = it.apply(&repository, "21");
    let ids = |step: &JobData| {
        let state = it.machine.state(step).unwrap();
        let resources = state["resources"].as_array().unwrap().clone();
        resources
            .iter()
            .map(|resource| resource["instances"][0]["attributes"]["id"].clone())
            .collect::<Vec<_>>()
    };
    let before = ids(&first);
    let (plan, apply) = it.steps(&repository, "22");
    let outcome = it.run(&with_options(&plan, "-replace=random_pet.first"));
    let changes = outcome.report().changes.unwrap();
    assert_eq!((changes.add, changes.remove), (1, 1), "{outcome}");
    let outcome = it.run(&apply);
    let changes = outcome.report().changes.unwrap();
    assert_eq!((changes.add, changes.remove), (1, 1), "{outcome}");
    let after = ids(&apply);
    assert_ne!(before[0], after[0]);
    assert_eq!(before[1], after[1]);
}

fn what_was_made_before_a_failure_is_kept_and_the_next_run_makes_the_rest(tool: Tool) {
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    // A file is where the folder of the other would be.
    let (inside, folder) = (it.file("folder/note"), it.file("folder"));
    fs::write(&folder, "in the way").unwrap();
    let repository = module(&format!(
        "resource \"random_pet\" \"first\" {{}}\nresource \"local_file\" \"note\" {{\n  filename = \"{}\"\n  content  = \
         random_pet.first.id\n}}\nresource \"null_resource\" \"last\" {{\n  depends_on = [local_file.note]\n}}\n",
        inside.display()
    ));
    let (plan, apply) = it.steps(&repository, "21");
    it.run(&plan);
    let outcome = it.executor(&apply).run().expect_code(1);
    assert_eq!(it.machine.resources(&apply), ["random_pet.first"]);
    let progress = outcome.report().progress.clone().expect("an account");
    assert_eq!(progress.applied, 1, "{outcome}");
    assert_eq!(progress.failed, ["local_file.note"], "{outcome}");
    assert_eq!(progress.not_begun, Some(1), "{outcome}");
    assert!(
        outcome.error().contains("1 of 3 changes was made"),
        "{outcome}"
    );
    assert_eq!(it.machine.record(&apply).history.len(), 1, "{outcome}");

    fs::remove_file(&folder).unwrap();
    let (planned, _, apply) = it.apply(&repository, "22");
    assert_eq!(planned.report().changes.unwrap().add, 2, "{planned}");
    assert_eq!(it.machine.resources(&apply).len(), 3);
    assert!(inside.exists());
}
