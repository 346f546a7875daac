//! The state of a workspace, where the platform's own executors keep it. The tool of an executor uses it as an `http` backend.

use std::sync::{Arc, Mutex};

use artifact_store::{Condition, StoreError};
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use axum::response::IntoResponse as _;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use job_contract::keys::Artifact;
use pool_protocol::artifact::RESCUE;
use tracing::{info, warn};

use super::changes::{SAVE, place, to_its_end};
use super::check::{Check, Refused, check_lock, has_seen, is_about_state, may_change, stored};
use super::head::{HeadScanner, StateHead};
use super::kept::{keep, unlist};
use super::seen::noted;
use super::upload::{self, Incoming, WhyRefused};
use super::{Answer, MIB, again, allow, check_again, failed, forget, no_method, respond, turn};
use crate::Hub;
use crate::failure::Failure;
use crate::relay::rules::When;

/// The largest state.
pub(super) const LARGEST: u64 = 512 * MIB;
/// The parameter with the lock of the tool.
const LOCK: &str = "lock";
/// The tool writes serial and lineage of a state into so many of its first bytes.
const BEGINNING: usize = 64 * 1024;

pub(super) async fn handle(
    State(hub): State<Arc<Hub>>,
    Path((task, lease)): Path<(String, String)>,
    request: Request,
) -> Answer {
    let of = (task.as_str(), lease.as_str());
    let (head, body) = request.into_parts();
    let mut body = Some(body);
    let answer = match head.method {
        Method::GET => read(&hub, of, &head).await,
        Method::POST => write(&hub, of, &head, &mut body).await,
        Method::DELETE => delete(&hub, of, &head).await,
        _ => Err(no_method()),
    };
    body.into_iter().for_each(forget);
    answer
}

async fn read(hub: &Arc<Hub>, of: (&str, &str), head: &Parts) -> Answer {
    let allowed = allow(hub, head, of, SAVE).await?;
    let (place, task) = (place(hub, &allowed.task)?, allowed.task.task);
    // A rescue looks at the state only to store what it has. It knows nothing of what it finds.
    let is_seen = parameter(head, RESCUE).is_none();
    let turn = turn(hub, allowed).await?;
    let state = place.open().await.map_err(|error| failed(&error))?;
    // The tool's backend for Azure stores an empty blob for its lock.
    let state = state.filter(|state| state.size_bytes > 0);
    if let Some(state) = state {
        let state = if is_seen {
            noted(Arc::clone(hub), task, state)
        } else {
            state
        };
        return Ok(respond(state, turn));
    }
    if is_seen {
        hub.store.saw_state(task, None).await?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn delete(hub: &Arc<Hub>, of: (&str, &str), head: &Parts) -> Answer {
    let allowed = allow(hub, head, of, CHANGE).await?;
    may_change(hub, &allowed.task)?;
    let (state, lock) = (place(hub, &allowed.task)?, parameter(head, LOCK));
    let write = hub.artifacts.states.next(&allowed.task).await?;
    let hub = Arc::clone(hub);
    let deleted = async move {
        let (_write, task) = (write, &allowed.task);
        let found = state.open().await.map_err(|error| failed(&error))?;
        let condition = Condition::unchanged(found.as_ref());
        let before = stored(found).await?;
        has_seen(&hub, task.task, before.as_ref()).await?;
        check_lock(&hub, &state, lock.as_deref(), task.task).await?;
        check_again(&hub, task, CHANGE).await?;
        let deleted = state.delete(lock.as_deref(), &condition).await;
        deleted.map_err(|error| failed(&error))?;
        hub.store.stored_state(task.task, None).await?;
        info!(task = %task.task, "the state of a workspace was removed");
        Ok(())
    };
    to_its_end(deleted).await
}

/// What may be done while an executor has the task.
const CHANGE: When = When {
    before_acceptance: false,
    after_end: false,
};

/// A parameter of a request: the id of the lock that the tool has taken, or whether a rescue asks.
fn parameter(head: &Parts, wanted: &str) -> Option<String> {
    let query = head.uri.query()?;
    let mut pairs = url::form_urlencoded::parse(query.as_bytes());
    let found = pairs.find(|(name, _)| name == wanted);
    found.map(|(_, value)| value.into_owned())
}

async fn write(hub: &Arc<Hub>, of: (&str, &str), head: &Parts, body: &mut Option<Body>) -> Answer {
    let allowed = allow(hub, head, of, SAVE).await?;
    let (state, task) = (place(hub, &allowed.task)?, allowed.task.clone());
    let key = allowed.key(Artifact::ErroredState);
    let write = hub.artifacts.states.next(&task).await?;
    let turns = &hub.artifacts.state_uploads;
    let declared = (&head.headers, upload::length(body.as_ref()));
    let turn = upload::turn(hub, turns, allowed, declared, LARGEST).await?;
    check_again(hub, &task, SAVE).await?;
    let found = state.open().await.map_err(|error| failed(&error))?;
    let condition = Condition::unchanged(found.as_ref());
    let before = stored(found).await?;
    let check = Check {
        hub: Arc::clone(hub),
        task: task.clone(),
        state,
        lock: parameter(head, LOCK),
        before,
        condition,
        digest: turn.digest.clone(),
    };
    let incoming = turn.receive(body.take().unwrap_or_default());
    let hub = Arc::clone(hub);
    to_its_end(async move {
        let _write = write;
        let (begun, incoming) = begin(incoming).await;
        let Some(begun) = begun else {
            return store(check, incoming, false).await;
        };
        let decided = check.decide(&begun).await;
        let Err(why) = decided else {
            return store(check, incoming, true).await;
        };
        warn!(task = %task.task, workspace_id = task.workspace, ?why, "a state was refused");
        if is_about_state(&why) {
            return Err(keep(&hub, &task, &key, (incoming, why)).await);
        }
        Err(why)
    })
    .await
}

/// Reads the beginning of a state. Returns its head, if it is there, and all of the state.
async fn begin(incoming: Incoming) -> (Option<StateHead>, Incoming) {
    let Incoming {
        digest,
        chunks,
        taken,
    } = incoming;
    // It may end here already.
    let mut chunks = chunks.fuse();
    let (mut scanner, mut begun, mut length) = (HeadScanner::default(), Vec::new(), 0);
    while length < BEGINNING && scanner.so_far().is_none() {
        let Some(next) = chunks.next().await else {
            break;
        };
        let is_broken = next.is_err();
        if let Ok(chunk) = &next {
            scanner.read(chunk);
            length += chunk.len();
        }
        begun.push(next);
        if is_broken {
            break;
        }
    }
    let incoming = Incoming {
        digest,
        chunks: Box::pin(stream::iter(begun).chain(chunks)),
        taken,
    };
    (scanner.so_far(), incoming)
}

/// Replaces the state, unless that is refused when all of the new one has arrived. `was_allowed` says that nothing spoke against it
/// before.
async fn store(check: Check, mut incoming: Incoming, was_allowed: bool) -> Result<(), Failure> {
    let (hub, task) = (Arc::clone(&check.hub), check.task.clone());
    let (state, lock) = (check.state.clone(), check.lock.clone());
    let condition = check.condition.clone();
    let sha256 = incoming.digest.sha256.clone();
    let scanner = Arc::<Mutex<HeadScanner>>::default();
    let reader = Arc::clone(&scanner);
    let chunks = incoming.chunks;
    let chunks = chunks.inspect_ok(move |chunk| runtime::lock(&reader).read(chunk));
    incoming.chunks = Box::pin(chunks);
    let at_the_end = async move {
        let head = std::mem::take(&mut *runtime::lock(&scanner)).finish();
        check.at_the_end(head).await
    };
    let refused = WhyRefused::<Refused>::default();
    let (upload, taken) = incoming.into_upload(Box::pin(at_the_end), Arc::clone(&refused));
    let put = state.put(upload, lock.as_deref(), &condition).await;
    drop(taken);
    if put.is_err() {
        // A sender that has lost its right learns that, and no other reason. Otherwise it repeats the write.
        check_again(&hub, &task, SAVE).await?;
    }
    let refused = runtime::lock(&refused).take();
    match (put, refused) {
        (Ok(()), _) => {
            unlist(&hub, &task).await?;
            hub.store.stored_state(task.task, Some(&sha256)).await?;
            info!(task = %task.task, workspace_id = task.workspace, "a state was stored");
            Ok(())
        }
        (Err(StoreError::Broken(_)), Some(Refused::AlreadyThere)) => unlist(&hub, &task).await,
        (Err(StoreError::Broken(_)), Some(Refused::Because(why))) => {
            warn!(task = %task.task, workspace_id = task.workspace, ?why, "a state was refused");
            if was_allowed && is_about_state(&why) {
                // The sender tries again, and then the state is kept.
                return Err(again("the state was changed meanwhile: try again"));
            }
            Err(why)
        }
        (Err(error), _) => Err(failed(&error)),
    }
}
