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
            if let Ok(_place) = at_once.acquire().await {
                work.await;
            }
            drop(turn);
        });
    }

    /// Waits until no work runs any more. Work that has not begun does not begin: the store gives it again.
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
        let chains = Chains::new(8);
        let (task, other) = (TaskId::new(), TaskId::new());
        let (say, mut said) = unbounded_channel();
        let (open, gate) = oneshot::channel::<()>();
        let word = |word: &'static str| {
            let say = say.clone();
            async move { say.send(word).unwrap() }
        };
        let first = word("first");
        chains.start(task, async move {
            gate.await.unwrap();
            first.await;
        });
        chains.start(task, word("again"));
        chains.start(other, word("other"));
        assert_eq!(said.recv().await, Some("other"));
        open.send(()).unwrap();
        assert_eq!(said.recv().await, Some("first"));
        chains.finish().await;
        assert!(said.try_recv().is_err());
    }

    #[tokio::test]
    async fn at_the_end_what_has_begun_is_finished_and_nothing_begins() {
        let chains = Chains::new(1);
        let (say, mut said) = unbounded_channel();
        let (open, gate) = oneshot::channel::<()>();
        let begun = say.clone();
        chains.start(TaskId::new(), async move {
            begun.send("begun").unwrap();
            gate.await.unwrap();
            begun.send("finished").unwrap();
        });
        assert_eq!(said.recv().await, Some("begun"));
        chains.start(TaskId::new(), async move { say.send("too late").unwrap() });
        let finish = chains.finish();
        tokio::pin!(finish);
        assert!(futures_util::poll!(&mut finish).is_pending());
        open.send(()).unwrap();
        finish.await;
        assert_eq!(said.recv().await, Some("finished"));
        assert_eq!(said.recv().await, None);
    }
}
