//! The example of a hook with policies, with the real OPA.

use std::path::Path;

use integration_tests::{Repository, job};
use job_contract::env;
use serde_json::Value;
use test_peers::skips::needed;

use super::result;
use crate::machine;

fn opa() -> Result<(), String> {
    let is_there = test_peers::installed("tools/opa").is_file();
    let missing = "OPA is not there: `cargo xtask ci tools` builds it with Go";
    is_there.then_some(()).ok_or_else(|| missing.to_owned())
}

/// A replacement of a resource, with the example's policies as they are, and with an exemption of the workspace.
fn policies_judge_a_plan() {
    let Some(()) = needed(opa()) else {
        return;
    };
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/hooks/opa");
    for (workspace, replaces, code, outcome) in [
        (job::WORKSPACE, false, 0, "passed"),
        (job::WORKSPACE, true, 1, "failed"),
        ("91c3a5be-0000-4000-8000-000000000000", true, 0, "passed"),
    ] {
        let machine = machine();
        let repository = Repository::fixture();
        let run = |job| {
            let programs = test_peers::installed("tools").canonicalize().unwrap();
            let path = std::env::var("PATH").unwrap();
            machine
                .executor(job)
                .env("PATH", format!("{path}:{}", programs.display()))
                .env(env::HOOKS_DIR, &example)
                .run()
        };
        let mut apply = job::step(job_contract::StepType::Apply, &repository);
        workspace.clone_into(&mut apply.workspace_id);
        machine.queue(&[&apply]);
        run(&apply).expect_code(0);

        let mut plan = job::in_job(&job::plan(&repository), "413");
        workspace.clone_into(&mut plan.workspace_id);
        if replaces {
            plan.step_type = Some(job_contract::StepType::PlanDestroy.name().to_owned());
        }
        machine.queue(&[&plan]);
        let ran = run(&plan).expect_code(code);
        let judged = result(&machine, &plan, "post-plan");
        assert_eq!(judged["outcome"], outcome, "{ran}");
        let checks = judged["result"]["checks"].as_array().unwrap();
        let find = |name: &str| -> &Value {
            let mut checks = checks.iter();
            checks.find(|check| check["name"] == name).unwrap()
        };
        let protected = find("protected-resources");
        assert_eq!(protected["passed"], !replaces, "{ran}");
        let level = if outcome == "passed" && replaces {
            "advisory"
        } else {
            "mandatory"
        };
        assert_eq!(protected["level"], level, "{ran}");
        assert_eq!(find("few-changes")["passed"], true);
    }
}

/// The stage has OPA.
mod tools {
    #[test]
    fn policies_judge_a_plan() {
        super::policies_judge_a_plan();
    }
}
