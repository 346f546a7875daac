//! Turns of pools at something that all of them use. No pool takes all turns, and each has some that no other can take.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use pool_protocol::id::PoolName;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How many turns there are at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Those that all pools share.
    pub(crate) shared: usize,
    /// The largest number of a pool, its own included.
    pub(crate) of_a_pool: usize,
    /// Those that each pool has for itself.
    pub(crate) own: usize,
}

/// The turns of all pools.
#[derive(Debug)]
pub(crate) struct PoolTurns {
    limits: Limits,
    pools: Mutex<HashMap<PoolName, OfPool>>,
    shared: Arc<Semaphore>,
}

/// The turns of one pool.
#[derive(Clone, Debug)]
struct OfPool {
    own: Arc<Semaphore>,
    /// How many it may have of the shared ones.
    of_shared: Arc<Semaphore>,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(crate) struct PoolTurn {
    _of_pool: OwnedSemaphorePermit,
    /// `None` if the turn is one of the pool's own.
    _shared: Option<OwnedSemaphorePermit>,
}

impl PoolTurns {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            pools: Mutex::default(),
            shared: Arc::new(Semaphore::new(limits.shared)),
        }
    }

    /// Waits for a turn of this pool. Returns `None` after [`Self::close`].
    pub(crate) async fn next(&self, pool: &PoolName) -> Option<PoolTurn> {
        let pool = self.of_pool(pool);
        let of_shared = async {
            let of_pool = pool.of_shared.acquire_owned().await.ok()?;
            let shared = Arc::clone(&self.shared).acquire_owned().await.ok()?;
            Some((of_pool, Some(shared)))
        };
        let (of_pool, shared) = tokio::select! {
            biased;
            own = pool.own.acquire_owned() => (own.ok()?, None),
            turn = of_shared => turn?,
        };
        Some(PoolTurn {
            _of_pool: of_pool,
            _shared: shared,
        })
    }

    pub(crate) fn close(&self) {
        self.shared.close();
        for pool in self.lock().values() {
            pool.close();
        }
    }

    fn of_pool(&self, pool: &PoolName) -> OfPool {
        let mut pools = self.lock();
        let of_pool = pools.entry(pool.clone()).or_insert_with(|| OfPool {
            own: Arc::new(Semaphore::new(self.limits.own)),
            of_shared: Arc::new(Semaphore::new(self.limits.of_a_pool - self.limits.own)),
        });
        if self.shared.is_closed() {
            of_pool.close();
        }
        of_pool.clone()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PoolName, OfPool>> {
        runtime::lock(&self.pools)
    }
}

impl OfPool {
    fn close(&self) {
        self.own.close();
        self.of_shared.close();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const LIMITS: Limits = Limits {
        shared: 8,
        of_a_pool: 4,
        own: 1,
    };

    /// Takes all turns that the pool can have now.
    fn take_all(turns: &PoolTurns, pool: &str) -> Vec<PoolTurn> {
        let pool: PoolName = pool.parse().unwrap();
        let next = || turns.next(&pool).now_or_never().map(Option::unwrap);
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn a_pool_that_keeps_its_turns_leaves_some_for_the_others() {
        let turns = PoolTurns::new(LIMITS);
        let mut kept = take_all(&turns, "eu");
        assert_eq!(kept.len(), 4);
        assert_eq!(take_all(&turns, "us").len(), 4);
        kept.pop();
        assert_eq!(take_all(&turns, "eu").len(), 1);
    }

    #[test]
    fn a_pool_has_turns_of_its_own_when_others_keep_theirs() {
        let turns = PoolTurns::new(LIMITS);
        let kept: Vec<_> = ["a", "b", "c"].map(|pool| take_all(&turns, pool)).into();
        assert_eq!(kept.iter().flatten().count(), 8 + 3);
        let own = take_all(&turns, "eu");
        assert_eq!(own.len(), 1);
        drop(kept);
        assert_eq!(take_all(&turns, "eu").len(), 3);
    }

    #[test]
    fn closed_turns_are_given_to_nobody() {
        let turns = PoolTurns::new(LIMITS);
        let (eu, us) = ("eu".parse().unwrap(), "us".parse().unwrap());
        let kept = take_all(&turns, "eu");
        let mut waiting = Box::pin(turns.next(&eu));
        assert!((&mut waiting).now_or_never().is_none());
        turns.close();
        drop(kept);
        assert!(waiting.now_or_never().unwrap().is_none());
        assert!(turns.next(&us).now_or_never().unwrap().is_none());
    }
}
