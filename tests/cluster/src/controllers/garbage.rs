//! The garbage collector: dependents whose owners are gone, and owners that wait for their dependents.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::core::ApiResource;
use kube::core::PartialObjectMeta;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::job::{ignore_missing, untrack};
use crate::api_server::crud::{FOREGROUND, ORPHAN};

/// An object as far as ownership goes.
#[derive(Debug, Clone)]
struct Node {
    resource: ApiResource,
    meta: ObjectMeta,
}

#[derive(Debug, Clone)]
enum News {
    Is(Node),
    Gone(Node),
    /// All there are of a kind, by UID: a watch that begins anew does not tell what was deleted meanwhile.
    Listed(String, HashSet<String>),
    /// Something could not be done about the object of this UID.
    Again(String),
}

impl News {
    /// What is to be looked at once more when it could not be acted upon. An object may have changed by then.
    fn again(&self) -> Self {
        match self {
            Self::Is(node) => Self::Again(uid(&node.meta)),
            other => other.clone(),
        }
    }
}

const TRY_AGAIN: Duration = Duration::from_millis(200);

/// Runs until the runtime ends.
pub(crate) async fn run(client: Client) {
    let (sender, mut news) = mpsc::unbounded_channel();
    follow::<Job>(&client, &sender);
    follow::<Pod>(&client, &sender);
    follow::<Secret>(&client, &sender);
    follow::<ConfigMap>(&client, &sender);
    let mut collector = Collector {
        client,
        nodes: HashMap::new(),
    };
    while let Some(message) = news.recv().await {
        let again = message.again();
        if collector.hear(message).await.is_err() {
            let sender = sender.clone();
            tokio::spawn(async move {
                sleep(TRY_AGAIN).await;
                sender.send(again)
            });
        }
    }
}

fn follow<K>(client: &Client, sender: &mpsc::UnboundedSender<News>)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let resource = ApiResource::erase::<K>(&());
    let stream = watcher(
        Api::<PartialObjectMeta<K>>::all(client.clone()),
        watcher::Config::default(),
    );
    let sender = sender.clone();
    tokio::spawn(async move {
        let mut stream = std::pin::pin!(stream.default_backoff());
        let mut listed = HashSet::new();
        while let Some(event) = stream.next().await {
            let Ok(event) = event else { continue };
            if let watcher::Event::InitApply(object) = &event {
                listed.insert(uid(&object.metadata));
            }
            let message = match event {
                watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
                    News::Is(Node {
                        resource: resource.clone(),
                        meta: object.metadata,
                    })
                }
                watcher::Event::Delete(object) => News::Gone(Node {
                    resource: resource.clone(),
                    meta: object.metadata,
                }),
                watcher::Event::Init => {
                    listed.clear();
                    continue;
                }
                watcher::Event::InitDone => {
                    News::Listed(resource.kind.clone(), std::mem::take(&mut listed))
                }
            };
            if sender.send(message).is_err() {
                return;
            }
        }
    });
}

struct Collector {
    client: Client,
    /// By UID.
    nodes: HashMap<String, Node>,
}

fn uid(meta: &ObjectMeta) -> String {
    meta.uid.clone().unwrap_or_default()
}

fn owners(meta: &ObjectMeta) -> &[OwnerReference] {
    meta.owner_references.as_deref().unwrap_or_default()
}

fn waits_for(meta: &ObjectMeta, finalizer: &str) -> bool {
    meta.deletion_timestamp.is_some()
        && meta
            .finalizers
            .iter()
            .flatten()
            .any(|name| name == finalizer)
}

impl Collector {
    fn api(&self, node: &Node) -> Api<DynamicObject> {
        let namespace = node.meta.namespace.as_deref().unwrap_or_default();
        Api::namespaced_with(self.client.clone(), namespace, &node.resource)
    }

    fn dependents(&self, owner: &str) -> Vec<Node> {
        self.nodes
            .values()
            .filter(|node| owners(&node.meta).iter().any(|o| o.uid == owner))
            .cloned()
            .collect()
    }

    async fn hear(&mut self, message: News) -> Result<(), kube::Error> {
        match message {
            News::Gone(node) => self.bury(&node).await,
            News::Is(node) => {
                self.nodes.insert(uid(&node.meta), node.clone());
                self.tend(&node).await
            }
            News::Listed(kind, listed) => {
                let is_gone =
                    |node: &&Node| node.resource.kind == kind && !listed.contains(&uid(&node.meta));
                let gone: Vec<Node> = self.nodes.values().filter(is_gone).cloned().collect();
                for node in gone {
                    self.bury(&node).await?;
                }
                Ok(())
            }
            News::Again(id) => match self.nodes.get(&id).cloned() {
                Some(node) => self.tend(&node).await,
                None => Ok(()),
            },
        }
    }

    async fn tend(&self, node: &Node) -> Result<(), kube::Error> {
        self.end(node).await?;
        self.collect(node).await
    }

    async fn bury(&mut self, node: &Node) -> Result<(), kube::Error> {
        let gone = uid(&node.meta);
        self.nodes.remove(&gone);
        for dependent in self.dependents(&gone) {
            if let Err(error) = self.collect(&dependent).await {
                // So that whoever tries again finds it.
                self.nodes.insert(gone, node.clone());
                return Err(error);
            }
        }
        // An owner may have waited for this one.
        for owner in owners(&node.meta) {
            if let Some(owner) = self.nodes.get(&owner.uid).cloned() {
                self.end(&owner).await?;
            }
        }
        Ok(())
    }

    /// An owner that is being deleted and waits for the collector.
    async fn end(&self, node: &Node) -> Result<(), kube::Error> {
        let id = uid(&node.meta);
        if waits_for(&node.meta, ORPHAN) {
            for dependent in self.dependents(&id) {
                let rest: Vec<&OwnerReference> = owners(&dependent.meta)
                    .iter()
                    .filter(|owner| owner.uid != id)
                    .collect();
                let patch = json!({"metadata": {"ownerReferences": rest}});
                self.patch(&dependent, patch).await?;
            }
            return self.drop_finalizer(node, ORPHAN).await;
        }
        if !waits_for(&node.meta, FOREGROUND) {
            return Ok(());
        }
        let mut blocked = false;
        for dependent in self.dependents(&id) {
            blocked |= owners(&dependent.meta)
                .iter()
                .any(|o| o.uid == id && o.block_owner_deletion == Some(true));
            if dependent.meta.deletion_timestamp.is_none() {
                self.delete(&dependent).await?;
            }
        }
        if blocked {
            Ok(())
        } else {
            self.drop_finalizer(node, FOREGROUND).await
        }
    }

    async fn drop_finalizer(&self, node: &Node, finalizer: &str) -> Result<(), kube::Error> {
        let rest: Vec<&String> = node
            .meta
            .finalizers
            .iter()
            .flatten()
            .filter(|name| *name != finalizer)
            .collect();
        self.patch(
            node,
            json!({"metadata": {"uid": node.meta.uid, "finalizers": rest}}),
        )
        .await
    }

    async fn patch(&self, node: &Node, patch: serde_json::Value) -> Result<(), kube::Error> {
        let name = node.meta.name.clone().unwrap_or_default();
        ignore_missing(
            self.api(node)
                .patch(&name, &PatchParams::default(), &Patch::Merge(patch))
                .await,
        )
    }

    async fn delete(&self, node: &Node) -> Result<(), kube::Error> {
        let mut options = DeleteParams::background();
        options.preconditions = Some(Preconditions {
            uid: node.meta.uid.clone(),
            resource_version: None,
        });
        ignore_missing(
            self.api(node)
                .delete(&node.meta.name.clone().unwrap_or_default(), &options)
                .await,
        )
    }

    /// Deletes an object none of whose owners is left.
    async fn collect(&self, node: &Node) -> Result<(), kube::Error> {
        if owners(&node.meta).is_empty() {
            return Ok(());
        }
        for owner in owners(&node.meta) {
            if self.nodes.contains_key(&owner.uid) || self.lives(node, owner).await? {
                return Ok(());
            }
        }
        if node.meta.deletion_timestamp.is_none() {
            self.delete(node).await?;
        }
        if node.resource.kind == "Pod" {
            // Nobody counts it any more.
            let pods = Api::<Pod>::namespaced(
                self.client.clone(),
                node.meta.namespace.as_deref().unwrap_or_default(),
            );
            if let Some(pod) = pods
                .get_opt(&node.meta.name.clone().unwrap_or_default())
                .await?
                && pod.metadata.uid == node.meta.uid
                && pod
                    .metadata
                    .finalizers
                    .iter()
                    .flatten()
                    .any(|name| name == super::job::TRACKING)
            {
                untrack(&pods, &pod).await?;
            }
        }
        Ok(())
    }

    /// Asks the server, since watches of different kinds are not in step.
    async fn lives(&self, node: &Node, owner: &OwnerReference) -> Result<bool, kube::Error> {
        let (group, version) = owner
            .api_version
            .split_once('/')
            .unwrap_or(("", &owner.api_version));
        let kind = kube::core::GroupVersionKind::gvk(group, version, &owner.kind);
        let resource = ApiResource::from_gvk(&kind);
        let namespace = node.meta.namespace.as_deref().unwrap_or_default();
        let api = Api::<DynamicObject>::namespaced_with(self.client.clone(), namespace, &resource);
        Ok(api
            .get_opt(&owner.name)
            .await?
            .is_some_and(|found| found.metadata.uid.as_ref() == Some(&owner.uid)))
    }
}
