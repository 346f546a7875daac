//! What takes the dispatches and runs the steps: launchers with a cluster, or a hub with agents.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::MutexGuard;

use crate::check::RemovedLock;
use crate::faults::Target;
use crate::hub::HubSide;
use crate::hub::faults::ExecutorProcess;
use crate::launchers::LauncherSide;
use crate::peers::{Locks, Peers};
use crate::schedule::Fault;

/// One of them.
#[derive(Debug)]
pub(crate) enum Side {
    Launchers(Box<LauncherSide>),
    Hub(Box<HubSide>),
}

/// A running executor.
#[derive(Debug)]
pub(crate) enum Executor {
    Pod(Box<Pod>),
    Process(ExecutorProcess),
}

impl Side {
    /// The URL to which the platform dispatches.
    pub(crate) fn dispatch_url(&self) -> String {
        match self {
            Self::Launchers(side) => side.dispatch_url(),
            Self::Hub(side) => side.dispatch_url(),
        }
    }

    /// The URLs of all programs that take dispatches.
    pub(crate) async fn dispatch_urls(&self) -> Vec<String> {
        match self {
            Self::Launchers(side) => side.dispatch_urls().await,
            Self::Hub(side) => vec![side.dispatch_url()],
        }
    }

    /// The URL of a pool whose agent can be cut off without other runs, if there is a hub.
    pub(crate) fn apart_url(&self) -> Option<String> {
        match self {
            Self::Launchers(_) => None,
            Self::Hub(side) => Some(side.apart_url()),
        }
    }

    /// The state locks of a workspace that a hub has removed.
    pub(crate) fn removed_locks(&self, workspace: &str) -> Vec<RemovedLock> {
        match self {
            Self::Launchers(_) => Vec::new(),
            Self::Hub(side) => side.removed_locks(workspace),
        }
    }

    /// How many programs of each kind were started so far.
    pub(crate) async fn started(&self) -> BTreeMap<&'static str, u32> {
        match self {
            Self::Launchers(side) => [("launchers", side.started().await)].into(),
            Self::Hub(side) => side.started().await,
        }
    }

    /// How many responses passed the proxies of the side, and how many were disturbed in which way.
    pub(crate) fn responses(&self) -> BTreeMap<&'static str, u64> {
        match self {
            Self::Launchers(_) => BTreeMap::new(),
            Self::Hub(side) => side.responses(),
        }
    }

    /// Starts the programs that do not run.
    pub(crate) async fn start_missing(&self) -> Result<()> {
        match self {
            Self::Launchers(side) => side.start_missing().await,
            Self::Hub(side) => side.start_missing().await,
        }
    }

    /// Ends all faults of the API server.
    pub(crate) fn clear_faults(&self) {
        if let Self::Launchers(side) = self {
            side.clear_faults();
        }
    }

    /// What executors printed, one text each.
    pub(crate) fn logs(&self) -> Result<Vec<String>> {
        match self {
            Self::Launchers(side) => Ok(side.logs()),
            Self::Hub(side) => side.logs(),
        }
    }

    /// The rights that were missing.
    pub(crate) fn denied(&self) -> Vec<String> {
        match self {
            Self::Launchers(side) => side.denied(),
            Self::Hub(_) => Vec::new(),
        }
    }

    /// Waits until nothing of the runs is left, and returns what is left. A hub does not run afterwards.
    pub(crate) async fn until_empty(&self, limit: Duration) -> Result<Vec<String>> {
        match self {
            Self::Launchers(side) => side.until_empty(limit).await,
            Self::Hub(side) => side.until_empty(limit).await,
        }
    }

    /// What the programs know of a job.
    pub(crate) fn evidence(&self, job: u32) -> Result<String> {
        match self {
            Self::Launchers(side) => side.evidence(job),
            Self::Hub(side) => side.evidence(job),
        }
    }

    /// Prepares the faults that must be ready before the job exists. The guard prevents other faults of the same peer.
    pub(crate) async fn before_dispatch<'a>(
        &self,
        locks: &'a Locks,
        fault: Fault,
    ) -> Option<MutexGuard<'a, ()>> {
        match self {
            Self::Launchers(side) => side.before_dispatch(locks, fault).await,
            Self::Hub(side) => side.before_dispatch(locks, fault).await,
        }
    }

    /// Injects a fault of the side while the job is dispatched. Returns whether it happened.
    pub(crate) async fn inject_at_dispatch(
        &self,
        peers: &Peers,
        fault: Fault,
        target: Target,
    ) -> Result<bool> {
        match self {
            Self::Launchers(side) => side.inject_at_dispatch(peers, fault, target).await,
            Self::Hub(side) => side.inject_at_dispatch().await,
        }
    }

    /// Injects a fault of the side before the executor claims the step. Returns whether it happened.
    pub(crate) async fn inject_before_claim(
        &self,
        peers: &Peers,
        fault: Fault,
        target: Target,
    ) -> Result<bool> {
        match self {
            Self::Launchers(side) => side.inject_before_claim(peers, fault, target).await,
            Self::Hub(side) => side.inject_before_claim(peers, fault, target).await,
        }
    }

    /// Injects a fault of the side while the tool works. Returns whether it happened.
    pub(crate) async fn inject_at_work(
        &self,
        peers: &Peers,
        fault: Fault,
        target: Target,
    ) -> Result<bool> {
        match self {
            Self::Launchers(side) => side.inject_at_work(peers, fault, target).await,
            Self::Hub(side) => side.inject_at_work(peers, fault, target).await,
        }
    }

    /// Waits until the lines before the gate are printed. Returns whether they are.
    pub(crate) async fn until_printed(&self, peers: &Peers, target: Target) -> bool {
        match self {
            Self::Launchers(side) => side.until_printed(peers, target).await,
            Self::Hub(side) => side.until_printed(peers, target).await,
        }
    }

    /// Waits until the Job or the folder of a finished run is removed. Returns whether it is.
    pub(crate) async fn until_removed(&self, peers: &Peers, target: Target) -> Result<bool> {
        match self {
            Self::Launchers(side) => side.until_removed(peers, target).await,
            Self::Hub(side) => Ok(side.until_removed(peers, target).await),
        }
    }

    /// The executor of a job, once it works.
    pub(crate) async fn executor(&self, peers: &Peers, job: u32) -> Option<Executor> {
        match self {
            Self::Launchers(side) => {
                let pod = side.executor(peers, job).await;
                pod.map(|pod| Executor::Pod(Box::new(pod)))
            }
            Self::Hub(side) => side.executor(peers, job).await.map(Executor::Process),
        }
    }

    /// Kills an executor.
    pub(crate) fn kill(&self, executor: &Executor) {
        match (self, executor) {
            (Self::Launchers(side), Executor::Pod(pod)) => side.kill(pod),
            (_, Executor::Process(process)) => process.kill(),
            (Self::Hub(_), Executor::Pod(_)) => {}
        }
    }

    /// Kills the hub, if there is one.
    pub(crate) async fn kill_hub(&self) {
        if let Self::Hub(side) = self {
            side.kill_hub().await;
        }
    }

    /// Waits until an executor has ended. Returns whether it has.
    pub(crate) async fn until_ended(&self, peers: &Peers, job: u32, executor: &Executor) -> bool {
        match (self, executor) {
            (Self::Launchers(side), Executor::Pod(pod)) => side.until_ended(peers, job, pod).await,
            (_, Executor::Process(process)) => process.until_ended().await,
            (Self::Hub(_), Executor::Pod(_)) => false,
        }
    }
}
