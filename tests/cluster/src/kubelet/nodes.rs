//! The nodes of a cluster, as far as a pod can tell them apart: labels and taints.

use std::collections::BTreeMap;

use tokio::sync::watch;

/// Keeps pods away that do not tolerate it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    /// Name of the taint.
    pub key: String,
    /// Its value.
    pub value: String,
    /// `NoSchedule` or `NoExecute`.
    pub effect: String,
}

/// A place for pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Name of the node.
    pub name: String,
    /// What a node selector looks at.
    pub labels: BTreeMap<String, String>,
    /// What tolerations look at.
    pub taints: Vec<Taint>,
}

/// The nodes of a cluster; one without labels and taints from the start.
#[derive(Debug)]
pub struct Nodes(watch::Sender<Vec<Node>>);

impl Default for Nodes {
    fn default() -> Self {
        let node = Node {
            name: "node-1".to_owned(),
            labels: BTreeMap::new(),
            taints: Vec::new(),
        };
        Self(watch::Sender::new(vec![node]))
    }
}

impl Nodes {
    /// Adds a node, or replaces the one of this name.
    pub fn set(&self, node: Node) {
        self.0.send_modify(|all| {
            all.retain(|other| other.name != node.name);
            all.push(node);
        });
    }

    /// No pod is put on this node any more.
    pub fn remove(&self, name: &str) {
        self.0
            .send_modify(|all| all.retain(|node| node.name != name));
    }

    /// All of them, now and after every change.
    pub(crate) fn follow(&self) -> watch::Receiver<Vec<Node>> {
        self.0.subscribe()
    }
}
