//! Tests of agents on target `kubernetes`: runs are Jobs, and the cluster is the agent's only record.

use integration_tests::Running;
use integration_tests::process::Stream;
use job_contract::env;
use nix::sys::signal::Signal;
use test_cluster::State;
use test_platform::Status;

use super::agent::{Gate, ends_with};
use super::fixture::{Fixture, Hub};
use crate::in_cluster::Fixture as ClusterFixture;

/// Starts the agent `eu-1` with the cluster of the test.
fn start(cluster: &ClusterFixture, fixture: &Fixture, hub: &Hub) -> Running {
    let mut command = cluster.command(&["agent", "--name", "eu-1"]);
    command
        .env("MAYFLY_AGENT_SERVICE_URL", hub.url())
        .env("MAYFLY_AGENT_TOKEN", fixture.token.reveal())
        .env(env::LOG_FORMAT, "json");
    Running::start(&mut command)
}

/// Gives executors the public URL of the platform, and a store of states that the test can read.
fn prepare(cluster: &ClusterFixture, fixture: &Fixture) {
    cluster.image_that_first(&format!(
        "export {}='{}' {}=LocalTerraformStateImpl {}=1",
        env::PUBLIC_API_URL,
        fixture.platform.url(),
        env::STATE_TYPE,
        env::STATUS_POLL_SECONDS,
    ));
}

fn one_job(state: &State) -> Option<String> {
    let name = |job: &k8s_openapi::api::batch::v1::Job| job.metadata.name.clone();
    (state.jobs.len() == 1).then(|| name(&state.jobs[0]))?
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_agent_finds_its_job_which_contains_no_token() {
    let Some(cluster) = ClusterFixture::new().await else {
        return;
    };
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    prepare(&cluster, &fixture);
    let agent = start(&cluster, &fixture, &hub);
    let gate = Gate::new(&fixture);
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    let state = cluster.state().await;
    let text = serde_json::to_string(&state.jobs).unwrap();
    assert!(
        !text.contains("mfr_") && text.contains("mayfly.dev/lease-id"),
        "{text}"
    );
    agent.signal(Signal::SIGKILL);
    drop(agent);
    let agent = start(&cluster, &fixture, &hub);
    tokio::task::block_in_place(|| {
        agent.wait_for(Stream::Stderr, "found an executor of an earlier agent");
    });
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    hub.until_metric(r#"mayfly_pool_slots{pool="eu",state="busy"} 0"#)
        .await;
    agent.signal(Signal::SIGTERM);
    ends_with(agent, 0);
    assert_eq!(fixture.times_run(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_cancelled_before_its_pod_starts_leaves_no_job() {
    let Some(cluster) = ClusterFixture::without_pods().await else {
        return;
    };
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = start(&cluster, &fixture, &hub);
    let gate = Gate::new(&fixture);
    let job = fixture.start_script(&gate);
    cluster.until("the Job is there", one_job).await;
    fixture.platform.cancel(job).await;
    let is_gone = |state: &State| state.jobs.is_empty().then_some(());
    cluster.until("the Job is gone", is_gone).await;
    hub.until_metric(r#"mayfly_pool_slots{pool="eu",state="busy"} 0"#)
        .await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_oom_killed_executor_fails_its_step_with_the_verdict() {
    let Some(cluster) = ClusterFixture::new().await else {
        return;
    };
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    prepare(&cluster, &fixture);
    let agent = start(&cluster, &fixture, &hub);
    let gate = Gate::new(&fixture);
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    let state = cluster.state().await;
    assert!(cluster.cluster.oom_kill(&state.pods[0]));
    fixture.platform.until_job(job, Status::Failed).await;
    let step = fixture
        .platform
        .job(job)
        .step_of("customScripts")
        .id
        .clone();
    let output = fixture.platform.step_output(job, &step).unwrap_or_default();
    assert!(output.contains("memory"), "{output}");
    hub.until_metric(r#"mayfly_pool_slots{pool="eu",state="busy"} 0"#)
        .await;
    assert_eq!(fixture.times_run(), 1);
    drop(agent);
}
