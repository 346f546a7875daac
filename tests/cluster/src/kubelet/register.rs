//! Makes the nodes of a test known to the scheduler and the controllers: an object with room for everything, a Lease that
//! is renewed, and for each node a task that runs the pods bound to it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node as Object, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, Client, Resource as _};
use serde_json::json;
use tokio::task::JoinHandle;

use super::nodes::Node;
use super::{Runner, run};
use crate::clock::{micro_now, now};

/// The label all nodes of a test have, and only pods of its namespaces ask for.
pub(crate) const LABEL: &str = "mayfly.dev/test-nodes";
/// A controller calls a node lost after four of these.
const RENEWAL: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(200);
const MANAGER: &str = "mayfly-test-nodes";
/// Of the Leases of nodes.
const LEASES: &str = "kube-node-lease";

struct Known {
    node: Node,
    /// Who owns its Lease.
    object: OwnerReference,
    kubelet: JoinHandle<()>,
}

/// The nodes of one test in a cluster that others use too.
pub(crate) struct Registry {
    client: Client,
    runner: Arc<Runner>,
    /// The nodes of other tests do not have it in their names and labels.
    id: String,
}

impl Registry {
    pub(crate) fn new(client: Client, runner: Arc<Runner>, id: &str) -> Self {
        Self {
            client,
            runner,
            id: id.to_owned(),
        }
    }

    fn name(&self, node: &Node) -> String {
        format!("{}-{}", node.name, self.id)
    }

    /// Keeps the objects like the nodes of the test until the runtime ends.
    pub(crate) async fn keep(self) {
        let mut nodes = self.runner.nodes.follow();
        let mut known: BTreeMap<String, Known> = BTreeMap::new();
        loop {
            let wanted = nodes.borrow_and_update().clone();
            let mut complete = true;
            for node in &wanted {
                complete &= self.keep_one(node, &mut known).await.is_ok();
            }
            let pause = if complete { RENEWAL } else { RETRY };
            let _ = tokio::time::timeout(pause, nodes.changed()).await;
        }
    }

    async fn keep_one(
        &self,
        node: &Node,
        known: &mut BTreeMap<String, Known>,
    ) -> Result<(), kube::Error> {
        if known
            .get(&node.name)
            .is_none_or(|known| known.node != *node)
        {
            let object = self.put(node).await?;
            let before = known.remove(&node.name);
            let now = Known {
                node: node.clone(),
                object,
                kubelet: before.map_or_else(|| self.kubelet(node), |before| before.kubelet),
            };
            known.insert(node.name.clone(), now);
        }
        match known.get(&node.name) {
            Some(known) => self.renew(known).await,
            None => Ok(()),
        }
    }

    fn kubelet(&self, node: &Node) -> JoinHandle<()> {
        let bound = format!("spec.nodeName={}", self.name(node));
        let pods = Api::<Pod>::all(self.client.clone());
        let config = watcher::Config::default().fields(&bound);
        tokio::spawn(run(
            self.client.clone(),
            Arc::clone(&self.runner),
            pods,
            config,
        ))
    }

    /// Makes or changes the object.
    async fn put(&self, node: &Node) -> Result<OwnerReference, kube::Error> {
        let name = self.name(node);
        let objects = Api::<Object>::all(self.client.clone());
        let params = PatchParams::apply(MANAGER).force();
        let mut labels = node.labels.clone();
        labels.insert(LABEL.to_owned(), self.id.clone());
        labels.insert("kubernetes.io/hostname".to_owned(), name.clone());
        let object = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
        });
        objects
            .patch(&name, &params, &Patch::Apply(&object))
            .await?;
        let room = json!({
            "cpu": "1000", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "10000",
        });
        let condition = |kind: &str, status: &str, reason: &str| {
            json!({
                "type": kind, "status": status, "reason": reason, "message": "a node of a test",
                "lastHeartbeatTime": now(), "lastTransitionTime": now(),
            })
        };
        let status = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
            "status": {
                "capacity": room, "allocatable": room,
                "conditions": [
                    condition("Ready", "True", "KubeletReady"),
                    condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
                    condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
                    condition("PIDPressure", "False", "KubeletHasSufficientPID"),
                ],
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            },
        });
        let there = objects
            .patch_status(&name, &params, &Patch::Apply(&status))
            .await?;
        Ok(there.owner_ref(&()).unwrap_or_default())
    }

    async fn renew(&self, known: &Known) -> Result<(), kube::Error> {
        let (name, owner) = (self.name(&known.node), &known.object);
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            // It goes with its node.
            "metadata": {"name": name, "ownerReferences": [owner]},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": micro_now()},
        });
        Api::<Lease>::namespaced(self.client.clone(), LEASES)
            .patch(
                &name,
                &PatchParams::apply(MANAGER).force(),
                &Patch::Apply(&lease),
            )
            .await
            .map(drop)
    }
}
