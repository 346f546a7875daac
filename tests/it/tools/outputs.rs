//! Sensitive values: in no log and no report, and marked where outputs are stored. Encrypted states of OpenTofu.

use std::fs;
use std::path::PathBuf;

use integration_tests::job;
use integration_tests::machine::files_below;
use integration_tests::tool::program;
use job_contract::Tool;
use job_contract::keys::ObjectKey;
use serde_json::json;
use test_peers::skips::needed;

use super::{Mirrored, module};

with_both_tools! {
    sensitive_values_are_in_no_log_and_marked_in_stored_outputs,
}

fn sensitive_values_are_in_no_log_and_marked_in_stored_outputs(tool: Tool) {
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    let repository = module(
        "resource \"random_password\" \"closed\" {\n  length  = 24\n  special = false\n}\noutput \"closed\" {\n  value     = \
         random_password.closed.result\n  sensitive = true\n}\noutput \"open\" {\n  value = \
         nonsensitive(length(random_password.closed.result))\n}\n",
    );
    let (planned, applied, apply) = it.apply(&repository, "21");
    let password = it.machine.output(&apply, "closed");
    let password = password.as_str().unwrap();
    let context = serde_json::to_string(&it.machine.context(&apply)).unwrap();
    let record = format!("{:?}", it.machine.record(&apply).history);
    for text in [
        &planned.to_string(),
        &applied.to_string(),
        &context,
        &record,
    ] {
        assert!(!text.contains(password), "{text}");
    }
    let outputs = &it.machine.context(&apply)["terraformOutputs"][&apply.step_id];
    assert_eq!(
        *outputs,
        json!([
            {"name": "closed", "type": "string", "sensitive": true, "value": null},
            {"name": "open", "type": "number", "sensitive": false, "value": 24},
        ])
    );
    assert!(
        it.machine
            .step_output(&apply)
            .contains("closed = <sensitive>")
    );
}

/// OpenTofu encrypts what it writes. What the platform shows is read through OpenTofu, and is not encrypted.
#[test]
fn an_encrypted_state_and_plan_are_used_and_stay_encrypted() {
    let tool = Tool::OpenTofu;
    if needed(program(tool)).is_none() {
        return;
    }
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    let repository = module(
        "resource \"random_pet\" \"name\" {}\noutput \"name\" {\n  value = random_pet.name.id\n}\n",
    );
    let (plan, apply) = it.steps(&repository, "21");
    it.run(&job::encrypted(&plan));
    let stored = fs::read(it.machine.plan_file(&plan)).unwrap();
    // A plan that is not encrypted is a ZIP archive.
    assert!(!stored.starts_with(b"PK"));
    let outcome = it.run(&job::encrypted(&apply));
    let state = it.machine.state(&apply).unwrap();
    assert!(state["encrypted_data"].is_string(), "{outcome}");
    assert!(state.get("outputs").is_none(), "{outcome}");

    let context = it.machine.context(&apply);
    let output = &context["terraformOutputs"][&apply.step_id][0];
    let name = output["value"].as_str().unwrap();
    let history = it.machine.record(&apply).history;
    assert_eq!(history.len(), 1, "{outcome}");
    let copy = ObjectKey::state_raw(job::ORGANIZATION, job::WORKSPACE, &history[0].lineage);
    let copies = it.machine.object(&copy).parent().unwrap().to_owned();
    let copies = files_below(&copies);
    let shows = |path: &PathBuf| fs::read_to_string(path).unwrap().contains(name);
    assert_eq!(copies.iter().filter(|path| shows(path)).count(), 2);

    let (plan, _) = it.steps(&repository, "22");
    let outcome = it.run(&job::encrypted(&plan));
    assert!(!it.machine.record(&plan).plan_changes, "{outcome}");
}
