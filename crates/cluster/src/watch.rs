//! The watcher: follows each run through the events of its Job and its pods, tells its observer what is new, releases what
//! waits, completes or removes what a crash left behind, and reports the end of runs whose executors cannot.
//!
//! Only one replica does this at a time ([`super::lease`]). The watcher keeps no record. Everything that must survive it is
//! written onto the Jobs, so the first list after a restart says it all again.
//!
//! [`state`] is a pure state machine: [`transition`] takes in an input with its time and returns effects. [`shell`] turns
//! events, timers and responses into inputs, and carries the effects out.

mod events;
mod fill;
mod heartbeat;
mod history;
mod message;
mod observation;
mod observer;
mod queue;
mod release;
mod report;
mod reporting;
mod requests;
mod run;
mod shell;
mod state;
mod transition;

use std::sync::Arc;
use std::time::Duration;

use job_contract::labels;
use manifest::fill::FillTemplate;
use verdict::Timeouts;

pub use history::HistoryLimits;
pub use observer::{Heartbeat, ReportOutcome, RunCounts, RunObserver};

use super::Cluster;

/// How the watcher behaves.
#[derive(Clone, Debug)]
pub struct WatchSettings {
    /// Which Jobs and pods are watched.
    pub selector: String,
    pub timeouts: Timeouts,
    pub history: HistoryLimits,
    /// A suspended Job whose job data is still missing after this time is removed: its submitter is dead.
    pub incomplete_after: Duration,
    /// Makes Jobs that fetch what runs lacked in their store of providers.
    pub fill: Option<Arc<FillTemplate>>,
    /// The pause before the second attempt to report a run. Later pauses grow.
    pub report_again: Duration,
}

impl Default for WatchSettings {
    fn default() -> Self {
        Self {
            selector: labels::of_launcher(),
            timeouts: Timeouts::default(),
            history: HistoryLimits::default(),
            incomplete_after: Duration::from_mins(1),
            fill: None,
            report_again: Duration::from_secs(5),
        }
    }
}

impl Cluster {
    /// Watches until dropped.
    pub async fn watch(&self, settings: WatchSettings, observer: Arc<dyn RunObserver>) {
        Box::pin(shell::watch(self, settings, observer)).await;
    }
}

#[cfg(test)]
mod tests;
