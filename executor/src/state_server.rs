//! Serves the tool's `http` backend on loopback, and passes its requests on to the hub of the lease. The tool gets address and
//! password in its environment, so that a stored plan names neither.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use artifact_store::{BackendSettings, HubStore, StateLocked, StoreError};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::TryStreamExt as _;
use http_body_util::{BodyExt as _, Collected, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH};
use hyper::{Request, Response, StatusCode};
use job_contract::chain;
use job_contract::report::{LockStatus, StateLock};
use run_log::LogWriter;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Map, Value};
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use crate::loopback::{self, Body, Loopback, status, streamed, whole};
use crate::stop::Stop;
use crate::terraform::raw_state::MAX_DOCUMENT_BYTES;

/// The user of the backend.
const USER: &str = "mayfly";
/// For how long after a stop order the tool waits for a hub that does not answer.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long each of its requests waits then. The tool repeats each twice.
const LEAST: Duration = Duration::from_secs(3);
/// A larger state has a second more for so many bytes.
const BYTES_A_SECOND: u64 = 1024 * 1024;

/// The server of one run. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct StateServer {
    loopback: Loopback,
    password: SecretString,
    hub: HubStore,
    holder: Holder,
    rescues: Arc<AtomicBool>,
}

/// What the holder of the lock has written that refused the tool.
type Holder = Arc<Mutex<Option<Bytes>>>;

impl StateServer {
    /// Starts the server on a free port.
    pub(crate) fn start(hub: HubStore, log: LogWriter, stop: Stop) -> io::Result<Self> {
        let password = loopback::new_password();
        let credentials = STANDARD.encode(format!("{USER}:{}", password.expose_secret()));
        let (holder, rescues) = (Holder::default(), Arc::<AtomicBool>::default());
        let backend = Arc::new(Backend {
            hub: hub.clone(),
            log,
            stop,
            holder: Arc::clone(&holder),
            rescues: Arc::clone(&rescues),
            authorization: format!("Basic {credentials}").into(),
        });
        let answer = move |request| {
            let backend = Arc::clone(&backend);
            async move { backend.answer(request).await }
        };
        Ok(Self {
            loopback: Loopback::start(answer)?,
            password,
            hub,
            holder,
            rescues,
        })
    }

    /// Says whether the tool is used to rescue a state. What it reads then, the run has not seen, so the state that it stores must
    /// not follow it.
    pub(crate) fn set_rescuing(&self, is_rescuing: bool) {
        self.rescues.store(is_rescuing, Ordering::Relaxed);
    }

    /// What the tool needs to use it.
    pub(crate) fn settings(&self) -> BackendSettings {
        BackendSettings::Http {
            address: format!("http://{}/state", self.loopback.address()),
            user: USER.to_owned(),
            password: self.password.clone(),
        }
    }

    /// The lock of somebody else that refused the tool. The tool itself shows its own request instead.
    pub(crate) fn blocking_lock(&self) -> Option<StateLock> {
        let holder = runtime::lock(&self.holder).clone()?;
        let fields: Map<String, Value> = serde_json::from_slice(&holder).ok()?;
        let text = |name: &str| fields.get(name)?.as_str().map(str::to_owned);
        Some(StateLock {
            id: text("ID")?,
            who: text("Who").unwrap_or_default(),
            operation: text("Operation").unwrap_or_default(),
            created: text("Created").unwrap_or_default(),
            path: text("Path").unwrap_or_default(),
            status: LockStatus::InTheWay,
        })
    }

    /// Releases the lock of this step, after the tool that took it has ended. Somebody else's lock stays.
    pub(crate) async fn release_lock(&self) {
        if let Err(error) = self.hub.unlock_state(&Bytes::new()).await {
            warn!(
                error = chain(&error),
                "whether the tool left its lock on the state is not known"
            );
        }
    }

    /// The password, which must never appear in a log.
    pub(crate) const fn secret(&self) -> &SecretString {
        &self.password
    }
}

/// The backend of the tool.
struct Backend {
    hub: HubStore,
    log: LogWriter,
    stop: Stop,
    holder: Holder,
    /// Whether the tool rescues a state.
    rescues: Arc<AtomicBool>,
    authorization: SecretString,
}

impl Backend {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let given = request.headers().get(AUTHORIZATION);
        let is_own =
            given.is_some_and(|given| loopback::is_same(given.as_bytes(), &self.authorization));
        if !is_own {
            return status(StatusCode::UNAUTHORIZED);
        }
        if request.uri().path() != "/state" {
            return status(StatusCode::NOT_FOUND);
        }
        let method = request.method().as_str().to_owned();
        let length = request.body().size_hint().lower();
        let answer = tokio::select! {
            biased;
            answer = self.pass_on(&method, request) => answer,
            () = self.time_is_up(length) => Err(Failure::Stopped),
        };
        match answer {
            Ok(response) => response,
            Err(Failure::Unread) => {
                let text = format!(
                    "The state cannot be read, or has more than {MAX_DOCUMENT_BYTES} bytes."
                );
                self.log.line(&text).await;
                status(StatusCode::BAD_REQUEST)
            }
            Err(Failure::Stopped) => status(StatusCode::SERVICE_UNAVAILABLE),
            Err(Failure::Method) => status(StatusCode::METHOD_NOT_ALLOWED),
            Err(Failure::Store(error)) => {
                warn!(
                    method,
                    error = chain(&error),
                    "the hub did not do what the tool asked for"
                );
                // The tool shows only the status.
                let text = format!("The state could not be used: {}.", chain(&error));
                self.log.line(&text).await;
                status(match error {
                    StoreError::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
                    // The tool takes 409 for the lock of somebody else.
                    _ => StatusCode::BAD_REQUEST,
                })
            }
        }
    }

    async fn pass_on(
        &self,
        method: &str,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Failure> {
        match method {
            "GET" => match self.hub.state(self.rescues.load(Ordering::Relaxed)).await? {
                None => Ok(status(StatusCode::NO_CONTENT)),
                Some(state) => {
                    let mut response = Response::new(streamed(state.chunks.map_err(Into::into)));
                    let length = state.size_bytes.into();
                    response.headers_mut().insert(CONTENT_LENGTH, length);
                    Ok(response)
                }
            },
            "POST" => {
                let lock = lock_of(&request);
                let state = read(request).await?;
                self.hub.put_state(&state, lock.as_deref()).await?;
                Ok(status(StatusCode::OK))
            }
            "DELETE" => {
                self.hub.delete_state().await?;
                Ok(status(StatusCode::OK))
            }
            "LOCK" => {
                let info = read(request).await?;
                Ok(self.locked(self.hub.lock_state(&info).await?))
            }
            "UNLOCK" => {
                let info = read(request).await?;
                Ok(self.locked(self.hub.unlock_state(&info).await?))
            }
            _ => Err(Failure::Method),
        }
    }

    fn locked(&self, answer: StateLocked) -> Response<Body> {
        let (code, holder) = match answer {
            StateLocked::Yes => (StatusCode::OK, None),
            StateLocked::By(holder) => (StatusCode::LOCKED, Some(holder)),
        };
        let mut response = Response::new(whole(holder.clone().unwrap_or_default()));
        *response.status_mut() = code;
        *runtime::lock(&self.holder) = holder;
        response
    }

    /// Waits for a stop order, and then for a hub that does not answer as long as a request of this length may take. The tool has
    /// to learn of that in time: then it leaves the state in a file, which is rescued.
    async fn time_is_up(&self, length: u64) {
        let least = Instant::now() + LEAST + Duration::from_secs(length / BYTES_A_SECOND);
        let order = self.stop.ordered().await;
        sleep_until(least.max(order.at + PATIENCE)).await;
    }
}

/// Why a request is not answered as the tool wants it.
enum Failure {
    Unread,
    Method,
    /// The hub did not answer in the time after a stop order.
    Stopped,
    Store(StoreError),
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// The id of the tool's lock, which it adds to its writes.
fn lock_of(request: &Request<Incoming>) -> Option<String> {
    let query = request.uri().query()?;
    let mut pairs = url::form_urlencoded::parse(query.as_bytes());
    let id = pairs.find(|(name, _)| name == "ID");
    id.map(|(_, id)| id.into_owned())
}

async fn read(request: Request<Incoming>) -> Result<Bytes, Failure> {
    let body = Limited::new(request.into_body(), MAX_DOCUMENT_BYTES)
        .collect()
        .await;
    body.map(Collected::to_bytes).map_err(|_| Failure::Unread)
}
