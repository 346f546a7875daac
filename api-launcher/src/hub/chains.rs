//! Work on tasks that takes its time, such as a question to the platform: one piece of work a task at a time, and a limited
//! number in all.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use pool_protocol::id::TaskId;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// Work of one kind.
#[derive(Clone, Debug)]
pub(crate) struct Chains {
    busy: Arc<Mutex<HashSet<TaskId>>>,
    at_once: Arc<Semaphore>,
    running: TaskTracker,
}

/// Ends the turn of a task, also if its work panics.
struct Turn {
    task: TaskId,
    busy: Arc<Mutex<HashSet<TaskId>>>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.remove(&self.task);
    }
}

impl Chains {
    pub(crate) fn new(at_once: usize) -> Self {
        Self {
            busy: Arc::default(),
            at_once: Arc::new(Semaphore::new(at_once)),
            running: TaskTracker::new(),
        }
    }

    /// Starts the work, unless the last one of this task still runs.
    pub(crate) fn start(&self, task: TaskId, work: impl Future<Output = ()> + Send + 'static) {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        if !busy.insert(task) {
            return;
        }
        drop(busy);
        let turn = Turn {
            task,
            busy: Arc::clone(&self.busy),
        };
        let at_once = Arc::clone(&self.at_once);
        self.running.spawn(async move {
            let _place = at_once.acquire().await;
            work.await;
            drop(turn);
        });
    }

    /// Waits until no work runs any more.
    pub(crate) async fn finish(&self) {
        self.running.close();
        self.running.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_task_has_one_piece_of_work_at_a_time() {
        let chains = Chains::new(8);
        let (task, other) = (TaskId::new(), TaskId::new());
        let done = Arc::new(AtomicUsize::new(0));
        let (open, gate) = oneshot::channel::<()>();
        let count = |done: &Arc<AtomicUsize>| {
            let done = Arc::clone(done);
            async move {
                done.fetch_add(1, Ordering::SeqCst);
            }
        };
        let first = count(&done);
        chains.start(task, async move {
            let _ = gate.await;
            first.await;
        });
        chains.start(task, count(&done));
        chains.start(other, count(&done));
        open.send(()).unwrap();
        chains.finish().await;
        assert_eq!(done.load(Ordering::SeqCst), 2);
    }
}
