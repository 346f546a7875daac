//! The artifacts of steps: plan, published states, output, and the state of the workspace. Executors of a pool with boundary
//! `relay` read and write them through the hub, so that the network of their agent holds no key of the store.
//!
//! The hub computes every key from the organization, workspace, job and step of the lease. It streams contents, and an object
//! appears in the store only whole.
//!
//! - [`upload`] receives contents, and limits how many are in progress.
//! - [`state`] is the state of a workspace. [`check`] decides whether a state may follow another one, and [`seen`] notes what a task
//!   was given. [`kept`] keeps what is refused, and lists it. [`locks`] locks the state as the tool's own backend does. [`changes`]
//!   lets the changes of both follow each other.

mod changes;
mod check;
mod head;
pub(crate) mod kept;
pub(crate) mod locks;
mod seen;
mod state;
mod upload;

use std::sync::Arc;
use std::time::Duration;

use artifact_store::{
    Condition, Content, KeptConditions, RequestTiming, ServedStore, StoreError, StoreSettings,
    UNREADABLE_LIST,
};
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get, post};
use futures_util::{StreamExt as _, TryStreamExt as _};
use job_contract::chain;
use job_contract::keys::{Artifact, ObjectKey, StepIds};
use pool_protocol::artifact::Artifacts;
use pool_protocol::id::{LeaseId, TaskId};
use pool_protocol::path;
use pool_protocol::problem::Code;
use pool_store::{Refusal, TaskView};
use tracing::{debug, warn};
use uuid::Uuid;

use self::changes::StateWrites;
use self::upload::{Incoming, Uploads, WhyRefused};
use crate::Hub;
use crate::failure::Failure;
use crate::passing::passed_on;
use crate::relay::rules::{self, When};
use crate::relay::{self, Place, Turn};
use crate::step_of;

/// How long a content may take to its reader, which is limited too while it reads nothing.
const CONTENT_TIMEOUT: Duration = Duration::from_mins(10);
/// The executor repeats its requests for longer, so each attempt of the hub is short.
pub(crate) const RETRY_FOR: Duration = Duration::from_secs(10);
const MIB: u64 = 1024 * 1024;
/// A longer content needs so many bytes a second.
const BYTES_A_SECOND: u64 = 256 * 1024;
/// How much is read of a body that was refused, and for how long.
const FORGOTTEN: u64 = 64 * MIB;
const FORGET_TIMEOUT: Duration = Duration::from_secs(30);

/// The store of the artifacts.
#[derive(Debug)]
pub(crate) struct ArtifactService {
    /// `None`: the hub has no store that others reach.
    store: Option<ServedStore>,
    uploads: Uploads,
    state_uploads: Uploads,
    states: StateWrites,
}

impl ArtifactService {
    pub(crate) fn open(store: Option<&StoreSettings>) -> Result<Self, StoreError> {
        let timing = RequestTiming {
            retry_for: RETRY_FOR,
            ..RequestTiming::default()
        };
        let open = |settings| ServedStore::open(settings, &timing);
        let is_bucket = !matches!(store, None | Some(StoreSettings::Local { .. }));
        let store = store.map(open).transpose()?;
        let has_lock = |store: &ServedStore| store.state("", "").has_lock();
        if is_bucket && !store.as_ref().is_some_and(has_lock) {
            warn!(
                "states of pools are not locked, because no lock is set or known for the artifact store: only the platform keeps \
                 runs of a workspace apart"
            );
        }
        Ok(Self {
            store,
            uploads: Uploads::of_contents(),
            state_uploads: Uploads::of_states(),
            states: StateWrites::default(),
        })
    }

    /// Asks the store which conditions it keeps; `None` without a store.
    pub(crate) async fn ask_conditions(&self) -> Option<Result<KeptConditions, StoreError>> {
        Some(self.store.as_ref()?.ask_conditions().await)
    }

    fn store(&self) -> Result<&ServedStore, Failure> {
        self.store.as_ref().ok_or_else(|| {
            conflict(
                "this hub has no store for the artifacts of pools: set `TerraformStateType` and the settings of the store, or \
                 `MAYFLY_DATA_DIR` for a folder",
            )
        })
    }
}

/// Returns the routes of executors.
pub(crate) fn router() -> Router<Arc<Hub>> {
    Router::new()
        .route(path::ARTIFACTS, get(names))
        .route(path::ARTIFACT, any(artifact))
        .route(path::STATE, any(state::handle))
        .route(path::STATE_LOCK, post(locks::lock))
        .route(path::STATE_UNLOCK, post(locks::unlock))
}

type Answer = Result<Response, Failure>;

/// A request of an executor that may make it.
struct Allowed {
    task: TaskView,
    lease: LeaseId,
    /// One of the requests of the task, until it is answered.
    place: Place,
}

impl Allowed {
    fn ids(&self) -> StepIds<'_> {
        StepIds {
            organization: &self.task.organization,
            workspace: &self.task.workspace,
            job: &self.task.job,
            step: &self.task.step,
        }
    }

    /// The name under which the step publishes its state. No lease can replace what another has published.
    fn state_name(&self) -> String {
        Uuid::new_v5(&Uuid::NAMESPACE_OID, self.lease.to_string().as_bytes()).to_string()
    }

    fn key(&self, artifact: Artifact) -> ObjectKey {
        artifact.key(self.ids(), &self.state_name())
    }
}

/// Checks the lease of a request, and whether the state of its task allows it.
async fn allow(
    hub: &Hub,
    head: &Parts,
    (task, lease): (&str, &str),
    when: When,
) -> Result<Allowed, Failure> {
    let ids = task.parse().ok().zip(lease.parse().ok());
    let (task, lease): (TaskId, LeaseId) = ids.ok_or(Refusal::TaskNotFound)?;
    let task = relay::authorize(hub, &head.headers, task, lease).await?;
    let refuse = |refusal| relay::refuse(&task, &head.method, head.uri.path(), &refusal);
    rules::check_state(&task, when).map_err(refuse)?;
    let is_plain = |id: &&String| rules::is_plain(id);
    let step = step_of(&task);
    let ids = [
        &step.organization_id,
        &step.workspace_id,
        &step.job_id,
        &step.step_id,
    ];
    if !ids.iter().all(is_plain) {
        return Err(conflict("the ids of the step cannot be parts of a key"));
    }
    let place = hub.relay.turns().place(task.task)?;
    Ok(Allowed { task, lease, place })
}

/// Checks again, for a request that has waited, that its lease is the current one and its task allows it.
async fn check_again(hub: &Hub, before: &TaskView, when: When) -> Result<(), Failure> {
    let task = hub.store.task(before.task).await?;
    let task = task.ok_or(Refusal::TaskNotFound)?;
    if (task.lease, task.fencing_token) != (before.lease, before.fencing_token) {
        return Err(Refusal::LeaseSuperseded.into());
    }
    let refuse = |refusal| relay::refuse(&task, &Method::PUT, "artifacts", &refusal);
    rules::check_state(&task, when).map_err(refuse)
}

/// Reads what a sender still sends after it was refused. Otherwise the connection ends under it, and it never sees why.
fn forget(body: Body) {
    let mut chunks = body.into_data_stream();
    let read = async move {
        let mut length = 0;
        while let Some(Ok(chunk)) = chunks.next().await {
            length += chunk.len() as u64;
            if length > FORGOTTEN {
                break;
            }
        }
    };
    tokio::spawn(tokio::time::timeout(FORGET_TIMEOUT, read));
}

async fn names(
    State(hub): State<Arc<Hub>>,
    Path((task, lease)): Path<(String, String)>,
    request: Request,
) -> Answer {
    let when = When {
        before_acceptance: true,
        after_end: true,
    };
    let (head, _) = request.into_parts();
    let allowed = allow(&hub, &head, (&task, &lease), when).await?;
    let store = hub.artifacts.store()?;
    let task = &allowed.task;
    let kept = store.names_of_kept_states(&task.organization, &task.workspace);
    let kept = match kept.await {
        // Only operations wait for it.
        Err(error @ StoreError::Unreadable { .. }) => {
            warn!(
                error = chain(&error),
                hint = error.hint(),
                workspace_id = task.workspace,
                "runs of a workspace wait, because its list of kept states cannot be read"
            );
            vec![UNREADABLE_LIST.to_owned()]
        }
        kept => kept.map_err(|error| failed(&error))?,
    };
    let reference = |artifact: Artifact| {
        let reference = store.reference(&allowed.key(artifact));
        (artifact.name().to_owned(), reference)
    };
    Ok(axum::Json(Artifacts {
        references: Artifact::ALL.map(reference).into(),
        state_name: allowed.state_name(),
        kept,
    })
    .into_response())
}

async fn artifact(
    State(hub): State<Arc<Hub>>,
    Path((task, lease, name)): Path<(String, String, String)>,
    request: Request,
) -> Answer {
    let artifact = Artifact::of_name(&name);
    let artifact = artifact.ok_or_else(|| conflict("a step has no such artifact"))?;
    let of = (task.as_str(), lease.as_str());
    let (head, body) = request.into_parts();
    let mut body = Some(body);
    let answer = match head.method {
        Method::GET => read(&hub, of, artifact, &head).await,
        Method::PUT => write(&hub, of, artifact, &head, &mut body).await,
        _ => Err(no_method()),
    };
    body.into_iter().for_each(forget);
    answer
}

async fn read(hub: &Hub, of: (&str, &str), artifact: Artifact, head: &Parts) -> Answer {
    let when = match artifact {
        // An executor adds its log to what the output has.
        Artifact::Output => When {
            before_acceptance: false,
            after_end: true,
        },
        Artifact::Plan | Artifact::PlanFiles | Artifact::PlanRecord => When {
            before_acceptance: true,
            after_end: false,
        },
        _ => return Err(conflict("executors do not read this artifact")),
    };
    let allowed = allow(hub, head, of, when).await?;
    let store = hub.artifacts.store()?;
    let key = match head.uri.query() {
        Some(query) => plan_of_job(store, &allowed, artifact, query)?,
        None => allowed.key(artifact),
    };
    let turn = turn(hub, allowed).await?;
    let content = store.read(&key).await.map_err(|error| failed(&error))?;
    let content = content.ok_or_else(|| {
        Failure::new(Code::Other, "the artifact does not exist").with_status(StatusCode::NOT_FOUND)
    })?;
    Ok(respond(content, turn))
}

/// Returns the key of the plan of another step of the job, which the platform knows by its reference, or of its files.
fn plan_of_job(
    store: &ServedStore,
    allowed: &Allowed,
    artifact: Artifact,
    query: &str,
) -> Result<ObjectKey, Failure> {
    let mut pairs = url::form_urlencoded::parse(query.as_bytes());
    let reference = match (artifact, pairs.next(), pairs.next()) {
        (Artifact::Plan | Artifact::PlanFiles, Some((name, reference)), None)
            if name == "reference" =>
        {
            reference
        }
        _ => return Err(conflict("its query is not one that this path takes")),
    };
    let key = store.key_behind(&reference);
    let ids = allowed.ids();
    let is_of_job = |key: &ObjectKey| {
        let step = key.path.rsplit('/').nth(1).unwrap_or_default();
        rules::is_plain(step) && *key == artifact.key(StepIds { step, ..ids }, "")
    };
    key.filter(is_of_job).ok_or_else(|| {
        warn!(task = %allowed.task.task, "an executor asked for a plan of another job");
        Failure::new(
            Code::ExecutorPoolForbidden,
            "the reference is not of a plan of this job",
        )
    })
}

async fn write(
    hub: &Arc<Hub>,
    of: (&str, &str),
    artifact: Artifact,
    head: &Parts,
    body: &mut Option<Body>,
) -> Answer {
    let when = When {
        before_acceptance: false,
        after_end: !matches!(
            artifact,
            Artifact::Plan | Artifact::PlanFiles | Artifact::PlanRecord
        ),
    };
    let allowed = allow(hub, head, of, when).await?;
    let (key, before) = (allowed.key(artifact), allowed.task.clone());
    let turns = &hub.artifacts.uploads;
    let declared = (&head.headers, upload::length(body.as_ref()));
    let turn = upload::turn(hub, turns, allowed, declared, largest(artifact)).await?;
    check_again(hub, &before, when).await?;
    let is_kept = artifact == Artifact::ErroredState;
    let listed = if is_kept {
        kept::list(hub, &before).await
    } else {
        Ok(())
    };
    let condition = condition(hub.artifacts.store()?, artifact, &key).await?;
    let incoming = turn.receive(body.take().unwrap_or_default());
    put(hub, &before, when, (&key, &condition), incoming).await?;
    if is_kept {
        kept::note(hub, &before, &key, listed).await?;
    }
    debug!(task = %before.task, artifact = artifact.name(), "stored an artifact");
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Stores a content. Its sender must still have the right to do so when all of it has arrived, which may take minutes.
async fn put(
    hub: &Arc<Hub>,
    task: &TaskView,
    when: When,
    (key, condition): (&ObjectKey, &Condition),
    incoming: Incoming,
) -> Result<(), Failure> {
    let store = hub.artifacts.store()?;
    let (at_hub, before) = (Arc::clone(hub), task.clone());
    let at_the_end = async move { check_again(&at_hub, &before, when).await };
    let refused = WhyRefused::<Failure>::default();
    let (upload, taken) = incoming.into_upload(Box::pin(at_the_end), Arc::clone(&refused));
    let stored = store.put(key, upload, condition).await;
    drop(taken);
    let Err(error) = stored else {
        return Ok(());
    };
    let refused = runtime::lock(&refused).take();
    if let Some(why) = refused {
        return Err(why);
    }
    // A sender that has lost its right learns that, and no other reason. Otherwise it repeats the write.
    check_again(hub, task, when).await?;
    Err(failed(&error))
}

/// What must be true of an artifact, so that a write that the store does late replaces no newer one. An executor adds its log to
/// what the output has, so its order does not matter.
async fn condition(
    store: &ServedStore,
    artifact: Artifact,
    key: &ObjectKey,
) -> Result<Condition, Failure> {
    if matches!(artifact, Artifact::Output) {
        return Ok(Condition::Any);
    }
    let found = store.read(key).await.map_err(|error| failed(&error))?;
    Ok(Condition::unchanged(found.as_ref()))
}

const fn largest(artifact: Artifact) -> u64 {
    match artifact {
        Artifact::PlanRecord => MIB,
        Artifact::Plan | Artifact::PlanFiles | Artifact::Output => 1024 * MIB,
        Artifact::State | Artifact::RawState | Artifact::ErroredState => state::LARGEST,
    }
}

/// Waits for a turn like those of other requests to the platform.
async fn turn(hub: &Hub, allowed: Allowed) -> Result<Turn, Failure> {
    let Allowed { task, place, .. } = allowed;
    hub.relay.turns().next(&task.pool, place).await
}

/// Passes a content on.
fn respond(content: Content, turn: Turn) -> Response {
    let Content {
        size_bytes, chunks, ..
    } = content;
    let chunks = chunks.map_err(std::io::Error::other);
    let in_all = CONTENT_TIMEOUT + Duration::from_secs(size_bytes / BYTES_A_SECOND);
    let mut response = Response::new(Body::from_stream(passed_on(chunks, in_all, turn)));
    let headers = response.headers_mut();
    // A reader recognizes an answer that broke off.
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size_bytes));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let media_type = HeaderValue::from_static("application/octet-stream");
    headers.insert(header::CONTENT_TYPE, media_type);
    response
}

/// A request that repetition does not change.
fn conflict(text: impl Into<String>) -> Failure {
    Failure::new(Code::RequestInvalid, text).with_status(StatusCode::CONFLICT)
}

/// A request that may succeed later.
fn again(text: &str) -> Failure {
    Failure::new(Code::StoreUnavailable, text)
}

fn no_method() -> Failure {
    Failure::new(Code::RequestInvalid, "this path has no such method")
        .with_status(StatusCode::METHOD_NOT_ALLOWED)
}

/// What an executor learns of an error of the store. The reference is the platform's, and no secret.
fn failed(error: &StoreError) -> Failure {
    match error {
        StoreError::Broken(source) if source.kind() == std::io::ErrorKind::TimedOut => {
            again("the content did not arrive in time: try again")
        }
        StoreError::Altered { .. } | StoreError::Broken(_) => {
            Failure::new(Code::RequestInvalid, chain(error))
        }
        StoreError::Changed { .. } => again("somebody has changed it meanwhile: try again"),
        StoreError::Uncertain { .. } => {
            warn!(
                error = chain(error),
                "the artifact store may delete it late"
            );
            again(locks::UNCERTAIN)
        }
        StoreError::Unavailable { .. } => {
            warn!(error = chain(error), "the artifact store cannot be used");
            again("the hub cannot use its artifact store now: try again")
        }
        error => {
            warn!(error = chain(error), "the artifact store refuses the hub");
            conflict(format!("the hub cannot use its artifact store: {error}"))
        }
    }
}
