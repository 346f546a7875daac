//! A pool whose executors reach the platform themselves. The hub still gives out leases, and takes claims and ends.

use job_contract::env;
use nix::sys::signal::Signal;
use serde_json::json;
use test_platform::Status;

use super::agent::ends_with;
use super::agent_in_cluster;
use super::fixture::Fixture;
use crate::in_cluster::Fixture as ClusterFixture;

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_with_the_platforms_secret_needs_no_relay() {
    let Some(cluster) = ClusterFixture::new().await else {
        return;
    };
    let fixture = Fixture::new().await;
    let platform = &fixture.platform;
    // The hub refuses every request to the relay of such a pool.
    let eu = json!({
        "organizations": [platform.organization()],
        "boundary": "direct",
        "tokens": [{"id": "t", "sha256": fixture.token.digest()}],
    });
    fixture.replace_pools(&json!({"pools": {"eu": eu}}).to_string());
    let hub = fixture.serve();
    cluster.image_that_first(&format!(
        "export {}='{}' {}='{}' {}='{}' {}=true {}=LocalTerraformStateImpl {}=1",
        env::API_URL,
        platform.url(),
        env::PUBLIC_API_URL,
        platform.url(),
        env::INTERNAL_SECRET,
        platform.secret(),
        env::LOG_VIA_API,
        env::STATE_TYPE,
        env::STATUS_POLL_SECONDS,
    ));
    let agent = agent_in_cluster::start(&cluster, &fixture, &hub);
    let gate = fixture.gate();
    let job = fixture.start_script(&gate);
    platform.until_streamed(job, "at-the-gate").await;
    gate.open().await;
    platform.until_job(job, Status::Completed).await;
    hub.until_metric(r#"mayfly_pool_slots{pool="eu",state="busy"} 0"#)
        .await;
    agent.signal(Signal::SIGTERM);
    ends_with(agent, 0);
    assert_eq!(fixture.times_run(), 1);
}
