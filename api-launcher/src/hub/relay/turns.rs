//! Limits the requests that are in progress, so that one task cannot keep the relay from the others, and one pool not from
//! the other pools.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pool_protocol::id::{PoolName, TaskId};
use pool_protocol::problem::Code;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::hub::shares::{Share, Shares};
use crate::hub::wire::Failure;

/// Requests at a time; further ones wait for their turn.
const AT_ONCE: usize = 256;
/// Requests of one pool at a time.
pub(super) const AT_ONCE_OF_A_POOL: usize = 64;
/// Those of them that each pool has for itself, also when others have taken all.
const OWN_OF_A_POOL: usize = 8;
/// Requests of one task at a time. An executor makes fewer.
const AT_ONCE_OF_A_TASK: usize = 8;
/// How long a request waits for its turn.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The turns of all tasks.
#[derive(Debug)]
pub(super) struct Turns {
    of_tasks: Arc<Shares<TaskId>>,
    of_pools: Mutex<HashMap<PoolName, PoolTurns>>,
    all: Arc<Semaphore>,
}

/// The turns of one pool.
#[derive(Clone, Debug)]
struct PoolTurns {
    /// Turns of its own.
    own: Arc<Semaphore>,
    /// How many it may have of all.
    of_all: Arc<Semaphore>,
}

/// One of the requests of a task, from before its body is read.
pub(super) type Place = Share<TaskId>;

/// The right to one request to the platform, until its answer has passed.
#[derive(Debug)]
pub(super) struct Turn {
    _place: Place,
    _of_pool: OwnedSemaphorePermit,
    /// `None` if the turn is one of the pool's own.
    _of_all: Option<OwnedSemaphorePermit>,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            of_tasks: Shares::new(AT_ONCE_OF_A_TASK, usize::MAX),
            of_pools: Mutex::default(),
            all: Arc::new(Semaphore::new(AT_ONCE)),
        }
    }

    /// Takes a place of a task.
    pub(super) fn place(&self, task: TaskId) -> Result<Place, Failure> {
        let place = self.of_tasks.take(&task);
        place.ok_or_else(|| limited("too many requests of this task at a time: try again"))
    }

    /// Waits for the turn of a request of this pool: one of its own, or one of all.
    pub(super) async fn next(&self, pool: &PoolName, place: Place) -> Result<Turn, Failure> {
        let (pool, all) = (self.of_pool(pool), Arc::clone(&self.all));
        let of_all = async {
            let of_pool = pool.of_all.acquire_owned().await.ok()?;
            Some((of_pool, Some(all.acquire_owned().await.ok()?)))
        };
        let turn = async {
            tokio::select! {
                biased;
                own = pool.own.acquire_owned() => Some((own.ok()?, None)),
                turn = of_all => turn,
            }
        };
        match tokio::time::timeout(TIMEOUT, turn).await {
            Ok(Some((of_pool, of_all))) => Ok(Turn {
                _place: place,
                _of_pool: of_pool,
                _of_all: of_all,
            }),
            _ => Err(limited("the relay has too many requests: try again")),
        }
    }

    fn of_pool(&self, pool: &PoolName) -> PoolTurns {
        let mut pools = self.of_pools.lock().unwrap_or_else(PoisonError::into_inner);
        let of_pool = pools.entry(pool.clone()).or_insert_with(|| PoolTurns {
            own: Arc::new(Semaphore::new(OWN_OF_A_POOL)),
            of_all: Arc::new(Semaphore::new(AT_ONCE_OF_A_POOL - OWN_OF_A_POOL)),
        });
        of_pool.clone()
    }
}

fn limited(text: &str) -> Failure {
    Failure::new(Code::RateLimited, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pool_that_keeps_its_turns_leaves_some_for_the_others() {
        let turns = Turns::new();
        let (eu, us) = ("eu".parse().unwrap(), "us".parse().unwrap());
        let next = async |pool| {
            let place = turns.place(TaskId::new()).unwrap();
            turns.next(pool, place).await
        };
        let mut kept = Vec::new();
        for _ in 0..AT_ONCE_OF_A_POOL {
            kept.push(next(&eu).await.unwrap());
        }
        let refused = next(&eu).await.unwrap_err();
        assert_eq!(refused.code(), Code::RateLimited);
        let began = tokio::time::Instant::now();
        next(&us).await.unwrap();
        assert_eq!(began.elapsed(), Duration::ZERO);
        kept.pop();
        next(&eu).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_pool_has_turns_of_its_own_when_others_keep_theirs() {
        let turns = Turns::new();
        let next = async |pool: &str| {
            let place = turns.place(TaskId::new()).unwrap();
            turns.next(&pool.parse().unwrap(), place).await
        };
        let mut kept = Vec::new();
        for pool in ["a", "b", "c", "d", "e"] {
            while let Ok(turn) = next(pool).await {
                kept.push(turn);
            }
        }
        let began = tokio::time::Instant::now();
        let mut own = Vec::new();
        for _ in 0..OWN_OF_A_POOL {
            own.push(next("eu").await.unwrap());
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(next("eu").await.is_err());
        own.pop();
        next("eu").await.unwrap();
        drop(kept);
        next("eu").await.unwrap();
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
