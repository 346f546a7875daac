//! Which run of a full queue is next.

use std::fs;

use integration_tests::WaitingPlatform;
use pool_protocol::path::LeaseCall;
use pool_protocol::token::PoolToken;
use serde_json::json;

use super::client::{Client, executor_of};
use super::fixture::Hub;
use test_platform::launcher::{self, Launcher};

const BURST: usize = 100;
const SLOTS: usize = 5;

/// A hub before a platform that waits for every run, with a pool for all organizations.
fn serve(platform: &WaitingPlatform, folder: &tempfile::TempDir, token: &PoolToken) -> Hub {
    let text = format!(
        "pools: {{eu: {{organizations: ['*'], tokens: [{{id: t, sha256: {}}}]}}}}",
        token.digest()
    );
    fs::write(folder.path().join("pools.yaml"), text).unwrap();
    let mut command = launcher::hub(crate::LAUNCHER, folder.path());
    Hub(Launcher::start(command.envs(platform.settings())))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_of_another_organization_comes_before_the_rest_of_a_burst() {
    let (platform, folder) = (WaitingPlatform::start().await, tempfile::tempdir().unwrap());
    let token = PoolToken::new("eu".parse().unwrap());
    let hub = serve(&platform, &folder, &token);
    let dispatch = Client::new(&hub.url(), &WaitingPlatform::dispatch_token());
    let post = async |organization: &str, number: usize| {
        let plan = WaitingPlatform::plan(organization, number);
        let plan = serde_json::to_value(plan).unwrap();
        dispatch
            .post("/pools/eu/api/v1/terraform-rs", plan)
            .await
            .ok();
    };
    for number in 0..BURST {
        post("burst", number).await;
    }
    let available = |count| format!(r#"mayfly_pool_tasks{{pool="eu",state="available"}} {count}"#);
    hub.until_metric(&available(BURST)).await;
    let agent = Client::new(&hub.url(), token.reveal());
    let instance = agent.register().await;
    let mut held = Vec::new();
    for _ in 0..SLOTS {
        let lease = agent.take(instance, &held).await;
        assert_eq!(lease.task.organization_id, "burst");
        executor_of(&agent, &lease).accept(&lease, "pod").await.ok();
        held.push(lease);
    }
    post("other", BURST).await;
    hub.until_metric(&available(BURST - SLOTS + 1)).await;

    // A slot becomes free.
    let done = held.remove(0);
    let end = json!({"exitCode": 0, "reported": true});
    executor_of(&agent, &done)
        .lease(&done, LeaseCall::Complete, end)
        .await
        .ok();
    let next = agent.take(instance, &held).await;
    assert_eq!(next.task.organization_id, "other");
}
