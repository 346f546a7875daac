//! The runs whose end the platform does not know yet, with their heartbeats.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use platform::heartbeat::Beat;
use tracing::warn;

use super::notes::Notes;
use crate::kubernetes::cluster::RunKey;
use crate::reporter::PlatformReporter;

/// A run that is not over, or whose end the platform does not know.
pub(super) struct TrackedRun {
    pub(super) first_seen: Instant,
    /// The heartbeat of the launcher. It lasts until the executor sends its own, and again from the end of the run until the
    /// platform knows the end. Otherwise the platform would say that the run was lost, and not why.
    pub(super) beat: Option<Beat>,
    /// Writes the reasons for waiting.
    pub(super) notes: Option<Notes>,
    /// Whether the platform's job had failed at the last look. Its executor may have reported that and be about to end.
    pub(super) failed_before: bool,
    /// Whether the run is being stopped, or has ended.
    pub(super) is_stopping: bool,
    /// When the run ended. It is counted, and only its report is missing.
    pub(super) ended: Option<Instant>,
}

impl fmt::Debug for TrackedRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrackedRun")
            .field("first_seen", &self.first_seen)
            .field("is_stopping", &self.is_stopping)
            .finish_non_exhaustive()
    }
}

/// The runs that an observer tracks.
#[derive(Debug)]
pub(super) struct TrackedRuns {
    reporter: Option<Arc<dyn PlatformReporter>>,
    tracked: Mutex<BTreeMap<RunKey, TrackedRun>>,
    /// The heartbeats of runs of which nothing is known except that their Jobs are held.
    held: Mutex<BTreeMap<RunKey, Option<Beat>>>,
    /// Whether the watch has ended. Reports that have begun are finished, but send no heartbeats.
    is_released: AtomicBool,
}

impl TrackedRuns {
    pub(super) const fn new(reporter: Option<Arc<dyn PlatformReporter>>) -> Self {
        Self {
            reporter,
            tracked: Mutex::new(BTreeMap::new()),
            held: Mutex::new(BTreeMap::new()),
            is_released: AtomicBool::new(false),
        }
    }

    pub(super) fn tracked(&self) -> MutexGuard<'_, BTreeMap<RunKey, TrackedRun>> {
        self.tracked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn held(&self) -> MutexGuard<'_, BTreeMap<RunKey, Option<Beat>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops every heartbeat, for good.
    pub(super) fn release(&self) {
        self.is_released.store(true, Ordering::SeqCst);
        // Who adds a run holds the lock. It has seen the flag, or its run is removed here.
        self.tracked().clear();
        self.held().clear();
    }

    /// Starts the heartbeat of a run whose Job is held.
    pub(super) fn hold(&self, run: &RunKey) {
        if !self.tracked().contains_key(run) {
            let mut held = self.held();
            held.entry(run.clone())
                .or_insert_with(|| self.start_heartbeat(run));
        }
    }

    /// Removes a run whose Job is gone.
    pub(super) fn forget(&self, run: &RunKey) {
        self.tracked().remove(run);
        self.held().remove(run);
    }

    /// Tracks a run. The heartbeat, if there is one, replaces the former.
    pub(super) fn track(&self, run: &RunKey, beat: Option<Beat>) {
        let mut tracked = self.tracked();
        let entry = tracked.entry(run.clone()).or_insert_with(|| TrackedRun {
            first_seen: Instant::now(),
            beat: None,
            notes: None,
            failed_before: false,
            is_stopping: false,
            ended: None,
        });
        if beat.is_some() {
            entry.beat = beat;
        }
    }

    /// Tracks a run that has no executor yet.
    pub(super) fn track_waiting(&self, run: &RunKey) {
        self.track(run, self.start_heartbeat(run));
    }

    /// Tracks a run whose executor sends its own heartbeat within that time.
    pub(super) fn track_running(&self, run: &RunKey, within: Option<Duration>) {
        let Some(reporter) = &self.reporter else {
            return;
        };
        if self.is_released.load(Ordering::SeqCst) {
            return;
        }
        let beat = reporter.start_heartbeat_until_executor(&run.job_id, within);
        self.track(run, beat);
    }

    /// Tracks the end of a run: only the launcher sends heartbeats now.
    pub(super) fn mark_ended(&self, run: &RunKey) {
        self.track(run, None);
        let beat = self.start_heartbeat(run);
        let mut tracked = self.tracked();
        let Some(entry) = tracked.get_mut(run) else {
            return;
        };
        entry.is_stopping = true;
        if entry.ended.is_none() {
            entry.ended = Some(Instant::now());
            entry.beat = beat;
        }
    }

    /// Stops the heartbeats of runs that ended longer ago than `timeout`.
    pub(super) fn stop_late_heartbeats(&self, timeout: Duration) {
        for (run, entry) in self.tracked().iter_mut() {
            let is_late = entry.ended.is_some_and(|ended| ended.elapsed() >= timeout);
            if is_late && entry.beat.take().is_some() {
                warn!(%run, "the platform does not accept the report of its end: its heartbeat is stopped");
            }
        }
    }

    fn start_heartbeat(&self, run: &RunKey) -> Option<Beat> {
        let reporter = self.reporter.as_ref()?;
        (!self.is_released.load(Ordering::SeqCst))
            .then(|| reporter.start_heartbeat(&run.job_id))
            .flatten()
    }
}
