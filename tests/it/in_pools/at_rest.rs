//! What the files of a hub show of the documents of runs, and what a hub says of damaged files.

use std::fs;

use integration_tests::process::Stream;
use job_contract::env;
use pool_protocol::path::LeaseCall;
use serde_json::json;
use test_platform::launcher::Launcher;

use super::client::executor_of;
use super::fixture::{Fixture, Hub};

/// Is in each document, and in nothing else that the hub stores.
const MARKER: &[u8] = b"git.example.test";

/// Fails if a file of the store has the marker. Returns the number of files.
#[track_caller]
fn no_file_has_the_marker(fixture: &Fixture) -> usize {
    let mut files = 0;
    for file in fs::read_dir(fixture.path("store")).unwrap() {
        let path = file.unwrap().path();
        // A log of SQLite may go while the folder is read.
        let Ok(bytes) = fs::read(&path) else { continue };
        let mut windows = bytes.windows(MARKER.len());
        assert!(!windows.any(|found| found == MARKER), "{}", path.display());
        files += 1;
    }
    files
}

#[tokio::test(flavor = "multi_thread")]
async fn no_file_of_the_store_has_a_document_at_any_moment() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let instance = agent.register().await;
    fixture.dispatched_plan().await;
    fixture.dispatched_plan().await;
    assert!(no_file_has_the_marker(&fixture) >= 4, "database and log");
    let lease = agent.request(instance).await;
    let document = serde_json::to_string(&lease.task.payload).unwrap();
    assert!(
        document
            .as_bytes()
            .windows(MARKER.len())
            .any(|found| found == MARKER)
    );
    let executor = executor_of(&agent, &lease);
    executor.accept(&lease, "one").await.ok();
    hub.crash();
    no_file_has_the_marker(&fixture);

    let hub = fixture.serve();
    no_file_has_the_marker(&fixture);
    let executor = executor_of(&fixture.client(&hub), &lease);
    let end = json!({"exitCode": 0, "reported": true});
    executor.lease(&lease, LeaseCall::Complete, end).await.ok();
    no_file_has_the_marker(&fixture);
    hub.crash();
    no_file_has_the_marker(&fixture);
    // The other run survived all that.
    let hub = fixture.serve();
    let agent = fixture.client(&hub);
    let other = agent.request(agent.register().await).await;
    assert_ne!(other.task_id, lease.task_id);
    no_file_has_the_marker(&fixture);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_log_is_named_and_the_hub_starts() {
    // Without an answer of the platform, runs wait for their confirmation.
    let fixture = Fixture::new()
        .await
        .with(env::API_URL, "http://127.0.0.1:1");
    let start = || Hub(Launcher::start(&mut fixture.command()));
    let hub = start();
    let token = fixture.platform.dispatch_token();
    for job in ["1", "2", "3"] {
        let document = json!({
            "type": "terraformPlan",
            "organizationId": fixture.platform.organization(),
            "workspaceId": "w",
            "jobId": job,
            "stepId": "s",
        });
        let url = format!("{}/pools/eu/api/v1/terraform-rs", hub.url());
        let request = reqwest::Client::new().post(url).bearer_auth(&token);
        let answer = request.body(document.to_string()).send().await.unwrap();
        assert_eq!(answer.status(), 202);
    }
    hub.crash();
    let hub = start();
    assert!(!hub.0.running.text(Stream::Stderr).contains("is damaged"));
    let beat = fixture.client(&hub).register().await;
    fixture.client(&hub).heartbeat(beat).await.ok();
    hub.crash();
    let log = fixture.path("store/pools.db-wal");
    let mut bytes = fs::read(&log).unwrap();
    // In the page of the first frame.
    bytes[32 + 24 + 100] ^= 1;
    fs::write(&log, bytes).unwrap();
    let hub = start();
    let line = hub.0.running.line_with(Stream::Stderr, "is damaged");
    assert!(
        line.contains("pools.db-wal") && line.contains("frame 1 does not check out"),
        "{line}"
    );
}
