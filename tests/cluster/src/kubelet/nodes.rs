//! The nodes of a cluster, as far as a pod can tell them apart: labels and taints.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, Toleration};
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

    /// The node a pod fits, or the words of the scheduler.
    pub(crate) fn place(&self, pod: &Pod) -> Result<String, String> {
        let all = self.0.borrow();
        let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
        for node in all.iter() {
            match unfit(node, pod) {
                None => return Ok(node.name.clone()),
                Some(reason) => *reasons.entry(reason).or_default() += 1,
            }
        }
        if all.is_empty() {
            return Err("no nodes available to schedule pods".to_owned());
        }
        let list: Vec<String> = reasons
            .iter()
            .map(|(reason, count)| format!("{count} {reason}"))
            .collect();
        let count = all.len();
        Err(format!(
            "0/{count} nodes are available: {}. preemption: 0/{count} nodes are available: {count} Preemption is not \
             helpful for scheduling.",
            list.join(", ")
        ))
    }
}

fn unfit(node: &Node, pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let taint = node
        .taints
        .iter()
        .find(|taint| !tolerations.iter().any(|t| tolerates(t, taint)));
    if let Some(taint) = taint {
        return Some(format!(
            "node(s) had untolerated taint {{{}: {}}}",
            taint.key, taint.value
        ));
    }
    let mut wanted = spec.node_selector.iter().flatten();
    wanted
        .any(|(key, value)| node.labels.get(key) != Some(value))
        .then(|| "node(s) didn't match Pod's node affinity/selector".to_owned())
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let key = toleration.key.as_deref().unwrap_or("");
    let effect = toleration.effect.as_deref().unwrap_or("");
    let exists = toleration.operator.as_deref() == Some("Exists");
    (effect.is_empty() || effect == taint.effect)
        && (key == taint.key || (key.is_empty() && exists))
        && (exists || toleration.value.as_deref().unwrap_or("") == taint.value)
}

#[cfg(test)]
mod tests {
    use super::{Node, Nodes, Taint};

    fn pod(spec: &serde_json::Value) -> k8s_openapi::api::core::v1::Pod {
        serde_json::from_value(serde_json::json!({"spec": spec})).unwrap()
    }

    #[test]
    fn a_tainted_node_takes_only_pods_that_tolerate_it() {
        let nodes = Nodes::default();
        let taint = Taint {
            key: "runs".into(),
            value: "only".into(),
            effect: "NoSchedule".into(),
        };
        nodes.set(Node {
            name: "node-1".into(),
            labels: [].into(),
            taints: vec![taint],
        });
        let refused = nodes
            .place(&pod(&serde_json::json!({"containers": []})))
            .unwrap_err();
        assert!(
            refused.starts_with(
                "0/1 nodes are available: 1 node(s) had untolerated taint {runs: only}"
            )
        );
        let tolerant = serde_json::json!({"containers": [], "tolerations": [{"key": "runs", "operator": "Exists"}]});
        assert_eq!(nodes.place(&pod(&tolerant)), Ok("node-1".to_owned()));
    }
}
