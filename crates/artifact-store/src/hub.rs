//! The store of a hub. An executor of a pool has the token of its lease, and names the artifacts of its step. The hub computes
//! their keys, and knows the store.

use std::fmt;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use backon::{BackoffBuilder as _, ExponentialBuilder};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use job_contract::keys::{self, Artifact, ObjectKey, StepIds};
use pool_protocol::artifact::{Artifacts, CONTENT_DIGEST, RESCUE, content_digest};
use pool_protocol::problem::Problem;
use pool_protocol::version::MIN_HEADER;
use reqwest::header::{AUTHORIZATION, CONTENT_LENGTH, HeaderValue, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Body, Method, Response, StatusCode};
use runtime::regular_file;
use secrecy::{ExposeSecret as _, SecretString};
use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep};
use tokio_util::io::ReaderStream;
use url::Url;

use crate::READ_BYTES;
use crate::digest::{Digest, Hasher};
use crate::error::{Answer, SOURCE, StoreError, TARGET};
use crate::local::{create_private, discard};
use crate::request::{Health, RequestTiming, asked_pause, check_tls};
use crate::service::ObjectService;
use crate::state_backend::BackendSettings;
use crate::transfer::{Condition, Content};

const SERVICE: &str = "the hub";
/// The longest document of the hub.
const DOCUMENT_BYTES: u64 = 64 * 1024;
/// The time for a request with a body of any size. The body may wait for its turn, and the hub passes it on before it answers.
const SEND_TIMEOUT: Duration = Duration::from_mins(5);
/// How much of a file is read at a time.
const CHUNK_BYTES: usize = 64 * 1024;
/// A larger body needs so many bytes a second, as the hub demands it.
const BYTES_A_SECOND: u64 = 256 * 1024;
/// The pause before a download begins again.
const PAUSE: Duration = Duration::from_secs(1);

/// Returns the current token of a lease. The hub may replace it during the run.
pub type CurrentToken = Arc<dyn Fn() -> SecretString + Send + Sync>;

/// The settings of the store of a hub.
#[derive(Clone)]
pub struct HubSettings {
    /// The URL of the lease.
    pub lease: Url,
    pub token: CurrentToken,
    pub organization: String,
    pub workspace: String,
    pub job: String,
    pub step: String,
}

impl fmt::Debug for HubSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubSettings")
            .field("lease", &self.lease.as_str())
            .finish_non_exhaustive()
    }
}

/// The store of a hub, for one step. Clones share it.
#[derive(Clone, Debug)]
pub struct HubStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    settings: HubSettings,
    client: reqwest::Client,
    /// For requests with bodies: the timeout of the other one would count while they are sent.
    sender: reqwest::Client,
    timing: RequestTiming,
    health: Health,
    /// What the store of the hub calls the artifacts of the step.
    artifacts: OnceCell<Artifacts>,
}

/// The answer to a request for the lock of a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateLocked {
    Yes,
    /// Somebody else has the lock. What they have written into it.
    By(Bytes),
}

/// What is sent with a request. A repeated request sends it again.
#[derive(Clone, Copy)]
enum Sent<'s> {
    Nothing,
    Bytes(&'s Bytes),
    File(&'s Path, &'s Digest),
    Open(&'s Arc<File>, &'s Digest),
}

impl Sent<'_> {
    /// The length of the body, if there is one.
    const fn length(self) -> Option<u64> {
        match self {
            Self::Nothing => None,
            Self::Bytes(bytes) => Some(bytes.len() as u64),
            Self::File(_, digest) | Self::Open(_, digest) => Some(digest.size_bytes),
        }
    }
}

impl HubStore {
    /// Opens the store. It sends no request yet.
    pub fn open(settings: HubSettings, timing: &RequestTiming) -> Result<Self, StoreError> {
        check_tls(SERVICE)?;
        let builder = || {
            reqwest::Client::builder()
                // A redirect would send the token to another address.
                .redirect(Policy::none())
                .connect_timeout(timing.connect_timeout)
                .user_agent(concat!("mayfly/", env!("CARGO_PKG_VERSION")))
        };
        let build = |builder: reqwest::ClientBuilder| {
            builder.build().map_err(|error| StoreError::Client {
                service: SERVICE,
                source: Answer::of(&error),
            })
        };
        // An answer waits for its turn at the hub.
        let client = build(builder().read_timeout(timing.read_timeout * 2))?;
        let sender = build(builder())?;
        Ok(Self(Arc::new(Inner {
            settings,
            client,
            sender,
            timing: timing.clone(),
            health: Health::default(),
            artifacts: OnceCell::new(),
        })))
    }

    /// What the store of the hub calls the artifacts of the step.
    pub async fn artifacts(&self) -> Result<&Artifacts, StoreError> {
        let ask = async || {
            let url = self.url(&["artifacts"]);
            let answer = self
                .send(Method::GET, &url, Sent::Nothing, "ask for the names of")
                .await?;
            let text = whole(answer, DOCUMENT_BYTES, "artifacts").await?;
            serde_json::from_slice(&text).map_err(|_| foreign("ask for the names of", "artifacts"))
        };
        self.0.artifacts.get_or_try_init(ask).await
    }

    /// Opens the state of the workspace; `None` if there is none. What a rescue or a comparison reads does not count as seen by the run.
    pub async fn state(&self, is_rescue: bool) -> Result<Option<Content>, StoreError> {
        let mut url = self.url(&["state"]);
        if is_rescue {
            url.query_pairs_mut().append_pair(RESCUE, "true");
        }
        let answer = self.send(Method::GET, &url, Sent::Nothing, "fetch").await?;
        if answer.status() == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        let Some(size_bytes) = answer.content_length() else {
            return Err(foreign("fetch", "state"));
        };
        let chunks = answer.bytes_stream();
        Ok(Some(Content {
            size_bytes,
            version: String::new(),
            chunks: chunks
                .map_err(|error| unavailable("fetch", "state", &error))
                .boxed(),
        }))
    }

    /// Replaces the state of the workspace. `lock` is the id of the lock that the tool has taken.
    pub async fn put_state(&self, state: &Bytes, lock: Option<&str>) -> Result<(), StoreError> {
        self.replace_state(Sent::Bytes(state), lock).await
    }

    /// Replaces the state as [`Self::put_state`] does, by the content of an open file.
    pub async fn put_state_file(
        &self,
        state: &Arc<File>,
        digest: &Digest,
        lock: Option<&str>,
    ) -> Result<(), StoreError> {
        self.replace_state(Sent::Open(state, digest), lock).await
    }

    async fn replace_state(&self, state: Sent<'_>, lock: Option<&str>) -> Result<(), StoreError> {
        let mut url = self.url(&["state"]);
        if let Some(lock) = lock {
            url.query_pairs_mut().append_pair("lock", lock);
        }
        let sent = self.send(Method::POST, &url, state, "store");
        sent.await.map(drop)
    }

    /// Removes the state of the workspace.
    pub async fn delete_state(&self) -> Result<(), StoreError> {
        let url = self.url(&["state"]);
        let sent = self.send(Method::DELETE, &url, Sent::Nothing, "delete");
        sent.await.map(drop)
    }

    /// Locks the state of the workspace.
    pub async fn lock_state(&self, info: &Bytes) -> Result<StateLocked, StoreError> {
        self.change_lock("lock", info).await
    }

    /// Unlocks the state of the workspace. Without `info`, it releases any lock of this step.
    pub async fn unlock_state(&self, info: &Bytes) -> Result<StateLocked, StoreError> {
        self.change_lock("unlock", info).await
    }

    async fn change_lock(
        &self,
        change: &'static str,
        info: &Bytes,
    ) -> Result<StateLocked, StoreError> {
        let url = self.url(&["state", change]);
        let answer = self
            .send(Method::POST, &url, Sent::Bytes(info), change)
            .await?;
        if answer.status() != StatusCode::LOCKED {
            return Ok(StateLocked::Yes);
        }
        let holder = whole(answer, DOCUMENT_BYTES, "lock of the state").await?;
        Ok(StateLocked::By(holder))
    }

    fn url(&self, path: &[&str]) -> Url {
        let mut url = self.0.settings.lease.clone();
        url.path_segments_mut()
            .expect("addresses of leases are http addresses")
            .pop_if_empty()
            .extend(path);
        url
    }

    async fn url_of(&self, key: &ObjectKey) -> Result<Url, StoreError> {
        let artifact = self.artifact(key).await?;
        Ok(self.url(&["artifacts", artifact.name()]))
    }

    async fn artifact(&self, key: &ObjectKey) -> Result<Artifact, StoreError> {
        let known = self.artifacts().await?;
        let HubSettings {
            organization,
            workspace,
            job,
            step,
            ..
        } = &self.0.settings;
        let ids = StepIds {
            organization,
            workspace,
            job,
            step,
        };
        Artifact::ALL
            .into_iter()
            .find(|artifact| artifact.key(ids, &known.state_name) == *key)
            .ok_or_else(|| StoreError::Foreign {
                reference: key.in_bucket(),
            })
    }

    /// Sends a request until it is answered. Answers that repetition can change are errors after the time for retries.
    async fn send(
        &self,
        method: Method,
        url: &Url,
        sent: Sent<'_>,
        action: &'static str,
    ) -> Result<Response, StoreError> {
        let Inner { timing, health, .. } = &*self.0;
        let mut pauses = ExponentialBuilder::default()
            .with_min_delay(timing.first_pause)
            .with_max_delay(timing.longest_pause)
            .with_jitter()
            .without_max_times()
            .build();
        let mut until = None;
        loop {
            let failure = match self.attempt(method.clone(), url, sent, action).await {
                Ok(answer) => {
                    health.set(None);
                    return Ok(answer);
                }
                Err(failure) => failure,
            };
            let Failure::Again {
                error,
                trouble,
                pause,
            } = failure
            else {
                health.set(None);
                return Err(failure.into_error());
            };
            health.set(Some(trouble));
            let until = until.get_or_insert_with(|| Instant::now() + timing.retry_for);
            let next = pauses.next().unwrap_or(timing.longest_pause);
            let next = next.max(pause.unwrap_or_default().min(timing.retry_for));
            if Instant::now() + next > *until {
                return Err(error);
            }
            sleep(next).await;
        }
    }

    async fn attempt(
        &self,
        method: Method,
        url: &Url,
        sent: Sent<'_>,
        action: &'static str,
    ) -> Result<Response, Failure> {
        let Inner {
            client,
            sender,
            settings,
            ..
        } = &*self.0;
        let (client, timeout) = match sent.length() {
            None => (client, None),
            Some(length) => {
                let longer = Duration::from_secs(length / BYTES_A_SECOND);
                (sender, Some(SEND_TIMEOUT + longer))
            }
        };
        let object = url.path().rsplit_once("/leases/").map_or("", |(_, of)| of);
        let object = object.split_once('/').map_or(object, |(_, name)| name);
        let mut bearer =
            HeaderValue::try_from(format!("Bearer {}", (settings.token)().expose_secret()))
                .map_err(|_| Failure::Final(foreign(action, object)))?;
        bearer.set_sensitive(true);
        let request = client
            .request(method, url.clone())
            .header(AUTHORIZATION, bearer);
        let request = match timeout {
            Some(timeout) => request.timeout(timeout),
            None => request,
        };
        let request = match sent {
            Sent::Nothing => request,
            Sent::Bytes(bytes) => {
                let mut hasher = Hasher::default();
                hasher.update(bytes);
                request
                    .header(CONTENT_DIGEST, content_digest(&hasher.finish().sha256))
                    .header(CONTENT_LENGTH, bytes.len())
                    .body(bytes.clone())
            }
            Sent::File(path, digest) => {
                let file = regular_file::open(path).map_err(StoreError::read(SOURCE, path));
                let file = tokio::fs::File::from_std(file.map_err(Failure::Final)?);
                request
                    .header(CONTENT_DIGEST, content_digest(&digest.sha256))
                    .header(CONTENT_LENGTH, digest.size_bytes)
                    .body(Body::wrap_stream(ReaderStream::with_capacity(
                        file,
                        CHUNK_BYTES,
                    )))
            }
            Sent::Open(file, digest) => request
                .header(CONTENT_DIGEST, content_digest(&digest.sha256))
                .header(CONTENT_LENGTH, digest.size_bytes)
                .body(Body::wrap_stream(content_of(Arc::clone(file)))),
        };
        let answer = match request.send().await {
            Ok(answer) => answer,
            Err(error) => {
                let trouble = if error.is_connect() {
                    "the hub cannot be reached"
                } else if error.is_timeout() {
                    "the hub does not answer in time"
                } else {
                    "the hub closed the connection"
                };
                return Err(Failure::Again {
                    error: unavailable(action, object, &error),
                    trouble: trouble.to_owned(),
                    pause: None,
                });
            }
        };
        self.judge(answer, action, object).await
    }

    /// Decides about an answer. One that is not the hub's says nothing about an artifact.
    async fn judge(
        &self,
        answer: Response,
        action: &'static str,
        object: &str,
    ) -> Result<Response, Failure> {
        let status = answer.status();
        let is_of_hub = answer.headers().contains_key(MIN_HEADER);
        if is_of_hub && (status.is_success() || status == StatusCode::LOCKED) {
            return Ok(answer);
        }
        let pause = answer.headers().get(RETRY_AFTER);
        let pause = pause.and_then(|value| asked_pause(value.to_str().ok()?));
        let text = whole(answer, DOCUMENT_BYTES, object)
            .await
            .unwrap_or_default();
        let problem: Option<Problem> = serde_json::from_slice(&text).ok();
        let is_passing = status.is_server_error()
            || matches!(
                status,
                StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS
            );
        let source = Answer::new(match &problem {
            Some(problem) => problem.title.clone(),
            None => format!("{status}, which is no answer of a hub"),
        });
        if is_passing || problem.is_none() || !is_of_hub {
            return Err(Failure::Again {
                error: StoreError::Unavailable {
                    service: SERVICE,
                    action,
                    object: object.to_owned(),
                    source,
                },
                trouble: format!("the hub answers {status}"),
                pause,
            });
        }
        Err(Failure::Final(match status {
            StatusCode::NOT_FOUND => StoreError::Missing {
                object: object.to_owned(),
            },
            _ => StoreError::Rejected {
                object: object.to_owned(),
                source,
            },
        }))
    }

    async fn put(&self, key: &ObjectKey, sent: Sent<'_>) -> Result<(), StoreError> {
        let url = self.url_of(key).await?;
        self.send(Method::PUT, &url, sent, "store").await.map(drop)
    }

    /// Copies an object into a new file. A download that breaks off begins again.
    async fn fetch_from(&self, url: &Url, target: &Path, limit: u64) -> Result<Digest, StoreError> {
        let until = Instant::now() + self.0.timing.retry_for;
        loop {
            match self.fetch_once(url, target, limit).await {
                Err(StoreError::Unavailable { .. }) if Instant::now() < until => {
                    sleep(PAUSE).await;
                }
                fetched => return fetched,
            }
        }
    }

    async fn fetch_once(&self, url: &Url, target: &Path, limit: u64) -> Result<Digest, StoreError> {
        let answer = self.send(Method::GET, url, Sent::Nothing, "fetch").await?;
        let size = answer.content_length();
        let size = size.ok_or_else(|| foreign("fetch", "artifact"))?;
        StoreError::unless_fits(url.path(), size, limit)?;
        let unwritable = StoreError::write(TARGET, target);
        let mut file = create_private(target).map_err(&unwritable)?;
        let copied = async {
            let mut hasher = Hasher::default();
            let mut content = answer.bytes_stream();
            while let Some(chunk) = content.next().await {
                let chunk = chunk.map_err(|error| unavailable("fetch", "artifact", &error))?;
                hasher.update(&chunk);
                file.write_all(&chunk).map_err(&unwritable)?;
            }
            Ok(hasher.finish())
        }
        .await;
        if copied.is_err() {
            discard(target);
        }
        copied
    }
}

/// The content of a file from its beginning. It leaves the position of the file alone, because an attempt that broke off may still
/// be reading.
fn content_of(file: Arc<File>) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    stream::try_unfold((file, 0), |(file, at): (Arc<File>, u64)| async move {
        let read = move || {
            let mut chunk = vec![0; CHUNK_BYTES];
            let length = file.read_at(&mut chunk, at)?;
            chunk.truncate(length);
            Ok::<_, io::Error>((file, chunk))
        };
        let (file, chunk) = tokio::task::spawn_blocking(read).await??;
        let next = at + chunk.len() as u64;
        let is_over = chunk.is_empty();
        Ok::<_, io::Error>((!is_over).then(|| (Bytes::from(chunk), (file, next))))
    })
}

/// Why an attempt failed.
enum Failure {
    Final(StoreError),
    /// Another attempt may succeed.
    Again {
        error: StoreError,
        trouble: String,
        /// The pause that the answer asks for.
        pause: Option<Duration>,
    },
}

impl Failure {
    fn into_error(self) -> StoreError {
        match self {
            Self::Final(error) | Self::Again { error, .. } => error,
        }
    }
}

fn unavailable(action: &'static str, object: &str, error: &reqwest::Error) -> StoreError {
    StoreError::Unavailable {
        service: SERVICE,
        action,
        object: object.to_owned(),
        source: Answer::of(error),
    }
}

/// An answer that is not as a hub sends it.
fn foreign(action: &'static str, object: &str) -> StoreError {
    StoreError::Unavailable {
        service: SERVICE,
        action,
        object: object.to_owned(),
        source: Answer::new("the answer is not as a hub sends it"),
    }
}

/// The whole body of an answer.
async fn whole(answer: Response, limit: u64, object: &str) -> Result<Bytes, StoreError> {
    let mut whole = Vec::new();
    let mut content = answer.bytes_stream();
    while let Some(chunk) = content.next().await {
        let chunk = chunk.map_err(|error| unavailable("fetch", object, &error))?;
        StoreError::unless_fits(object, (whole.len() + chunk.len()) as u64, limit)?;
        whole.extend_from_slice(&chunk);
    }
    Ok(whole.into())
}

#[async_trait]
impl ObjectService for HubStore {
    async fn reference(&self, key: &ObjectKey) -> Result<String, StoreError> {
        let artifact = self.artifact(key).await?;
        let known = self.artifacts().await?;
        let reference = known.references.get(artifact.name());
        reference
            .cloned()
            .ok_or_else(|| foreign("ask for the names of", "artifacts"))
    }

    async fn unchanged(&self, _key: &ObjectKey) -> Result<Condition, StoreError> {
        // The hub looks itself.
        Ok(Condition::Any)
    }

    async fn put(
        &self,
        key: &ObjectKey,
        bytes: Bytes,
        _condition: &Condition,
    ) -> Result<(), StoreError> {
        self.put(key, Sent::Bytes(&bytes)).await
    }

    async fn put_file(
        &self,
        key: &ObjectKey,
        source: &Path,
        _condition: &Condition,
    ) -> Result<(), StoreError> {
        let path = source.to_owned();
        let digest = tokio::task::spawn_blocking(move || Digest::of(&path)).await;
        let digest = digest.unwrap_or_else(|error| Err(error.into()));
        let digest = digest.map_err(StoreError::read(SOURCE, source))?;
        self.put(key, Sent::File(source, &digest)).await
    }

    async fn fetch(
        &self,
        reference: &str,
        target: &Path,
        limit: u64,
    ) -> Result<Digest, StoreError> {
        let known = self.artifacts().await?;
        let own = known.references.iter().find(|(_, own)| *own == reference);
        let of_plan = if reference.ends_with(keys::PLAN_FILES_FILE) {
            Artifact::PlanFiles
        } else {
            Artifact::Plan
        };
        let mut url = self.url(&[
            "artifacts",
            own.map_or(of_plan.name(), |(artifact, _)| artifact),
        ]);
        if own.is_none() {
            // The plan of another step of the job, or its files.
            url.query_pairs_mut().append_pair("reference", reference);
        }
        self.fetch_from(&url, target, limit).await
    }

    async fn read(&self, key: &ObjectKey) -> Result<Option<Bytes>, StoreError> {
        let url = self.url_of(key).await?;
        match self.send(Method::GET, &url, Sent::Nothing, "fetch").await {
            Ok(answer) => whole(answer, READ_BYTES, &key.path).await.map(Some),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn state_name(&self) -> Result<String, StoreError> {
        Ok(self.artifacts().await?.state_name.clone())
    }

    fn backend(&self, _organization: &str, _workspace: &str) -> BackendSettings {
        BackendSettings::Hub
    }

    fn health(&self) -> Option<&Health> {
        Some(&self.0.health)
    }
}
