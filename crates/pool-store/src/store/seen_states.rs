//! What each task has seen of the state of its workspace. The state itself is in the artifact store.
//!
//! A number that a writer chooses says nothing about what the writer knows. So a task may store a state only if the one before
//! it is the one that the task was given last, or has stored last.

use pool_protocol::id::TaskId;

use super::Store;
use crate::db::Value;
use crate::error::Error;

/// What is written in place of a SHA-256 if there was no state.
const NONE: &str = "";
/// What is written if an earlier version of the hub has served the state, which noted nothing.
const UNKNOWN: &str = "*";

/// A task that is over sees nothing more: it only saves what it has made before. What the task has stored itself stays: a slow reader of
/// an older state, such as a script beside the tool, does not make it forget that.
const SAW: &str = "\
    INSERT INTO seen_states (task, seen) SELECT id, CAST($2 AS TEXT) FROM tasks WHERE id = $1 AND end_reason IS NULL \
    ON CONFLICT (task) DO UPDATE SET seen = excluded.seen";
const STORES: &str = "\
    INSERT INTO seen_states (task, seen, storing) \
    SELECT id, CAST($2 AS TEXT), CAST($3 AS TEXT) FROM tasks WHERE id = $1 \
    ON CONFLICT (task) DO UPDATE SET seen = excluded.seen, storing = excluded.storing";
const STORED: &str = "UPDATE seen_states SET seen = $2, storing = $2, kept = NULL WHERE task = $1";
const KEPT: &str = "\
    INSERT INTO seen_states (task, seen, kept) SELECT id, '', CAST($2 AS TEXT) FROM tasks WHERE id = $1 \
    ON CONFLICT (task) DO UPDATE SET kept = excluded.kept";
const FIND: &str = "SELECT seen, storing, kept FROM seen_states WHERE task = $1";

/// What a task has seen of the state of its workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenState {
    seen: String,
    /// What it has stored last, or is storing.
    storing: Option<String>,
    /// Where a state of the task is that the hub has refused.
    pub kept: Option<String>,
}

impl SeenState {
    /// Returns whether the task was given the state with this SHA-256 last, or has stored it. `None`: there is no state.
    pub fn is(&self, sha256: Option<&str>) -> bool {
        let found = sha256.unwrap_or(NONE);
        self.seen == found || self.seen == UNKNOWN || self.storing.as_deref() == Some(found)
    }

    /// Returns the SHA-256 of the state that the task was given or has stored last; `None` if there was none, or it is not known.
    pub fn last(&self) -> Option<&str> {
        Some(&*self.seen).filter(|seen| !matches!(*seen, NONE | UNKNOWN))
    }
}

impl Store {
    /// Notes the SHA-256 of the state that a task is given; `None` if there is none. It has no effect once the task is over.
    pub async fn saw_state(&self, task: TaskId, sha256: Option<&str>) -> Result<(), Error> {
        let seen = Value::text(sha256.unwrap_or(NONE));
        self.change_seen_state(SAW, task, [seen]).await
    }

    /// Notes that a task replaces one state by another. Call it before the state is replaced.
    pub async fn stores_state(
        &self,
        task: TaskId,
        before: Option<&str>,
        sha256: &str,
    ) -> Result<(), Error> {
        let before = Value::text(before.unwrap_or(NONE));
        let values = [before, Value::text(sha256)];
        self.change_seen_state(STORES, task, values).await
    }

    /// Notes that a task has stored a state, or has removed it. Nothing of it is kept elsewhere any more.
    pub async fn stored_state(&self, task: TaskId, sha256: Option<&str>) -> Result<(), Error> {
        let seen = Value::text(sha256.unwrap_or(NONE));
        self.change_seen_state(STORED, task, [seen]).await
    }

    /// Notes where a state of a task is that the hub has refused.
    pub async fn kept_state(&self, task: TaskId, place: &str) -> Result<(), Error> {
        self.change_seen_state(KEPT, task, [Value::text(place)])
            .await
    }

    /// Returns what a task has seen of the state of its workspace.
    pub async fn seen_state(&self, task: TaskId) -> Result<SeenState, Error> {
        let mut tx = self.begin_for_task(task).await?;
        let row = tx.row(FIND, &[Value::text(task)]).await?;
        tx.rollback().await?;
        let Some(row) = row else {
            return Ok(SeenState::default());
        };
        Ok(SeenState {
            seen: row.text("seen")?,
            storing: row.maybe_text("storing")?,
            kept: row.maybe_text("kept")?,
        })
    }

    async fn change_seen_state<const N: usize>(
        &self,
        sql: &'static str,
        task: TaskId,
        values: [Value; N],
    ) -> Result<(), Error> {
        let mut tx = self.begin_for_task(task).await?;
        let mut all = vec![Value::text(task)];
        all.extend(values);
        tx.execute(sql, &all).await?;
        tx.commit().await
    }
}
