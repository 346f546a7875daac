//! Dispatches that go to the persistent executor.

use serde_json::json;
use test_peers::http::{Response, Server};
use test_peers::port::Port;

use crate::harness::Fixture;

/// A persistent executor with an answer of its own, and the URL for dispatches.
fn persistent_executor() -> (Server, String) {
    let answer = Response::new(418, r#"{"tea":"ready"}"#);
    let answer = answer.with_header("content-type", "application/vnd.tea+json");
    let server = Server::start(move |_| answer.clone()).unwrap();
    let url = format!("{}/api/v1/terraform-rs", server.url());
    (server, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn dispatches_without_the_flag_and_their_responses_are_forwarded_unchanged() {
    let fixture = Fixture::new();
    let (executor, url) = persistent_executor();
    let launcher = fixture.serve(&[
        ("MAYFLY_ROUTE", "flag"),
        ("MAYFLY_PERSISTENT_EXECUTOR_URL", &url),
    ]);
    let plain = fixture.job(1, "step", "terraformPlan");
    // White space and order are the sender's business.
    let body = format!(" {}\n", serde_json::to_string_pretty(&plain).unwrap());
    let request = launcher.request(&plain).body(body.clone()).build().unwrap();
    let token = request.headers()["authorization"].clone();
    let answer = reqwest::Client::new().execute(request).await.unwrap();
    assert_eq!(answer.status(), 418);
    assert_eq!(answer.headers()["content-type"], "application/vnd.tea+json");
    assert_eq!(answer.text().await.unwrap(), r#"{"tea":"ready"}"#);
    let received = &executor.requests()[0];
    assert_eq!(received.path, "/api/v1/terraform-rs");
    assert_eq!(received.body, body.as_bytes());
    assert_eq!(received.header("authorization"), token.to_str().ok());
    assert_eq!(received.header("content-type"), Some("application/json"));

    let mut flagged = fixture.script(2, "");
    flagged["environmentVariables"] = json!({"TERRAKUBE_ENABLE_EPHEMERAL_EXECUTOR": "false"});
    launcher.post(&flagged).await;
    launcher.wait_for_end(2, "step");
    assert_eq!(fixture.times_run(2), 1);
    assert_eq!(executor.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_persistent_executor_gives_status_503() {
    let fixture = Fixture::new();
    // Kept, so that nobody listens on it.
    let port = Port::take().unwrap();
    let url = format!("http://{}/", port.address());
    let launcher = fixture.serve(&[
        ("MAYFLY_ROUTE", "flag"),
        ("MAYFLY_PERSISTENT_EXECUTOR_URL", &url),
    ]);
    let job = fixture.job(1, "step", "terraformPlan");
    let answer = launcher.request(&job).send().await.unwrap();
    assert_eq!(answer.status(), 503);
    assert!(answer.text().await.unwrap().contains("cannot be reached"));
}
