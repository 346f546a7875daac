//! The heartbeats in Redis of jobs whose tasks the hub has: without one the platform fails the job.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use platform::heartbeat::Beat;
use pool_protocol::id::TaskId;

use crate::reporter::PlatformReporter;

/// One heartbeat a task.
#[derive(Debug, Default)]
pub(crate) struct Beats(Mutex<HashMap<TaskId, Kept>>);

#[derive(Debug)]
struct Kept {
    _beat: Option<Beat>,
    /// Since when the task is over, and the platform does not know.
    over_since: Option<Instant>,
}

impl Beats {
    /// Sends heartbeats for the job of a task, if none are sent yet.
    pub(crate) fn keep(&self, reporter: &dyn PlatformReporter, task: TaskId, job: &str) {
        self.lock().entry(task).or_insert_with(|| Kept {
            _beat: reporter.start_heartbeat(job),
            over_since: None,
        });
    }

    /// Ends the heartbeats of a task: the platform has its outcome.
    pub(crate) fn release(&self, task: TaskId) {
        self.lock().remove(&task);
    }

    /// Returns the tasks with heartbeats.
    pub(crate) fn tasks(&self) -> Vec<TaskId> {
        self.lock().keys().copied().collect()
    }

    /// The task is over, and its outcome was not reported. Ends its heartbeats when that has been so for `timeout`: the
    /// platform must be free to end the job itself.
    pub(crate) fn is_over(&self, task: TaskId, timeout: Duration) {
        let mut kept = self.lock();
        let Some(known) = kept.get_mut(&task) else {
            return;
        };
        let since = *known.over_since.get_or_insert_with(Instant::now);
        if since.elapsed() > timeout {
            kept.remove(&task);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TaskId, Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
