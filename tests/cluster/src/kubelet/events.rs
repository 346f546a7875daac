//! Events that a kubelet leaves behind for people and for `explain`.

use k8s_openapi::api::core::v1::Event;
use kube::api::PostParams;
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::json;

use crate::clock::now;

const COMPONENT: &str = "kubelet";

/// Leaves an event about `object`. Losing one is no failure of what it tells.
pub(crate) async fn emit<K>(client: &Client, object: &K, kind: &str, reason: &str, message: &str)
where
    K: Resource<DynamicType = ()>,
{
    emit_of(client, object, None, (kind, reason, message)).await;
}

/// Leaves an event about the part of `object` at this path.
pub(crate) async fn emit_of<K>(
    client: &Client,
    object: &K,
    path: Option<&str>,
    (kind, reason, message): (&str, &str, &str),
) where
    K: Resource<DynamicType = ()>,
{
    let namespace = object.namespace().unwrap_or_default();
    let now = now();
    let event = serde_json::from_value::<Event>(json!({
        "metadata": {"name": format!("{}.{}", object.name_any(), uuid::Uuid::new_v4().simple()), "namespace": namespace},
        "involvedObject": {
            "apiVersion": K::api_version(&()), "kind": K::kind(&()), "namespace": namespace,
            "name": object.name_any(), "uid": object.uid(), "resourceVersion": object.resource_version(),
            "fieldPath": path,
        },
        "type": kind, "reason": reason, "message": message, "count": 1,
        "firstTimestamp": now, "lastTimestamp": now,
        "source": {"component": COMPONENT}, "reportingComponent": COMPONENT, "reportingInstance": "",
    }));
    if let Ok(event) = event {
        let _ = Api::<Event>::namespaced(client.clone(), &namespace)
            .create(&PostParams::default(), &event)
            .await;
    }
}
