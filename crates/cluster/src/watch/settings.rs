//! The settings of the watcher.

use std::time::Duration;

use job_contract::labels;
use verdict::Timeouts;

use super::history::HistoryLimits;

/// How the watcher behaves.
#[derive(Clone, Debug)]
pub struct WatchSettings {
    /// Which Jobs and pods are watched.
    pub selector: String,
    pub timeouts: Timeouts,
    pub history: HistoryLimits,
    /// A suspended Job whose job data is still missing after this time is removed: its submitter is dead.
    pub incomplete_after: Duration,
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
            report_again: Duration::from_secs(5),
        }
    }
}
