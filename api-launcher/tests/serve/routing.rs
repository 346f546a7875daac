//! Dispatches that go to the persistent executor.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use serde_json::json;
use test_peers::port::Port;

use crate::harness::Place;

type Received = Arc<Mutex<Vec<(HeaderMap, Bytes)>>>;

/// A persistent executor that records what it gets and says it is busy, in words of its own.
async fn stand_in() -> (String, Received) {
    let received = Received::default();
    let record = Arc::clone(&received);
    let answer = move |headers: HeaderMap, body: Bytes| async move {
        record.lock().unwrap().push((headers, body));
        (
            StatusCode::IM_A_TEAPOT,
            [("content-type", "application/vnd.tea+json")],
            r#"{"tea":"ready"}"#,
        )
    };
    let router = Router::new().route("/api/v1/terraform-rs", post(answer));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!(
        "http://{}/api/v1/terraform-rs",
        listener.local_addr().unwrap()
    );
    tokio::spawn(async move { axum::serve(listener, router).await });
    (url, received)
}

#[tokio::test(flavor = "multi_thread")]
async fn workspaces_without_the_flag_go_on_unchanged_and_so_does_the_answer() {
    let place = Place::new();
    let (url, received) = stand_in().await;
    let mut launcher = place.serve(&[
        ("MAYFLY_ROUTE", "flag"),
        ("MAYFLY_PERSISTENT_EXECUTOR_URL", &url),
    ]);
    let plain = place.job(1, "step", "terraformPlan");
    // White space and order are the sender's business.
    let body = format!(" {}\n", serde_json::to_string_pretty(&plain).unwrap());
    let request = launcher.request(&plain).body(body.clone()).build().unwrap();
    let token = request.headers()["authorization"].clone();
    let answer = reqwest::Client::new().execute(request).await.unwrap();
    assert_eq!(answer.status(), 418);
    assert_eq!(answer.headers()["content-type"], "application/vnd.tea+json");
    assert_eq!(answer.text().await.unwrap(), r#"{"tea":"ready"}"#);
    {
        let received = received.lock().unwrap();
        let (headers, got) = &received[0];
        assert_eq!(got, &body);
        assert_eq!(headers["authorization"], token);
        assert_eq!(headers["content-type"], "application/json");
    }

    let mut flagged = place.script(2, "");
    flagged["environmentVariables"] = json!({"TERRAKUBE_ENABLE_EPHEMERAL_EXECUTOR": "false"});
    launcher.post(&flagged).await;
    launcher.wait_for_end(2, "step");
    assert_eq!(place.times_run(2), 1);
    assert_eq!(received.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_strict_flag_may_say_no() {
    let place = Place::new();
    let (url, received) = stand_in().await;
    let launcher = place.serve(&[
        ("MAYFLY_ROUTE", "flag"),
        ("MAYFLY_ROUTE_STRICT", "true"),
        ("MAYFLY_PERSISTENT_EXECUTOR_URL", &url),
    ]);
    let mut job = place.job(1, "step", "terraformPlan");
    job["environmentVariables"] = json!({"TERRAKUBE_ENABLE_EPHEMERAL_EXECUTOR": "false"});
    let answer = launcher.request(&job).send().await.unwrap();
    assert_eq!(answer.status(), 418);
    assert_eq!(received.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_persistent_executor_that_is_away_means_later() {
    let place = Place::new();
    // Kept, so that nobody listens on it.
    let port = Port::take().unwrap();
    let url = format!("http://{}/", port.address());
    let launcher = place.serve(&[
        ("MAYFLY_ROUTE", "flag"),
        ("MAYFLY_PERSISTENT_EXECUTOR_URL", &url),
    ]);
    let job = place.job(1, "step", "terraformPlan");
    let answer = launcher.request(&job).send().await.unwrap();
    assert_eq!(answer.status(), 503);
    assert!(answer.text().await.unwrap().contains("cannot be reached"));
}
