//! Limits the requests that are in progress, so that one task cannot keep the relay from the others.

use std::sync::Arc;
use std::time::Duration;

use pool_protocol::id::TaskId;
use pool_protocol::problem::Code;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::hub::shares::{Share, Shares};
use crate::hub::wire::Failure;

/// Requests at a time; further ones wait for their turn.
const AT_ONCE: usize = 256;
/// Requests of one task at a time. An executor makes fewer.
const AT_ONCE_OF_A_TASK: usize = 8;
/// How long a request waits for its turn.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The turns of all tasks.
#[derive(Debug)]
pub(super) struct Turns {
    of_tasks: Arc<Shares<TaskId>>,
    all: Arc<Semaphore>,
}

/// The right to one request, from before its body is read until its response is sent.
#[derive(Debug)]
pub(super) struct Turn {
    _of_task: Share<TaskId>,
    _of_all: OwnedSemaphorePermit,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            of_tasks: Shares::new(AT_ONCE_OF_A_TASK, usize::MAX),
            all: Arc::new(Semaphore::new(AT_ONCE)),
        }
    }

    /// Waits for the turn of a request of this task.
    pub(super) async fn next(&self, task: TaskId) -> Result<Turn, Failure> {
        let limited = |text: &str| Failure::new(Code::RateLimited, text);
        let of_task = self.of_tasks.take(&task);
        let of_task = of_task
            .ok_or_else(|| limited("too many requests of this task at a time: try again"))?;
        let turn = Arc::clone(&self.all).acquire_owned();
        match tokio::time::timeout(TIMEOUT, turn).await {
            Ok(Ok(turn)) => Ok(Turn {
                _of_task: of_task,
                _of_all: turn,
            }),
            _ => Err(limited("the relay has too many requests: try again")),
        }
    }
}
