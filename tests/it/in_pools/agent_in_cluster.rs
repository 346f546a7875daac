//! Tests of agents on target `kubernetes`: runs are Jobs, and the cluster is the agent's only record.

use std::process::Command;

use integration_tests::process::Stream;
use integration_tests::{Repository, Running};
use job_contract::env;
use nix::sys::signal::Signal;
use test_cluster::{Builder, Cluster, Fault, State};
use test_peers::wait::until;
use test_platform::launcher;
use test_platform::{Flow, LogEntry, NewJob, Status, Variable, Workspace};

use super::agent::{ends_with, tasks_taken};
use super::fixture::{Fixture, Hub};
use crate::chart::{agents_rights, values};
use crate::in_cluster::{Fixture as ClusterFixture, LAUNCHER, suspended};

/// A cluster where the agent has the rights that the chart grants.
pub(super) async fn cluster(parts: Builder) -> Option<ClusterFixture> {
    let rights = agents_rights(&values("agent"));
    ClusterFixture::of(parts, &rights).await
}

/// The agent `eu-1` with the cluster of the test.
pub(super) fn command(cluster: &ClusterFixture, fixture: &Fixture, hub: &Hub) -> Command {
    let mut command = cluster.command(&[]);
    let token = fixture.token.reveal();
    launcher::agent(&mut command, "eu-1", &hub.url(), token);
    command
}

/// Starts it.
pub(super) fn start(cluster: &ClusterFixture, fixture: &Fixture, hub: &Hub) -> Running {
    Running::start(&mut command(cluster, fixture, hub))
}

/// Gives executors the public URL of the platform.
fn prepare(cluster: &ClusterFixture, fixture: &Fixture) {
    prepare_with(cluster, fixture, "");
}

/// The same, with words of a shell before the executor.
pub(super) fn prepare_with(cluster: &ClusterFixture, fixture: &Fixture, words: &str) {
    cluster.image_that_first(&format!(
        "export {}='{}' {}=1\n{words}",
        env::PUBLIC_API_URL,
        fixture.platform.url(),
        env::STATUS_POLL_SECONDS,
    ));
}

fn one_job(state: &State) -> Option<String> {
    let name = |job: &k8s_openapi::api::batch::v1::Job| job.metadata.name.clone();
    (state.jobs.len() == 1).then(|| name(&state.jobs[0]))?
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_agent_finds_its_job_again_and_no_token_is_in_it() {
    let Some(cluster) = cluster(Cluster::builder()).await else {
        return;
    };
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    prepare(&cluster, &fixture);
    let agent = start(&cluster, &fixture, &hub);
    let gate = fixture.gate();
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
    let Some(cluster) = cluster(Cluster::builder().without_kubelet()).await else {
        return;
    };
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = start(&cluster, &fixture, &hub);
    let gate = fixture.gate();
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
async fn an_executor_that_is_killed_for_its_memory_fails_its_step_with_the_verdict() {
    let Some(cluster) = cluster(Cluster::builder()).await else {
        return;
    };
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    prepare(&cluster, &fixture);
    let agent = start(&cluster, &fixture, &hub);
    let gate = fixture.gate();
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    let state = cluster.state().await;
    assert!(cluster.cluster.oom_kill(&state.pods[0]));
    fixture.platform.until_job(job, Status::Failed).await;
    let output = fixture.output(job);
    assert!(output.contains("memory"), "{output}");
    hub.until_metric(r#"mayfly_pool_slots{pool="eu",state="busy"} 0"#)
        .await;
    assert_eq!(fixture.times_run(), 1);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_run_says_why_its_pod_does_not_start() {
    let Some(cluster) = cluster(Cluster::builder()).await else {
        return;
    };
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = start(&cluster, &fixture, &hub);
    let platform = &fixture.platform;
    let selector = Variable::env("EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS", "disk=ssd");
    let workspace = Workspace::new(&Repository::fixture().url()).with(selector);
    let workspace = platform.workspace(workspace);
    let flow = Flow::new("customScripts", 100).with_script("true");
    let job = platform.start_job(NewJob::new(&workspace, vec![flow]));
    platform
        .until_streamed(job, "Agent `eu-1` of pool `eu`: ")
        .await;
    let lines = platform.streamed(job).await;
    let is_reason = |line: &LogEntry| line.output.contains("nodes are available");
    assert!(lines.iter().any(is_reason), "{lines:?}");
    platform.cancel(job).await;
    let is_gone = |state: &State| state.jobs.is_empty().then_some(());
    cluster.until("the Job is gone", is_gone).await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_job_the_cluster_refuses_fails_at_once_with_its_words() {
    let Some(cluster) = cluster(Cluster::builder()).await else {
        return;
    };
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let words = "runs need an owner";
    let refused = cluster.cluster.refuse_jobs(&cluster.runs, words);
    refused.await.unwrap();
    let agent = start(&cluster, &fixture, &hub);
    let job = fixture.start_note();
    fixture.platform.until_job(job, Status::Failed).await;
    let output = fixture.output(job);
    assert!(output.contains(words), "{output}");
    agent.signal(Signal::SIGTERM);
    let log = ends_with(agent, 0);
    assert_eq!(tasks_taken(&log).len(), 1, "{log}");
    assert_eq!(fixture.times_run(), 0);
}

/// What an agent asks of the cluster to start a run.
const STEPS: [(&str, &str); 3] = [("create", "jobs"), ("create", "secrets"), ("patch", "jobs")];

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_killed_at_any_request_of_a_start_leaves_one_job_of_each_run() {
    let Some(cluster) = ClusterFixture::new().await else {
        return;
    };
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    prepare(&cluster, &fixture);
    let mut runs = 0;
    for (verb, resource) in STEPS {
        // Killed before the request is carried out, and after that.
        for fault in [Fault::Hang, Fault::DropAfter] {
            let agent = start(&cluster, &fixture, &hub);
            let faults = cluster.cluster.faults();
            faults.next_of(LAUNCHER, 1, verb, resource, fault.clone());
            let job = fixture.start_note();
            until("the request", async || faults.left() == 0).await;
            runs += 1;
            if fault == Fault::DropAfter {
                let is_done = |state: &State| {
                    let done = match (verb, resource) {
                        ("create", "jobs") => state.jobs.len() == runs,
                        ("create", _) => state.secrets.len() == runs,
                        _ => state.jobs.len() == runs && !state.jobs.iter().any(suspended),
                    };
                    done.then_some(())
                };
                cluster.until("the request is carried out", is_done).await;
            }
            agent.signal(Signal::SIGKILL);
            drop(agent);
            let agent = start(&cluster, &fixture, &hub);
            fixture.platform.until_job(job, Status::Completed).await;
            hub.until_metric(r#"mayfly_pool_slots{pool="eu",state="busy"} 0"#)
                .await;
            agent.signal(Signal::SIGTERM);
            ends_with(agent, 0);
            let state = cluster.state().await;
            assert_eq!((fixture.times_run(), state.jobs.len()), (runs, runs));
            assert!(!state.jobs.iter().any(suspended), "{verb} {resource}");
            assert_eq!(state.secrets.len(), runs, "{verb} {resource}");
        }
    }
    fixture.platform.assert_kept().await;
}
