//! The runs whose end the platform does not know yet, with their heartbeats.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use cluster::RunRef;
use platform::heartbeat::Beat;
use reporter::{HeartbeatKeeper, PlatformReporter};

use super::notes::Notes;

/// A run that is not over, or whose end the platform does not know.
pub(super) struct UnreportedRun {
    pub(super) first_seen: Instant,
    pub(super) notes: Option<Notes>,
    /// Whether the platform's job had failed at the last look. Its executor may have reported that and be about to end.
    pub(super) failed_before: bool,
    /// Whether the run is being stopped, or has ended.
    pub(super) is_stopping: bool,
    /// When the run ended. It is counted, and only its report is missing.
    pub(super) ended: Option<Instant>,
}

impl fmt::Debug for UnreportedRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnreportedRun")
            .field("first_seen", &self.first_seen)
            .field("is_stopping", &self.is_stopping)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(super) struct TrackedRuns {
    reporter: Option<Arc<dyn PlatformReporter>>,
    tracked: Mutex<BTreeMap<RunRef, UnreportedRun>>,
    /// The heartbeats of the launcher, also of runs whose Jobs are held and that are not tracked yet. They last until the
    /// executor sends its own, and again from the end of the run until the platform knows the end. Otherwise the platform
    /// would say that the run was lost, and not why.
    pub(super) heartbeats: HeartbeatKeeper<RunRef>,
}

impl TrackedRuns {
    pub(super) fn new(reporter: Option<Arc<dyn PlatformReporter>>) -> Self {
        Self {
            reporter,
            tracked: Mutex::new(BTreeMap::new()),
            heartbeats: HeartbeatKeeper::default(),
        }
    }

    pub(super) fn tracked(&self) -> MutexGuard<'_, BTreeMap<RunRef, UnreportedRun>> {
        runtime::lock(&self.tracked)
    }

    /// Stops every heartbeat, for good. Reports that have begun are finished, but send no heartbeats.
    pub(super) fn release(&self) {
        self.heartbeats.close();
        self.tracked().clear();
    }

    /// Starts the heartbeat of a run whose Job is held.
    pub(super) fn hold(&self, run: &RunRef) {
        if !self.tracked().contains_key(run) {
            self.heartbeats.start(run, || self.start_heartbeat(run));
        }
    }

    /// Removes a run whose Job is gone, or whose end the platform knows.
    pub(super) fn forget(&self, run: &RunRef) -> Option<UnreportedRun> {
        self.heartbeats.release(run);
        self.tracked().remove(run)
    }

    pub(super) fn track(&self, run: &RunRef) {
        let mut tracked = self.tracked();
        tracked.entry(run.clone()).or_insert_with(|| UnreportedRun {
            first_seen: Instant::now(),
            notes: None,
            failed_before: false,
            is_stopping: false,
            ended: None,
        });
    }

    /// Tracks a run that has no executor yet.
    pub(super) fn track_waiting(&self, run: &RunRef) {
        self.track(run);
        self.heartbeats.replace(run, || self.start_heartbeat(run));
    }

    /// Tracks a run whose executor sends its own heartbeat within that time.
    pub(super) fn track_running(&self, run: &RunRef, within: Option<Duration>) {
        self.track(run);
        self.heartbeats.replace(run, || {
            let reporter = self.reporter.as_ref()?;
            reporter.start_heartbeat_until_executor(&run.job_id, within)
        });
    }

    /// Tracks the end of a run: only the launcher sends heartbeats now.
    pub(super) fn mark_ended(&self, run: &RunRef) {
        self.track(run);
        let mut tracked = self.tracked();
        let Some(entry) = tracked.get_mut(run) else {
            return;
        };
        entry.is_stopping = true;
        if entry.ended.is_none() {
            entry.ended = Some(Instant::now());
            self.heartbeats.replace(run, || self.start_heartbeat(run));
        }
    }

    /// Stops the heartbeats of runs that ended longer before `now` than `timeout`.
    pub(super) fn stop_late_heartbeats(&self, timeout: Duration, now: Instant) {
        for (run, entry) in &*self.tracked() {
            let ended = entry.ended.map(|ended| now.duration_since(ended));
            if ended.is_some_and(|ended| ended >= timeout) {
                self.heartbeats.release_late(run);
            }
        }
    }

    fn start_heartbeat(&self, run: &RunRef) -> Option<Beat> {
        self.reporter.as_ref()?.start_heartbeat(&run.job_id)
    }
}
