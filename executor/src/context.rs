//! What every phase of one run works with, and the timer of the phases.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use artifact_store::{Store, StoreError};
use job_contract::job::JobDataError;
use job_contract::progress::Phase;
use job_contract::report::PhaseTiming;
use job_contract::{Exit, JobData, StepType, chain, env};
use nix::unistd::{AccessFlags, eaccess};
use platform::StepRef;
use platform::StepView;
use run_log::{FileSink, LogConfig, LogError, Redactor, RunLog, Sink, StdoutSink, secrets_of};
use runtime::Deadline;
use runtime::private_file::private_folder;
use runtime::setting::is_wrong_place;
use secrecy::ExposeSecret as _;
use tokio_util::task::AbortOnDropHandle;

use crate::banner::Palette;
use crate::child_env::{ChildEnv, ChildEnvError};
use crate::config::{Config, ConfigError, Folders};
use crate::connections::Connections;
use crate::error::ErrorKind;
use crate::job::JobError;
use crate::process::ProcessError;
use crate::running_report::Announcement;
use crate::scripts::ScriptError;
use crate::stop::{Budget, Stop};
use crate::store_watch;
use crate::stored_plan::PlanError;
use crate::telemetry;
use crate::terraform::backend::BackendError;
use crate::terraform::variables::VariablesError;
use crate::tool::ToolError;
use crate::workspace::{self, Layout, WorkspaceError};

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

/// Why a step did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    JobData(#[from] JobDataError),
    #[error(transparent)]
    Job(#[from] JobError),
    #[error(transparent)]
    ChildEnv(#[from] ChildEnvError),
    /// A mandatory policy would be passed over.
    #[error("{what}, and this executor does not evaluate policies: nothing was run")]
    Policies { what: &'static str },
    #[error("could not make the work folder `{path}`")]
    WorkDir {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Log(#[from] LogError),
    #[error(transparent)]
    Platform(#[from] platform::PlatformError),
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error(transparent)]
    Script(#[from] ScriptError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Variables(#[from] VariablesError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    Artifact(#[from] StoreError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("could not write into the working directory `{path}`")]
    WorkingDir {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("the state could not be read back from where the tool keeps it")]
    StateUnread,
    #[error("the log could not be stored in time")]
    LogNotStored,
    #[error("the object store did not take it in time")]
    StoreTooSlow,
    #[error("stopped before anything was started")]
    Stopped,
    #[error("the step has ended while it was run a second time")]
    StepEnded,
    #[error("a stage of the run panicked")]
    Panicked,
}

impl StepError {
    /// Whose fault it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Workspace(error) => error.kind(),
            Self::Tool(error) => error.kind(),
            // Not the plan's fault, nor that of whoever reviewed it.
            Self::Plan(PlanError::Unavailable(StoreError::Unavailable { .. })) => {
                ErrorKind::Infrastructure
            }
            Self::JobData(_)
            | Self::Job(_)
            | Self::Policies { .. }
            | Self::ChildEnv(_)
            | Self::Variables(_)
            | Self::Plan(_) => ErrorKind::User,
            Self::Script(
                ScriptError::UnknownRuntime { .. }
                | ScriptError::NoGroovy { .. }
                | ScriptError::Exports { .. }
                | ScriptError::Process(ProcessError::TooLarge { .. }),
            )
            | Self::Process(ProcessError::TooLarge { .. }) => ErrorKind::User,
            Self::Panicked => ErrorKind::Defect,
            Self::Stopped
            | Self::StepEnded
            | Self::LogNotStored
            | Self::StoreTooSlow
            | Self::StateUnread
            | Self::Config(_)
            | Self::WorkDir { .. }
            | Self::Log(_)
            | Self::Platform(_)
            | Self::Script(_)
            | Self::Process(_)
            | Self::Artifact(_)
            | Self::Backend(_)
            | Self::WorkingDir { .. } => ErrorKind::Infrastructure,
        }
    }

    /// The exit code when this ends a step.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Config(_) => Exit::BadConfiguration,
            Self::Platform(error) => error.exit(),
            Self::WorkDir { source, .. } if is_wrong_place(source) => Exit::BadConfiguration,
            Self::Tool(error) if error.is_wrong_setting() => Exit::BadConfiguration,
            // The document is sound; what it refers to says no.
            Self::Policies { .. } => Exit::StepFailed,
            Self::Plan(_) if self.kind() == ErrorKind::User => Exit::StepFailed,
            _ => self.kind().exit(),
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Workspace(error) => error.hint(),
            Self::Tool(error) => error.hint(),
            Self::Platform(error) => error.hint(),
            Self::Job(error) => Some(error.hint().to_owned()),
            Self::Policies { .. } => Some(format!(
                "run the workspace with an executor that evaluates policies, or have the operator set `{}=true` on this \
                 one, which passes over all of them",
                env::IGNORE_POLICIES
            )),
            Self::Plan(error) => Some(error.hint()),
            Self::Script(ScriptError::NoGroovy { .. }) => {
                Some("use an executor image with Groovy, or rewrite the script in Bash".to_owned())
            }
            Self::Artifact(error) => error.hint(),
            Self::WorkDir { source, .. } if is_wrong_place(source) => Some(format!(
                "`{}`, or else `{}`, names a folder the executor's user can write in, and so does `{}` where it is set",
                env::WORK_DIR,
                env::DATA_DIR,
                env::CHECKOUT_DIR
            )),
            Self::WorkDir { .. } | Self::Backend(_) | Self::WorkingDir { .. } => Some(
                "check that the disk is not full and the folder belongs to the executor's user"
                    .to_owned(),
            ),
            Self::Config(ConfigError::Store(error)) => Some(error.hint()),
            Self::Config(_) => Some("run `executor --help` for the settings".to_owned()),
            _ => None,
        }
    }

    /// The whole story in one sentence.
    pub fn story(&self) -> String {
        chain(self)
    }
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
                .map_err(|source| StepError::WorkDir {
                    path: folder.display().to_string(),
                    source,
                })?;
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
            () = deadline.over() => Err(StepError::StoreTooSlow),
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

/// Durations of the phases so far, in the order they ended.
#[derive(Default)]
pub struct PhaseTimer {
    timings: Mutex<Vec<PhaseTiming>>,
}

impl fmt::Debug for PhaseTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.timings()).finish()
    }
}

impl PhaseTimer {
    /// Times a piece of work; `ok` judges its result.
    pub async fn time<T>(
        &self,
        phase: Phase,
        work: impl Future<Output = T>,
        ok: impl FnOnce(&T) -> bool,
    ) -> T {
        telemetry::phase_started(phase);
        let start = Instant::now();
        let result = work.await;
        let duration_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let ok = ok(&result);
        telemetry::phase_finished(phase, duration_ms, ok);
        self.lock().push(PhaseTiming {
            phase,
            duration_ms,
            ok,
        });
        result
    }

    /// The durations so far.
    pub fn timings(&self) -> Vec<PhaseTiming> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<PhaseTiming>> {
        self.timings
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
