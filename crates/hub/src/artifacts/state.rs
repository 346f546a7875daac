//! The state of a workspace, where the platform's own executors keep it. The tool of an executor uses it as an `http` backend.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, Weak};

use artifact_store::{Digest, StoreError, WorkspaceState};
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use axum::response::IntoResponse as _;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use job_contract::encoding::hex;
use pool_store::Refusal;
use sha2::{Digest as _, Sha256};
use tracing::{info, warn};

use super::head::{HeadScanner, StateHead};
use super::locks::{self, holder_id};
use super::upload::{self, Chunks};
use super::{Allowed, Answer, MIB, allow, conflict, failed, no_method, respond, turn};
use crate::Hub;
use crate::failure::Failure;
use crate::relay;
use crate::relay::rules::{self, When};

/// The largest state.
pub(super) const LARGEST: u64 = 512 * MIB;
/// The parameter with the lock of the tool.
const LOCK: &str = "lock";

/// Lets the writes of a workspace's state follow each other. A write that an executor has given up may still be in progress.
#[derive(Debug, Default)]
pub(super) struct StateWrites(Mutex<HashMap<(String, String), Weak<tokio::sync::Mutex<()>>>>);

impl StateWrites {
    fn of(&self, allowed: &Allowed) -> Arc<tokio::sync::Mutex<()>> {
        let task = &allowed.task;
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

/// A state as it is stored.
#[derive(Debug)]
struct StoredState {
    head: StateHead,
    digest: Digest,
}

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Write {
    Replace,
    /// The state is there: an answer was lost.
    Nothing,
}

pub(super) async fn handle(
    State(hub): State<Arc<Hub>>,
    Path((task, lease)): Path<(String, String)>,
    request: Request,
) -> Answer {
    let of = (task.as_str(), lease.as_str());
    let (head, body) = request.into_parts();
    match head.method {
        Method::GET => {
            let allowed = allow(&hub, &head, of, SAVE).await?;
            let turn = turn(&hub, &allowed.task).await?;
            let state = place(&hub, &allowed)?.open().await;
            let state = state.map_err(|error| failed(&error))?;
            // The tool's backend for Azure stores an empty blob for its lock.
            let state = state.filter(|state| state.size_bytes > 0);
            Ok(state.map_or_else(
                || StatusCode::NO_CONTENT.into_response(),
                |state| respond(state, turn),
            ))
        }
        Method::POST => write(&hub, of, &head, body).await,
        Method::DELETE => {
            let allowed = allow(&hub, &head, of, CHANGE).await?;
            let _write = hub.artifacts.states.of(&allowed).lock_owned().await;
            let state = place(&hub, &allowed)?;
            check_lock(&state, lock_of(&head).as_deref()).await?;
            state.delete().await.map_err(|error| failed(&error))?;
            info!(task = %allowed.task.task, "the state of a workspace was removed");
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        _ => Err(no_method()),
    }
}

/// What may be done while an executor has the task.
const CHANGE: When = When {
    before_acceptance: false,
    after_end: false,
};
/// What may be done to rescue a state.
pub(super) const SAVE: When = When {
    before_acceptance: false,
    after_end: true,
};

pub(super) fn place(hub: &Hub, allowed: &Allowed) -> Result<WorkspaceState, Failure> {
    let store = hub.artifacts.store()?;
    Ok(store.state(&allowed.task.organization, &allowed.task.workspace))
}

/// The id of the lock that the tool has taken.
fn lock_of(head: &Parts) -> Option<String> {
    let query = head.uri.query()?;
    let mut pairs = url::form_urlencoded::parse(query.as_bytes());
    let lock = pairs.find(|(name, _)| name == LOCK);
    lock.map(|(_, id)| id.into_owned())
}

async fn write(hub: &Arc<Hub>, of: (&str, &str), head: &Parts, body: Body) -> Answer {
    let allowed = allow(hub, head, of, SAVE).await?;
    let state = place(hub, &allowed)?;
    let lock = lock_of(head);
    let incoming = upload::receive(hub, &allowed, &head.headers, body, LARGEST).await?;
    let write = hub.artifacts.states.of(&allowed).lock_owned().await;
    // The sender may leave, but the write goes on, and the next one follows it.
    let hub = Arc::clone(hub);
    let written = tokio::spawn(async move {
        let _write = write;
        let task = hub.store.task(allowed.task.task).await?;
        let task = task.ok_or(Refusal::TaskNotFound)?;
        let is_same =
            (task.lease, task.fencing_token) == (Some(allowed.lease), allowed.task.fencing_token);
        if !is_same {
            return Err(Refusal::LeaseSuperseded.into());
        }
        rules::check_state(&task, SAVE)
            .map_err(|refusal| relay::refuse(&task, &Method::POST, "state", &refusal))?;
        check_lock(&state, lock.as_deref()).await?;
        let before = stored(&state).await?;
        let (digest, taken) = (incoming.digest, incoming.taken);
        let refused = Arc::<Mutex<Option<&'static str>>>::default();
        let chunks = checked(
            incoming.chunks,
            before,
            digest.clone(),
            Arc::clone(&refused),
        );
        let upload = artifact_store::Upload {
            content: Box::new(tokio_util::io::StreamReader::new(chunks)),
            digest,
        };
        let stored = state.put(upload).await;
        drop(taken);
        match (stored, *runtime::lock(&refused)) {
            (Ok(()), _) => {
                info!(task = %task.task, workspace_id = task.workspace, "a state was stored");
                Ok(())
            }
            (Err(StoreError::Broken(_)), Some(ALREADY_THERE)) => Ok(()),
            (Err(StoreError::Broken(_)), Some(why)) => {
                warn!(task = %task.task, workspace_id = task.workspace, why, "a state was refused");
                Err(conflict(why))
            }
            (Err(error), _) => Err(failed(&error)),
        }
    });
    let written = written.await.unwrap_or_else(|error| {
        warn!(%error, "a write of a state ended without an answer");
        Err(conflict("the write ended without an answer: try again"))
    });
    written.map(|()| StatusCode::NO_CONTENT.into_response())
}

/// Refuses a write while somebody else has the lock.
async fn check_lock(state: &WorkspaceState, own: Option<&str>) -> Result<(), Failure> {
    let info = state.lock_info().await.map_err(|error| failed(&error))?;
    match info {
        Some(info) if holder_id(&info).as_deref() != own => Err(locks::held(&info)),
        _ => Ok(()),
    }
}

/// The state before a write, without its content; `None` if there is none.
async fn stored(state: &WorkspaceState) -> Result<Option<StoredState>, Failure> {
    let content = state.open().await.map_err(|error| failed(&error))?;
    let Some(content) = content.filter(|content| content.size_bytes > 0) else {
        return Ok(None);
    };
    let (mut scanner, mut hasher) = (HeadScanner::default(), Sha256::new());
    let mut chunks = content.chunks;
    while let Some(chunk) = chunks.try_next().await.map_err(|error| failed(&error))? {
        scanner.read(&chunk);
        hasher.update(&chunk);
    }
    let head = scanner.finish().ok_or_else(|| {
        conflict("the stored state has no serial and lineage, so nothing can follow it")
    })?;
    let digest = Digest {
        size_bytes: content.size_bytes,
        sha256: hex(&hasher.finalize()),
    };
    Ok(Some(StoredState { head, digest }))
}

/// Stands for a state that is there.
const ALREADY_THERE: &str = "the state is there";

/// Returns the chunks, and an error instead of their end if the state must not be stored. The store then keeps what it has.
fn checked(
    chunks: Chunks,
    before: Option<StoredState>,
    digest: Digest,
    refused: Arc<Mutex<Option<&'static str>>>,
) -> Chunks {
    let end = move |head: Option<StateHead>| {
        let refusal = match decide(before.as_ref(), head, &digest) {
            Ok(Write::Replace) => return None,
            Ok(Write::Nothing) => ALREADY_THERE,
            Err(why) => why,
        };
        *runtime::lock(&refused) = Some(refusal);
        Some(Err(io::Error::other(refusal)))
    };
    let start = (chunks, HeadScanner::default(), Some(end));
    Box::pin(stream::unfold(
        start,
        |(mut chunks, mut scanner, mut end)| async move {
            end.as_ref()?;
            let chunk: Option<io::Result<Bytes>> = chunks.next().await;
            let next = match chunk {
                Some(Ok(chunk)) => {
                    scanner.read(&chunk);
                    Ok(chunk)
                }
                Some(Err(error)) => Err(error),
                None => {
                    let scanner = std::mem::take(&mut scanner);
                    end.take()?(scanner.finish())?
                }
            };
            Some((next, (chunks, scanner, end)))
        },
    ))
}

/// Decides whether a state may follow the stored one.
fn decide(
    before: Option<&StoredState>,
    head: Option<StateHead>,
    digest: &Digest,
) -> Result<Write, &'static str> {
    let head = head.ok_or("it is no state: it has no serial and lineage")?;
    let Some(before) = before else {
        return Ok(Write::Replace);
    };
    if before.digest == *digest {
        Ok(Write::Nothing)
    } else if before.head.lineage != head.lineage {
        Err("the stored state has another lineage: it belongs to other resources")
    } else if head.serial > before.head.serial {
        Ok(Write::Replace)
    } else {
        Err(
            "the stored state has the same serial or a later one: somebody has changed it meanwhile",
        )
    }
}

#[cfg(test)]
mod unit_tests {
    use rstest::rstest;

    use super::*;

    fn digest(sha256: &str) -> Digest {
        Digest {
            size_bytes: 1,
            sha256: sha256.to_owned(),
        }
    }

    fn head(serial: u64, lineage: &str) -> StateHead {
        StateHead {
            serial,
            lineage: lineage.to_owned(),
        }
    }

    #[rstest]
    #[case::first(None, Some(head(0, "l")), Ok(Write::Replace))]
    #[case::next(Some(6), Some(head(7, "l")), Ok(Write::Replace))]
    #[case::smaller(Some(8), Some(head(7, "l")), Err("later"))]
    #[case::same_serial(Some(7), Some(head(7, "l")), Err("same serial"))]
    #[case::lineage(Some(6), Some(head(7, "m")), Err("another lineage"))]
    #[case::no_state(None, None, Err("no state"))]
    fn a_state_follows_an_earlier_one_of_its_lineage(
        #[case] before: Option<u64>,
        #[case] after: Option<StateHead>,
        #[case] expected: Result<Write, &str>,
    ) {
        let before = before.map(|serial| StoredState {
            head: head(serial, "l"),
            digest: digest("before"),
        });
        match (decide(before.as_ref(), after, &digest("after")), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected),
            (Err(found), Err(part)) => assert!(found.contains(part), "{found}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_repeated_write_changes_nothing() {
        let before = StoredState {
            head: head(7, "l"),
            digest: digest("same"),
        };
        let decided = decide(Some(&before), Some(head(7, "l")), &digest("same"));
        assert_eq!(decided, Ok(Write::Nothing));
    }
}
