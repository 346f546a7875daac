//! Whether an executor on a node that may be lost is still at work, by its heartbeats. Pure.

use std::time::{Duration, Instant};

use super::observer::Heartbeat;

/// The pause between two looks for a heartbeat.
const CHECK_AGAIN: Duration = Duration::from_secs(5);
/// An executor without a heartbeat for this long, after its last one has expired, is gone. Another make of executor renews
/// its heartbeat as often.
pub(super) const SILENCE: Duration = Duration::from_secs(15);

/// The looks for a heartbeat of one executor.
#[derive(Debug, Default)]
pub(super) struct HeartbeatCheck {
    /// A look is in progress, or begins after its pause.
    in_progress: bool,
    last: Option<Heartbeat>,
    missing_since: Option<Instant>,
}

impl HeartbeatCheck {
    /// Whether the executor is lost. Where heartbeats cannot be read, only a pod whose deletion is overdue is.
    pub(super) fn is_lost(&self, is_overdue: bool, now: Instant) -> bool {
        let is_silent = self
            .missing_since
            .is_some_and(|since| now.duration_since(since) >= SILENCE);
        is_silent || (is_overdue && self.last == Some(Heartbeat::Unknown))
    }

    /// Begins the next look, after the returned pause. `None` if a look is in progress.
    pub(super) fn begin(&mut self) -> Option<Duration> {
        let is_new = !std::mem::replace(&mut self.in_progress, true);
        is_new.then(|| self.last.map_or(Duration::ZERO, |_| CHECK_AGAIN))
    }

    /// Takes in what the look in progress found.
    pub(super) fn finish(&mut self, found: Heartbeat, now: Instant) {
        self.in_progress = false;
        self.last = Some(found);
        self.missing_since = match found {
            Heartbeat::Missing => self.missing_since.or(Some(now)),
            Heartbeat::Present | Heartbeat::Unknown => None,
        };
    }
}
