//! The locks of states that a hub removes from an artifact store. Some services delete without a condition, and may do it late: then
//! they delete the lock of somebody else. So a removal is stored before the request, and stays until it is seen done.

use std::time::Duration;

use super::Store;
use crate::clock::{Millis, millis};
use crate::db::Value;
use crate::error::Error;
use crate::view::TaskView;

const BEGIN: &str = "\
    INSERT INTO lock_removals (organization, workspace, lock_id, at) VALUES ($1, $2, $3, $4) \
    ON CONFLICT (organization, workspace) DO UPDATE SET lock_id = excluded.lock_id, at = excluded.at \
    WHERE lock_removals.at <= $5";
const FIND: &str =
    "SELECT lock_id, at FROM lock_removals WHERE organization = $1 AND workspace = $2";
const END: &str =
    "DELETE FROM lock_removals WHERE organization = $1 AND workspace = $2 AND at = $3";
/// By this time after it was decided, no service does it any more: a hub sends the request within a minute, and a service refuses a
/// signature that is older than 15 minutes.
const OVER: Duration = Duration::from_mins(20);

/// A lock that is being removed from the artifact store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockRemoval {
    /// The id of the lock.
    pub lock: String,
    /// Whether the service can no longer do what it was asked for.
    pub is_over: bool,
    at: Millis,
}

impl Store {
    /// Notes that a lock of the workspace of a task is being removed. Returns `None` if another removal is not seen done yet. Call it
    /// before the store is asked to delete the lock.
    pub async fn begin_lock_removal(
        &self,
        task: &TaskView,
        lock: &str,
    ) -> Result<Option<LockRemoval>, Error> {
        let mut tx = self.begin_for_task(task.task).await?;
        let at = tx.now;
        let [organization, workspace] = place(task);
        let over = Value::from(at - millis(OVER));
        let values = [
            organization,
            workspace,
            Value::text(lock),
            Value::from(at),
            over,
        ];
        let changed = tx.execute(BEGIN, &values).await?;
        tx.commit().await?;
        Ok((changed > 0).then(|| LockRemoval {
            lock: lock.to_owned(),
            is_over: false,
            at,
        }))
    }

    /// Returns the lock that is being removed from the workspace of a task.
    pub async fn lock_removal(&self, task: &TaskView) -> Result<Option<LockRemoval>, Error> {
        let mut tx = self.begin_for_task(task.task).await?;
        let now = tx.now;
        let row = tx.row(FIND, &place(task)).await?;
        tx.rollback().await?;
        let Some(row) = row else {
            return Ok(None);
        };
        let at = row.int("at")?;
        Ok(Some(LockRemoval {
            lock: row.text("lock_id")?,
            is_over: at <= now - millis(OVER),
            at,
        }))
    }

    /// Notes that a removal is done, or will not be done any more. It leaves a later one alone.
    pub async fn end_lock_removal(
        &self,
        task: &TaskView,
        removal: &LockRemoval,
    ) -> Result<(), Error> {
        let mut tx = self.begin_for_task(task.task).await?;
        let [organization, workspace] = place(task);
        let values = [organization, workspace, Value::from(removal.at)];
        tx.execute(END, &values).await?;
        tx.commit().await
    }
}

fn place(task: &TaskView) -> [Value; 2] {
    [
        Value::text(&task.organization),
        Value::text(&task.workspace),
    ]
}
