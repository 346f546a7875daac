//! The tasks that may have locked the state of their workspace. The lock itself is in the artifact store.

use pool_protocol::id::TaskId;

use super::Store;
use super::rows::read;
use crate::db::Value;
use crate::error::Error;
use crate::view::{PAGE, TaskView};

const NOTE: &str = "INSERT INTO state_locks (task) VALUES ($1) ON CONFLICT (task) DO NOTHING";
const FORGET: &str = "DELETE FROM state_locks WHERE task = $1";
const LEFT: &str = "\
    SELECT t.* FROM state_locks l JOIN tasks t ON t.id = l.task WHERE t.end_reason IS NOT NULL ORDER BY t.id LIMIT $1";

impl Store {
    /// Notes that a task may have the lock of its state. Call it before the lock is taken, or nobody releases a lock that is
    /// left.
    pub async fn note_state_lock(&self, task: TaskId) -> Result<(), Error> {
        self.change_state_lock(NOTE, task).await
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

    /// Returns tasks that are over and may have left their lock.
    pub async fn left_state_locks(&self) -> Result<Vec<TaskView>, Error> {
        let mut tx = self.begin().await?;
        let rows = tx.rows(LEFT, &[Value::from(PAGE)]).await?;
        let tasks: Vec<_> = rows.iter().map(read).collect::<Result<_, _>>()?;
        let views = self.views(&mut tx, &tasks).await?;
        tx.rollback().await?;
        Ok(views)
    }
}
