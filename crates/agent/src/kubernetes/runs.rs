//! Passes the observations of the watch to the supervisors of runs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use cluster::RunRef;
use cluster::watch::{ReportOutcome, RunObserver};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use pool_protocol::id::LeaseId;
use tokio::sync::{mpsc, watch};
use verdict::{Observation, Verdict};

/// The observed state of one run.
#[derive(Clone, Debug, Default)]
pub(super) struct ObservedRun {
    /// Why it waits.
    pub(super) reason: Option<String>,
    /// How it ended.
    pub(super) end: Option<Arc<Verdict>>,
    /// The Job is gone, and there is no verdict.
    pub(super) is_forgotten: bool,
}

/// The runs that are followed.
#[derive(Debug, Default)]
pub(super) struct Runs(Mutex<BTreeMap<LeaseId, watch::Sender<ObservedRun>>>);

impl Runs {
    fn views(&self) -> MutexGuard<'_, BTreeMap<LeaseId, watch::Sender<ObservedRun>>> {
        runtime::lock(&self.0)
    }

    /// Starts to follow a run. Several receivers may follow the same run.
    pub(super) fn follow(&self, lease: LeaseId) -> watch::Receiver<ObservedRun> {
        self.views().entry(lease).or_default().subscribe()
    }

    /// Ends following a run. The hub has its end.
    pub(super) fn unfollow(&self, lease: LeaseId) {
        self.views().remove(&lease);
    }

    fn is_followed(&self, lease: LeaseId) -> bool {
        self.views().contains_key(&lease)
    }

    fn change(&self, lease: LeaseId, change: impl FnOnce(&mut ObservedRun)) {
        if let Some(view) = self.views().get(&lease) {
            view.send_modify(change);
        }
    }
}

/// Receives the observations of the watch.
#[derive(Debug)]
pub(super) struct AgentObserver {
    runs: Arc<Runs>,
    /// Receives runs that are not followed yet.
    unknown: mpsc::UnboundedSender<RunRef>,
}

impl AgentObserver {
    pub(super) const fn new(runs: Arc<Runs>, unknown: mpsc::UnboundedSender<RunRef>) -> Self {
        Self { runs, unknown }
    }

    /// Returns the lease of a run, and starts to follow the run.
    fn lease_of(&self, run: &RunRef) -> Option<LeaseId> {
        let lease = run.lease?.lease;
        if !self.runs.is_followed(lease) {
            drop(self.runs.follow(lease));
            // If there is no receiver, the agent has ended.
            let _ = self.unknown.send(run.clone());
        }
        Some(lease)
    }
}

impl RunObserver for AgentObserver {
    fn on_forgotten(&self, run: &RunRef) {
        if let Some(lease) = run.lease {
            self.runs
                .change(lease.lease, |view| view.is_forgotten = true);
        }
    }

    fn on_observation(&self, run: &RunRef, observation: &Observation) {
        let reason = match observation {
            Observation::Ended(verdict) => {
                // Without a report, the end follows when the Job has stopped. If the run is not followed, its end was
                // reported before.
                if let Some(lease) = run.lease.filter(|_| verdict.executor_reported()) {
                    let end = Arc::new(Verdict::clone(verdict));
                    self.runs.change(lease.lease, |view| view.end = Some(end));
                }
                return;
            }
            Observation::Waiting(wait) => wait.reason.is_news().then(|| wait.sentence.clone()),
            Observation::InProgress => None,
        };
        if let Some(lease) = self.lease_of(run) {
            self.runs.change(lease, |view| view.reason = reason);
        }
    }

    fn on_ended<'a>(
        &'a self,
        run: &'a RunRef,
        verdict: &'a Verdict,
    ) -> BoxFuture<'a, ReportOutcome> {
        async {
            if let Some(lease) = self.lease_of(run) {
                let mut view = self.runs.follow(lease);
                let end = Arc::new(verdict.clone());
                self.runs.change(lease, |view| view.end = Some(end));
                // Waits until the hub has the end and the agent no longer follows the run.
                while view.changed().await.is_ok() {}
            }
            ReportOutcome::Delivered
        }
        .boxed()
    }
}
