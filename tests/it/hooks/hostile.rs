//! What providers and scripts of a workspace do to have another plan judged than the one that is applied.

use std::fs;

use integration_tests::job::{bash, before};
use integration_tests::{FakeTool, Repository, job};
use job_contract::JobData;

use super::{hooks, run_plan_of, with_hooks};
use crate::machine;

/// Providers take part when the tool makes JSON of a plan.
#[test]
fn what_providers_write_does_not_reach_a_hook() {
    let (machine, repository) = (machine(), Repository::fixture());
    let look = "cat metadata.json outcome.json plan.json; ls; sleep 0.2; cat plan.json; [ ! -e result.json ]";
    hooks(&machine, &[("post-plan", look)]);
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    let provider = r#"
        folder=$(dirname "${@: -1}")
        if [ "${folder##*/}" = hook ]; then
            for file in metadata outcome result; do echo '{"summary": "forged"}' > "$folder/$file.json"; done
            setsid bash -c "while :; do echo forged > '$folder/plan.json'; done" > /dev/null 2>&1 &
            until [ -s "$folder/plan.json" ]; do sleep 0.01; done
        fi
        echo '{"resource_changes": []}'"#;
    let tool = FakeTool::new()
        .on("plan", "echo plan > \"$out\"; exit 2")
        .on("show", provider);
    let outcome = with_hooks(&machine, &plan, &tool).run().expect_code(0);
    let log = outcome.log();
    assert!(
        log.contains("\"resource_changes\"") && log.contains("plan.tfplan"),
        "{outcome}"
    );
    assert!(!log.contains("forged"), "{outcome}");
}

#[test]
fn a_plan_that_is_shown_as_two_documents_does_not_pass() {
    let (machine, repository) = (machine(), Repository::fixture());
    hooks(&machine, &[("post-plan", "exit 0")]);
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    let tool = FakeTool::new()
        .on("plan", "echo plan > \"$out\"; exit 2")
        .on("show", "echo '{\"resource_changes\": []}'; echo '{}'");
    let outcome = with_hooks(&machine, &plan, &tool).run().expect_code(1);
    assert!(
        outcome.error().contains("needs the plan as JSON"),
        "{outcome}"
    );
    assert_eq!(machine.record(&plan).terraform_plan, None);
}

#[test]
fn nothing_in_the_background_replaces_a_judged_plan() {
    let (machine, repository) = (machine(), Repository::fixture());
    let (plan, _) = run_plan_of(&machine, &repository, &[("post-plan", "exit 0")], 0);
    let replace = "setsid bash -c 'while :; do echo other > terraformLibrary.tfPlan; done' > /dev/null 2>&1 &\n                   until [ -s terraformLibrary.tfPlan ]; do sleep 0.01; done; echo left";
    let apply = JobData {
        command_list: vec![before(bash(1, replace))],
        ..job::apply_after(&plan)
    };
    let tool = FakeTool::new().on(
        "apply",
        "sleep 0.2; cat terraformLibrary.tfPlan > \"$tool/applied\"",
    );
    let outcome = with_hooks(&machine, &apply, &tool).run().expect_code(0);
    assert!(outcome.log().contains("left"), "{outcome}");
    assert_eq!(fs::read_to_string(tool.file("applied")).unwrap(), "plan\n");
}
