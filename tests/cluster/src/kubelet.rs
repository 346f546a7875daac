//! The pod runner: plays the kubelet for pods that the scheduler has bound to a node, with local processes as containers.
//!
//! Faithful: when a pod waits and why (Secret, config map, image), the environment a container gets, volumes as files, phases, conditions, container statuses, restarts, the termination message, exit
//! codes, the order of signals and grace, deletion.
//!
//! Not faithful, since no namespaces or cgroups are used: a container sees the whole machine; mounts are folders, and
//! a mount path at the start of an environment value, or anywhere in an argument, is replaced by its folder; read-only mounts, security
//! contexts and limits are not enforced; probes, hooks and sidecars are not run; out-of-memory kills, evictions and
//! lost nodes come when a test orders them.

mod container;
mod environment;
mod events;
pub(crate) mod nodes;
mod pod;
mod process;
pub(crate) mod register;
mod volumes;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::sync::{mpsc, watch};

use crate::front::logs::Logs;
use nodes::Nodes;
pub(crate) use process::Groups;

/// What a test orders to happen to a running pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Order {
    OomKill,
    Evict,
    /// The node is started anew: its containers ended with it, and what they ended with is not known.
    Reboot,
    /// The node is gone: the processes end and no kubelet reports it.
    NodeLost,
}

/// A local program in place of an image.
#[derive(Debug, Clone)]
pub(crate) struct Image {
    pub(crate) program: PathBuf,
    pub(crate) env: Vec<(String, String)>,
}

/// What all pods share.
#[derive(Debug)]
pub(crate) struct Runner {
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) groups: Arc<Groups>,
    images: Mutex<HashMap<String, Image>>,
    orders: Mutex<HashMap<String, mpsc::UnboundedSender<Order>>>,
    logs: Arc<Logs>,
    dir: PathBuf,
}

impl Runner {
    pub(crate) fn new(dir: &Path, logs: Arc<Logs>) -> Self {
        Self {
            nodes: Arc::default(),
            groups: Arc::default(),
            images: Mutex::default(),
            orders: Mutex::default(),
            logs,
            dir: dir.to_owned(),
        }
    }

    pub(crate) fn set_image(&self, name: &str, image: Image) {
        self.images
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(name.to_owned(), image);
    }

    /// No order reaches a pod that is gone.
    fn forget(&self, uid: &str) {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        orders.remove(uid);
    }

    fn image(&self, name: &str) -> Option<Image> {
        self.images
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .cloned()
    }

    /// Whether the pod is being run.
    pub(crate) fn order(&self, uid: &str, order: Order) -> bool {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        orders
            .get(uid)
            .is_some_and(|sender| sender.send(order).is_ok())
    }

    pub(crate) fn claim_dir(&self, namespace: &str, claim: &str) -> PathBuf {
        self.dir.join("claims").join(namespace).join(claim)
    }

    fn pod_dir(&self, uid: &str) -> PathBuf {
        self.dir.join("pods").join(uid)
    }
}

/// Runs these pods until the runtime ends.
pub(crate) async fn run(
    client: Client,
    runner: Arc<Runner>,
    pods: Api<Pod>,
    which: watcher::Config,
) {
    let mut stream = std::pin::pin!(watcher(pods, which).default_backoff());
    let mut running: HashMap<String, watch::Sender<Option<Pod>>> = HashMap::new();
    let mut listed = HashSet::new();
    while let Some(event) = stream.next().await {
        match event {
            Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => {
                let uid = pod.uid().unwrap_or_default();
                listed.insert(uid.clone());
                if let Some(sender) = running.get(&uid) {
                    sender.send_replace(Some(pod));
                } else {
                    let (sender, receiver) = watch::channel(Some(pod.clone()));
                    running.insert(uid.clone(), sender);
                    let (orders, ordered) = mpsc::unbounded_channel();
                    runner
                        .orders
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .insert(uid, orders);
                    tokio::spawn(pod::work(
                        client.clone(),
                        Arc::clone(&runner),
                        pod,
                        receiver,
                        ordered,
                    ));
                }
            }
            Ok(watcher::Event::Delete(pod)) => {
                let uid = pod.uid().unwrap_or_default();
                if let Some(sender) = running.remove(&uid) {
                    sender.send_replace(None);
                }
                runner.forget(&uid);
            }
            Ok(watcher::Event::Init) => listed.clear(),
            // A watch that begins anew does not tell what was deleted meanwhile.
            Ok(watcher::Event::InitDone) => {
                for (uid, sender) in running.extract_if(|uid, _| !listed.contains(uid)) {
                    sender.send_replace(None);
                    runner.forget(&uid);
                }
            }
            Err(_) => {}
        }
    }
}
