//! Those who wait for a task. Each new task wakes one of them: the one that has waited longest.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pool_protocol::id::PoolName;
use tokio::sync::Notify;

/// All that wait, by pool.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    pools: Mutex<HashMap<PoolName, Arc<Notify>>>,
    closed: AtomicBool,
    #[cfg(test)]
    pub(crate) asleep: tokio::sync::watch::Sender<HashMap<PoolName, usize>>,
}

impl Waiters {
    /// Where those wait who want a task of this pool.
    pub(crate) fn of(&self, pool: &PoolName) -> Arc<Notify> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = pools.get(pool) {
            return Arc::clone(notify);
        }
        Arc::clone(pools.entry(pool.clone()).or_default())
    }

    /// Wakes this many.
    pub(crate) fn wake(&self, pool: &PoolName, count: usize) {
        let pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = pools.get(pool) {
            // Without waiters one wake-up is kept, for one who is about to wait.
            (0..count).for_each(|_| notify.notify_one());
        }
    }

    /// Wakes all: what they wait for may have come unheard.
    pub(crate) fn wake_all(&self) {
        let pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.values().for_each(|notify| notify.notify_waiters());
    }

    /// Ends all waiting.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.wake_all();
    }

    /// Returns whether nothing comes any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}

/// A wake-up that was taken. It goes to another waiter unless it was used.
#[derive(Debug)]
pub(crate) struct Woken(Option<Arc<Notify>>);

impl Woken {
    /// Takes one.
    pub(crate) const fn by(notify: Arc<Notify>) -> Self {
        Self(Some(notify))
    }

    /// The task was taken, by this waiter or another.
    pub(crate) fn used(mut self) {
        self.0 = None;
    }
}

impl Drop for Woken {
    fn drop(&mut self) {
        if let Some(notify) = &self.0 {
            notify.notify_one();
        }
    }
}

#[cfg(test)]
mod asleep {
    use super::{PoolName, Waiters};

    /// One that waits.
    pub(crate) struct Asleep<'a>(&'a Waiters, PoolName);

    impl Waiters {
        /// Counts one that waits, for as long as it does.
        pub(crate) fn fall_asleep(&self, pool: &PoolName) -> Asleep<'_> {
            self.asleep
                .send_modify(|asleep| *asleep.entry(pool.clone()).or_default() += 1);
            Asleep(self, pool.clone())
        }
    }

    impl Drop for Asleep<'_> {
        fn drop(&mut self) {
            self.0
                .asleep
                .send_modify(|asleep| *asleep.entry(self.1.clone()).or_default() -= 1);
        }
    }

    impl crate::Store {
        /// Returns once this many wait for a task of a pool.
        pub(crate) async fn waits(&self, pool: &PoolName, count: usize) {
            let mut asleep = self.waiters().asleep.subscribe();
            let enough = |asleep: &std::collections::HashMap<PoolName, usize>| {
                asleep.get(pool).copied().unwrap_or_default() >= count
            };
            asleep.wait_for(enough).await.unwrap();
        }
    }
}
