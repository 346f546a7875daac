//! The state of a workspace, where the platform's own executors keep it. The tool of an executor uses it as an `http` backend.

use std::io;
use std::sync::{Arc, Mutex};

use artifact_store::{Condition, Digest, StoreError, Upload, WorkspaceState};
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use axum::response::IntoResponse as _;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use job_contract::encoding::hex;
use pool_protocol::id::TaskId;
use pool_store::TaskView;
use sha2::{Digest as _, Sha256};
use tokio_util::io::StreamReader;
use tracing::{info, warn};

use super::changes::{SAVE, place, to_its_end};
use super::head::{HeadScanner, StateHead};
use super::locks::{self, is_of};
use super::upload::{self, Chunks};
use super::{
    Answer, MIB, again, allow, check_again, conflict, failed, forget, no_method, respond, turn,
};
use crate::Hub;
use crate::failure::Failure;
use crate::relay::rules::When;

/// The largest state.
pub(super) const LARGEST: u64 = 512 * MIB;
/// The parameter with the lock of the tool.
const LOCK: &str = "lock";

/// A state as it is stored.
#[derive(Debug)]
struct StoredState {
    head: StateHead,
    digest: Digest,
    version: String,
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

async fn read(hub: &Hub, of: (&str, &str), head: &Parts) -> Answer {
    let allowed = allow(hub, head, of, SAVE).await?;
    let place = place(hub, &allowed.task)?;
    let turn = turn(hub, allowed).await?;
    let state = place.open().await.map_err(|error| failed(&error))?;
    // The tool's backend for Azure stores an empty blob for its lock.
    let state = state.filter(|state| state.size_bytes > 0);
    Ok(state.map_or_else(
        || StatusCode::NO_CONTENT.into_response(),
        |state| respond(state, turn),
    ))
}

async fn delete(hub: &Arc<Hub>, of: (&str, &str), head: &Parts) -> Answer {
    let allowed = allow(hub, head, of, CHANGE).await?;
    let (state, lock) = (place(hub, &allowed.task)?, lock_of(head));
    let write = hub.artifacts.states.next(&allowed.task).await?;
    let deleted = async move {
        let (_write, task) = (write, &allowed.task);
        check_lock(&state, lock.as_deref(), task.task).await?;
        let deleted = state.delete(lock.as_deref(), &Condition::Any).await;
        deleted.map_err(|error| failed(&error))?;
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
/// The id of the lock that the tool has taken.
fn lock_of(head: &Parts) -> Option<String> {
    let query = head.uri.query()?;
    let mut pairs = url::form_urlencoded::parse(query.as_bytes());
    let lock = pairs.find(|(name, _)| name == LOCK);
    lock.map(|(_, id)| id.into_owned())
}

async fn write(hub: &Arc<Hub>, of: (&str, &str), head: &Parts, body: &mut Option<Body>) -> Answer {
    let allowed = allow(hub, head, of, SAVE).await?;
    let (state, task) = (place(hub, &allowed.task)?, allowed.task.clone());
    let lock = lock_of(head);
    let write = hub.artifacts.states.next(&task).await?;
    let turns = &hub.artifacts.state_uploads;
    let declared = (&head.headers, upload::length(body.as_ref()));
    let turn = upload::turn(hub, turns, allowed, declared, LARGEST).await?;
    let before = stored(&state).await?;
    let check = Check {
        hub: Arc::clone(hub),
        task: task.clone(),
        state: state.clone(),
        lock: lock.clone(),
        before,
        digest: turn.digest.clone(),
    };
    check.lease_and_lock().await?;
    let incoming = turn.receive(body.take().unwrap_or_default());
    to_its_end(async move {
        let _write = write;
        let (digest, taken) = (incoming.digest, incoming.taken);
        let refused = Arc::<Mutex<Option<Refused>>>::default();
        let chunks = checked(incoming.chunks, check, Arc::clone(&refused));
        let upload = Upload {
            content: Box::new(StreamReader::new(chunks)),
            digest,
        };
        let stored = state.put(upload, lock.as_deref(), &Condition::Any).await;
        drop(taken);
        let refused = runtime::lock(&refused).take();
        match (stored, refused) {
            (Ok(()), _) => {
                info!(task = %task.task, workspace_id = task.workspace, "a state was stored");
                Ok(())
            }
            (Err(StoreError::Broken(_)), Some(Refused::AlreadyThere)) => Ok(()),
            (Err(StoreError::Broken(_)), Some(Refused::Because(failure))) => {
                warn!(task = %task.task, workspace_id = task.workspace, ?failure, "a state was refused");
                Err(failure)
            }
            (Err(error), _) => Err(failed(&error)),
        }
    })
    .await
}

/// Refuses a write while somebody else has the lock.
async fn check_lock(
    state: &WorkspaceState,
    own: Option<&str>,
    task: TaskId,
) -> Result<(), Failure> {
    let info = state.lock_info().await.map_err(|error| failed(&error))?;
    match info {
        Some(info) if !is_of(&info, own, task) => Err(locks::held(&info)),
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
    Ok(Some(StoredState {
        head,
        digest,
        version: content.version,
    }))
}

/// Why a state is not stored.
#[derive(Debug)]
enum Refused {
    /// It is there: the answer to an earlier request was lost.
    AlreadyThere,
    Because(Failure),
}

/// What is checked before a state takes the place of another one.
struct Check {
    hub: Arc<Hub>,
    task: TaskView,
    state: WorkspaceState,
    /// The lock of the tool.
    lock: Option<String>,
    before: Option<StoredState>,
    digest: Digest,
}

impl Check {
    async fn lease_and_lock(&self) -> Result<(), Failure> {
        check_again(&self.hub, &self.task, SAVE).await?;
        check_lock(&self.state, self.lock.as_deref(), self.task.task).await
    }

    /// The content has arrived, which may have taken minutes. Nobody may have changed anything meanwhile.
    async fn at_the_end(&self, head: Option<StateHead>) -> Result<(), Refused> {
        match decide(self.before.as_ref(), head, &self.digest) {
            Ok(Write::Replace) => {}
            Ok(Write::Nothing) => return Err(Refused::AlreadyThere),
            Err(why) => return Err(Refused::Because(conflict(why))),
        }
        self.lease_and_lock().await.map_err(Refused::Because)?;
        let now = self.state.open().await;
        let now = now.map_err(|error| Refused::Because(failed(&error)))?;
        let now = now.filter(|now| now.size_bytes > 0).map(|now| now.version);
        if now == self.before.as_ref().map(|before| before.version.clone()) {
            Ok(())
        } else {
            // It may have been an earlier attempt of the same write, at another hub.
            let text = "the state was changed meanwhile: try again";
            Err(Refused::Because(again(text)))
        }
    }
}

/// Returns the chunks, and an error instead of their end if the state must not be stored. The store then keeps what it has.
fn checked(chunks: Chunks, check: Check, refused: Arc<Mutex<Option<Refused>>>) -> Chunks {
    let start = (chunks, HeadScanner::default(), Some((check, refused)));
    Box::pin(stream::unfold(
        start,
        async |(mut chunks, mut scanner, mut check)| {
            check.as_ref()?;
            let next = match chunks.next().await {
                Some(Ok(chunk)) => {
                    scanner.read(&chunk);
                    Ok(chunk)
                }
                Some(Err(error)) => Err(error),
                None => {
                    let (check, refused) = check.take()?;
                    let head = std::mem::take(&mut scanner).finish();
                    let why = check.at_the_end(head).await.err()?;
                    *runtime::lock(&refused) = Some(why);
                    Err(io::Error::other("the state is refused"))
                }
            };
            Some((next, (chunks, scanner, check)))
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
mod tests {
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
            version: String::new(),
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
            version: String::new(),
        };
        let decided = decide(Some(&before), Some(head(7, "l")), &digest("same"));
        assert_eq!(decided, Ok(Write::Nothing));
    }
}
