//! Limits how much a task adds to its live log. The platform's Redis has the heartbeats of all jobs too, and an executor's own
//! limit is on the side of the pool.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pool_protocol::id::TaskId;

/// The largest sum of the documents of one task, in bytes. An executor stops at half of it by default.
const LIMIT: usize = 64 << 20;
/// How long a sum is kept after the last document. A task adds none so long after its end.
const KEPT: Duration = Duration::from_mins(15);
/// Old sums are looked for when this many are known, and then when twice as many are.
const MANY: usize = 1024;

/// The sums of all tasks.
#[derive(Debug, Default)]
pub(super) struct LogLimits(Mutex<Sums>);

#[derive(Debug, Default)]
struct Sums {
    of_tasks: HashMap<TaskId, (usize, Instant)>,
    /// How many sums are known when old ones are looked for.
    look_at: usize,
}

impl LogLimits {
    /// Returns whether the task has added all that it may, when it wants to add more.
    pub(super) fn is_full(&self, task: TaskId) -> bool {
        let mut sums = self.lock();
        let Some((sum, last)) = sums.of_tasks.get_mut(&task) else {
            return false;
        };
        *last = Instant::now();
        *sum > LIMIT
    }

    /// Adds a document that the platform has accepted. Returns whether the task is full now, and was not before.
    pub(super) fn add(&self, task: TaskId, bytes: usize) -> bool {
        let (now, mut sums) = (Instant::now(), self.lock());
        if sums.of_tasks.len() >= sums.look_at.max(MANY) {
            sums.of_tasks
                .retain(|_, (_, last)| now.duration_since(*last) < KEPT);
            sums.look_at = 2 * sums.of_tasks.len();
        }
        let (sum, last) = sums.of_tasks.entry(task).or_insert((0, now));
        let was_full = *sum > LIMIT;
        (*sum, *last) = (sum.saturating_add(bytes), now);
        *sum > LIMIT && !was_full
    }

    fn lock(&self) -> MutexGuard<'_, Sums> {
        runtime::lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_task_has_a_limit_of_its_own() {
        let limits = LogLimits::default();
        let [one, other] = [TaskId::new(), TaskId::new()];
        assert!(!limits.add(one, LIMIT) && !limits.is_full(one));
        assert!(limits.add(one, 1) && limits.is_full(one));
        assert!(!limits.add(one, usize::MAX), "it was full before");
        for _ in 0..2 * MANY {
            limits.add(TaskId::new(), 1);
        }
        assert!(limits.is_full(one), "it is not old");
        assert!(!limits.add(other, LIMIT) && !limits.is_full(other));
    }
}
