//! The nodes of a cluster, as far as a pod can tell them apart: labels.

use std::collections::BTreeMap;

use tokio::sync::watch;

/// A place for pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Name of the node.
    pub name: String,
    /// What a node selector looks at.
    pub labels: BTreeMap<String, String>,
}

/// The nodes of a cluster; one without labels from the start.
#[derive(Debug)]
pub struct Nodes(watch::Sender<Vec<Node>>);

impl Default for Nodes {
    fn default() -> Self {
        let node = Node {
            name: "node-1".to_owned(),
            labels: BTreeMap::new(),
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

    /// All of them, now and after every change.
    pub(crate) fn follow(&self) -> watch::Receiver<Vec<Node>> {
        self.0.subscribe()
    }
}
