//! The tasks that may have locked the state of their workspace. The lock itself is in the artifact store.
//!
//! `late` is 1 if the lock was taken after the end of the task, to rescue its state, and 2 if it was released.

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
const RELEASED: &str = "UPDATE state_locks SET late = 2 WHERE task = $1";
const FORGET: &str = "\
    DELETE FROM state_locks WHERE task = $1 AND (late = 2 OR task IN (SELECT id FROM tasks WHERE ended_at <= $2))";
const LEFT: &str = "\
    SELECT t.* FROM state_locks l JOIN tasks t ON t.id = l.task \
    WHERE t.end_reason IS NOT NULL AND (l.late = 0 OR l.late = 2 AND t.ended_at <= $3 OR t.ended_at <= $2) \
    ORDER BY t.id LIMIT $1";
const LEFT_ONE: &str = "\
    SELECT t.id FROM tasks t LEFT JOIN state_locks l ON t.id = l.task \
    WHERE t.id = $1 AND t.end_reason IS NOT NULL AND (l.task IS NULL OR l.late <> 1 OR t.ended_at <= $2)";
const MUST_LOCK: &str = "\
    SELECT t.id FROM tasks t LEFT JOIN state_locks l ON t.id = l.task \
    WHERE t.id = $1 AND (t.end_reason IS NOT NULL OR l.late = 2 AND $2 = 1)";
/// A store may still take a lock whose request was repeated, after the lock was released. By this time after the end of the task,
/// it has done so.
const SETTLED: Duration = Duration::from_secs(30);
/// By then, no executor may rescue its state any more, and its last request is over.
const RESCUED: Duration = Duration::from_mins(12);
/// By then, no request of the executor can take the lock any more.
const LATE: Duration = Duration::from_mins(15);

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

    /// Returns whether a lock that names this task is left: the task is over, and does not rescue its state.
    pub async fn has_left_state_lock(&self, task: TaskId) -> Result<bool, Error> {
        let mut tx = self.begin().await?;
        let rescued = Value::from(tx.now - millis(RESCUED));
        let found = tx.row(LEFT_ONE, &[Value::text(task), rescued]).await?;
        tx.rollback().await?;
        Ok(found.is_some())
    }

    /// Returns whether a task writes its state only with a lock: it is over, so that its lock may have been released as left, or
    /// it names a lock and has released it. A tool that takes no locks (`-lock=false`) names none.
    pub async fn must_lock_state(&self, task: TaskId, names_lock: bool) -> Result<bool, Error> {
        let mut tx = self.begin_for_task(task).await?;
        let values = [Value::text(task), Value::from(i64::from(names_lock))];
        let found = tx.row(MUST_LOCK, &values).await?;
        tx.rollback().await?;
        Ok(found.is_some())
    }

    /// Notes that a task has released its lock.
    pub async fn released_state_lock(&self, task: TaskId) -> Result<(), Error> {
        self.change_state_lock(RELEASED, task).await
    }

    /// Forgets the lock of one of [`Self::left_state_locks`] that is not there, if it cannot come back.
    pub async fn forget_state_lock(&self, task: TaskId) -> Result<(), Error> {
        let mut tx = self.begin_for_task(task).await?;
        let late = Value::from(tx.now - millis(LATE));
        tx.execute(FORGET, &[Value::text(task), late]).await?;
        tx.commit().await
    }

    async fn change_state_lock(&self, sql: &'static str, task: TaskId) -> Result<(), Error> {
        let mut tx = self.begin_for_task(task).await?;
        tx.execute(sql, &[Value::text(task)]).await?;
        tx.commit().await
    }

    /// Returns tasks that are over and may have left their lock. One that rescues its state has left it only when no executor may
    /// do that any more. One that has released its lock is returned too, after a while.
    pub async fn left_state_locks(&self) -> Result<Vec<TaskView>, Error> {
        let mut tx = self.begin().await?;
        let rescued = Value::from(tx.now - millis(RESCUED));
        let settled = Value::from(tx.now - millis(SETTLED));
        let rows = tx
            .rows(LEFT, &[Value::from(PAGE), rescued, settled])
            .await?;
        let tasks: Vec<_> = rows.iter().map(read).collect::<Result<_, _>>()?;
        let views = self.views(&mut tx, &tasks).await?;
        tx.rollback().await?;
        Ok(views)
    }
}
