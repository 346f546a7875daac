//! Limits the requests that are in progress, so that one task cannot keep the relay from the others, and one pool not from
//! the other pools.

use std::sync::Arc;
use std::time::Duration;

use pool_protocol::id::{PoolName, TaskId};
use pool_protocol::problem::Code;

use crate::failure::Failure;
use crate::pool_turns::{Limits, PoolTurn, PoolTurns};
use crate::shares::{Share, Shares};

/// Requests at a time; further ones wait for their turn.
const LIMITS: Limits = Limits {
    shared: 256,
    of_a_pool: AT_ONCE_OF_A_POOL,
    own: 8,
};
/// Requests of one pool at a time.
pub(super) const AT_ONCE_OF_A_POOL: usize = 64;
/// Requests of one task at a time. An executor makes fewer.
const AT_ONCE_OF_A_TASK: usize = 8;
/// How long a request waits for its turn.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The turns of all tasks.
#[derive(Debug)]
pub(crate) struct Turns {
    of_tasks: Arc<Shares<TaskId>>,
    of_pools: PoolTurns,
}

/// One of the requests of a task, from before its body is read.
pub(crate) type Place = Share<TaskId>;

/// The right to one request to the platform, until its answer has passed.
#[derive(Debug)]
pub(crate) struct Turn {
    _place: Place,
    _of_pool: PoolTurn,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            of_tasks: Shares::new(AT_ONCE_OF_A_TASK, usize::MAX),
            of_pools: PoolTurns::new(LIMITS),
        }
    }

    pub(crate) fn place(&self, task: TaskId) -> Result<Place, Failure> {
        let place = self.of_tasks.take(&task);
        place.ok_or_else(|| limited("too many requests of this task at a time: try again"))
    }

    pub(crate) async fn next(&self, pool: &PoolName, place: Place) -> Result<Turn, Failure> {
        match tokio::time::timeout(TIMEOUT, self.of_pools.next(pool)).await {
            Ok(Some(of_pool)) => Ok(Turn {
                _place: place,
                _of_pool: of_pool,
            }),
            _ => Err(limited("the relay has too many requests: try again")),
        }
    }
}

fn limited(text: &str) -> Failure {
    Failure::new(Code::RateLimited, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_that_gets_no_turn_in_time_is_refused() {
        let turns = Turns::new();
        let eu = "eu".parse().unwrap();
        let next = async || {
            let place = turns.place(TaskId::new()).unwrap();
            turns.next(&eu, place).await
        };
        let mut kept = Vec::new();
        for _ in 0..AT_ONCE_OF_A_POOL {
            kept.push(next().await.unwrap());
        }
        assert_eq!(next().await.unwrap_err().code(), Code::RateLimited);
        kept.pop();
        next().await.unwrap();
    }

    #[tokio::test]
    async fn a_ninth_request_of_a_task_is_refused() {
        let (turns, task) = (Turns::new(), TaskId::new());
        let mut kept: Vec<_> = (0..8).map(|_| turns.place(task).unwrap()).collect();
        assert!(turns.place(task).is_err());
        turns.place(TaskId::new()).unwrap();
        kept.pop();
        turns.place(task).unwrap();
    }
}
