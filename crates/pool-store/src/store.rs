//! The store. Each operation is one transaction.

mod choice;
mod holders;
mod instances;
mod lease_batches;
mod platform;
mod rows;
mod sweep;
mod tasks;
mod views;

use std::sync::Arc;

use pool_protocol::id::TaskId;

use crate::clock::{Clock, SystemClock};
use crate::db::{Database, Tx};
use crate::error::{Error, OpenError, Refusal};
use crate::rules::Rules;
use crate::state::{Event, Task, apply};
use crate::waiters::Waiters;

use self::lease_batches::LeaseBatches;

/// The queue. Cheap to clone.
///
/// Callers may repeat each operation after an error or a lost response. A repetition has no further effect.
#[derive(Clone, Debug)]
pub struct Store {
    database: Arc<Database>,
    rules: Arc<Rules>,
    batches: Arc<LeaseBatches>,
}

impl Store {
    /// Opens the store at a URL: `sqlite:/folder/file.db` or `postgres://…`.
    ///
    /// The platform must confirm all waiting tasks again, because the store may be a restored backup.
    pub async fn open(url: &str, rules: Rules) -> Result<Self, OpenError> {
        Self::open_with(url, rules, SystemClock::new()).await
    }

    /// Opens the store with another clock, for tests.
    pub async fn open_with(url: &str, rules: Rules, clock: impl Clock) -> Result<Self, OpenError> {
        let database = Database::open(url, Box::new(clock)).await?;
        let store = Self {
            database: Arc::new(database),
            rules: Arc::new(rules),
            batches: Arc::default(),
        };
        store.resume().await?;
        Ok(store)
    }

    /// Closes the store. Requests that wait for a task end without one.
    pub async fn close(&self) {
        self.database.close().await;
    }

    pub(crate) async fn begin(&self) -> Result<Tx, Error> {
        self.database.begin().await
    }

    /// Returns the requests that wait for tasks.
    pub(crate) fn waiters(&self) -> &Waiters {
        self.database.waiters()
    }

    /// Applies an event to a task, and stores the result.
    async fn change(&self, task: TaskId, event: Event<'_>) -> Result<(Task, crate::Millis), Error> {
        let mut tx = self.begin().await?;
        let now = tx.now;
        let Some(before) = tx.task(task).await? else {
            tx.rollback().await?;
            return Err(Refusal::TaskNotFound.into());
        };
        let transition = match apply(&before, event, now, &self.rules) {
            Ok(transition) => transition,
            Err(refusal) => {
                tx.rollback().await?;
                return Err(refusal.into());
            }
        };
        tx.save(before.state, &transition, &self.rules).await?;
        if transition.changed {
            tx.commit().await?;
        } else {
            tx.rollback().await?;
        }
        Ok((transition.task, now))
    }
}
