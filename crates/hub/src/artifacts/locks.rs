//! Locks the state of a workspace as the tool's own backend does, so that executors in the cluster and those of pools keep each
//! other out. The lock says which task has it. So a lock that a dead executor has left is released when its task is over.

use std::sync::Arc;

use artifact_store::WorkspaceState;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use http_service::body;
use pool_protocol::id::TaskId;
use pool_protocol::problem::Code;
use serde_json::{Map, Value};
use tracing::{info, warn};

use super::state::{SAVE, place};
use super::{Allowed, Answer, allow, conflict, failed};
use crate::Hub;
use crate::failure::Failure;

/// The largest description of a lock.
const LARGEST: usize = 16 * 1024;
/// The longest id.
const LONGEST_ID: usize = 128;
/// The field of the tool for an explanation. It names the task after this word.
const INFO: &str = "Info";
const TASK: &str = "mayfly task ";
const ID: &str = "ID";
/// How often the lock is taken again that another holder has released meanwhile.
const ATTEMPTS: usize = 5;

pub(super) async fn lock(
    State(hub): State<Arc<Hub>>,
    Path((task, lease)): Path<(String, String)>,
    request: Request,
) -> Answer {
    let (head, body) = request.into_parts();
    let allowed = allow(&hub, &head, (&task, &lease), SAVE).await?;
    let state = place(&hub, &allowed)?;
    let info = read(body).await?;
    let (id, info) = named(&info, allowed.task.task)?;
    if !state.has_lock() {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    // This comes first, so that no lock is left that nobody knows.
    hub.store.note_state_lock(allowed.task.task).await?;
    match take(&hub, &state, &id, info).await? {
        None => {}
        Some(holder) => return Ok(held_response(&holder)),
    }
    // The task may have ended meanwhile, and its locks may have been released before this one.
    if let Err(failure) = is_current(&hub, &allowed).await {
        state.unlock().await.map_err(|error| failed(&error))?;
        return Err(failure);
    }
    info!(task = %allowed.task.task, workspace_id = allowed.task.workspace, "a state was locked");
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(super) async fn unlock(
    State(hub): State<Arc<Hub>>,
    Path((task, lease)): Path<(String, String)>,
    request: Request,
) -> Answer {
    let (head, body) = request.into_parts();
    let allowed = allow(&hub, &head, (&task, &lease), SAVE).await?;
    let state = place(&hub, &allowed)?;
    let asked = read(body).await?;
    let found = state.lock_info().await.map_err(|error| failed(&error))?;
    if let Some(found) = found {
        // `force-unlock` describes no lock. It must not release the lock of another run.
        let may = if asked.is_empty() {
            task_of(&found) == Some(allowed.task.task)
        } else {
            holder_id(&asked).is_some() && holder_id(&asked) == holder_id(&found)
        };
        if !may {
            return Ok(held_response(&found));
        }
        state.unlock().await.map_err(|error| failed(&error))?;
    }
    hub.store.forget_state_lock(allowed.task.task).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Takes the lock. Returns what its holder has written, if somebody has it.
async fn take(
    hub: &Hub,
    state: &WorkspaceState,
    id: &str,
    info: Bytes,
) -> Result<Option<Bytes>, Failure> {
    for _ in 0..ATTEMPTS {
        let taken = state.lock(info.clone()).await;
        if taken.map_err(|error| failed(&error))? {
            return Ok(None);
        }
        let holder = state.lock_info().await.map_err(|error| failed(&error))?;
        let Some(holder) = holder else {
            // It was released meanwhile.
            continue;
        };
        if holder_id(&holder).as_deref() == Some(id) {
            // The answer to the first request was lost.
            return Ok(None);
        }
        if !is_left(hub, &holder).await? {
            return Ok(Some(holder));
        }
        warn!(holder = %String::from_utf8_lossy(&holder), "the lock of a task that is over is released");
        state.unlock().await.map_err(|error| failed(&error))?;
    }
    let text = "the lock of the state changes all the time: try again";
    Err(Failure::new(Code::RateLimited, text))
}

/// Whether a lock is of a task that is over.
async fn is_left(hub: &Hub, holder: &[u8]) -> Result<bool, Failure> {
    let Some(task) = task_of(holder) else {
        return Ok(false);
    };
    Ok(hub
        .store
        .task(task)
        .await?
        .is_some_and(|task| task.state.is_terminal()))
}

async fn is_current(hub: &Hub, allowed: &Allowed) -> Result<(), Failure> {
    let task = hub.store.task(allowed.task.task).await?;
    let task = task.ok_or(pool_store::Refusal::TaskNotFound)?;
    if (task.lease, task.fencing_token) == (Some(allowed.lease), allowed.task.fencing_token)
        && task.state.is_terminal() == allowed.task.state.is_terminal()
    {
        Ok(())
    } else {
        Err(pool_store::Refusal::LeaseSuperseded.into())
    }
}

/// Releases the lock that a task has left, if it is still there. Returns whether nothing of it is left.
pub(crate) async fn release_left(hub: &Hub, task: &pool_store::TaskView) -> bool {
    let Ok(store) = hub.artifacts.store() else {
        return true;
    };
    let state = store.state(&task.organization, &task.workspace);
    let released = async {
        let found = state.lock_info().await?;
        let is_its = found.is_some_and(|info| task_of(&info) == Some(task.task));
        if is_its {
            state.unlock().await?;
            warn!(
                task = %task.task,
                workspace_id = task.workspace,
                "the lock that a run has left on its state is released"
            );
        }
        Ok::<_, artifact_store::StoreError>(())
    };
    match released.await {
        Ok(()) => true,
        Err(error) => {
            warn!(task = %task.task, %error, "whether a run has left its lock is not known");
            false
        }
    }
}

async fn read(body: Body) -> Result<Bytes, Failure> {
    let body = body::read(body, LARGEST).await;
    let body = body.map_err(|_| {
        Failure::new(
            Code::RequestInvalid,
            "the description of the lock cannot be read",
        )
    })?;
    Ok(body.into())
}

/// Returns the id of a lock, and its description with the task.
fn named(info: &[u8], task: TaskId) -> Result<(String, Bytes), Failure> {
    let id = holder_id(info).filter(|id| {
        let is_known = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !id.is_empty() && id.len() <= LONGEST_ID && id.bytes().all(is_known)
    });
    let fields: Option<Map<String, Value>> = serde_json::from_slice(info).ok();
    let (Some(id), Some(mut fields)) = (id, fields) else {
        return Err(conflict("it is no description of a lock"));
    };
    fields.insert(INFO.to_owned(), format!("{TASK}{task}").into());
    let info = serde_json::to_vec(&fields).expect("fields of a document are a document");
    Ok((id, info.into()))
}

/// The id of a lock.
pub(super) fn holder_id(info: &[u8]) -> Option<String> {
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

    #[test]
    fn a_lock_names_its_task_and_keeps_what_the_tool_says() {
        let task = TaskId::new();
        let info =
            json!({"ID": "4711-a", "Who": "me", "Info": "", "Operation": "OperationTypeApply"});
        let (id, named) = named(info.to_string().as_bytes(), task).unwrap();
        assert_eq!((id.as_str(), task_of(&named)), ("4711-a", Some(task)));
        let fields: Value = serde_json::from_slice(&named).unwrap();
        assert_eq!(fields["Who"], "me");
        for other in ["", "[]", "{}", r#"{"ID": 7}"#, r#"{"ID": "a/../b"}"#] {
            assert!(super::named(other.as_bytes(), task).is_err(), "{other}");
        }
        assert_eq!(task_of(info.to_string().as_bytes()), None);
    }
}
