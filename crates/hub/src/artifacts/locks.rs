//! Locks the state of a workspace as the tool's own backend does, so that executors in the cluster and those of pools keep each
//! other out. The lock says which task has it. So a lock that a dead executor has left is released when its task is over.
//!
//! A service may delete a lock without a condition, and late. So the hub notes in its database what it deletes there. No hub gives the
//! lock until the old one is seen to be gone, and none deletes it again while the first request may still be done.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use artifact_store::{StoreError, WorkspaceState};
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use http_service::body::{self, BodyError};
use pool_protocol::id::TaskId;
use pool_protocol::problem::Code;
use pool_store::TaskView;
use serde_json::{Map, Value};
use tracing::{info, warn};
use uuid::Uuid;

use super::changes::{SAVE, place, to_its_end};
use super::{Answer, again, allow, check_again, conflict, failed};
use crate::Hub;
use crate::failure::Failure;

/// The largest description of a lock. Azure keeps at most 8 KiB of metadata, in base64.
const LARGEST: usize = 4 * 1024;
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// The field of the tool for an explanation. It names the task after this word.
const INFO: &str = "Info";
const TASK: &str = "mayfly task ";
const ID: &str = "ID";
/// How often the lock is taken again that another holder has released meanwhile.
const ATTEMPTS: usize = 5;
/// What an executor learns of a lock that may be deleted late.
pub(super) const UNCERTAIN: &str = "the release of the last lock of the state is not confirmed: wait up to 20 minutes and start the run \
     again, and do not use `force-unlock`, because the store may still delete the lock of the next run";

pub(super) async fn lock(
    State(hub): State<Arc<Hub>>,
    Path((task, lease)): Path<(String, String)>,
    request: Request,
) -> Answer {
    let (head, body) = request.into_parts();
    let allowed = allow(&hub, &head, (&task, &lease), SAVE).await?;
    let state = place(&hub, &allowed.task)?;
    let info = read(body).await?;
    let (id, info) = named(&info, allowed.task.task)?;
    if !state.has_lock() {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let write = hub.artifacts.states.next(&allowed.task).await?;
    let refused = Arc::<Mutex<Option<Bytes>>>::default();
    let holder = Arc::clone(&refused);
    let locked = to_its_end(async move {
        let (_write, task) = (write, &allowed.task);
        // This comes first, so that no lock is left that nobody knows.
        hub.store.note_state_lock(task.task).await?;
        if let Some(other) = take(&hub, &state, task, (&id, info)).await? {
            *runtime::lock(&holder) = Some(other);
            return Ok(());
        }
        // The task may have ended meanwhile, and its locks may have been released before this one.
        if let Err(failure) = check_again(&hub, task, SAVE).await {
            let is_own = |info: &[u8]| is_of(info, Some(&id), task.task);
            release(&hub, &state, task, is_own).await?;
            return Err(failure);
        }
        hub.store.took_state_lock(task.task).await?;
        info!(task = %task.task, workspace_id = task.workspace, "a state was locked");
        Ok(())
    });
    let locked = locked.await?;
    let refused = runtime::lock(&refused).take();
    Ok(refused.map_or(locked, |holder| held_response(&holder)))
}

pub(super) async fn unlock(
    State(hub): State<Arc<Hub>>,
    Path((task, lease)): Path<(String, String)>,
    request: Request,
) -> Answer {
    let (head, body) = request.into_parts();
    let allowed = allow(&hub, &head, (&task, &lease), SAVE).await?;
    let state = place(&hub, &allowed.task)?;
    let asked = read(body).await?;
    let write = hub.artifacts.states.next(&allowed.task).await?;
    let refused = Arc::<Mutex<Option<Bytes>>>::default();
    let holder = Arc::clone(&refused);
    let unlocked = to_its_end(async move {
        let (_write, task) = (write, &allowed.task);
        let id = holder_id(&asked);
        // Without a description, it is the lock of this task.
        let is_own = |info: &[u8]| match &id {
            Some(id) => is_of(info, Some(id), task.task),
            None => asked.is_empty() && task_of(info) == Some(task.task),
        };
        match release(&hub, &state, task, is_own).await? {
            Some(other) => *runtime::lock(&holder) = Some(other),
            None => hub.store.released_state_lock(task.task).await?,
        }
        Ok(())
    });
    let unlocked = unlocked.await?;
    let refused = runtime::lock(&refused).take();
    Ok(refused.map_or(unlocked, |holder| held_response(&holder)))
}

/// Takes the lock. Returns what its holder has written, if somebody has it.
async fn take(
    hub: &Hub,
    state: &WorkspaceState,
    task: &TaskView,
    (id, info): (&str, Bytes),
) -> Result<Option<Bytes>, Failure> {
    for _ in 0..ATTEMPTS {
        see_removed(hub, state, task).await?;
        let taken = state.lock(info.clone()).await;
        if taken.map_err(|error| failed(&error))? {
            return Ok(None);
        }
        let holder = state.lock_info().await.map_err(|error| failed(&error))?;
        let Some(holder) = holder else {
            // It was released meanwhile.
            continue;
        };
        if is_of(&holder, Some(id), task.task) {
            // The answer to the first request was lost.
            return Ok(None);
        }
        let Some(left) = left(hub, &holder).await? else {
            return Ok(Some(holder));
        };
        warn!(task = %left, "the lock of a task that is over is released");
        release(hub, state, task, |info| task_of(info) == Some(left)).await?;
    }
    let text = "the lock of the state changes all the time: try again";
    Err(Failure::new(Code::RateLimited, text))
}

/// Returns the task that has left a lock.
async fn left(hub: &Hub, holder: &[u8]) -> Result<Option<TaskId>, Failure> {
    let Some(task) = task_of(holder) else {
        return Ok(None);
    };
    let is_left = hub.store.has_left_state_lock(task).await?;
    Ok(is_left.then_some(task))
}

/// Releases the lock if it is the one of the caller, who may change the state of the workspace. Otherwise returns what its holder
/// has written.
async fn release(
    hub: &Hub,
    state: &WorkspaceState,
    task: &TaskView,
    is_own: impl Fn(&[u8]) -> bool + Send,
) -> Result<Option<Bytes>, Failure> {
    let found = state.lock_info().await.map_err(|error| failed(&error))?;
    match found {
        Some(found) if !is_own(&found) => return Ok(Some(found)),
        Some(found) => remove(hub, state, task, &found).await?,
        None => {}
    }
    Ok(None)
}

/// Removes the lock with this description from the workspace of a task, if it is still there.
async fn remove(
    hub: &Hub,
    state: &WorkspaceState,
    task: &TaskView,
    lock: &[u8],
) -> Result<(), Failure> {
    if state.unlocks_on_condition() {
        let removed = state.unlock(lock).await;
        return removed.map_err(|error| failed(&error));
    }
    see_removed(hub, state, task).await?;
    // The time comes first: the process may be frozen between any two lines.
    let since = SystemTime::now();
    let id = holder_id(lock).unwrap_or_default();
    let begun = hub.store.begin_lock_removal(task, &id).await?;
    let removal = begun.ok_or_else(|| again(UNCERTAIN))?;
    match state.unlock_once(lock, since).await {
        // It stays noted. Whoever wants the lock looks whether it is done.
        Err(error @ StoreError::Uncertain { .. }) => Err(failed(&error)),
        removed => {
            hub.store.end_lock_removal(task, &removal).await?;
            removed.map_err(|error| failed(&error))
        }
    }
}

/// Makes sure that no lock of the workspace of a task is being removed: what a hub has begun is seen done, or can no longer be done.
async fn see_removed(hub: &Hub, state: &WorkspaceState, task: &TaskView) -> Result<(), Failure> {
    let Some(removal) = hub.store.lock_removal(task).await? else {
        return Ok(());
    };
    let found = state.lock_info().await.map_err(|error| failed(&error))?;
    let id = found.and_then(|info| holder_id(&info));
    let is_there = id.as_deref() == Some(&*removal.lock);
    if is_there && !removal.is_over && !state.unlocks_on_condition() {
        return Err(again(UNCERTAIN));
    }
    hub.store.end_lock_removal(task, &removal).await?;
    Ok(())
}

/// Releases the lock that a task has left, if it is still there. Returns whether nothing of it is left.
pub(crate) async fn release_left(hub: &Hub, task: &TaskView) -> bool {
    let Ok(state) = place(hub, task) else {
        return true;
    };
    // A write of the task may be in progress.
    let Some(_write) = hub.artifacts.states.free(task) else {
        return false;
    };
    // It may have taken the lock again meanwhile, to rescue its state.
    if !matches!(hub.store.has_left_state_lock(task.task).await, Ok(true)) {
        return false;
    }
    let found = state.lock_info().await;
    let found = match found {
        Ok(found) => found.filter(|info| task_of(info) == Some(task.task)),
        Err(error) => {
            warn!(task = %task.task, %error, "whether a run has left its lock is not known");
            return false;
        }
    };
    let Some(found) = found else {
        return true;
    };
    match remove(hub, &state, task, &found).await {
        Ok(()) => {
            warn!(
                task = %task.task,
                workspace_id = task.workspace,
                "the lock that a run has left on its state is released"
            );
            true
        }
        Err(why) => {
            warn!(task = %task.task, ?why, "the lock that a run has left is not released");
            false
        }
    }
}

async fn read(body: Body) -> Result<Bytes, Failure> {
    let body = body::read_in_time(body, LARGEST, BODY_TIMEOUT, |_| true).await;
    let body = body.map_err(|error| match error {
        BodyError::TooLarge => conflict("it is no description of a lock: it is too large"),
        _ => again("the description of the lock did not arrive in time: try again"),
    })?;
    Ok(body.into())
}

/// Returns the id of a lock, and its description with the task.
fn named(info: &[u8], task: TaskId) -> Result<(String, Bytes), Failure> {
    // Terraform and OpenTofu generate it. On Azure, it is the id of a lease.
    let id = holder_id(info).filter(|id| {
        let parsed: Result<Uuid, _> = id.parse();
        parsed.is_ok_and(|parsed| parsed.to_string() == *id)
    });
    let fields: Option<Map<String, Value>> = serde_json::from_slice(info).ok();
    let (Some(id), Some(mut fields)) = (id, fields) else {
        return Err(conflict("it is no description of a lock"));
    };
    fields.insert(INFO.to_owned(), format!("{TASK}{task}").into());
    let info = serde_json::to_vec(&fields).expect("fields of a document are a document");
    Ok((id, info.into()))
}

/// Whether a lock is of this task, and has this id.
pub(super) fn is_of(info: &[u8], id: Option<&str>, task: TaskId) -> bool {
    id.is_some() && holder_id(info).as_deref() == id && task_of(info) == Some(task)
}

/// The id of a lock.
fn holder_id(info: &[u8]) -> Option<String> {
    let fields: Map<String, Value> = serde_json::from_slice(info).ok()?;
    Some(fields.get(ID)?.as_str()?.to_owned())
}

/// The task that has a lock.
fn task_of(info: &[u8]) -> Option<TaskId> {
    let fields: Map<String, Value> = serde_json::from_slice(info).ok()?;
    fields.get(INFO)?.as_str()?.strip_prefix(TASK)?.parse().ok()
}

/// Answers that somebody else has the lock, with what they have written, as the tool expects it.
fn held_response(holder: &Bytes) -> Response {
    let json = [(header::CONTENT_TYPE, "application/json")];
    (StatusCode::LOCKED, json, holder.clone()).into_response()
}

/// Refuses a write while somebody else has the lock.
pub(super) fn held(holder: &[u8]) -> Failure {
    let fields: Map<String, Value> = serde_json::from_slice(holder).unwrap_or_default();
    let text = |name: &str| {
        let text = fields.get(name).and_then(Value::as_str);
        text.unwrap_or("somebody")
            .chars()
            .take(128)
            .collect::<String>()
    };
    conflict(format!(
        "the state is locked by {} ({}, lock {}), and not by this write",
        text("Who"),
        text("Operation"),
        text(ID)
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "6c2a9f0e-3f0b-4b52-9d0c-6f6c8b8d7a11";

    #[test]
    fn a_lock_names_its_task_and_keeps_what_the_tool_says() {
        let task = TaskId::new();
        let info = json!({"ID": ID, "Who": "me", "Info": "", "Operation": "OperationTypeApply"});
        let (id, named) = named(info.to_string().as_bytes(), task).unwrap();
        assert_eq!((id.as_str(), task_of(&named)), (ID, Some(task)));
        let fields: Value = serde_json::from_slice(&named).unwrap();
        assert_eq!(fields["Who"], "me");
        let upper = json!({"ID": ID.to_uppercase()}).to_string();
        for other in [
            "",
            "[]",
            "{}",
            r#"{"ID": 7}"#,
            r#"{"ID": "a/../b"}"#,
            &upper,
        ] {
            assert!(super::named(other.as_bytes(), task).is_err(), "{other}");
        }
        assert_eq!(task_of(info.to_string().as_bytes()), None);
    }
}
