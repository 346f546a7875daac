//! The store. Each operation is one transaction.

mod choice;
mod health;
mod holders;
mod instances;
mod known_pools;
mod lease_batches;
mod leases;
mod lock_removals;
mod rows;
mod seen_states;
mod state_locks;
mod submissions;
mod sweep;
mod views;

use std::sync::Arc;

use pool_protocol::id::{PoolName, TaskId};
use pool_protocol::task::TaskState;

use crate::clock::{Clock, SystemClock};
use crate::db::{Database, Tx};
use crate::document_keys::DocumentKeySource;
use crate::error::{Error, OpenError, Refusal};
use crate::rules::Rules;
use crate::state::{Event, Task, apply};
use crate::turns::Line;
use crate::waiters::Waiters;

use self::health::Health;
use self::known_pools::KnownPools;
use self::lease_batches::LeaseBatches;

pub use self::lock_removals::LockRemoval;
pub use self::seen_states::SeenState;

/// The queue. Cheap to clone.
///
/// Callers may repeat each operation after an error or a lost response. A repetition has no further effect.
#[derive(Clone, Debug)]
pub struct Store {
    database: Arc<Database>,
    rules: Arc<Rules>,
    keys: Arc<dyn DocumentKeySource>,
    batches: Arc<LeaseBatches>,
    known_pools: Arc<KnownPools>,
    health: Arc<Health>,
}

impl Store {
    /// Opens the store at a URL: `sqlite:/folder/file.db` or `postgres://…`.
    ///
    /// The platform must confirm all waiting tasks again, because the store may be a restored backup.
    pub async fn open(
        url: &str,
        rules: Rules,
        keys: Arc<dyn DocumentKeySource>,
    ) -> Result<Self, OpenError> {
        Self::open_with(url, rules, keys, SystemClock::start()).await
    }

    /// Opens the store with another clock, for tests.
    pub async fn open_with(
        url: &str,
        rules: Rules,
        keys: Arc<dyn DocumentKeySource>,
        clock: impl Clock,
    ) -> Result<Self, OpenError> {
        let database = Database::open(url, Box::new(clock)).await?;
        let store = Self {
            database: Arc::new(database),
            rules: Arc::new(rules),
            keys,
            batches: Arc::default(),
            known_pools: Arc::default(),
            health: Arc::default(),
        };
        store.resume().await?;
        store.swept();
        Ok(store)
    }

    /// Stores that a credential is no longer valid. If the task still has a lease of it, the lease ends: a task that no
    /// executor has accepted returns to the queue, and another one fails.
    pub async fn revoke(&self, task: TaskId, credential: &str) -> Result<TaskState, Error> {
        let task = self
            .change_for_hub(task, Event::Revoked { credential })
            .await?;
        Ok(task.state.protocol_state())
    }

    /// Closes the store. Requests that wait for a task end without one.
    pub async fn close(&self) {
        self.database.close().await;
    }

    pub(crate) async fn begin(&self) -> Result<Tx, Error> {
        self.database.begin(&Line::Hub).await
    }

    async fn begin_for_pool(&self, pool: &PoolName) -> Result<Tx, Error> {
        self.database.begin(&Line::Pool(pool.clone())).await
    }

    async fn begin_for_task(&self, task: TaskId) -> Result<Tx, Error> {
        self.database.begin(&self.known_pools.line(task)).await
    }

    /// Returns the number of calls that wait for their turn at the database.
    #[cfg(test)]
    pub(crate) fn calls_waiting(&self) -> usize {
        self.database.calls_waiting()
    }

    pub(crate) fn waiters(&self) -> &Waiters {
        self.database.waiters()
    }

    /// Applies an event of a call to a task, and stores the result.
    async fn change(&self, task: TaskId, event: Event<'_>) -> Result<(Task, crate::Millis), Error> {
        let tx = self.begin_for_task(task).await?;
        self.change_in(tx, task, event).await
    }

    /// The same for an event of the hub. It does not wait for the calls of the pool.
    async fn change_for_hub(&self, task: TaskId, event: Event<'_>) -> Result<Task, Error> {
        let tx = self.begin().await?;
        self.change_in(tx, task, event).await.map(|(task, _)| task)
    }

    async fn change_in(
        &self,
        mut tx: Tx,
        task: TaskId,
        event: Event<'_>,
    ) -> Result<(Task, crate::Millis), Error> {
        let now = tx.now;
        let before = tx.task(task).await?;
        let applied = before.ok_or(Refusal::TaskNotFound).and_then(|before| {
            self.known_pools.add(&before);
            Ok((before.state, apply(&before, event, now, &self.rules)?))
        });
        let (mut tx, (before, transition)) =
            tx.unless_refused(applied.map_err(Error::from)).await?;
        tx.save(before, &transition, &self.rules).await?;
        if transition.changed {
            tx.commit().await?;
        } else {
            tx.rollback().await?;
        }
        Ok((transition.task, now))
    }
}
