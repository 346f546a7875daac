//! An agent as the chart installs it: its `StatefulSet`, the Role of its account, and the pod template of its runs.

use job_contract::env;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{DeleteParams, LogParams, PostParams};
use kube::{Api, ResourceExt as _};
use pool_protocol::token::PoolToken;
use serde_json::json;
use test_chart::{Document, Release, chart};
use test_cluster::{ADMIN, Cluster, State};
use test_peers::port::Port;
use test_platform::Status;

use super::agent_in_cluster::cluster;
use super::fixture::{Fixture, Hub};
use crate::in_cluster::Fixture as ClusterFixture;
use crate::in_cluster::chart::install;

/// The name of its pod, and so its own.
const AGENT: &str = "mayfly-agent-0";

/// Makes what the agent needs beside its release, and then the release.
async fn install_agent(
    cluster: &ClusterFixture,
    fixture: &Fixture,
    hub: &Hub,
    port: &Port,
) -> Vec<Document> {
    let values = json!({
        "agent": {
            "serviceUrl": hub.url(),
            "listenAddress": "127.0.0.1",
            "port": port.number(),
            "onStop": "force",
        },
        "log": {"format": "json"},
        "platform": {"publicApiUrl": fixture.platform.url()},
    });
    let mut release = Release::new()
        .with(&chart().join("ci/agent-values.yaml"))
        .set(values);
    cluster.runs.clone_into(&mut release.namespace);
    let images = &cluster.cluster;
    images.image("mayfly-launcher:0.1.0", &cluster.program_of_launcher());
    let often = format!("export {}=1", env::STATUS_POLL_SECONDS);
    images.image("mayfly-executor:0.1.0", &cluster.program_that_first(&often));
    let token: Secret = serde_json::from_value(json!({
        "metadata": {"name": "pool-token"},
        "stringData": {"token": fixture.token.reveal()},
    }))
    .unwrap();
    let secrets = Api::<Secret>::namespaced(images.client(ADMIN).unwrap(), &cluster.runs);
    secrets
        .create(&PostParams::default(), &token)
        .await
        .unwrap();
    let documents = release.documents();
    install(images, &documents).await;
    documents
}

/// Starts the pod of `helm test`, and returns how it ended, with its log.
async fn tested(cluster: &ClusterFixture, documents: &[Document]) -> (String, String) {
    let pod = documents.iter().find(|document| document.kind() == "Pod");
    let pod: Pod = serde_json::from_value(pod.unwrap().value.clone()).unwrap();
    let pods = Api::<Pod>::namespaced(cluster.cluster.client(ADMIN).unwrap(), &cluster.runs);
    pods.create(&PostParams::default(), &pod).await.unwrap();
    let name = pod.name_any();
    let phase = |state: &State| {
        let pod = state.pods.iter().find(|pod| pod.name_any() == name)?;
        let phase = pod.status.as_ref()?.phase.clone()?;
        ["Succeeded", "Failed"].contains(&&*phase).then_some(phase)
    };
    let ended = cluster.until("the test of the release ends", phase).await;
    let log = pods.logs(&name, &LogParams::default()).await.unwrap();
    pods.delete(&name, &DeleteParams::default()).await.unwrap();
    let is_gone = |state: &State| {
        state
            .pods
            .iter()
            .all(|pod| pod.name_any() != name)
            .then_some(())
    };
    cluster.until("the pod of the test is gone", is_gone).await;
    (ended, log)
}

/// The id of the agent's pod.
fn agent_of(state: &State) -> Option<String> {
    let pod = state.pods.iter().find(|pod| pod.name_any() == AGENT)?;
    pod.uid()
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_an_installed_agent_does_uses_each_right_the_chart_grants_and_no_other() {
    let cluster = or_skip!(cluster(Cluster::builder()).await);
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let port = Port::take().unwrap();
    install_agent(&cluster, &fixture, &hub, &port).await;
    hub.until_metric(r#"mayfly_pool_agents{pool="eu",state="online"} 1"#)
        .await;
    let health = reqwest::get(format!("http://{}/readyz", port.address())).await;
    assert_eq!(health.unwrap().status(), 200);

    let gate = fixture.gate();
    let job = fixture.start_script(&gate);
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    let state = cluster.state().await;
    let text = serde_json::to_string(&state.jobs).unwrap();
    assert!(text.contains(AGENT) && !text.contains("mfr_"), "{text}");

    // An end that its executor did not report.
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    let state = cluster.state().await;
    let is_at_work = |pod: &&Pod| {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        pod.name_any() != AGENT && phase == Some("Running")
    };
    let executor = state.pods.iter().find(is_at_work).unwrap();
    assert!(cluster.cluster.oom_kill(executor));
    fixture.platform.until_job(job, Status::Failed).await;

    // Its pod goes, and takes a run with it. The next pod of the name takes the next run.
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    let first = cluster.until("the agent has a pod", agent_of).await;
    let pods = Api::<Pod>::namespaced(cluster.cluster.client(ADMIN).unwrap(), &cluster.runs);
    pods.delete(AGENT, &DeleteParams::default()).await.unwrap();
    fixture.platform.until_job(job, Status::Failed).await;
    let is_next = |state: &State| agent_of(state).filter(|pod| *pod != first);
    cluster.until("the agent has a new pod", is_next).await;
    let job = fixture.start_script(&gate);
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;

    let asked = cluster.asked();
    // No workspace here has a plugin cache.
    assert_eq!(asked.unused(&cluster.rules), ["get persistentvolumeclaims"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_test_of_a_release_asks_the_hub_and_for_the_rights_of_the_agent() {
    let cluster = or_skip!(cluster(Cluster::builder()).await);
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let port = Port::take().unwrap();
    let documents = install_agent(&cluster, &fixture, &hub, &port).await;
    let (ended, log) = tested(&cluster, &documents).await;
    assert_eq!(ended, "Succeeded", "{log}");
    assert!(log.contains("answers, and takes the token"), "{log}");
    assert!(log.contains("right to delete pods"), "{log}");

    // A token of another hub.
    fixture.write_pools(&[&PoolToken::new("eu".parse().unwrap())]);
    let (ended, log) = tested(&cluster, &documents).await;
    assert_eq!(ended, "Failed", "{log}");
    assert!(
        log.contains("add the token to the file of the pools"),
        "{log}"
    );
    assert!(!log.contains(fixture.token.reveal()), "{log}");
}
