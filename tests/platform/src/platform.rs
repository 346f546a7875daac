//! The platform as tests see it.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use test_peers::evidence;
use test_peers::terraform;
use test_peers::wait::{self, DEADLINE};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedMutexGuard, watch};
use uuid::Uuid;

use crate::dispatch::{self, Native};
use crate::faults::{Fault, Faults};
use crate::launcher::Endpoint;
use crate::ledger::{Actor, Ledger, Rule};
use crate::records::{Job, NewJob, Records, Status, Workspace};
use crate::release::Release;
use crate::server::Server;
use crate::streams::{LogEntry, StreamPosition, Streams};
use crate::token::{INTERNAL, LIFETIME, Secret};
use crate::{scheduler, sweep};

/// The tool puts fewer characters before a line of a provisioner.
const ADDRESS: usize = 200;
/// The pieces of a line are among this number of lines.
const PIECES: usize = 16;

/// A heartbeat lasts 45 seconds and is written every 15. A live one has more time left than this.
const LIVING: Duration = Duration::from_secs(28);

/// Why a platform did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No port or thread.
    #[error("the platform did not start")]
    System(#[from] io::Error),
    /// No address of a Redis.
    #[error("no client for Redis")]
    Redis(#[from] redis::RedisError),
}

type Find = dyn Fn(&str, &str, &str) -> Option<Vec<u8>> + Send + Sync;

/// The place of step outputs.
#[derive(Clone)]
pub struct Outputs(Arc<Find>);

impl Outputs {
    /// `find` gets organization, job and step.
    pub fn from_fn(
        find: impl Fn(&str, &str, &str) -> Option<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(find))
    }

    /// Outputs in a folder, as a local store lays them out.
    pub fn folder(folder: &Path) -> Self {
        let folder = folder.to_owned();
        Self::from_fn(move |organization, job, step| {
            let path = folder.join(organization).join(job);
            fs::read(path.join(format!("{step}.tfoutput"))).ok()
        })
    }

    pub(crate) fn find(&self, organization: &str, job: u32, step: &str) -> Option<Vec<u8>> {
        (self.0)(organization, &job.to_string(), step)
    }
}

impl fmt::Debug for Outputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Outputs")
    }
}

/// Settings of a platform. Times are short for tests: a stock platform looks every 30 seconds, waits 60 seconds for an
/// answer, and fails a job after 60 seconds without a heartbeat.
#[derive(Debug, Clone)]
pub struct Builder {
    redis: Option<String>,
    outputs: Option<Outputs>,
    host: Option<String>,
    pub(crate) native: Option<Native>,
    secret: Vec<u8>,
    pub(crate) retry: Duration,
    pub(crate) answer_within: Duration,
    pub(crate) grace: Duration,
    pub(crate) release: Release,
    /// Addresses of private networks are refused, as without `AgentSsrfBlockPrivateNetworks=false`.
    pub(crate) blocks_private: bool,
    /// How soon after the end of its job a heartbeat must be gone.
    silent_within: Duration,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            redis: None,
            outputs: None,
            host: None,
            native: None,
            secret: b"0123456789abcdef0123456789abcdef".to_vec(),
            retry: Duration::from_millis(100),
            answer_within: Duration::from_mins(1),
            grace: Duration::from_mins(1),
            release: Release::default(),
            blocks_private: false,
            silent_within: DEADLINE,
        }
    }
}

impl Builder {
    /// Logs and heartbeats are in the Redis at this address.
    pub fn redis(mut self, url: &str) -> Self {
        self.redis = Some(url.to_owned());
        self
    }

    /// The place of step outputs. The platform checks that they are stored.
    pub fn outputs(mut self, outputs: Outputs) -> Self {
        self.outputs = Some(outputs);
        self
    }

    /// What leads executors to loopback, where the platform listens.
    pub fn reached_at(mut self, host: &str) -> Self {
        self.host = Some(host.to_owned());
        self
    }

    /// The platform makes Kubernetes Jobs itself where a workspace asks for it.
    pub fn native(mut self, native: Native) -> Self {
        self.native = Some(native);
        self
    }

    /// The secret shared with executors.
    pub fn secret(mut self, secret: &[u8]) -> Self {
        self.secret = secret.to_vec();
        self
    }

    /// How often the scheduler looks at a job that waits for dispatch.
    pub fn retry(mut self, every: Duration) -> Self {
        self.retry = every;
        self
    }

    /// How long a dispatch may take to be answered.
    pub fn answer_within(mut self, limit: Duration) -> Self {
        self.answer_within = limit;
        self
    }

    /// How long a job may go without a heartbeat after its last change.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Whose rules it has. The default is the newest release.
    pub fn release(mut self, release: Release) -> Self {
        self.release = release;
        self
    }

    /// Executors at addresses of private networks are refused, as newer releases do by default.
    pub fn blocking_private_networks(mut self) -> Self {
        self.blocks_private = true;
        self
    }

    /// How soon after the end of its job a heartbeat must be gone.
    pub fn silent_within(mut self, limit: Duration) -> Self {
        self.silent_within = limit;
        self
    }

    /// Starts the platform.
    pub async fn start(self) -> Result<Platform, StartError> {
        // An earlier provider of this process stays.
        drop(rustls::crypto::ring::default_provider().install_default());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        let (updates, received) = unbounded_channel();
        let shared = Arc::new(Shared {
            streams: Streams::new(self.redis.as_deref())?,
            secret: Secret::new(&self.secret),
            client: client(),
            records: Mutex::new(Records::new()),
            changed: watch::channel(()).0,
            rows: Mutex::default(),
            firings: Mutex::default(),
            deletions: Arc::default(),
            ledger: Mutex::default(),
            faults: Faults::default(),
            executor_url: Mutex::default(),
            url: Mutex::default(),
            updates,
            outputs: Mutex::new(self.outputs.clone()),
            settings: self,
        });
        let start = runtime.spawn(Server::start(Arc::clone(&shared)));
        let server = start.await.map_err(io::Error::other)??;
        *lock(&shared.url) = server.url(shared.settings.host.as_deref());
        let known = Arc::downgrade(&shared);
        evidence::keep("the platform", move || {
            let shared = known.upgrade()?;
            let records = evidence::lock(&shared.records)?;
            Some(report(&records, &*evidence::lock(&shared.ledger)?))
        });
        runtime.spawn(scheduler::run(Arc::clone(&shared), received));
        runtime.spawn(sweep::run(Arc::clone(&shared)));
        Ok(Platform {
            runtime: Some(runtime),
            server,
            shared,
        })
    }
}

/// Locks of jobs.
type Locks = BTreeMap<u32, Arc<tokio::sync::Mutex<()>>>;

/// The state that all parts share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: Builder,
    pub(crate) secret: Secret,
    pub(crate) streams: Streams,
    pub(crate) client: reqwest::Client,
    pub(crate) faults: Faults,
    records: Mutex<Records>,
    changed: watch::Sender<()>,
    rows: Mutex<Locks>,
    firings: Mutex<Locks>,
    /// Late deletions of log streams wait for it.
    pub(crate) deletions: Arc<tokio::sync::Mutex<()>>,
    ledger: Mutex<Ledger>,
    executor_url: Mutex<String>,
    outputs: Mutex<Option<Outputs>>,
    url: Mutex<String>,
    updates: UnboundedSender<u32>,
}

impl Shared {
    pub(crate) fn read<T>(&self, look: impl FnOnce(&Records) -> T) -> T {
        look(&lock(&self.records))
    }

    /// Changes records, and wakes those that wait for changes.
    pub(crate) fn write<T>(&self, change: impl FnOnce(&mut Records) -> T) -> T {
        let result = change(&mut lock(&self.records));
        self.changed.send_replace(());
        result
    }

    /// Wakes those that wait for requests.
    pub(crate) fn requests_changed(&self) {
        self.changed.send_replace(());
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }

    /// Notes violations.
    pub(crate) fn found(&self, findings: impl IntoIterator<Item = (Rule, String)>) {
        let mut ledger = self.ledger();
        for (rule, why) in findings {
            ledger.violated(rule, why);
        }
    }

    /// The lock of a job's row.
    pub(crate) fn row(&self, job: u32) -> Arc<tokio::sync::Mutex<()>> {
        Arc::clone(lock(&self.rows).entry(job).or_default())
    }

    /// The lock of a firing. In older releases, changes of the job wait for it too.
    pub(crate) fn firing(&self, job: u32) -> Arc<tokio::sync::Mutex<()>> {
        match self.settings.release {
            Release::Old => self.row(job),
            Release::Newest => Arc::clone(lock(&self.firings).entry(job).or_default()),
        }
    }

    /// Makes the scheduler look at the job.
    pub(crate) fn fire(&self, job: u32) {
        // The scheduler has ended when the platform stops.
        let _ = self.updates.send(job);
    }

    pub(crate) fn outputs(&self) -> Option<Outputs> {
        lock(&self.outputs).clone()
    }

    pub(crate) fn executor_url(&self) -> String {
        lock(&self.executor_url).clone()
    }

    pub(crate) fn url(&self) -> String {
        lock(&self.url).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A client like the platform's own: it follows no redirects.
pub(crate) fn client() -> reqwest::Client {
    reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(Duration::from_secs(10))
        .pool_max_idle_per_host(0)
        .build()
        .expect("a client without special settings")
}

/// A platform. It ends on drop.
#[derive(Debug)]
pub struct Platform {
    runtime: Option<tokio::runtime::Runtime>,
    server: Server,
    shared: Arc<Shared>,
}

impl Platform {
    /// The settings of a new platform.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Its address, internal and public.
    pub fn url(&self) -> String {
        self.shared.url()
    }

    /// The secret as operators set it.
    pub fn secret(&self) -> String {
        self.shared.secret.text()
    }

    /// Where a launcher or hub takes dispatches of this platform.
    pub fn endpoint(&self, address: SocketAddr) -> Endpoint {
        Endpoint::new(address, self.shared.secret.clone())
    }

    /// A token as it comes with a dispatch.
    pub fn dispatch_token(&self) -> String {
        self.shared.secret.dispatch_token(LIFETIME)
    }

    /// Id of the only organization.
    pub fn organization(&self) -> String {
        self.shared.read(|records| records.organization.clone())
    }

    /// Returns whether a request has a token of the platform's own programs, as its registry checks it.
    pub fn token_check(&self) -> impl Fn(&str) -> bool + Send + Sync + use<> {
        let secret = self.shared.secret.clone();
        move |authorization| {
            let bearer = secret.read(authorization);
            bearer.is_ok_and(|bearer| bearer.issuer == INTERNAL)
        }
    }

    /// Where dispatches go, complete with the path.
    pub fn dispatch_to(&self, url: &str) {
        url.clone_into(&mut lock(&self.shared.executor_url));
    }

    /// Changes the place of step outputs.
    pub fn read_outputs(&self, outputs: Outputs) {
        *lock(&self.shared.outputs) = Some(outputs);
    }

    /// Changes records as an administrator may.
    pub fn edit<T>(&self, change: impl FnOnce(&mut Records) -> T) -> T {
        self.shared.write(change)
    }

    /// Stores a workspace, and returns its id.
    pub fn workspace(&self, workspace: Workspace) -> String {
        let id = workspace.id.clone();
        self.edit(|records| records.workspaces.insert(id.clone(), workspace));
        id
    }

    /// Delays deletions of log streams after a dispatch while the guard exists. Only newer releases delete so late.
    pub async fn hold_deletions(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.shared.deletions).lock_owned().await
    }

    /// Waits until the job has a heartbeat, and ends its grace period, as if its last change was so long ago. From now on the sweep
    /// fails it once it has no heartbeat.
    pub async fn end_grace(&self, job: u32) {
        let what = format!("a heartbeat of job {job}");
        wait::until(&what, async || self.heartbeat(job).await).await;
        self.edit(|records| records.job_mut(job).grace_ended = true);
    }

    /// Makes a job. The scheduler looks at it at once.
    pub fn start_job(&self, new: NewJob) -> u32 {
        let job = self.edit(|records| records.create(new));
        self.shared.fire(job);
        job
    }

    /// Stores a job as `change` leaves it. The scheduler leaves it alone, so that a test sets every status.
    pub fn store_job(&self, new: NewJob, change: impl FnOnce(&mut Job)) -> u32 {
        self.edit(|records| {
            let id = records.create(new);
            let job = records.job_mut(id);
            job.wedged = true;
            change(job);
            id
        })
    }

    /// Stores an archive as a command line uploads it. Returns the source of a job with this content.
    pub fn upload(&self, archive: Vec<u8>) -> String {
        let id = Uuid::new_v4().to_string();
        let path = format!("remote/tfe/v2/configuration-versions/{id}/terraformContent.tar.gz");
        self.edit(|records| records.uploads.insert(id, archive));
        format!("{}/{path}", self.url())
    }

    /// A person approves.
    pub async fn approve(&self, job: u32) {
        self.decide(job, Status::Approved).await;
    }

    /// A person rejects.
    pub async fn reject(&self, job: u32) {
        self.decide(job, Status::Rejected).await;
    }

    /// A person cancels. In older releases this waits while a dispatch of the job is open.
    pub async fn cancel(&self, job: u32) {
        let row = self.shared.row(job);
        let _held = row.lock().await;
        self.shared.write(|records| {
            records.set_job(job, Status::Cancelled, Actor::User);
            records.close_steps(job, Status::Cancelled, Actor::User);
        });
    }

    async fn decide(&self, job: u32, status: Status) {
        let row = self.shared.row(job);
        let held = row.lock().await;
        self.shared.write(|records| {
            let now = records.job(job).status;
            assert_eq!(now, Status::WaitingApproval, "there is nothing to decide");
            records.set_job(job, status, Actor::User);
        });
        drop(held);
        self.shared.fire(job);
    }

    /// A job as it is now.
    pub fn job(&self, job: u32) -> Job {
        self.shared.read(|records| records.job(job).clone())
    }

    /// The document of the step that was dispatched last.
    pub fn job_data(&self, job: u32) -> Value {
        self.shared.read(|records| {
            let job = records.job(job);
            let step = job.dispatched_step().expect("a step was dispatched");
            dispatch::job_data(records, job, step, &step.flow.commands)
        })
    }

    /// All records as they are now.
    pub fn records(&self) -> Records {
        self.shared.read(Records::clone)
    }

    /// The requests and violations so far.
    pub fn ledger(&self) -> Ledger {
        self.shared.ledger().clone()
    }

    /// Orders a fault.
    pub fn fault(&self, fault: Fault) {
        self.shared.faults.order(fault);
    }

    /// How many requests of this method will fail by an ordered fault.
    pub fn faults_left(&self, method: &str) -> usize {
        self.shared.faults.left(method)
    }

    /// Removes all ordered faults.
    pub fn clear_faults(&self) {
        self.shared.faults.clear();
    }

    /// Ends all connections, and refuses new ones.
    pub async fn go_down(&self) {
        self.server.go_down().await;
    }

    /// Accepts connections again, at the same address.
    pub async fn come_up(&self) {
        self.server.come_up().await;
    }

    /// Waits until `look` finds something in the records.
    pub async fn until<T>(&self, what: &str, mut look: impl FnMut(&Records) -> Option<T>) -> T {
        let mut changes = self.shared.changed.subscribe();
        let wait = async {
            loop {
                if let Some(found) = self.shared.read(&mut look) {
                    return found;
                }
                changes.changed().await.expect("the platform is there");
            }
        };
        let found = tokio::time::timeout(DEADLINE, wait).await;
        found.unwrap_or_else(|_| panic!("{what}: not in time\n{}", self.report()))
    }

    /// Waits until the job has this status. Fails at once if it ends with another one. A job in `queue` has also got an empty log
    /// stream.
    pub async fn until_job(&self, job: u32, status: Status) -> Job {
        let what = format!("job {job} is {status}");
        let found = self
            .until(&what, |records| {
                let found = records.job(job);
                let is_so = found.status == status
                    && !(status == Status::Queue && records.undeleted.contains(&job));
                let over = is_so || found.status.is_terminal() || found.wedged;
                over.then(|| found.clone())
            })
            .await;
        assert_eq!(found.status, status, "{}", self.report());
        found
    }

    /// Waits until the step of this type has this status.
    pub async fn until_step(&self, job: u32, kind: &str, status: Status) {
        let what = format!("step {kind} of job {job} is {status}");
        self.until(&what, |records| {
            (records.job(job).step_of(kind).status == status).then_some(())
        })
        .await;
    }

    /// Waits until `look` finds something among the requests.
    pub async fn until_asked<T>(
        &self,
        what: &str,
        mut look: impl FnMut(&Ledger) -> Option<T>,
    ) -> T {
        self.until(what, |_| look(&self.shared.ledger())).await
    }

    /// Every line that was in the job's stream.
    pub async fn streamed(&self, job: u32) -> Vec<LogEntry> {
        let found = self.on_runtime(
            job,
            |shared, job| async move { shared.streams.all(job).await },
        );
        found.await.0
    }

    /// Waits until the job's stream contains this text. Fails at once if the job ends without it. The tool may have cut the
    /// line of a provisioner.
    pub async fn until_streamed(&self, job: u32, needle: &str) {
        let said = needle.rsplit(' ').next().unwrap_or(needle);
        let holds = |lines: &[LogEntry]| {
            let texts = || lines.iter().map(|entry| entry.output.as_str());
            let short = |text: &&str| text.len() < needle.len() + ADDRESS;
            texts().any(|text| text.contains(needle)) || {
                let pieces: Vec<&str> = texts().filter(short).collect();
                terraform::whole(&pieces.join("\n"), |line| line == said).contains(needle)
            }
        };
        let seen = tokio::sync::Mutex::new((StreamPosition::default(), Vec::new()));
        let look = || async {
            let (position, lines) = &mut *seen.lock().await;
            let over = self.job(job).status.is_terminal();
            lines.extend(self.news(job, position).await);
            let found = holds(lines);
            // The next lines may complete a cut line.
            lines.drain(..lines.len().saturating_sub(PIECES));
            (found || over).then_some(found)
        };
        let found = wait::within(DEADLINE, needle, look).await;
        if !found.as_ref().is_ok_and(|found| *found) {
            let lines = self.streamed(job).await;
            panic!("{needle:?} is not in {lines:#?}\n{}", self.report());
        }
    }

    /// The new entries of a job's stream since this position.
    async fn news(&self, job: u32, position: &mut StreamPosition) -> Vec<LogEntry> {
        let mut at = position.clone();
        let found = self.on_runtime(job, |shared, job| async move {
            let news = shared.streams.news(job, &mut at).await?;
            Ok((news, at))
        });
        let (news, at) = found.await;
        *position = at;
        news
    }

    /// The documents in the job's structured live stream.
    pub async fn structured(&self, job: u32) -> Vec<Value> {
        self.on_runtime(job, |shared, job| async move {
            shared.streams.structured(job).await
        })
        .await
        .0
    }

    /// How long the job's heartbeat still lasts.
    pub async fn heartbeat(&self, job: u32) -> Option<Duration> {
        self.on_runtime(job, |shared, job| async move {
            shared.streams.heartbeat(job).await
        })
        .await
    }

    async fn on_runtime<T, F>(&self, job: u32, ask: impl FnOnce(Arc<Shared>, u32) -> F) -> T
    where
        T: Send + 'static,
        F: Future<Output = redis::RedisResult<T>> + Send + 'static,
    {
        let runtime = self.runtime.as_ref().expect("it runs until it is dropped");
        let asked = runtime.spawn(ask(Arc::clone(&self.shared), job)).await;
        asked
            .expect("asking Redis does not panic")
            .unwrap_or_else(|error| panic!("Redis: {error}"))
    }

    /// The stored output of a step.
    pub fn step_output(&self, job: u32, step: &str) -> Option<String> {
        let outputs = self.shared.outputs()?;
        let found = outputs.find(&self.organization(), job, step)?;
        Some(String::from_utf8_lossy(&found).into_owned())
    }

    /// Checks what is left of every job, and fails if there is a violation.
    pub async fn assert_kept(&self) {
        self.look_back().await;
        let broken = self.ledger().broken();
        assert!(broken.is_empty(), "{broken:?}\n{}", self.report());
    }

    /// Checks what is left of every job, and notes violations.
    pub async fn look_back(&self) {
        let jobs: Vec<Job> = self
            .shared
            .read(|records| records.jobs.values().cloned().collect());
        for job in jobs {
            let mut findings = self.leftovers(job.id).await;
            if job.status.is_terminal() && !self.falls_silent(job.id).await {
                findings.push((Rule::HeartbeatLeft, format!("job {}", job.id)));
            }
            self.shared.found(findings);
        }
    }

    /// Whether the heartbeat of the job ends. The process that reported its end needs a moment to end itself. A key that
    /// expires without another beat counts as removed.
    async fn falls_silent(&self, job: u32) -> bool {
        let is_silent = || async { self.heartbeat(job).await.is_none_or(|left| left <= LIVING) };
        let limit = self.shared.settings.silent_within;
        let silent = wait::within(limit, "the heartbeat ends", is_silent).await;
        silent.is_ok()
    }

    async fn leftovers(&self, job: u32) -> Vec<(Rule, String)> {
        self.on_runtime(job, |shared, job| async move {
            let mut findings = shared.streams.plain_keys(job).await?;
            findings.extend(shared.streams.all(job).await?.1);
            findings.extend(shared.streams.structured(job).await?.1);
            Ok(findings)
        })
        .await
    }

    /// Jobs, changes and requests, for the message of a failed assertion.
    pub fn report(&self) -> String {
        report(&self.records(), &self.ledger())
    }
}

fn report(records: &Records, ledger: &Ledger) -> String {
    let mut text = String::new();
    for job in records.jobs.values() {
        let steps: Vec<String> = job
            .steps
            .iter()
            .map(|step| format!("{} {} ({:?})", step.flow.kind, step.status, step.name))
            .collect();
        let _ = writeln!(
            text,
            "job {} is {}: {}",
            job.id,
            job.status,
            steps.join(", ")
        );
    }
    for change in &records.transitions {
        let step = change
            .step
            .map_or_else(String::new, |step| format!(" step {step}"));
        let _ = writeln!(
            text,
            "job {}{step}: {} -> {} by {:?}",
            change.job, change.from, change.to, change.by
        );
    }
    text + &ledger.to_string()
}

impl Drop for Platform {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
