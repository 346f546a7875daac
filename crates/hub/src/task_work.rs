//! Runs work on tasks that takes a while, such as requests to the platform. Each task has at most one piece of work at
//! a time. The total is limited, and so is that of a pool: the work of one pool does not wait for that of another.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use pool_protocol::id::{PoolName, TaskId};
use tokio_util::task::TaskTracker;

use super::pool_turns::{Limits, PoolTurns};

/// The work of one duty.
#[derive(Clone, Debug)]
pub(crate) struct TaskWork {
    busy: Arc<Mutex<HashSet<TaskId>>>,
    turns: Arc<PoolTurns>,
    running: TaskTracker,
}

/// Marks a task as free when its work ends, even if the work panics.
struct BusyGuard {
    task: TaskId,
    busy: Arc<Mutex<HashSet<TaskId>>>,
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        let mut busy = runtime::lock(&self.busy);
        busy.remove(&self.task);
    }
}

impl TaskWork {
    pub(crate) fn new(at_once: usize) -> Self {
        let own = at_once.div_ceil(8);
        let limits = Limits {
            shared: at_once,
            of_a_pool: own.max(at_once / 2),
            own,
        };
        Self {
            busy: Arc::default(),
            turns: Arc::new(PoolTurns::new(limits)),
            running: TaskTracker::new(),
        }
    }

    /// Starts work on a task of this pool, unless the task still has earlier work.
    pub(crate) fn start(
        &self,
        pool: &PoolName,
        task: TaskId,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let mut busy = runtime::lock(&self.busy);
        if !busy.insert(task) {
            return;
        }
        drop(busy);
        let guard = BusyGuard {
            task,
            busy: Arc::clone(&self.busy),
        };
        let (turns, pool) = (Arc::clone(&self.turns), pool.clone());
        self.running.spawn(async move {
            if let Some(_turn) = turns.next(&pool).await {
                work.await;
            }
            drop(guard);
        });
    }

    /// Waits for the work that runs. Work that waits for its turn is dropped, because the store returns its task again.
    pub(crate) async fn finish(&self) {
        self.turns.close();
        self.running.close();
        self.running.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::mpsc::unbounded_channel;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_task_has_one_piece_of_work_at_a_time() {
        let (task_work, pool) = (TaskWork::new(8), "eu".parse().unwrap());
        let (task, other) = (TaskId::new(), TaskId::new());
        let (sender, mut receiver) = unbounded_channel();
        let (open, gate) = oneshot::channel::<()>();
        let word = |word: &'static str| {
            let sender = sender.clone();
            async move { sender.send(word).unwrap() }
        };
        let first = word("first");
        task_work.start(&pool, task, async move {
            gate.await.unwrap();
            first.await;
        });
        task_work.start(&pool, task, word("again"));
        task_work.start(&pool, other, word("other"));
        assert_eq!(receiver.recv().await, Some("other"));
        open.send(()).unwrap();
        assert_eq!(receiver.recv().await, Some("first"));
        task_work.finish().await;
        assert!(receiver.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn work_of_a_pool_does_not_wait_for_that_of_another() {
        let task_work = TaskWork::new(16);
        let (busy, calm) = ("busy".parse().unwrap(), "calm".parse().unwrap());
        let (sender, mut receiver) = unbounded_channel();
        let (open, gate) = tokio::sync::watch::channel(false);
        for _ in 0..200 {
            let mut gate = gate.clone();
            task_work.start(&busy, TaskId::new(), async move {
                gate.wait_for(|open| *open).await.unwrap();
            });
        }
        task_work.start(&calm, TaskId::new(), async move {
            sender.send("calm").unwrap();
        });
        let word = tokio::time::timeout(Duration::from_secs(1), receiver.recv()).await;
        assert_eq!(word.unwrap(), Some("calm"));
        open.send(true).unwrap();
        task_work.finish().await;
    }

    #[tokio::test]
    async fn finish_waits_for_running_work_and_starts_no_more() {
        let (task_work, pool) = (TaskWork::new(1), "eu".parse().unwrap());
        let (sender, mut receiver) = unbounded_channel();
        let (open, gate) = oneshot::channel::<()>();
        let begun = sender.clone();
        task_work.start(&pool, TaskId::new(), async move {
            begun.send("begun").unwrap();
            gate.await.unwrap();
            begun.send("finished").unwrap();
        });
        assert_eq!(receiver.recv().await, Some("begun"));
        task_work.start(&pool, TaskId::new(), async move {
            sender.send("too late").unwrap();
        });
        let finish = task_work.finish();
        tokio::pin!(finish);
        assert!(futures_util::poll!(&mut finish).is_pending());
        open.send(()).unwrap();
        finish.await;
        assert_eq!(receiver.recv().await, Some("finished"));
        assert_eq!(receiver.recv().await, None);
    }
}
