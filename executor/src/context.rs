//! What every phase of one run works with: the job, the settings, and everything that is opened for the run.
//!
//! Knows neither the phases nor their order.

use std::future::Future;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use artifact_store::{Store, StoreError};
use job_contract::progress::Phase;
use job_contract::{JobData, StepType, env};
use nix::unistd::{AccessFlags, eaccess};
use platform::StepRef;
use platform::StepView;
use run_log::{FileSink, LogConfig, Redactor, RunLog, Sink, StdoutSink, secrets_of};
use runtime::Deadline;
use runtime::private_file::private_folder;
use secrecy::ExposeSecret as _;
use tokio_util::task::AbortOnDropHandle;

use crate::banner::Palette;
use crate::child_env::ChildEnv;
use crate::config::{Config, Folders};
use crate::connections::Connections;
use crate::error::StepError;
use crate::phase_timer::PhaseTimer;
use crate::running_report::Announcement;
use crate::stop::{Budget, Stop};
use crate::store_watch;
use crate::workspace::{self, Layout};

/// One run: the job, the settings, and everything opened for it.
#[derive(Debug)]
pub struct RunContext<'c> {
    pub job: JobData,
    pub step_type: StepType,
    pub step: StepRef,
    pub config: &'c Config,
    pub folders: Folders,
    pub layout: Layout,
    pub log: RunLog,
    pub connections: Connections,
    pub store: Store,
    pub env: ChildEnv,
    pub stop: Stop,
    pub budget: Budget,
    pub timer: PhaseTimer,
    /// Whether the run waits for its turn, which is no silence.
    pub waiting: Arc<AtomicBool>,
    /// The report that the step runs, as long as it has to be repeated.
    pub(crate) announcement: OnceLock<Announcement>,
    /// What the platform said when it let the step run.
    pub view: OnceLock<StepView>,
    /// Writes to the log while the store fails.
    _store_watch: Option<AbortOnDropHandle<()>>,
}

impl<'c> RunContext<'c> {
    /// Opens everything a run needs; nothing has been fetched or asked yet.
    pub fn open(
        config: &'c Config,
        connections: Connections,
        job: JobData,
        stop: Stop,
    ) -> Result<Self, StepError> {
        job.validate()?;
        let step_type = job.step_type()?;
        let folders = config.folders(std::env::var_os("HOME"))?;
        let store = config.store.open(&folders)?;
        let mut env = ChildEnv::new(std::env::vars_os(), &config.run.env_forward, &job)?;
        if env.get("HOME").is_none() {
            env.set("HOME", &folders.home.to_string_lossy())?;
        }
        for folder in [&folders.work, &folders.checkouts] {
            private_folder(folder)
                .and_then(|folder| Ok(eaccess(folder, AccessFlags::W_OK)?))
                .map_err(|source| StepError::work_folder(folder, source))?;
        }
        let layout = Layout::create(workspace::Site {
            work_dir: &folders.work,
            checkouts: &folders.checkouts,
            name: &format!("{}_{}", job.organization_id, job.workspace_id),
        })?;
        let log = open_log(config, &job, &layout, &store)?;
        let store_watch = store_watch::start(&store, log.writer());
        Ok(Self {
            step: StepRef::of(&job),
            connections,
            announcement: OnceLock::new(),
            view: OnceLock::new(),
            store,
            budget: Budget::of(config.run.grace_period(step_type)),
            timer: PhaseTimer::default(),
            waiting: Arc::default(),
            job,
            step_type,
            config,
            folders,
            layout,
            log,
            env,
            stop,
            _store_watch: store_watch,
        })
    }

    /// How long the platform is asked or told something.
    pub fn deadline(&self) -> Deadline {
        self.connections.deadline(&self.stop, self.budget.saving)
    }

    /// How long something is tried that saves results.
    pub fn while_saving(&self, limit: Duration) -> Deadline {
        self.stop.deadline(limit, self.budget.saving)
    }

    /// Waits for the store, after a stop order as long as there is time.
    pub async fn stored<T>(
        &self,
        storing: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StepError> {
        // The store's client gives up by itself.
        let deadline = self.while_saving(Duration::MAX);
        tokio::select! {
            biased;
            stored = storing => Ok(stored?),
            () = deadline.over() => Err(StepError::infrastructure(
                "the object store did not take it in time",
            )),
        }
    }

    /// Colours of what Mayfly itself writes.
    pub const fn palette(&self) -> Palette {
        Palette {
            color: self.config.run.color_output,
        }
    }

    /// Times a phase and announces its beginning and end.
    pub async fn phase<T, E>(
        &self,
        phase: Phase,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        self.timer.time(phase, work, Result::is_ok).await
    }
}

fn open_log(
    config: &Config,
    job: &JobData,
    layout: &Layout,
    store: &Store,
) -> Result<RunLog, StepError> {
    let mut secrets = secrets_of(job);
    let own = store
        .secrets()
        .into_iter()
        .chain(config.platform.internal_secret.clone())
        .chain(config.redis.redis_password.clone())
        .chain(config.redis.redis_sentinel_password.clone());
    secrets.extend(own.map(|secret| secret.expose_secret().to_owned()));
    secrets.extend(std::env::var(env::REPORT_KEY));
    let mut sinks: Vec<Box<dyn Sink>> = vec![Box::new(StdoutSink::open()?)];
    if let Some(file) = &config.run.log_file {
        sinks.push(Box::new(FileSink::new(file.clone())));
    }
    Ok(RunLog::start(
        LogConfig::new(layout.spool()),
        Redactor::new(secrets),
        sinks,
    )?)
}
