//! The tasks that may have locked the state of their workspace. The lock itself is in the artifact store.

use std::time::Duration;

use pool_protocol::id::TaskId;

use super::Store;
use super::rows::read;
use crate::clock::millis;
use crate::db::Value;
use crate::error::Error;
use crate::view::{PAGE, TaskView};

const NOTE: &str =
    "INSERT INTO state_locks (task, late) VALUES ($1, 0) ON CONFLICT (task) DO NOTHING";
const TAKEN: &str = "\
    UPDATE state_locks SET late = (SELECT CASE WHEN end_reason IS NULL THEN 0 ELSE 1 END FROM tasks WHERE id = $1) \
    WHERE task = $1";
const FORGET: &str = "DELETE FROM state_locks WHERE task = $1";
const LEFT: &str = "\
    SELECT t.* FROM state_locks l JOIN tasks t ON t.id = l.task \
    WHERE t.end_reason IS NOT NULL AND (l.late = 0 OR t.ended_at <= $2) ORDER BY t.id LIMIT $1";
const LEFT_ONE: &str = "\
    SELECT t.id FROM state_locks l JOIN tasks t ON t.id = l.task \
    WHERE t.id = $1 AND t.end_reason IS NOT NULL AND (l.late = 0 OR t.ended_at <= $2)";
/// By then, no executor may rescue its state any more, and its last request is over.
const RESCUED: Duration = Duration::from_mins(12);

impl Store {
    /// Notes that a task may have the lock of its state. Call it before the lock is taken, or nobody releases a lock that is
    /// left.
    pub async fn note_state_lock(&self, task: TaskId) -> Result<(), Error> {
        self.change_state_lock(NOTE, task).await
    }

    /// Notes that a task has taken its lock.
    pub async fn took_state_lock(&self, task: TaskId) -> Result<(), Error> {
        self.change_state_lock(TAKEN, task).await
    }

    /// Returns whether a task is one of [`Self::left_state_locks`].
    pub async fn has_left_state_lock(&self, task: TaskId) -> Result<bool, Error> {
        let mut tx = self.begin().await?;
        let rescued = Value::from(tx.now - millis(RESCUED));
        let found = tx.row(LEFT_ONE, &[Value::text(task), rescued]).await?;
        tx.rollback().await?;
        Ok(found.is_some())
    }

    /// Forgets a lock that was released.
    pub async fn forget_state_lock(&self, task: TaskId) -> Result<(), Error> {
        self.change_state_lock(FORGET, task).await
    }

    async fn change_state_lock(&self, sql: &'static str, task: TaskId) -> Result<(), Error> {
        let mut tx = self.begin_for_task(task).await?;
        tx.execute(sql, &[Value::text(task)]).await?;
        tx.commit().await
    }

    /// Returns tasks that are over and may have left their lock. One that rescues its state has left it only when no executor may
    /// do that any more.
    pub async fn left_state_locks(&self) -> Result<Vec<TaskView>, Error> {
        let mut tx = self.begin().await?;
        let rescued = Value::from(tx.now - millis(RESCUED));
        let rows = tx.rows(LEFT, &[Value::from(PAGE), rescued]).await?;
        let tasks: Vec<_> = rows.iter().map(read).collect::<Result<_, _>>()?;
        let views = self.views(&mut tx, &tasks).await?;
        tx.rollback().await?;
        Ok(views)
    }
}
