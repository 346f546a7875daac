//! Requests that wait for a task. Each new task wakes the one that has waited longest.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pool_protocol::id::PoolName;
use tokio::sync::Notify;

/// All waiting requests, by pool.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    pools: Mutex<HashMap<PoolName, Arc<Notify>>>,
    closed: AtomicBool,
    #[cfg(test)]
    pub(crate) asleep: tokio::sync::watch::Sender<HashMap<PoolName, usize>>,
}

impl Waiters {
    /// Returns the notification of a pool's waiting requests.
    pub(crate) fn queue(&self, pool: &PoolName) -> Arc<Notify> {
        let mut pools = runtime::lock(&self.pools);
        if let Some(notify) = pools.get(pool) {
            return Arc::clone(notify);
        }
        Arc::clone(pools.entry(pool.clone()).or_default())
    }

    /// Wakes this many waiting requests of a pool.
    pub(crate) fn wake(&self, pool: &PoolName, count: usize) {
        let pools = runtime::lock(&self.pools);
        if let Some(notify) = pools.get(pool) {
            // If no request waits, one notification is kept for the next one.
            (0..count).for_each(|_| notify.notify_one());
        }
    }

    /// Wakes all waiting requests, because a notification may be lost.
    pub(crate) fn wake_all(&self) {
        let pools = runtime::lock(&self.pools);
        pools.values().for_each(|notify| notify.notify_waiters());
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.wake_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}

/// A received notification. If it is dropped unused, it wakes another request.
#[derive(Debug)]
pub(crate) struct Woken(Option<Arc<Notify>>);

impl Woken {
    pub(crate) const fn by(notify: Arc<Notify>) -> Self {
        Self(Some(notify))
    }

    /// Drops the notification: a request has taken the task.
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

    /// A waiting request.
    pub(crate) struct Asleep<'a>(&'a Waiters, PoolName);

    impl Waiters {
        /// Counts a waiting request until the result is dropped.
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
        /// Returns when this many requests wait for a task of a pool.
        pub(crate) async fn waits(&self, pool: &PoolName, count: usize) {
            let mut asleep = self.waiters().asleep.subscribe();
            let enough = |asleep: &std::collections::HashMap<PoolName, usize>| {
                asleep.get(pool).copied().unwrap_or_default() >= count
            };
            asleep.wait_for(enough).await.unwrap();
        }
    }
}
