//! Runs work on tasks that takes a while, such as requests to the platform. Each task has at most one piece of work at
//! a time, and the total is limited.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use pool_protocol::id::TaskId;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// The work of one duty.
#[derive(Clone, Debug)]
pub(crate) struct TaskWork {
    busy: Arc<Mutex<HashSet<TaskId>>>,
    at_once: Arc<Semaphore>,
    running: TaskTracker,
}

/// Marks a task as free when its work ends, even if the work panics.
struct BusyGuard {
    task: TaskId,
    busy: Arc<Mutex<HashSet<TaskId>>>,
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.remove(&self.task);
    }
}

impl TaskWork {
    pub(crate) fn new(at_once: usize) -> Self {
        Self {
            busy: Arc::default(),
            at_once: Arc::new(Semaphore::new(at_once)),
            running: TaskTracker::new(),
        }
    }

    /// Starts work on a task, unless the task still has earlier work.
    pub(crate) fn start(&self, task: TaskId, work: impl Future<Output = ()> + Send + 'static) {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        if !busy.insert(task) {
            return;
        }
        drop(busy);
        let guard = BusyGuard {
            task,
            busy: Arc::clone(&self.busy),
        };
        let at_once = Arc::clone(&self.at_once);
        self.running.spawn(async move {
            if let Ok(_permit) = at_once.acquire().await {
                work.await;
            }
            drop(guard);
        });
    }

    /// Waits for the work that runs. Work that waits for a permit is dropped, because the store returns its task again.
    pub(crate) async fn finish(&self) {
        self.at_once.close();
        self.running.close();
        self.running.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_task_has_one_piece_of_work_at_a_time() {
        let task_work = TaskWork::new(8);
        let (task, other) = (TaskId::new(), TaskId::new());
        let (sender, mut receiver) = unbounded_channel();
        let (open, gate) = oneshot::channel::<()>();
        let word = |word: &'static str| {
            let sender = sender.clone();
            async move { sender.send(word).unwrap() }
        };
        let first = word("first");
        task_work.start(task, async move {
            gate.await.unwrap();
            first.await;
        });
        task_work.start(task, word("again"));
        task_work.start(other, word("other"));
        assert_eq!(receiver.recv().await, Some("other"));
        open.send(()).unwrap();
        assert_eq!(receiver.recv().await, Some("first"));
        task_work.finish().await;
        assert!(receiver.try_recv().is_err());
    }

    #[tokio::test]
    async fn finish_waits_for_running_work_and_starts_no_more() {
        let task_work = TaskWork::new(1);
        let (sender, mut receiver) = unbounded_channel();
        let (open, gate) = oneshot::channel::<()>();
        let begun = sender.clone();
        task_work.start(TaskId::new(), async move {
            begun.send("begun").unwrap();
            gate.await.unwrap();
            begun.send("finished").unwrap();
        });
        assert_eq!(receiver.recv().await, Some("begun"));
        task_work.start(
            TaskId::new(),
            async move { sender.send("too late").unwrap() },
        );
        let finish = task_work.finish();
        tokio::pin!(finish);
        assert!(futures_util::poll!(&mut finish).is_pending());
        open.send(()).unwrap();
        finish.await;
        assert_eq!(receiver.recv().await, Some("finished"));
        assert_eq!(receiver.recv().await, None);
    }
}
