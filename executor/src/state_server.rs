//! Serves the tool's `http` backend on loopback, and passes its requests on to the hub of the lease. The tool gets address and
//! password in its environment, so that a stored plan names neither.

mod received;

use std::io;
use std::path::{Path, PathBuf};
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

use self::received::{ReceivedState, WholeState};
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
/// The longest description of a lock.
const MAX_LOCK_BYTES: usize = 64 * 1024;

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
    /// Starts the server on a free port. Large states that the tool writes pass through `private`, a folder of this run.
    pub(crate) fn start(
        hub: HubStore,
        private: PathBuf,
        log: LogWriter,
        stop: Stop,
    ) -> io::Result<Self> {
        let password = loopback::new_password();
        let credentials = STANDARD.encode(format!("{USER}:{}", password.expose_secret()));
        let (holder, rescues) = (Holder::default(), Arc::<AtomicBool>::default());
        let backend = Arc::new(Backend {
            hub: hub.clone(),
            private,
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
    private: PathBuf,
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
            Err(Failure::Unread { what, limit }) => {
                let text = format!("The {what} cannot be read, or has more than {limit} bytes.");
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
                let lock = lock.as_deref();
                match receive(request, &self.private).await? {
                    WholeState::Memory(state) => self.hub.put_state(&state, lock).await?,
                    WholeState::File(state, digest) => {
                        self.hub.put_state_file(&state, &digest, lock).await?;
                    }
                }
                Ok(status(StatusCode::OK))
            }
            "DELETE" => {
                self.hub.delete_state().await?;
                Ok(status(StatusCode::OK))
            }
            "LOCK" => {
                let info = read_lock(request).await?;
                Ok(self.locked(self.hub.lock_state(&info).await?))
            }
            "UNLOCK" => {
                let info = read_lock(request).await?;
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
    Unread {
        what: &'static str,
        limit: usize,
    },
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

/// The state in the body of a request.
async fn receive(request: Request<Incoming>, private: &Path) -> Result<WholeState, Failure> {
    let unread = || Failure::Unread {
        what: "state",
        limit: MAX_DOCUMENT_BYTES,
    };
    let mut state = ReceivedState::new(private);
    let mut body = Limited::new(request.into_body(), MAX_DOCUMENT_BYTES);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| unread())?;
        if let Some(chunk) = frame.data_ref() {
            state.add(chunk).map_err(|_| unread())?;
        }
    }
    Ok(state.finish())
}

async fn read_lock(request: Request<Incoming>) -> Result<Bytes, Failure> {
    let body = Limited::new(request.into_body(), MAX_LOCK_BYTES)
        .collect()
        .await;
    body.map(Collected::to_bytes).map_err(|_| Failure::Unread {
        what: "lock of the state",
        limit: MAX_LOCK_BYTES,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use artifact_store::{HubSettings, RequestTiming};
    use rstest::rstest;
    use run_log::{LogConfig, Redactor, RunLog};
    use test_peers::http;
    use url::Url;

    use super::received::IN_MEMORY;
    use super::*;

    /// A hub marks its answers by it.
    const OF_HUB: &str = "x-terrakube-executor-protocol-min";

    /// Modes and sizes of the files in a folder that this process has open.
    fn open_files(folder: &Path) -> Vec<(u32, u64)> {
        let open = fs::read_dir("/proc/self/fd").unwrap();
        let file = |entry: io::Result<fs::DirEntry>| {
            let path = entry.ok()?.path();
            let target = fs::read_link(&path).ok()?;
            let found = target.starts_with(folder).then(|| fs::metadata(&path));
            let found = found?.ok()?;
            Some((found.mode() & 0o777, found.len()))
        };
        open.filter_map(file).collect()
    }

    /// What the tool sends arrives, whatever the disk does. While the hub takes it, a large state is in a file without a name.
    #[rstest]
    #[case::large(3 * IN_MEMORY, true, true)]
    #[case::small(1000, true, false)]
    #[case::without_a_disk(3 * IN_MEMORY, false, false)]
    #[tokio::test]
    async fn a_large_state_is_in_a_file_of_the_run(
        #[case] length: usize,
        #[case] has_disk: bool,
        #[case] is_in_file: bool,
    ) {
        // It fails if another test was first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let private = folder.path().join("private");
        if has_disk {
            fs::create_dir(&private).unwrap();
        }
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (looked, looking) = (Arc::clone(&seen), private.clone());
        let hub = http::Server::start(move |_| {
            *looked.lock().unwrap() = open_files(&looking);
            http::Response::new(200, "").with_header(OF_HUB, "1")
        })
        .unwrap();
        let settings = HubSettings {
            lease: Url::parse(&format!("{}/leases/l", hub.url())).unwrap(),
            token: Arc::new(|| "token".to_owned().into()),
            organization: "o".to_owned(),
            workspace: "w".to_owned(),
            job: "1".to_owned(),
            step: "s".to_owned(),
        };
        let store = HubStore::open(settings, &RequestTiming::default()).unwrap();
        let spool = tempfile::tempdir().unwrap();
        let log = RunLog::start(
            LogConfig::new(spool.path().to_owned()),
            Redactor::new([""; 0]),
            Vec::new(),
        );
        let log = log.unwrap();
        let server =
            StateServer::start(store, private.clone(), log.writer(), Stop::default()).unwrap();
        let BackendSettings::Http {
            address,
            user,
            password,
        } = server.settings()
        else {
            panic!("not the backend of a hub");
        };
        let state: Vec<u8> = (0..=250).cycle().take(length).collect();

        let answer = reqwest::Client::new()
            .post(format!("{address}?ID=own-lock"))
            .basic_auth(user, Some(password.expose_secret()))
            .body(state.clone())
            .send()
            .await
            .unwrap();

        assert_eq!(answer.status().as_u16(), 200);
        let stored = hub.requests().pop().unwrap();
        assert!(stored.body == state, "{} bytes", stored.body.len());
        assert_eq!(stored.query, "lock=own-lock");
        let file = is_in_file.then_some((0o600, length as u64));
        let expected: Vec<(u32, u64)> = file.into_iter().collect();
        assert_eq!(*seen.lock().unwrap(), expected);
        let named = fs::read_dir(&private).into_iter().flatten().count();
        assert_eq!(named, 0);
    }
}
