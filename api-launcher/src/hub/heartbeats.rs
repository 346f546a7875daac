//! Sends heartbeats to Redis for jobs whose tasks the hub has. Without heartbeats, the platform fails a job.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use platform::heartbeat::Beat;
use pool_protocol::id::TaskId;

use crate::reporter::PlatformReporter;

/// The heartbeats of all tasks.
#[derive(Debug, Default)]
pub(crate) struct JobHeartbeats(Mutex<HashMap<TaskId, Option<Beat>>>);

impl JobHeartbeats {
    /// Starts heartbeats for the job of a task, unless they are already running.
    pub(crate) fn start(&self, reporter: &dyn PlatformReporter, task: TaskId, job: &str) {
        self.lock()
            .entry(task)
            .or_insert_with(|| reporter.start_heartbeat(job));
    }

    /// Ends the heartbeats of a task. The platform has its outcome, or must be free to end the job itself.
    pub(crate) fn release(&self, task: TaskId) {
        self.lock().remove(&task);
    }

    /// Returns the tasks with heartbeats.
    pub(crate) fn tasks(&self) -> Vec<TaskId> {
        self.lock().keys().copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TaskId, Option<Beat>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
