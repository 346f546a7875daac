//! The store: one transaction for each operation.

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
/// Each operation may be repeated after an error, or after its response was lost: it does nothing twice.
#[derive(Clone, Debug)]
pub struct Store {
    database: Arc<Database>,
    rules: Arc<Rules>,
    batches: Arc<LeaseBatches>,
}

impl Store {
    /// Opens the store of a URL: `sqlite:/folder/file.db` or `postgres://…`.
    ///
    /// All tasks that waited for an instance wait to be confirmed again: the store may be a backup.
    pub async fn open(url: &str, rules: Rules) -> Result<Self, OpenError> {
        Self::open_with(url, rules, SystemClock::new()).await
    }

    /// The same with another clock, for tests.
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

    /// Closes it. Calls that still wait for a task end without one.
    pub async fn close(&self) {
        self.database.close().await;
    }

    pub(crate) async fn begin(&self) -> Result<Tx, Error> {
        self.database.begin().await
    }

    /// Those who wait for tasks.
    pub(crate) fn waiters(&self) -> &Waiters {
        self.database.waiters()
    }

    /// Does to a task what an event does.
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
