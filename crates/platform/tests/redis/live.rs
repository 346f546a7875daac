//! The live view of a run.

use std::time::Duration;

use platform::java;
use platform::live::{LivePhase, LiveState, LiveStream, LiveViewPublisher};
use serde_json::{Value, json};
use test_peers::clock::hold_clock;
use test_peers::redis::RedisServer;
use test_peers::wait::until;
use tokio::task::yield_now;
use tokio::time::Instant;

use crate::support::{LONG, redis_at, stream};

const STEP: &str = "5a5e1f0b-9c3f-4a55-9f0e-3d0f3b8f0101";
const NAME: &str = "412-context";

fn state(status: &str) -> LiveState {
    LiveState {
        phase: LivePhase::Apply,
        changes: vec![json!({"address": "terraform_data.a", "status": status})],
        diagnostics: vec![json!({"severity": "warning", "summary": "deprecated"})],
    }
}

#[tokio::test]
async fn pictures_stand_in_a_stream_that_expires() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let live = LiveViewPublisher::start(LiveStream::new(redis_at(&server), "412", STEP));
    live.publish(state("applying"));
    until("the first is there at once", async || {
        (!stream(&mut client, NAME).is_empty()).then_some(())
    })
    .await;
    // Only the last of these is published.
    for number in 0..1000 {
        live.publish(state(&format!("applying {number}")));
    }
    live.publish(state("applied"));
    live.finish(LONG).await;

    let entries = stream(&mut client, NAME);
    assert_eq!(entries.len(), 2, "{entries:?}");
    let fields: Vec<_> = entries[1].fields.iter().map(|(name, _)| name).collect();
    assert_eq!(fields, ["jobId", "stepId", "output"]);
    assert_eq!(entries[1].field("jobId"), "412");
    assert_eq!(entries[1].field("stepId"), STEP);
    let output: Value = serde_json::from_str(entries[1].field("output")).unwrap();
    assert_eq!(
        output,
        json!({
            "phase": "apply",
            "changes": {STEP: [{"address": "terraform_data.a", "status": "applied"}]},
            "jobDiagnostics": {STEP: [{"severity": "warning", "summary": "deprecated"}]},
        })
    );
    let left: i64 = redis::cmd("TTL")
        .arg(java::encode(NAME))
        .query(&mut client)
        .unwrap();
    assert!((21_000..=21_600).contains(&left), "{left}");
}

#[tokio::test(start_paused = true)]
async fn the_last_picture_does_not_wait_for_its_turn() {
    let server = RedisServer::start().unwrap();
    let mut client = server.connect().unwrap();
    let held = hold_clock();
    let started = Instant::now();
    let live = LiveViewPublisher::start(LiveStream::new(redis_at(&server), "412", STEP));
    live.publish(state("applying"));
    while stream(&mut client, NAME).is_empty() {
        yield_now().await;
    }
    live.publish(state("applied"));
    live.finish(LONG).await;
    assert_eq!(started.elapsed(), Duration::ZERO);
    assert_eq!(stream(&mut client, NAME).len(), 2);
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn a_redis_that_is_away_costs_the_limit_and_nothing_before() {
    let server = RedisServer::start().unwrap();
    let live = LiveViewPublisher::start(LiveStream::new(redis_at(&server), "412", STEP));
    server.freeze().unwrap();
    let started = Instant::now();
    for _ in 0..1000 {
        live.publish(state("applying"));
    }
    assert_eq!(started.elapsed(), Duration::ZERO);
    live.finish(Duration::from_secs(3)).await;
    assert_eq!(started.elapsed().as_secs(), 3);
    server.thaw().unwrap();
}

#[tokio::test]
async fn a_redis_that_is_available_again_gets_the_latest_picture() {
    let mut server = RedisServer::start().unwrap();
    server.kill();
    let live = LiveViewPublisher::start(LiveStream::new(redis_at(&server), "412", STEP));
    live.publish(state("first"));
    server.restart().unwrap();
    let mut client = server.connect().unwrap();
    let arrived = until("one arrives", async || {
        live.publish(state("later"));
        stream(&mut client, NAME).pop()
    });
    let entry = arrived.await;
    assert!(entry.field("output").contains("later"));
    live.finish(LONG).await;
}
