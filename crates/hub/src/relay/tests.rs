//! Tables of requests that pass the relay, and requests that do not.

#![expect(
    clippy::needless_pass_by_value,
    reason = "the rows of a table are read best without references"
)]

use std::time::Duration;

use axum::body::Body;
use axum::http::Method;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use platform::local::LocalPlatform;
use platform::terrakube::{Terrakube, TerrakubeConfig, TokenSource};
use pool_protocol::id::{LeaseId, TaskId};
use pool_protocol::task::TaskState;
use pool_store::state::{EndReason, TaskEnd};
use pool_store::{Refusal, TaskView};
use rstest::rstest;
use serde_json::{Value, json};
use test_peers::http::{Request, Response, Server};
use url::Url;

use super::forward::{Asked, MAX_CONTEXT, MAX_RECORDED_CONTEXT, Outgoing, ToTerrakube};
use super::rules::{self, Call, RelayRefusal};
use super::turns::Turns;
use super::{Destination, body};
use crate::budget::Budget;
use crate::sample_views::task;
use crate::step_of;

fn call(request: &str) -> Result<Call, RelayRefusal> {
    let (method, target) = request.split_once(' ').unwrap();
    let (path, query) = match target.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (target, None),
    };
    let path: Vec<&str> = path.split('/').collect();
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    Call::find(&method, &path, query, &step_of(&task(TaskState::Running)))
}

#[rstest]
#[case("GET api/v1/organization/org/job/412", Call::ReadJob)]
#[case("GET api/v1/organization/org/job/412?include=step", Call::ReadJob)]
#[case("PATCH api/v1/organization/org/job/412", Call::ChangeJob)]
#[case("PATCH api/v1/organization/org/job/412/step/plan-id", Call::ChangeStep)]
#[case("POST api/v1/organization/org/workspace/ws/history", Call::AddHistory)]
#[case(
    "GET api/v1/organization/org/workspace/ws/history?filter%5Bhistory%5D=jobReference%3D%3D%27412%27",
    Call::ReadHistory
)]
#[case("POST logs/412/setup-consumer-groups", Call::SetUpLog)]
#[case("POST logs", Call::AddLines)]
#[case("GET context/v1/412", Call::ReadContext)]
#[case("POST context/v1/412", Call::WriteContext)]
#[case(
    "GET remote/tfe/v2/configuration-versions/0b1f6c1e/terraformContent.tar.gz",
    Call::ReadContent
)]
#[case("GET tofu/index.json", Call::ReadReleases)]
#[case("POST live", Call::ShowChanges)]
#[case("GET registry", Call::ReadHosts)]
#[case("GET registry/modules/v1/acme/net/aws/versions", Call::ReadRegistry)]
#[case(
    "GET registry/modules/v1/acme/net/aws/1.2.0/download",
    Call::ReadRegistry
)]
#[case(
    "GET registry/modules/v1/download/acme/net/aws/1.2.0/module.zip",
    Call::ReadModule
)]
#[case("GET registry/providers/v1/acme/dns/versions", Call::ReadRegistry)]
#[case(
    "GET registry/providers/v1/acme/dns/1.2.0/download/linux/amd64",
    Call::ReadRegistry
)]
fn requests_of_executors_pass(#[case] request: &str, #[case] expected: Call) {
    assert_eq!(call(request), Ok(expected));
}

#[rstest]
#[case::job("GET api/v1/organization/org/job/413")]
#[case::job_change("PATCH api/v1/organization/org/job/413")]
#[case::organization("GET api/v1/organization/other/job/412")]
#[case::step("PATCH api/v1/organization/org/job/412/step/apply-id")]
#[case::step_of_another_job("PATCH api/v1/organization/org/job/413/step/plan-id")]
#[case::workspace("POST api/v1/organization/org/workspace/other/history")]
#[case::log("POST logs/413/setup-consumer-groups")]
#[case::context("GET context/v1/413")]
#[case::context_change("POST context/v1/413")]
fn requests_about_another_run_are_refused(#[case] request: &str) {
    assert_eq!(
        call(request),
        Err(RelayRefusal::Request("it is about another run"))
    );
}

#[rstest]
#[case::method("DELETE api/v1/organization/org/job/412")]
#[case::post_to_a_job("POST api/v1/organization/org/job/412")]
#[case::put("PUT context/v1/412")]
#[case::method_of_another_case("get tofu/index.json")]
#[case::list("GET api/v1/organization/org/job")]
#[case::organization("GET api/v1/organization/org")]
#[case::variables("GET api/v1/organization/org/workspace/ws/variable")]
#[case::workspace("PATCH api/v1/organization/org/workspace/ws")]
#[case::below_a_job("GET api/v1/organization/org/job/412/step")]
#[case::graphql("POST graphql/api/v1")]
#[case::state("GET tfstate/v1/organization/org/workspace/ws/state/terraform.tfstate")]
#[case::tokens("GET pat/v1")]
#[case::dots("GET api/v1/organization/org/job/412/../413")]
#[case::dots_at_the_end("GET context/v1/..")]
#[case::a_dot("GET ./tofu/index.json")]
#[case::encoded_dots("GET context/v1/412/%2e%2e/413")]
#[case::encoded_slash("GET api/v1/organization/org/job%2F413")]
#[case::encoded_slash_in_an_id("GET context/v1/412%2F..%2F413")]
#[case::double_encoding("GET context/v1/%252e%252e")]
#[case::encoded_letter("GET %63ontext/v1/412")]
#[case::empty_part("GET api//v1/organization/org/job/412")]
#[case::slash_at_the_end("GET context/v1/412/")]
#[case::slash_at_the_start("GET /context/v1/412")]
#[case::nothing("GET ")]
#[case::matrix_parameter("GET context/v1/412;x=1")]
#[case::back_slash("GET context\\v1\\412")]
#[case::at("GET @evil.example.test/context/v1/412")]
#[case::null("GET context/v1/412%00")]
#[case::more_of_an_id("GET context/v1/4120")]
#[case::less_of_an_id("GET context/v1/41")]
#[case::change_of_the_registry("POST registry/modules/v1/acme/net/aws/versions")]
#[case::readme_of_a_module("GET registry/readme/v1/acme/net/aws/1.2.0/download")]
#[case::discovery("GET registry/.well-known/terraform.json")]
#[case::dots_in_the_registry("GET registry/modules/v1/acme/../aws/versions")]
#[case::encoded_namespace("GET registry/modules/v1/acme%2F..%2Fother/net/aws/versions")]
#[case::content_of_another_name("GET remote/tfe/v2/configuration-versions/x/terraform.tar.gz")]
fn other_requests_are_refused(#[case] request: &str) {
    assert!(call(request).is_err(), "{request}");
}

#[rstest]
#[case("GET api/v1/organization/org/job/412?include=step,workspace")]
#[case("GET api/v1/organization/org/job/412?include=step&include=workspace")]
#[case("GET api/v1/organization/org/job/412?fields[job]=tcl")]
#[case("GET context/v1/412?job=413")]
#[case("PATCH api/v1/organization/org/job/412?include=step")]
#[case("GET api/v1/organization/org/workspace/ws/history")]
#[case("GET api/v1/organization/org/workspace/ws/history?filter[history]=jobReference=='413'")]
#[case(
    "GET api/v1/organization/org/workspace/ws/history?filter[history]=jobReference=='412'&include=workspace"
)]
#[case("POST logs?jobId=413")]
fn other_queries_are_refused(#[case] request: &str) {
    let expected = RelayRefusal::Request("its query is not one that this path takes");
    assert_eq!(call(request), Err(expected));
}

#[rstest]
#[case("GET workspace/ws")]
#[case("PATCH workspace/ws")]
#[case("GET workspace/ws?include=variable,history")]
#[case("GET workspace/ws/variable?page%5Bsize%5D=10")]
#[case("POST workspace/ws/variable")]
#[case("PATCH workspace/ws/variable/1")]
#[case("DELETE workspace/ws/variable/1")]
#[case("GET workspace/ws/schedule")]
#[case("GET workspace/ws/history/1")]
#[case("GET job/412?include=step")]
#[case("GET job/412/step")]
#[case("POST job")]
fn scripts_may_ask_about_their_workspace_and_job(#[case] request: &str) {
    let (method, rest) = request.split_once(' ').unwrap();
    let request = format!("{method} scripts/api/v1/organization/org/{rest}");
    assert_eq!(call(&request), Ok(Call::OfScript));
}

#[rstest]
#[case::workspace("GET api/v1/organization/org/workspace/other")]
#[case::variables("GET api/v1/organization/org/workspace/other/variable")]
#[case::job("GET api/v1/organization/org/job/413")]
#[case::organization("GET api/v1/organization/other/workspace/ws")]
#[case::organization_itself("GET api/v1/organization/org")]
#[case::jobs("GET api/v1/organization/org/job")]
#[case::change_of_a_job("PATCH api/v1/organization/org/job/412")]
#[case::end_of_a_workspace("DELETE api/v1/organization/org/workspace/ws")]
#[case::change_of_the_history("POST api/v1/organization/org/workspace/ws/history")]
#[case::schedule("POST api/v1/organization/org/workspace/ws/schedule")]
#[case::tags("PATCH api/v1/organization/org/workspace/ws/workspaceTag/1")]
#[case::tokens("GET api/v1/organization/org/workspace/ws/access")]
#[case::secrets("GET api/v1/organization/org/vcs")]
#[case::job_of_the_workspace("GET api/v1/organization/org/workspace/ws/job/413")]
#[case::way_back("GET api/v1/organization/org/workspace/ws/organization")]
#[case::relationship("GET api/v1/organization/org/workspace/ws/relationships/organization")]
#[case::deeper("GET api/v1/organization/org/workspace/ws/variable/1/workspace")]
#[case::graphql("POST graphql/api/v1")]
#[case::encoded("GET api/v1/organization/org/workspace/ws%2Fvariable")]
#[case::included("GET api/v1/organization/org/workspace/ws?include=organization")]
#[case::included_deeper("GET api/v1/organization/org/workspace/ws?include=history.job")]
#[case::included_twice(
    "GET api/v1/organization/org/workspace/ws?include=history&include=organization.vcs"
)]
#[case::filter(
    "GET api/v1/organization/org/workspace/ws/variable?filter=workspace.organization.vcs.clientSecret=='a*'"
)]
#[case::sorted("GET api/v1/organization/org/workspace/ws/variable?sort=workspace.name")]
#[case::executors_only("POST logs")]
#[case::context_of_another_job("GET context/v1/413")]
fn other_requests_of_scripts_are_refused(#[case] request: &str) {
    let (method, rest) = request.split_once(' ').unwrap();
    let found = call(&format!("{method} scripts/{rest}"));
    assert!(matches!(found, Err(RelayRefusal::Request(_))), "{found:?}");
}

#[rstest]
#[case("workspace/ws/variable", json!({"type": "variable", "attributes": {"key": "a"}}))]
#[case("workspace/ws/variable/1", json!({"type": "variable", "id": "1", "attributes": {}}))]
#[case("workspace/ws", json!({"type": "workspace", "id": "ws", "attributes": {"locked": true}}))]
#[case("job", json!({"type": "job", "attributes": {"tcl": "Zmxvdzo="},
    "relationships": {"workspace": {"data": {"type": "workspace", "id": "ws"}}}}))]
fn documents_of_scripts_pass(#[case] path: &str, #[case] data: Value) {
    assert!(document_of_script(path, data).is_ok());
}

#[rstest]
#[case::type_("workspace/ws/variable", json!({"type": "vcs", "attributes": {}}))]
#[case::id("workspace/ws", json!({"type": "workspace", "id": "other", "attributes": {}}))]
#[case::no_id("workspace/ws/variable/1", json!({"type": "variable", "attributes": {}}))]
#[case::moved("workspace/ws", json!({"type": "workspace", "id": "ws", "attributes": {},
    "relationships": {"organization": {"data": {"type": "organization", "id": "other"}}}}))]
#[case::moved_to_its_own("workspace/ws/variable", json!({"type": "variable", "attributes": {},
    "relationships": {"workspace": {"data": {"type": "workspace", "id": "ws"}}}}))]
#[case::job_of_no_workspace("job", json!({"type": "job", "attributes": {}}))]
#[case::job_of_another_workspace("job", json!({"type": "job", "attributes": {},
    "relationships": {"workspace": {"data": {"type": "workspace", "id": "other"}}}}))]
#[case::attribute_that_is_a_relationship("workspace/ws/variable/1", json!({"type": "variable", "id": "1",
    "attributes": {"workspace": {"id": "other"}}}))]
#[case::attribute_with_the_id_of_a_relationship("workspace/ws", json!({"type": "workspace", "id": "ws",
    "attributes": {"vcs": "other"}}))]
#[case::record_of_any_organization("workspace/ws", json!({"type": "workspace", "id": "ws",
    "attributes": {"moduleSshKey": "other"}}))]
#[case::end_of_a_workspace("workspace/ws", json!({"type": "workspace", "id": "ws", "attributes": {"deleted": true}}))]
#[case::value_with_fields("workspace/ws/variable/1", json!({"type": "variable", "id": "1",
    "attributes": {"value": {"id": "other"}}}))]
#[case::status_of_a_new_job("job", json!({"type": "job", "attributes": {"status": "completed"},
    "relationships": {"workspace": {"data": {"type": "workspace", "id": "ws"}}}}))]
#[case::template_of_any_organization("job", json!({"type": "job", "attributes": {"templateReference": "t"},
    "relationships": {"workspace": {"data": {"type": "workspace", "id": "ws"}}}}))]
#[case::list("workspace/ws/variable", json!([{"type": "variable", "attributes": {}}]))]
fn other_documents_of_scripts_are_refused(#[case] path: &str, #[case] data: Value) {
    let refused = document_of_script(path, data);
    assert!(matches!(refused, Err(RelayRefusal::Body(_))), "{refused:?}");
}

fn document_of_script(path: &str, data: Value) -> Result<Vec<u8>, RelayRefusal> {
    let path = format!("api/v1/organization/org/{path}");
    let path: Vec<_> = path.split('/').collect();
    let bytes = json!({ "data": data }).to_string();
    let step = step_of(&task(TaskState::Running));
    super::scripts::document(&path, bytes.as_bytes(), &step)
}

#[test]
fn a_path_is_split_without_decoding() {
    let (task, lease) = (TaskId::new(), LeaseId::new());
    let relay = pool_protocol::path::relay(task, lease);
    let path = format!("{relay}/context/v1/4%2e12");
    let target = rules::split(&path).unwrap();
    assert_eq!((target.task, target.lease), (task, lease));
    assert_eq!(target.path, ["context", "v1", "4%2e12"]);
    for other in [
        relay.clone(),
        relay.replace("/leases/", "/leases%2f"),
        format!("/x{relay}/logs"),
        format!("/api/v1/executor/tasks/{task}/leases/x/platform/logs"),
    ] {
        assert!(rules::split(&other).is_none(), "{other}");
    }
}

fn check(call: Call, document: &Value) -> Result<Vec<u8>, RelayRefusal> {
    check_bytes(call, document.to_string().as_bytes())
}

fn check_bytes(call: Call, bytes: &[u8]) -> Result<Vec<u8>, RelayRefusal> {
    let step = step_of(&task(TaskState::Running));
    body::check(call, bytes, &step, Some(&PUBLIC.parse().unwrap()))
}

fn change(kind: &str, id: &str, attributes: Value) -> Value {
    json!({"data": {"type": kind, "id": id, "attributes": attributes}})
}

fn history(mut attributes: Value) -> Value {
    for (name, value) in [
        ("serial", json!(1)),
        ("md5", json!("0")),
        ("lineage", json!("0")),
    ] {
        let known = attributes.as_object_mut().unwrap();
        known.entry(name).or_insert(value);
    }
    json!({"data": {"type": "history", "attributes": attributes}})
}

const PUBLIC: &str = "https://tk.example.test/base/";
const OUTPUT: &str =
    "https://tk.example.test/base/tfoutput/v1/organization/org/job/412/step/plan-id";
const STATE: &str =
    "https://tk.example.test/base/tfstate/v1/organization/org/workspace/ws/state/f.json";

#[rstest]
#[case(Call::ChangeJob, change("job", "412", json!({"status": "running", "commitId": "9f"})))]
#[case(
    Call::ChangeJob,
    change("job", "412", json!({"status": "pending", "planChanges": true, "output": "", "terraformPlan": "s3://x"}))
)]
#[case(Call::ChangeStep, change("step", "plan-id", json!({"status": "failed", "output": OUTPUT, "name": "no disk"})))]
#[case(
    Call::AddHistory,
    history(json!({"output": STATE, "jobReference": "412", "serial": 3}))
)]
#[case(
    Call::AddLines,
    json!({"data": [{"jobId": 412, "stepId": "plan-id", "lineNumber": 1, "output": "{\"jobId\": 413}"}]})
)]
#[case(Call::AddLines, json!({"data": []}))]
fn reports_about_the_run_pass(#[case] call: Call, #[case] document: Value) {
    let sent = check(call, &document).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&sent).unwrap(), document);
}

#[rstest]
#[case::another_host("https://evil.example.test/tk.example.test")]
#[case::another_port("https://tk.example.test:8443/base")]
#[case::a_script("javascript://tk.example.test/%0aalert(1)/")]
#[case::a_user("https://tk.example.test@evil.example.test/")]
fn an_address_below_another_one_becomes_the_platforms(#[case] other: &str) {
    let elsewhere = |own: &str| own.replacen(PUBLIC.trim_end_matches('/'), other, 1);
    let step = |output: &str| change("step", "plan-id", json!({"output": output}));
    let state = |output: &str| history(json!({"output": output, "jobReference": "412"}));
    for (call, document, expected) in [
        (Call::ChangeStep, step(&elsewhere(OUTPUT)), step(OUTPUT)),
        (Call::AddHistory, state(&elsewhere(STATE)), state(STATE)),
    ] {
        let sent = check(call, &document).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&sent).unwrap(), expected);
    }
}

#[rstest]
#[case::other_job(Call::ChangeJob, change("job", "413", json!({"status": "failed"})))]
#[case::other_type(Call::ChangeJob, change("step", "412", json!({"status": "failed"})))]
#[case::number(Call::ChangeJob, json!({"data": {"type": "job", "id": 412, "attributes": {}}}))]
#[case::no_id(Call::ChangeJob, json!({"data": {"type": "job", "attributes": {}}}))]
#[case::list(Call::ChangeJob, json!({"data": [{"type": "job", "id": "412", "attributes": {}}]}))]
#[case::status(Call::ChangeJob, change("job", "412", json!({"status": "approved"})))]
#[case::queue(Call::ChangeJob, change("job", "412", json!({"status": "queue"})))]
#[case::no_status(Call::ChangeJob, change("job", "412", json!({"status": null})))]
#[case::template(Call::ChangeJob, change("job", "412", json!({"tcl": "Zmxvdzo="})))]
#[case::source(Call::ChangeJob, change("job", "412", json!({"overrideSource": "https://evil"})))]
#[case::plan_changes(Call::ChangeJob, change("job", "412", json!({"planChanges": "true"})))]
#[case::plan(Call::ChangeJob, change("job", "412", json!({"terraformPlan": 1})))]
#[case::commit(Call::ChangeJob, change("job", "412", json!({"commitId": null})))]
#[case::text(Call::ChangeJob, change("job", "412", json!({"output": false})))]
#[case::step_name(Call::ChangeStep, change("step", "plan-id", json!({"name": 7})))]
#[case::step_status(Call::ChangeStep, change("step", "plan-id", json!({"status": "pending"})))]
#[case::serial(Call::AddHistory, history(json!({"output": STATE, "jobReference": "412", "serial": "1"})))]
#[case::negative_serial(Call::AddHistory, history(json!({"output": STATE, "jobReference": "412", "serial": -1})))]
#[case::digest(Call::AddHistory, history(json!({"output": STATE, "jobReference": "412", "md5": [1]})))]
#[case::field_of_a_history(Call::AddHistory, history(json!({"output": STATE, "jobReference": "412", "id": "1"})))]
#[case::long_digest(Call::AddHistory, history(json!({"output": STATE, "jobReference": "412", "md5": "x".repeat(257)})))]
#[case::long_lineage(Call::AddHistory, history(json!({"output": STATE, "jobReference": "412", "lineage": "x".repeat(257)})))]
#[case::nested(Call::ChangeJob, change("job", "412", json!({"output": {"a": 1}})))]
#[case::relationships(
    Call::ChangeJob,
    json!({"data": {"type": "job", "id": "412", "attributes": {}, "relationships": {"workspace": {}}}})
)]
#[case::included(Call::ChangeJob, json!({"data": {"type": "job", "id": "412", "attributes": {}}, "included": []}))]
#[case::operations(Call::ChangeJob, json!({"atomic:operations": []}))]
#[case::other_step(Call::ChangeStep, change("step", "apply-id", json!({"status": "failed"})))]
#[case::step_number(Call::ChangeStep, change("step", "plan-id", json!({"stepNumber": 1})))]
#[case::output_of_another_step(
    Call::ChangeStep,
    change("step", "plan-id", json!({"output": OUTPUT.replace("plan-id", "apply-id")}))
)]
#[case::output_in_a_query(
    Call::ChangeStep,
    change("step", "plan-id", json!({"output": format!("https://evil/?x={OUTPUT}")}))
)]
#[case::output_that_climbs(
    Call::ChangeStep,
    change("step", "plan-id", json!({"output": format!("{OUTPUT}/../other")}))
)]
#[case::history_of_another_job(Call::AddHistory, history(json!({"output": STATE, "jobReference": "4"})))]
#[case::history_of_no_job(Call::AddHistory, history(json!({"output": STATE})))]
#[case::history_with_an_id(Call::AddHistory, change("history", "1", json!({"output": STATE, "jobReference": "412"})))]
#[case::state_of_another_workspace(
    Call::AddHistory,
    history(json!({"output": STATE.replace("/ws/", "/other/"), "jobReference": "412"}))
)]
#[case::state_elsewhere(
    Call::AddHistory,
    history(json!({"output": format!("{STATE}/x"), "jobReference": "412"}))
)]
#[case::line_of_another_job(Call::AddLines, json!({"data": [{"jobId": 413, "stepId": "plan-id", "lineNumber": 1, "output": ""}]}))]
#[case::line_of_another_step(Call::AddLines, json!({"data": [{"jobId": 412, "stepId": "apply-id", "lineNumber": 1, "output": ""}]}))]
#[case::second_line(
    Call::AddLines,
    json!({"data": [
        {"jobId": 412, "stepId": "plan-id", "lineNumber": 1, "output": ""},
        {"jobId": 413, "stepId": "plan-id", "lineNumber": 2, "output": ""},
    ]})
)]
#[case::line_number(Call::AddLines, json!({"data": [{"jobId": 412, "stepId": "plan-id", "lineNumber": -1, "output": ""}]}))]
#[case::text_for_a_line_number(
    Call::AddLines,
    json!({"data": [{"jobId": 412, "stepId": "plan-id", "lineNumber": "1", "output": ""}]})
)]
#[case::line_of_no_text(Call::AddLines, json!({"data": [{"jobId": 412, "stepId": "plan-id", "lineNumber": 1, "output": {"a": 1}}]}))]
#[case::field_of_a_line(
    Call::AddLines,
    json!({"data": [{"jobId": 412, "stepId": "plan-id", "lineNumber": 1, "output": "", "level": 1}]})
)]
#[case::line_of_no_job(Call::AddLines, json!({"data": [{"stepId": "plan-id"}]}))]
#[case::text_for_a_number(Call::AddLines, json!({"data": [{"jobId": "412", "stepId": "plan-id"}]}))]
#[case::set_up(Call::SetUpLog, json!({}))]
#[case::read(Call::ReadJob, json!({}))]
fn other_documents_are_refused(#[case] call: Call, #[case] document: Value) {
    assert!(
        matches!(check(call, &document), Err(RelayRefusal::Body(_))),
        "{document}"
    );
}

#[rstest]
#[case::file("/var/lib/mayfly/tfoutput/plan", true)]
#[case::s3("s3://bucket/tfoutput/plan", true)]
#[case::azure("https://account.blob.core.windows.net/tfoutput/plan", true)]
#[case::google("gs://bucket/tfoutput/plan", true)]
#[case::none("", true)]
#[case::script("javascript:alert(1)", false)]
#[case::hidden_script("\u{1} java\nscript:alert(1)", false)]
#[case::data("data:text/html,x", false)]
#[case::host_alone("//evil.example.test/x", false)]
#[case::hidden_host("\u{1}//evil.example.test/x", false)]
#[case::hidden_slash("/\t/evil.example.test/x", false)]
fn the_place_of_a_plan_runs_nothing(#[case] plan: &str, #[case] passes: bool) {
    let document = change(
        "job",
        "412",
        json!({"status": "pending", "terraformPlan": plan}),
    );
    let sent = check(Call::ChangeJob, &document).unwrap();
    let sent: Value = serde_json::from_slice(&sent).unwrap();
    let expected = if passes {
        document
    } else {
        change("job", "412", json!({"status": "pending"}))
    };
    assert_eq!(sent, expected);
}

/// Its text is for people. An address in it would be one that the run has chosen.
#[rstest]
#[case::text("Before. Step plan-id completed\n", true)]
#[case::nothing("", true)]
#[case::no_scheme(" Step plan-id completed\n", true)]
#[case::script("javascript:alert(1)// Step plan-id completed\n", false)]
#[case::hidden_script(" \tjava\nscript:alert(1)", false)]
#[case::elsewhere("https://evil.example.test/", false)]
#[case::data("data:text/html,x", false)]
#[case::host_alone("//evil.example.test/x", false)]
#[case::path_alone(" /x", false)]
#[case::back_slashes("\\\\evil.example.test", false)]
#[case::host_behind_control_characters("\u{1}//evil.example.test/x", false)]
#[case::script_behind_control_characters("\u{1}javascript:alert(1)", false)]
fn the_output_of_a_job_is_no_address(#[case] output: &str, #[case] passes: bool) {
    let document = change("job", "412", json!({"status": "pending", "output": output}));
    let sent = check(Call::ChangeJob, &document).unwrap();
    let sent: Value = serde_json::from_slice(&sent).unwrap();
    let expected = if passes {
        document
    } else {
        // The report itself counts.
        change("job", "412", json!({"status": "pending"}))
    };
    assert_eq!(sent, expected);
}

#[test]
fn the_relay_sends_what_it_has_read() {
    let twice =
        br#"{"data":{"type":"job","id":"413","id":"412","attributes":{"status":"failed"}}}"#;
    let refused = check_bytes(Call::ChangeJob, twice);
    assert!(matches!(refused, Err(RelayRefusal::Body(_))), "{refused:?}");
    let escaped =
        br#"{"data":{"type":"job","id":"\u0034\u0031\u0032", "attributes":{"status":"failed"}}}"#;
    let sent = String::from_utf8(check_bytes(Call::ChangeJob, escaped).unwrap()).unwrap();
    assert!(sent.contains(r#""id":"412""#), "{sent}");
    let broken = check_bytes(Call::ChangeJob, b"{");
    assert_eq!(broken, Err(RelayRefusal::Unread("it is not valid JSON")));
}

async fn outgoing(
    call: Call,
    to: &Destination,
    body: impl Into<Body>,
) -> Result<Outgoing, RelayRefusal> {
    let task = task(TaskState::Running);
    let taken = Budget::new().of_task(&task.pool, task.task);
    let asked = Asked {
        call,
        method: Method::POST,
        path: &["context", "v1", "412"],
        query: None,
    };
    Outgoing::new(asked, &step_of(&task), to, body.into(), taken).await
}

/// The relay to a platform at this address.
fn to_terrakube(url: &str) -> ToTerrakube {
    // Programs install the provider at their start. An earlier test may have installed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let url: Url = url.parse().unwrap();
    let config = TerrakubeConfig {
        api_url: url.clone(),
        public_url: url,
        registry_domain: None,
        tokens: TokenSource::parse(&"x".repeat(64)).unwrap(),
        dispatch_wait: Duration::ZERO,
        status_poll: Duration::ZERO,
        report_patience: Duration::ZERO,
        lease: None,
    };
    ToTerrakube::new(Terrakube::new(config, None).unwrap()).unwrap()
}

/// Newer platforms give a token the rights of the step that it names.
#[tokio::test]
async fn a_relayed_request_has_a_token_of_its_step_for_a_minute_and_one_for_releases_has_none() {
    let server = Server::start(|_| Response::new(200, "{}")).unwrap();
    let (task, turns) = (task(TaskState::Running), Turns::new());
    let to = Destination::Terrakube(Box::new(to_terrakube(&server.url())));
    let relay = to_terrakube(&server.url());
    for call in [Call::ReadJob, Call::WriteContext, Call::ReadReleases] {
        let outgoing = outgoing(call, &to, Body::empty()).await.unwrap();
        let place = turns.place(task.task).unwrap();
        let turn = turns.next(&task.pool, place).await.unwrap();
        let sent = relay.send(outgoing, &step_of(&task), turn).await;
        assert!(sent.unwrap().status().is_success(), "{call:?}");
    }
    let claims = |request: &Request| {
        let token = request.header("authorization")?.strip_prefix("Bearer ")?;
        let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
        serde_json::from_slice::<Value>(&claims).ok()
    };
    let requests = server.requests();
    assert_eq!(requests.len(), 3);
    for request in &requests[..2] {
        let claims = claims(request).unwrap();
        for (name, value) in [
            ("sub", "TerrakubeInternal (EXECUTOR)"),
            ("organizationId", "org"),
            ("workspaceId", "ws"),
            ("jobId", "412"),
            ("stepId", "plan-id"),
        ] {
            assert_eq!(claims[name], value, "{claims}");
        }
        let time = |name: &str| claims[name].as_u64().unwrap();
        assert_eq!(time("exp") - time("iat"), 60, "{claims}");
    }
    assert_eq!(requests[2].header("authorization"), None);
}

#[tokio::test]
async fn a_context_that_is_too_large_is_refused_before_it_is_sent() {
    let to = Destination::Terrakube(Box::new(to_terrakube(PUBLIC)));
    let outgoing = |length: usize| outgoing(Call::WriteContext, &to, vec![0; length]);
    assert!(outgoing(MAX_CONTEXT).await.is_ok());
    let refused = outgoing(MAX_CONTEXT + 1).await.unwrap_err();
    assert_eq!(refused, RelayRefusal::TooLarge(MAX_CONTEXT));
}

#[tokio::test]
async fn the_records_of_a_machine_take_a_whole_context_of_their_size() {
    let folder = tempfile::tempdir().unwrap();
    let to = Destination::Records(LocalPlatform::new(folder.path()));
    let write = async |context: String| outgoing(Call::WriteContext, &to, context).await.err();
    let of_length = |length: usize| format!(r#"{{"a":"{}"}}"#, "x".repeat(length - 8));
    assert_eq!(write(of_length(MAX_RECORDED_CONTEXT)).await, None);
    let refused = write(of_length(MAX_RECORDED_CONTEXT + 1)).await;
    assert_eq!(
        refused,
        Some(RelayRefusal::ContextTooLarge(MAX_RECORDED_CONTEXT))
    );
    for other in [
        "[]",
        "{",
        "",
        r#"{"a":1}{}"#,
        &format!(r#"{{"a":{}1}}"#, "[".repeat(200)),
    ] {
        let refused = write(other.to_owned()).await;
        assert!(matches!(refused, Some(RelayRefusal::Unread(_))), "{other}");
    }
}

fn over(reason: EndReason, ago: u64) -> TaskView {
    TaskView {
        end: Some(TaskEnd {
            reported: true,
            ..TaskEnd::new(reason, String::new(), 0)
        }),
        ended: Some(Duration::from_secs(ago)),
        holder: Some("pod".to_owned()),
        ..task(TaskState::Failed)
    }
}

#[rstest]
#[case::running(task(TaskState::Running), Call::ChangeStep, None)]
#[case::silent(task(TaskState::Orphaned), Call::ChangeStep, None)]
#[case::reads_before_the_claim(task(TaskState::Leased), Call::ReadJob, None)]
#[case::content_before_the_claim(task(TaskState::Leased), Call::ReadContent, None)]
#[case::writes_before_the_claim(
    task(TaskState::Leased),
    Call::ChangeJob,
    Some(Refusal::LeaseNotAccepted)
)]
#[case::lines_before_the_claim(
    task(TaskState::Leased),
    Call::AddLines,
    Some(Refusal::LeaseNotAccepted)
)]
#[case::context_before_the_claim(
    task(TaskState::Leased),
    Call::WriteContext,
    Some(Refusal::LeaseNotAccepted)
)]
#[case::lease_has_ended(task(TaskState::Available), Call::ReadJob, Some(Refusal::LeaseExpired))]
#[case::report_afterwards(
    over(EndReason::Finished, 1),
    Call::ChangeJob,
    Some(Refusal::TaskAlreadyTerminal)
)]
#[case::status_afterwards(
    over(EndReason::Finished, 1),
    Call::ChangeStep,
    Some(Refusal::TaskAlreadyTerminal)
)]
#[case::last_state(over(EndReason::Finished, 1), Call::AddHistory, None)]
#[case::last_state_too_late(
    over(EndReason::Finished, 601),
    Call::AddHistory,
    Some(Refusal::TaskAlreadyTerminal)
)]
#[case::context_afterwards(
    over(EndReason::Finished, 1),
    Call::WriteContext,
    Some(Refusal::TaskAlreadyTerminal)
)]
#[case::content_afterwards(
    over(EndReason::Finished, 1),
    Call::ReadContent,
    Some(Refusal::TaskAlreadyTerminal)
)]
#[case::report_of_a_lost_run(
    over(EndReason::Lost, 1),
    Call::ChangeStep,
    Some(Refusal::TaskAlreadyTerminal)
)]
#[case::state_of_a_lost_run(over(EndReason::Lost, 1), Call::AddHistory, None)]
#[case::state_of_a_revoked_agent(
    over(EndReason::Revoked, 1),
    Call::AddHistory,
    Some(Refusal::TaskAlreadyTerminal)
)]
#[case::lines_of_a_lost_run(over(EndReason::Lost, 1), Call::AddLines, None)]
#[case::state_without_a_claim(
    TaskView { holder: None, ..over(EndReason::Cancelled, 1) },
    Call::AddHistory,
    Some(Refusal::TaskAlreadyTerminal)
)]
#[case::lines_without_a_claim(
    TaskView { holder: None, ..over(EndReason::Poison, 1) },
    Call::AddLines,
    Some(Refusal::TaskAlreadyTerminal)
)]
fn the_state_of_a_task_decides_which_calls_pass(
    #[case] task: TaskView,
    #[case] call: Call,
    #[case] refused: Option<Refusal>,
) {
    let expected = refused.map_or(Ok(()), |refusal| Err(RelayRefusal::State(refusal)));
    assert_eq!(rules::check_state(&task, call.when()), expected);
}
