//! Puts a pod on a node, or says why it fits none.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::watch;

use super::Runner;
use crate::controllers::events::{Source, emit};

const RETRY: Duration = Duration::from_millis(100);

async fn place(client: &Client, runner: &Runner, pod: &Pod) -> Result<String, String> {
    let namespace = pod.namespace().unwrap_or_default();
    let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), &namespace);
    let volumes = pod
        .spec
        .iter()
        .flat_map(|spec| spec.volumes.iter().flatten());
    for claim in volumes.filter_map(|volume| volume.persistent_volume_claim.as_ref()) {
        if let Ok(None) = claims.get_opt(&claim.claim_name).await {
            let name = &claim.claim_name;
            return Err(format!(
                "0/1 nodes are available: persistentvolumeclaim \"{name}\" not found. preemption: 0/1 nodes are available: \
                 1 Preemption is not helpful for scheduling."
            ));
        }
    }
    runner.nodes.place(pod)
}

/// Waits until the pod fits a node and is bound to it. Nothing when the pod goes away before.
pub(crate) async fn schedule(
    client: &Client,
    runner: &Runner,
    pod: &Pod,
    seen: &watch::Receiver<Option<Pod>>,
) -> Option<String> {
    let api = Api::<Pod>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let mut told = String::new();
    loop {
        let current = seen.borrow().clone()?;
        if current.metadata.deletion_timestamp.is_some() {
            return None;
        }
        if let Some(node) = current
            .spec
            .as_ref()
            .and_then(|spec| spec.node_name.clone())
        {
            return Some(node);
        }
        match place(client, runner, pod).await {
            Ok(node) => {
                let binding = json!({
                    "apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod.name_any()},
                    "target": {"apiVersion": "v1", "kind": "Node", "name": node},
                });
                let bound = api
                    .create_subresource::<_, serde_json::Value>(
                        "binding",
                        &pod.name_any(),
                        &PostParams::default(),
                        &binding,
                    )
                    .await;
                if bound.is_ok() {
                    let message = format!(
                        "Successfully assigned {}/{} to {node}",
                        pod.namespace().unwrap_or_default(),
                        pod.name_any()
                    );
                    emit(
                        client,
                        pod,
                        Source::Scheduler,
                        "Normal",
                        "Scheduled",
                        &message,
                    )
                    .await;
                    return Some(node);
                }
            }
            Err(why) if why != told => {
                let condition = json!({
                    "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why,
                    "lastTransitionTime": crate::api_server::crud::now(),
                });
                let patch = json!({"status": {"conditions": [condition]}});
                // Told again when it could not be told now.
                if api
                    .patch_status(
                        &pod.name_any(),
                        &PatchParams::default(),
                        &Patch::Strategic(patch),
                    )
                    .await
                    .is_ok()
                {
                    emit(
                        client,
                        pod,
                        Source::Scheduler,
                        "Warning",
                        "FailedScheduling",
                        &why,
                    )
                    .await;
                    told = why;
                }
            }
            Err(_) => {}
        }
        tokio::time::sleep(RETRY).await;
    }
}
