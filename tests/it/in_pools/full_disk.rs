//! A hub whose disk is full accepts nothing, says so, keeps what it has accepted, also when it starts again, and serves agents.

use std::fs;

use job_contract::env;
use reqwest::StatusCode;
use serde_json::json;
use test_peers::wait::until;

use super::fixture::{Fixture, Hub};
use crate::small_disk::SmallDisk;
use test_platform::launcher::Launcher;

/// Bytes of the disk.
const DISK: usize = 16 << 20;
/// Characters in a variable of each run.
const LARGE: usize = 400_000;
/// Characters in a variable of a run of the usual size.
const SMALL: usize = 30_000;

fn serve(disk: &SmallDisk, fixture: &Fixture) -> Hub {
    let mut command = disk.with_variables_of(&fixture.command());
    Hub(Launcher::start(&mut command))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_answers_503_and_what_was_accepted_is_there() {
    // Without an answer of the platform, runs wait for their confirmation.
    let fixture = Fixture::new()
        .await
        .with(env::API_URL, "http://127.0.0.1:1");
    let folder = fixture.path("store").into_os_string();
    fs::create_dir_all(&folder).unwrap();
    let disk = or_skip!(SmallDisk::mount(&folder, DISK));
    let hub = serve(&disk, &fixture);
    let token = fixture.platform.dispatch_token();
    let http = reqwest::Client::new();
    let dispatch = async |hub: &Hub, job: usize, size: usize| {
        let document = json!({
            "type": "terraformPlan",
            "organizationId": fixture.platform.organization(),
            "workspaceId": "w",
            "jobId": job.to_string(),
            "stepId": "s",
            "variables": {"large": "x".repeat(size)},
        });
        let url = format!("{}/pools/eu/api/v1/terraform-rs", hub.url());
        let request = http
            .post(url)
            .bearer_auth(&token)
            .body(document.to_string());
        let answer = request.send().await.unwrap();
        (answer.status(), answer.text().await.unwrap())
    };
    let readiness = async |hub: &Hub| {
        let url = format!("{}/actuator/health/readiness", hub.url());
        let answer = http.get(url).send().await.unwrap();
        (answer.status(), answer.text().await.unwrap())
    };
    assert_eq!(readiness(&hub).await.0, StatusCode::OK);
    let mut accepted = 0;
    let (refused, why) = loop {
        match dispatch(&hub, accepted, LARGE).await {
            (StatusCode::ACCEPTED, _) => accepted += 1,
            other => break other,
        }
        assert!(accepted * LARGE < DISK, "the disk is never full");
    };
    assert_eq!(refused, StatusCode::SERVICE_UNAVAILABLE);
    assert!(why.contains("the disk of the store"), "{why}");
    assert!(accepted > 5, "{accepted}");
    // Returns how many runs fill the disk.
    let fill = async |hub: &Hub, mut accepted: usize| {
        until("the metrics say that the disk is full", async || {
            while dispatch(hub, accepted, SMALL).await.0 == StatusCode::ACCEPTED {
                accepted += 1;
            }
            // Runs in progress need the hub, so it stays an endpoint of its Service.
            let (status, text) = readiness(hub).await;
            assert_eq!(status, StatusCode::OK);
            assert!(text.contains("UP"), "{text}");
            // The log of the database shrinks at a checkpoint, and then there is space for some more. Metrics are made
            // once a second.
            let metrics = hub.get("/metrics").await;
            let is_full = |line| line == "mayfly_pool_store_full 1";
            let full = text.contains("bytes left") && metrics.lines().any(is_full);
            full.then_some(accepted)
        })
        .await
    };
    let is_full = async |hub: &Hub, accepted: usize| {
        fixture.client(hub).register().await;
        // A run that is there is a duplicate, and needs no room.
        for job in 0..accepted {
            assert_eq!(
                dispatch(hub, job, SMALL).await.0,
                StatusCode::ACCEPTED,
                "job {job}"
            );
        }
    };
    accepted = fill(&hub, accepted).await;
    is_full(&hub, accepted).await;
    // The queue has left what a start needs.
    hub.crash();
    let hub = serve(&disk, &fixture);
    accepted = fill(&hub, accepted).await;
    is_full(&hub, accepted).await;
    disk.grow(&folder, 8 * DISK);
    let again = dispatch(&hub, accepted, SMALL).await.0;
    assert_eq!(again, StatusCode::ACCEPTED);
    let (_, text) = readiness(&hub).await;
    assert!(!text.contains("problem"), "{text}");
}
