//! Sends heartbeats to Redis for jobs whose tasks the hub has. Without heartbeats, the platform fails a job.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use platform::heartbeat::Beat;
use pool_protocol::id::TaskId;

use crate::reporter::PlatformReporter;

/// The heartbeats of all tasks.
#[derive(Debug, Default)]
pub(crate) struct JobHeartbeats(Mutex<HashMap<TaskId, JobHeartbeat>>);

#[derive(Debug)]
struct JobHeartbeat {
    _beat: Option<Beat>,
    /// When the task was first seen as over without a report.
    over_since: Option<Instant>,
}

impl JobHeartbeats {
    /// Starts heartbeats for the job of a task, unless they are already running.
    pub(crate) fn start(&self, reporter: &dyn PlatformReporter, task: TaskId, job: &str) {
        self.lock().entry(task).or_insert_with(|| JobHeartbeat {
            _beat: reporter.start_heartbeat(job),
            over_since: None,
        });
    }

    /// Ends the heartbeats of a task. The platform has its outcome.
    pub(crate) fn release(&self, task: TaskId) {
        self.lock().remove(&task);
    }

    /// Returns the tasks with heartbeats.
    pub(crate) fn tasks(&self) -> Vec<TaskId> {
        self.lock().keys().copied().collect()
    }

    /// Ends the heartbeats of a task that is over, if its outcome was not reported within `timeout`. Then the platform
    /// can end the job itself.
    pub(crate) fn release_after(&self, task: TaskId, timeout: Duration) {
        let mut heartbeats = self.lock();
        let Some(known) = heartbeats.get_mut(&task) else {
            return;
        };
        let since = *known.over_since.get_or_insert_with(Instant::now);
        if since.elapsed() > timeout {
            heartbeats.remove(&task);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TaskId, JobHeartbeat>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
