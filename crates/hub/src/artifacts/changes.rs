//! What changes of a state and of its lock have in common: they follow each other, and each goes to its end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use artifact_store::WorkspaceState;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use pool_protocol::problem::Code;
use pool_store::TaskView;
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;
use tracing::warn;

use super::upload::TURN_TIMEOUT;
use super::{Answer, again};
use crate::Hub;
use crate::failure::Failure;
use crate::relay::rules::When;

/// What may be done to rescue a state.
pub(super) const SAVE: When = When {
    before_acceptance: false,
    after_end: true,
};

/// Where the state of the workspace of a task is.
pub(super) fn place(hub: &Hub, task: &TaskView) -> Result<WorkspaceState, Failure> {
    let store = hub.artifacts.store()?;
    Ok(store.state(&task.organization, &task.workspace))
}

/// Lets the changes of a workspace's state and of its lock follow each other. A write that an executor has given up may still be
/// in progress.
#[derive(Debug, Default)]
pub(super) struct StateWrites(Mutex<HashMap<Workspace, Weak<tokio::sync::Mutex<()>>>>);

/// Ids of an organization and of its workspace.
type Workspace = (String, String);

/// The right to change the state of a workspace.
pub(super) type StateWrite = OwnedMutexGuard<()>;

impl StateWrites {
    /// Waits for the right.
    pub(super) async fn next(&self, task: &TaskView) -> Result<StateWrite, Failure> {
        let next = timeout(TURN_TIMEOUT, self.of(task).lock_owned()).await;
        next.map_err(|_| {
            let text = "the state of the workspace is being written: try again";
            Failure::new(Code::RateLimited, text)
        })
    }

    /// Returns the right if nobody has it.
    pub(super) fn free(&self, task: &TaskView) -> Option<StateWrite> {
        self.of(task).try_lock_owned().ok()
    }

    fn of(&self, task: &TaskView) -> Arc<tokio::sync::Mutex<()>> {
        let mut writes = runtime::lock(&self.0);
        writes.retain(|_, write| write.strong_count() > 0);
        let key = (task.organization.clone(), task.workspace.clone());
        let known = writes.get(&key).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let write = Arc::default();
            writes.insert(key, Arc::downgrade(&write));
            write
        })
    }
}

/// Does something to its end, also if its caller leaves: the next change must not overtake it.
pub(super) async fn to_its_end(
    change: impl Future<Output = Result<(), Failure>> + Send + 'static,
) -> Answer {
    let done = tokio::spawn(change).await.unwrap_or_else(|error| {
        warn!(%error, "a change of a state ended without an answer");
        Err(again("the request ended without an answer: try again"))
    });
    done.map(|()| StatusCode::NO_CONTENT.into_response())
}
