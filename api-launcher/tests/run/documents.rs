//! `run -f`: one document, one step.

use std::fs;

use serde_json::json;
use test_peers::process::Running;

use crate::harness::Fixture;

const WORKS: &str = r#"
[[ $type == terraformApply ]] && cp "$MAYFLY_DATA_DIR/platform/jobs/$job_id.json" "$MAYFLY_DATA_DIR/seen"
echo "$job" >"$MAYFLY_DATA_DIR/job"
record completed completed true
"#;

fn document(step_type: &str, step: &str) -> String {
    json!({
        "type": step_type, "organizationId": "org", "workspaceId": "ws", "jobId": "412", "stepId": step,
        "terraformVersion": "1.9.8", "source": "https://git.example.test/x.git", "branch": "main",
        "folder": "/", "variables": {"region": "a", "size": "1"},
        "environmentVariables": {"STAGE": "dev"},
    })
    .to_string()
}

#[test]
fn a_document_keeps_its_ids_and_takes_what_the_options_add() {
    let fixture = Fixture::new(WORKS);
    fs::write(fixture.path("job.json"), document("terraformPlan", "s1")).unwrap();
    let done = fixture.run(
        "-f job.json --var region=b --env STAGE=prod --env HOME --tool tofu --tool-version 1.10",
    );
    assert_eq!(done.code(), 0, "{}", done.stderr);
    let job: serde_json::Value = serde_json::from_str(&fixture.read("job")).unwrap();
    assert_eq!(
        (&job["jobId"], &job["stepId"]),
        (&json!("412"), &json!("s1"))
    );
    assert_eq!(job["variables"], json!({"region": "b", "size": "1"}));
    assert_eq!(job["environmentVariables"]["STAGE"], "prod");
    assert!(job["environmentVariables"]["HOME"].is_string());
    assert_eq!(
        (&job["tofu"], &job["terraformVersion"]),
        (&json!(true), &json!("1.10"))
    );
    assert_eq!(fixture.record("412")["steps"][0]["id"], "s1");
}

#[test]
fn an_apply_document_finds_the_record_its_plan_left() {
    let fixture = Fixture::new(WORKS);
    fs::write(fixture.path("plan.json"), document("terraformPlan", "s1")).unwrap();
    fs::write(fixture.path("apply.json"), document("terraformApply", "s2")).unwrap();
    assert_eq!(fixture.run("-f plan.json").code(), 0);
    let mut record = fixture.record("412");
    record["terraformPlan"] = json!("/stored/plan");
    fs::write(
        fixture.data().join("platform/jobs/412.json"),
        record.to_string(),
    )
    .unwrap();

    assert_eq!(fixture.run("-f apply.json").code(), 0);
    let seen: serde_json::Value = serde_json::from_str(&fixture.read("seen")).unwrap();
    assert_eq!(seen["terraformPlan"], "/stored/plan");
    assert_eq!(seen["status"], "queue");
    assert_eq!(seen["steps"][0]["status"], "completed");
    assert_eq!(
        (&seen["steps"][1]["id"], &seen["steps"][1]["status"]),
        (&json!("s2"), &json!("pending"))
    );
}

#[test]
fn a_document_may_come_from_standard_input() {
    let fixture = Fixture::new(WORKS);
    let mut run = Running::start_interactive(&mut fixture.launcher("-f -"));
    run.write(&document("customScripts", "s1"));
    run.close_input();
    assert_eq!(run.wait().code(), 0);
    assert_eq!(fixture.read("started"), "customScripts\n");
}

#[test]
fn what_cannot_be_decoded_is_located_and_not_quoted() {
    let fixture = Fixture::new(WORKS);
    let broken = "{\n  \"accessToken\": \"hunter2\",\n  \"tofu\": \"hunter2\"\n}";
    fs::write(fixture.path("job.json"), broken).unwrap();
    let done = fixture.run("-f job.json");
    assert_eq!(done.code(), 65);
    assert!(done.stderr.contains("line 3"), "{}", done.stderr);
    assert!(!done.stderr.contains("hunter2"), "{}", done.stderr);
    assert_eq!(fixture.read("started"), "");
}
