//! The heartbeats that the launcher sends on behalf of runs. Without heartbeats, the platform fails a job.

use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard};

use platform::heartbeat::Beat;
use tracing::warn;

/// Keeps the heartbeats of runs, by a key that tells runs apart. A platform without heartbeats gives none to keep.
#[derive(Debug)]
pub struct HeartbeatKeeper<K>(Mutex<Kept<K>>);

#[derive(Debug)]
struct Kept<K> {
    beats: HashMap<K, Option<Beat>>,
    /// No heartbeat starts any more.
    is_closed: bool,
}

impl<K> Default for HeartbeatKeeper<K> {
    fn default() -> Self {
        Self(Mutex::new(Kept {
            beats: HashMap::new(),
            is_closed: false,
        }))
    }
}

impl<K: Clone + Display + Eq + Hash> HeartbeatKeeper<K> {
    /// Starts the heartbeat of a run, unless the run has one.
    pub fn start(&self, run: &K, start: impl FnOnce() -> Option<Beat>) {
        let mut kept = self.lock();
        if !kept.is_closed && !kept.beats.contains_key(run) {
            kept.beats.insert(run.clone(), start());
        }
    }

    /// Replaces the heartbeat of a run. The new one starts before the former ends, so there is no gap.
    pub fn replace(&self, run: &K, start: impl FnOnce() -> Option<Beat>) {
        let mut kept = self.lock();
        if !kept.is_closed {
            kept.beats.insert(run.clone(), start());
        }
    }

    /// Ends the heartbeat of a run. The platform has its outcome, or must be free to end the job itself.
    pub fn release(&self, run: &K) {
        self.lock().beats.remove(run);
    }

    /// Ends the heartbeat of a run whose end the platform has not taken in time.
    pub fn release_late(&self, run: &K) {
        if self.lock().beats.remove(run).flatten().is_some() {
            warn!(%run, "the platform does not accept the report of its end: its heartbeat is stopped");
        }
    }

    /// Ends every heartbeat, for good.
    pub fn close(&self) {
        let mut kept = self.lock();
        kept.is_closed = true;
        kept.beats.clear();
    }

    /// Returns the runs that were started and not released.
    pub fn runs(&self) -> Vec<K> {
        self.lock().beats.keys().cloned().collect()
    }

    /// Returns how many heartbeats are sent.
    pub fn count(&self) -> usize {
        self.lock().beats.values().flatten().count()
    }

    fn lock(&self) -> MutexGuard<'_, Kept<K>> {
        runtime::lock(&self.0)
    }
}
