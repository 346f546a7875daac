//! The hub stores the runs of pools in a durable queue and leases them to agents. It sends requests to the platform for
//! them. Agents and executors use the protocol of `pool_protocol`.
//!
//! - [`Hub`]: [`Hub::submit`] stores a dispatch, [`Hub::work`] does what a hub does by itself: confirmations, reports, time limits.
//! - [`router`] has the paths of agents and executors, the relay to the platform included. [`page::router`] has the status page.
//! - [`settings`] has the options, and [`token_line`] the line of a token in the file of the pools.
//! - [`store_check`] asks the artifact store of a hub which conditions it keeps.
//!
//! A hub must not know agents, except by their calls, or the HTTP service of dispatches. What happens to a task is decided by
//! `pool_store`.

mod addresses;
mod artifacts;
mod budget;
mod callers;
mod duties;
mod failure;
mod forms;
mod job_token_keys;
mod json_check;
mod metrics;
mod oidc;
pub mod page;
mod passing;
mod pool_turns;
mod pools;
mod relay;
mod run_logs;
#[cfg(test)]
mod sample_views;
pub mod settings;
mod shares;
pub mod store_check;
mod submit;
mod tails;
mod task_work;
mod token_line;
mod watched_file;
mod wire;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::any;
use data_dir::DataError;
use http_service::{Fresh, MetricsRegistry, Readiness, Shutdown};
use job_contract::Exit;
use platform::StepRef;
use pool_protocol::id::{PoolName, TaskId};
use pool_protocol::path;
use pool_protocol::token::JobTokenKeys;
use pool_store::{OpenError, Page, PoolView, Store, TaskView};
use reporter::settings::PlatformSetupError;
use reporter::{HeartbeatKeeper, LocalReporter, PlatformReporter};
use runtime::private_file::private_folder;
use runtime::setting::is_wrong_place;
use tokio::sync::Notify;

use self::artifacts::ArtifactService;
use self::budget::Budget;
use self::forms::Forms;
use self::metrics::PoolMetrics;
use self::oidc::Issuers;
use self::pools::Pools;
use self::relay::Relay;
use self::run_logs::KeptLogs;
use self::settings::{HubPlatform, HubSettings, KeySetting};
use self::shares::Shares;
use self::tails::Tails;
use self::watched_file::WatchedFile;

pub use self::pools::{Boundary, OwnPool, RunLogs};
pub use self::submit::SubmitError;
pub use self::token_line::token_line;

/// The largest number of requests for tasks that wait at the same time.
const MAX_POLLS: usize = 2000;
/// Those of one pool.
const MAX_POLLS_OF_A_POOL: usize = 1000;
/// Those that each pool has, also when others have taken all.
const POLLS_OF_EACH_POOL: usize = 64;
/// The most exchanges of tokens in progress.
const MAX_EXCHANGES: usize = 512;
/// The interval of heartbeats of an instance.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// The timeout for reading a form.
const FORM_TIMEOUT: Duration = Duration::from_secs(10);

/// The hub.
#[derive(Debug)]
pub struct Hub {
    pools: WatchedFile<Pools>,
    keys: Arc<WatchedFile<JobTokenKeys>>,
    store: Store,
    reporter: Arc<dyn PlatformReporter>,
    relay: Relay,
    artifacts: ArtifactService,
    /// The ends of run logs, for the status page.
    tails: Tails,
    run_logs: Option<KeptLogs>,
    issuers: Issuers,
    heartbeats: HeartbeatKeeper<TaskId>,
    metrics: PoolMetrics,
    views: Fresh<Result<Arc<[PoolView]>, String>>,
    polls: Arc<Shares<PoolName>>,
    /// The bytes in progress for agents and executors.
    budget: Budget,
    /// The exchanges of tokens in progress.
    exchanges: Arc<Forms>,
    /// How long a lease is valid.
    lease: Duration,
    /// How long nothing may be heard of an executor that has accepted its task.
    lost_after: Duration,
    /// Notified when there may be an outcome to report.
    ended: Notify,
    shutdown: Shutdown,
}

/// Why a hub cannot start.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error(transparent)]
    Store(#[from] OpenError),
    #[error(transparent)]
    Platform(#[from] PlatformSetupError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error("could not set up the client of the platform")]
    Client(#[source] reqwest::Error),
    #[error("could not set up the store of artifacts")]
    Artifacts(#[source] artifact_store::StoreError),
    #[error("could not set up the client of OpenID providers")]
    Issuers(#[source] reqwest::Error),
    #[error("could not create `{}` for the store of pools", path.display())]
    Folder {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the key of job tokens in `{}` cannot be used: it {}", path.display(), errors.join("; "))]
    Key { path: PathBuf, errors: Vec<String> },
}

impl HubError {
    /// Returns the exit code: a wrong setting, or a failure of the machine.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Store(
                OpenError::Url | OpenError::InUse(_) | OpenError::NetworkFileSystem { .. },
            )
            | Self::Key { .. } => Exit::BadConfiguration,
            Self::Data(error) => error.exit(),
            Self::Store(OpenError::File { source, .. }) | Self::Folder { source, .. }
                if is_wrong_place(source) =>
            {
                Exit::BadConfiguration
            }
            _ => Exit::Infrastructure,
        }
    }
}

/// Returns the routes of agents and executors.
pub fn router(hub: Arc<Hub>) -> Router {
    wire::router()
        .route(path::RELAY, any(relay::handle))
        .with_state(hub)
}

impl Hub {
    /// Opens the store. Creates its folder and the key of job tokens if they do not exist.
    pub async fn open(
        settings: HubSettings,
        metrics: &MetricsRegistry,
        shutdown: Shutdown,
    ) -> Result<Self, HubError> {
        if let Some(folder) = settings.store.file().and_then(|file| file.parent()) {
            private_folder(folder).map_err(|source| HubError::Folder {
                path: folder.to_owned(),
                source,
            })?;
        }
        let kept = settings.store.file().and_then(|file| file.parent());
        let run_logs = settings
            .logs
            .zip(kept)
            .map(|(logs, kept)| KeptLogs::open(logs, kept));
        let (lease, lost_after) = (settings.rules.lease, settings.rules.lost_after);
        let keys = Arc::new(open_keys(settings.keys)?);
        let keys_of_store = Arc::clone(&keys);
        let store = Store::open(settings.store.reveal(), settings.rules, keys_of_store).await?;
        let artifacts = settings.platform.artifacts();
        let artifacts = ArtifactService::open(artifacts.as_ref()).map_err(HubError::Artifacts)?;
        let reporter: Arc<dyn PlatformReporter> = match settings.platform {
            HubPlatform::Terrakube(platform) => Arc::new(platform.open()?.of_hub()),
            HubPlatform::Records(data) => Arc::new(LocalReporter::new(data.create()?.path())),
        };
        Ok(Self {
            pools: settings.pools,
            keys,
            store,
            relay: Relay::new(reporter.platform()).map_err(HubError::Client)?,
            artifacts,
            issuers: Issuers::new().map_err(HubError::Issuers)?,
            reporter,
            tails: Tails::default(),
            run_logs,
            heartbeats: HeartbeatKeeper::default(),
            metrics: PoolMetrics::register(metrics),
            views: Fresh::default(),
            polls: Shares::with_reserve(MAX_POLLS_OF_A_POOL, MAX_POLLS, POLLS_OF_EACH_POOL),
            budget: Budget::new(),
            exchanges: Forms::new(MAX_EXCHANGES),
            lease,
            lost_after,
            ended: Notify::new(),
            shutdown,
        })
    }

    /// Runs the duties of the hub until the launcher stops.
    pub async fn work(self: &Arc<Self>) {
        Box::pin(duties::perform(self)).await;
    }

    /// Closes the store. Nothing may use it afterwards.
    pub async fn close(&self) {
        self.store.close().await;
    }

    /// Returns whether the hub can be used now.
    pub async fn readiness(&self) -> Readiness {
        let unread = self.pool_views().await.err();
        if let Some(problem) = self.store.problem().or(unread) {
            return Readiness::NotReady(problem);
        }
        // A hub that is not ready gets no calls, and runs in progress need theirs. So a lack of space alone is no reason.
        let problem = self.store.lack_of_space();
        let problem = problem.or_else(|| self.pools.problem());
        let problem = problem.or_else(|| self.keys.problem());
        problem.map_or(Readiness::Ready, Readiness::Impaired)
    }

    async fn pool_views(&self) -> Result<Arc<[PoolView]>, String> {
        let read = async {
            let pools = self.store.pools().await;
            pools.map(Arc::from).map_err(|error| error.to_string())
        };
        self.views.get(read).await
    }

    /// Updates the metrics. Nobody may read them meanwhile.
    pub async fn measure(&self) {
        let (pools, file) = (self.pool_views().await, self.pools.current());
        // An error is shown by the readiness.
        if let Ok(pools) = pools {
            self.metrics.observe(file.names(), &pools);
        }
        let waiting = i64::try_from(self.polls.taken()).unwrap_or(i64::MAX);
        self.metrics.polls.set(waiting);
        let is_full = self.store.lack_of_space().is_some();
        self.metrics.store_full.set(is_full.into());
    }

    /// Returns all tasks that are not over. The store returns them in pages.
    async fn open_tasks(&self) -> Result<Vec<TaskView>, pool_store::Error> {
        let mut tasks = Vec::new();
        let mut page = Page::first();
        loop {
            let more = self
                .store
                .tasks(None, pool_store::TaskFilter::Open, page)
                .await?;
            page.after = more.last().map(|task| task.task);
            let is_last = more.len() < page.limit as usize;
            tasks.extend(more);
            if is_last {
                return Ok(tasks);
            }
        }
    }
}

fn open_keys(setting: KeySetting) -> Result<WatchedFile<JobTokenKeys>, HubError> {
    match setting {
        KeySetting::Known(source) => Ok(source),
        KeySetting::Create(path) => {
            job_token_keys::create_file(&path).map_err(|source| HubError::Folder {
                path: path.clone(),
                source,
            })?;
            WatchedFile::open(&path, job_token_keys::parse)
                .map_err(|errors| HubError::Key { path, errors })
        }
    }
}

fn step_of(task: &TaskView) -> StepRef {
    StepRef {
        organization_id: task.organization.clone(),
        workspace_id: task.workspace.clone(),
        job_id: task.job.clone(),
        step_id: task.step.clone(),
        step_type: task.kind.clone(),
    }
}
