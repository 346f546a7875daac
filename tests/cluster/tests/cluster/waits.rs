//! Waits for the state of a namespace. They need no control plane: the API server behind the front has nothing, and the front
//! refuses.

use std::fs;
use std::time::Duration;

use serde_json::json;
use test_cluster::{ADMIN, Cluster, Fault, Seen, State};
use test_peers::http::{Response, Server};
use test_peers::wait::DEADLINE;

/// Long enough for a request, also on a busy machine.
const SHORT: Duration = Duration::from_secs(5);
const NAMESPACE: &str = "runs";

/// A cluster with nothing in it. The server ends with its value.
async fn empty_cluster() -> (Cluster, Server) {
    let server = Server::start(|_| Response::new(200, r#"{"metadata": {}, "items": []}"#)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    let url = format!("http://{}", server.address());
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": ""}}],
    });
    fs::write(&kubeconfig, text.to_string()).unwrap();
    let cluster = Cluster::builder().without_kubelet().start(&kubeconfig);
    (cluster.await.unwrap(), server)
}

/// What a wait for an end looks for.
fn is_empty(state: &State) -> Option<()> {
    state.jobs.is_empty().then_some(())
}

#[tokio::test]
async fn a_refused_list_is_no_empty_namespace() {
    let (cluster, _server) = empty_cluster().await;
    let faults = cluster.faults();
    faults.next_of(ADMIN, usize::MAX, "list", "*", Fault::InternalError);
    let refused = cluster.wait_for(NAMESPACE, SHORT, "no Job", is_empty).await;
    let error = refused.unwrap_err();
    assert!(matches!(&error.seen, Some(Seen::Unread(_))), "{error}");
    assert!(error.to_string().contains("Internal error"), "{error}");

    // It is read again until it is read.
    faults.clear();
    faults.next_of(ADMIN, 3, "list", "*", Fault::InternalError);
    let found = cluster
        .wait_for(NAMESPACE, DEADLINE, "no Job", is_empty)
        .await;
    found.unwrap();
    assert_eq!(faults.left(), 0);
}

#[tokio::test]
async fn a_request_without_an_answer_does_not_outlast_the_deadline() {
    let (cluster, _server) = empty_cluster().await;
    cluster.faults().next_of(ADMIN, 1, "list", "*", Fault::Hang);
    let limit = Duration::from_millis(100);
    let wait = cluster.wait_for(NAMESPACE, limit, "no Job", is_empty);
    let found = tokio::time::timeout(DEADLINE, wait).await.unwrap();
    assert!(found.unwrap_err().seen.is_none());
}
