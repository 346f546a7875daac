//! What a test needs of a cluster beyond nodes: folders behind its claims, pods that are refused, and an end without
//! remains.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{
    Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, ResourceQuota,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, PostParams,
};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use test_peers::wait;

use crate::kubelet::Runner;
use crate::kubelet::register::LABEL;

/// Makes a volume for every claim of a namespace, as a provisioner of local folders does, until the runtime ends.
pub(crate) async fn provide_volumes(
    client: Client,
    runner: Arc<Runner>,
    namespace: String,
    id: String,
) {
    let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), &namespace);
    let stream = watcher(claims, watcher::Config::default()).default_backoff();
    let mut stream = std::pin::pin!(stream.applied_objects());
    while let Some(claim) = stream.next().await {
        let Ok(claim) = claim else { continue };
        let spec = claim.spec.clone().unwrap_or_default();
        if spec.volume_name.is_some() {
            continue;
        }
        let folder: PathBuf = runner.claim_dir(&namespace, &claim.name_any());
        let uid = claim.uid().unwrap_or_default();
        let volume = json!({
            "metadata": {"name": format!("mayfly-test-{uid}"), "labels": {LABEL: id}},
            "spec": {
                "capacity": spec.resources.and_then(|resources| resources.requests),
                "accessModes": spec.access_modes,
                "storageClassName": spec.storage_class_name.unwrap_or_default(),
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {
                    "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace,
                    "name": claim.name_any(), "uid": uid,
                },
                "hostPath": {"path": folder},
            },
        });
        // It may be there already, from what was seen of the claim before.
        let _ = create::<PersistentVolume>(&Api::all(client.clone()), volume).await;
    }
}

/// What admission refuses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Refused {
    Jobs,
    Pods,
}

/// Refuses every object of this kind in a namespace in these words. Returns when the API server does so.
pub(crate) async fn refuse(
    client: &Client,
    refused: Refused,
    namespace: &str,
    words: &str,
    id: &str,
) -> Result<(), kube::Error> {
    let (group, resource) = match refused {
        Refused::Jobs => ("batch", "jobs"),
        Refused::Pods => ("", "pods"),
    };
    let name = format!("mayfly-test-{id}");
    let metadata = json!({"name": name, "labels": {LABEL: id}});
    let policy = json!({
        "metadata": metadata,
        "spec": {
            "matchConstraints": {"resourceRules": [
                {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [resource]},
            ]},
            "validations": [{"expression": "false", "message": words}],
        },
    });
    let only = json!({"matchLabels": {"kubernetes.io/metadata.name": namespace}});
    let binding = json!({
        "metadata": metadata,
        "spec": {
            "policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": only},
        },
    });
    create::<ValidatingAdmissionPolicy>(&Api::all(client.clone()), policy).await?;
    create::<ValidatingAdmissionPolicyBinding>(&Api::all(client.clone()), binding).await?;
    until_refused(words, || async {
        match refused {
            Refused::Jobs => try_job(client, namespace).await.map(drop),
            Refused::Pods => try_pod(client, namespace).await.map(drop),
        }
    })
    .await
}

/// Lets a namespace have no pod. Returns when the API server refuses them.
pub(crate) async fn allow_no_pod(client: &Client, namespace: &str) -> Result<(), kube::Error> {
    let quota = json!({"metadata": {"name": "runs"}, "spec": {"hard": {"pods": "0"}}});
    create::<ResourceQuota>(&Api::namespaced(client.clone(), namespace), quota).await?;
    let tried = || async { try_pod(client, namespace).await.map(drop) };
    until_refused("exceeded quota", tried).await
}

async fn create<K>(api: &Api<K>, object: Value) -> Result<(), kube::Error>
where
    K: Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize,
{
    let object = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
    api.create(&PostParams::default(), &object).await.map(drop)
}

/// Leads the pods of a namespace to the nodes of its test. Returns when the API server does so.
pub(crate) async fn lead_pods(
    client: &Client,
    namespace: &str,
    id: &str,
) -> Result<(), kube::Error> {
    let is_led = |answer: Result<Pod, kube::Error>| -> Result<bool, kube::Error> {
        let selector = answer?.spec.and_then(|spec| spec.node_selector);
        let value = selector.and_then(|selector| selector.get(LABEL).cloned());
        Ok(value.is_some_and(|value| value == id))
    };
    // By the annotation of the namespace, where the admission plugin for it is on.
    if is_led(try_pod(client, namespace).await)? {
        return Ok(());
    }
    let name = format!("mayfly-test-{id}");
    let metadata = json!({"name": name, "labels": {LABEL: id}});
    let escaped = LABEL.replace('/', "~1");
    let expression = format!(
        "has(object.spec.nodeSelector) \
         ? [JSONPatch{{op: 'add', path: '/spec/nodeSelector/{escaped}', value: '{id}'}}] \
         : [JSONPatch{{op: 'add', path: '/spec/nodeSelector', value: {{'{LABEL}': '{id}'}}}}]"
    );
    let policy = json!({
        "metadata": metadata,
        "spec": {
            "matchConstraints": {
                "namespaceSelector": {"matchLabels": {LABEL: id}},
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]},
                ],
            },
            "reinvocationPolicy": "Never",
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}],
        },
    });
    let binding = json!({"metadata": metadata, "spec": {"policyName": name}});
    let [policies, bindings] = mutating(client);
    for (api, object) in [(policies, policy), (bindings, binding)] {
        match create(&api, object).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {
                return Err(error(io::Error::other(
                    "the cluster has neither the admission plugin PodNodeSelector nor MutatingAdmissionPolicy in v1 \
                     (Kubernetes 1.36), so that no pod of a test would find its node",
                )));
            }
            // Of an earlier namespace of this test.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            made => made?,
        }
    }
    let is_led = || async {
        match is_led(try_pod(client, namespace).await) {
            Ok(true) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    let led = wait::within(wait::DEADLINE, "pods are led to their nodes", is_led).await;
    led.map_err(|late| error(io::Error::other(late)))
}

/// The kinds of policies that change what is created, and of their bindings.
fn mutating(client: &Client) -> [Api<DynamicObject>; 2] {
    ["MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"].map(|kind| {
        let plural = match kind {
            "MutatingAdmissionPolicy" => "mutatingadmissionpolicies",
            _ => "mutatingadmissionpolicybindings",
        };
        let kind = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind);
        let resource = ApiResource::from_gvk_with_plural(&kind, plural);
        Api::all_with(client.clone(), &resource)
    })
}

pub(crate) fn error(error: io::Error) -> kube::Error {
    kube::Error::Service(Box::new(error))
}

async fn try_pod(client: &Client, namespace: &str) -> Result<Pod, kube::Error> {
    try_object(&Api::namespaced(client.clone(), namespace), harmless_pod()).await
}

async fn try_job(client: &Client, namespace: &str) -> Result<Job, kube::Error> {
    let job = json!({"metadata": {"name": "tried"}, "spec": {"template": harmless_pod()}});
    try_object(&Api::namespaced(client.clone(), namespace), job).await
}

/// A pod that the restricted profile of pod security permits.
fn harmless_pod() -> Value {
    json!({
        "metadata": {"name": "tried"},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "none", "image": "registry.example.test/none:1",
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    })
}

/// What the API server would make of an object.
async fn try_object<K>(api: &Api<K>, object: Value) -> Result<K, kube::Error>
where
    K: Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize,
{
    let object = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
    let dry = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    api.create(&dry, &object).await
}

async fn until_refused<F: Future<Output = Result<(), kube::Error>>>(
    words: &str,
    tried: impl Fn() -> F,
) -> Result<(), kube::Error> {
    let is_refused = || async {
        match tried().await {
            Err(kube::Error::Api(status)) if status.message.contains(words) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    let refused = wait::within(wait::DEADLINE, "what is refused", is_refused).await;
    refused.map_err(|late| error(io::Error::other(late)))
}

/// Removes all that a test has made besides what is in its namespaces, and these.
pub(crate) async fn remove(client: &Client, namespaces: Vec<String>, id: &str) {
    // What cannot be deleted now is left to the owner of the cluster.
    let all = Api::<Namespace>::all(client.clone());
    for name in namespaces {
        let _ = all.delete(&name, &DeleteParams::default()).await;
        // No kubelet will confirm their end.
        let pods = Api::<Pod>::namespaced(client.clone(), &name);
        let at_once = DeleteParams::default().grace_period(0);
        let _ = pods
            .delete_collection(&at_once, &ListParams::default())
            .await;
    }
    let (at_last, ours) = (
        DeleteParams::default(),
        ListParams::default().labels(&format!("{LABEL}={id}")),
    );
    for policies in mutating(client) {
        let _ = policies.delete_collection(&at_last, &ours).await;
    }
    macro_rules! remove_all {
        ($($kind:ty)*) => {$(
            let all = Api::<$kind>::all(client.clone());
            let _ = all.delete_collection(&at_last, &ours).await;
        )*};
    }
    remove_all!(
        Node PersistentVolume ValidatingAdmissionPolicyBinding ValidatingAdmissionPolicy CustomResourceDefinition
    );
}
