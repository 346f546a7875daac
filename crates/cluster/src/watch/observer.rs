//! What the watcher tells its observer, and what the observer answers.

use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use verdict::{Observation, Verdict};

use crate::RunRef;

/// The result of a report to the platform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReportOutcome {
    /// The platform knows how the run ended.
    Delivered,
    /// The report failed. Another attempt may succeed.
    Retry,
    /// The platform will never accept the report, for this reason.
    Refused(String),
}

/// Whether the executor of a run sends heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heartbeat {
    Present,
    /// There is none, where there would be one.
    Missing,
    /// Heartbeats cannot be read here, or not at the moment.
    Unknown,
}

/// Receives what the watcher finds out about runs.
pub trait RunObserver: Send + Sync + 'static {
    /// A Job is suspended and was never released. A later observation says whether its run has to wait, and for what. The
    /// launcher that accepted the run may be dead.
    fn on_held(&self, _run: &RunRef) {}

    /// No more calls follow for this run. Its Job is gone, and there is nothing to report.
    fn on_forgotten(&self, _run: &RunRef) {}

    /// The observation of a run has changed. This is called once for each change, and once for each run after a restart.
    fn on_observation(&self, run: &RunRef, observation: &Observation);

    /// The executor of a run is at work. `since` is how long it has been, if that is known. Called after the observation
    /// that says so.
    fn on_running(&self, _run: &RunRef, _since: Option<Duration>) {}

    /// Looks for a heartbeat of the executor of a run, because the node of the run may be lost.
    fn check_heartbeat<'a>(&'a self, _run: &'a RunRef) -> BoxFuture<'a, Heartbeat> {
        futures_util::future::ready(Heartbeat::Unknown).boxed()
    }

    /// A run ended, and its executor did not report how: report it to the platform, unless the platform knows already. Until
    /// the report is delivered or refused, this is called again. Calls for one run never overlap.
    ///
    /// A verdict may be `Completed`: an executor of another make ends with 0 only after it has reported.
    fn on_ended<'a>(
        &'a self,
        run: &'a RunRef,
        verdict: &'a Verdict,
    ) -> BoxFuture<'a, ReportOutcome>;

    /// The executor of an ended run has reported, and the launcher can add what the executor did not know or could not
    /// deliver.
    fn on_more<'a>(&'a self, _run: &'a RunRef, _verdict: &'a Verdict) -> BoxFuture<'a, ()> {
        futures_util::future::ready(()).boxed()
    }

    /// The numbers of runs. Called after every change.
    fn on_counts(&self, _counts: RunCounts) {}
}

/// The numbers of runs that are not over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Suspended until the launcher releases them.
    pub held: usize,
    /// Suspended until a queue of the cluster releases them.
    pub queued: usize,
    /// Released.
    pub in_flight: usize,
}
