//! The context of one run, which every phase uses: the job, the settings, and all connections and folders of the run.
//!
//! This module knows neither the phases nor their order.

use std::collections::BTreeMap;
use std::fs::File;
use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use artifact_store::{BackendSettings, Store, StoreError};
use job_contract::keys::ObjectKey;
use job_contract::progress::Phase;
use job_contract::{JobData, StepType, chain, env};
use nix::unistd::{AccessFlags, eaccess};
use platform::StepRef;
use platform::StepView;
use provider_store::Unpacked;
use run_log::{FileSink, LogConfig, Redactor, RunLog, Sink, StdoutSink, secrets_of};
use runtime::Deadline;
use runtime::handover;
use runtime::private_file::private_folder;
use secrecy::ExposeSecret as _;
use serde_json::{Map, Value};
use tokio::time::timeout;
use tracing::warn;

use crate::banner::Palette;
use crate::cgroup::{MemoryGroup, OomKills};
use crate::child_env::ChildEnv;
use crate::config::{Config, Folders};
use crate::connections::Connections;
use crate::deploy_role::WantedRole;
use crate::error::StepError;
use crate::hooks::Hooks;
use crate::phase_timer::PhaseTimer;
use crate::platform_server::PlatformServer;
use crate::providers::shared_store::Wanted;
use crate::references::{References, without_references};
use crate::role_server::RoleServer;
use crate::running_report::StartReportRetry;
use crate::state_server::StateServer;
use crate::stop::{Budget, Stop};
use crate::store_watch::StoreWatch;
use crate::volume::Volume;
use crate::workspace::{Layout, LayoutConfig};

/// Timeout of the platform's answer with the job context.
const CONTEXT_TIMEOUT: Duration = Duration::from_secs(10);

/// The context of one run: the job, the settings, and all connections and folders of the run.
#[derive(Debug)]
pub(crate) struct RunContext<'c> {
    pub(crate) job: JobData,
    pub(crate) step_type: StepType,
    pub(crate) step: StepRef,
    pub(crate) config: &'c Config,
    pub(crate) folders: Folders,
    pub(crate) layout: Layout,
    pub(crate) log: RunLog,
    pub(crate) connections: Connections,
    pub(crate) store: Store,
    /// Where the tool keeps the state.
    pub(crate) backend: BackendSettings,
    /// Serves the state of a hub to the tool.
    pub(crate) state_server: Option<StateServer>,
    /// Behind the relay of a hub.
    pub(crate) platform_server: Option<PlatformServer>,
    /// What children see, with references in the place of secrets. See [`Self::child_env`].
    env: ChildEnv,
    /// The references of the run, if they are on.
    pub(crate) references: Option<References>,
    /// The run with secrets in the place of references, once they are resolved.
    pub(crate) resolved: OnceLock<ResolvedRun>,
    pub(crate) stop: Stop,
    pub(crate) oom_kills: OomKills,
    pub(crate) budget: Budget,
    pub(crate) timer: PhaseTimer,
    /// Whether the run waits for its turn. Then the limit on silence does not apply.
    pub(crate) waiting: Arc<AtomicBool>,
    /// The retry of the report that the step runs, if the first report failed.
    pub(crate) start_report_retry: OnceLock<StartReportRetry>,
    /// The platform's step view when it permitted the step.
    pub(crate) view: OnceLock<StepView>,
    pub(crate) commit_id: OnceLock<String>,
    /// The tool, if it is used where it is in the cache.
    pub(crate) held_tools: Mutex<Vec<File>>,
    /// The folder that runs share, if the launcher has mounted one.
    pub(crate) mounted_cache: Option<PathBuf>,
    /// The volume of the store that runs share.
    pub(crate) store_volume: Volume,
    /// Packages of the shared store that the tool uses where they are. They must stay there until the run ends.
    pub(crate) held_packages: Mutex<Vec<Arc<Unpacked>>>,
    /// What the run lacked in a store of providers that it only reads.
    pub(crate) wanted: Wanted,
    /// Serves and renews the session of the run's deploy role.
    pub(crate) role_server: OnceLock<RoleServer>,
    /// Reports in the run's log that the store fails.
    pub(crate) store_watch: Option<StoreWatch>,
    /// What the operator runs in every run.
    pub(crate) hooks: Hooks,
}

/// A run with secrets in the place of references.
#[derive(Debug)]
pub(crate) struct ResolvedRun {
    pub(crate) job: JobData,
    pub(crate) env: ChildEnv,
    /// Texts of inputs where the tool reads them as expressions, if they differ.
    pub(crate) expressions: BTreeMap<String, String>,
}

/// The tool's variable for a folder of packages.
pub(crate) const PLUGIN_CACHE: &str = "TF_PLUGIN_CACHE_DIR";
/// Below the work folder.
const OWN_PLUGIN_CACHE: &str = "plugin-cache";

/// Where the launcher has mounted the folder that runs share, if it has.
fn mounted_cache(config: &Config, env: &ChildEnv) -> Option<PathBuf> {
    let mounted = env.get(PLUGIN_CACHE).filter(|_| config.is_in_pod());
    mounted.map(PathBuf::from)
}

/// What the run's tool and scripts see of the environment.
pub(crate) fn child_env(
    config: &Config,
    folders: &Folders,
    job: &JobData,
) -> Result<ChildEnv, StepError> {
    let mut env = shared_env(config, folders, job)?;
    if mounted_cache(config, &env).is_some() {
        // No two runs can use it as such a cache at a time. A tool that a script starts has one of its own.
        let own = folders.work.join(OWN_PLUGIN_CACHE);
        private_folder(&own).map_err(|source| {
            StepError::work_folder("could not create the folder", &own, &source)
        })?;
        env.set(PLUGIN_CACHE, &own.to_string_lossy())?;
    }
    Ok(env)
}

fn shared_env(config: &Config, folders: &Folders, job: &JobData) -> Result<ChildEnv, StepError> {
    let mut env = ChildEnv::new(std::env::vars_os(), &config.run.env_forward, job)?;
    if !config.identity.identity_pass_through {
        env.keep_pod_identity(&config.run.env_forward);
    }
    if WantedRole::has_role(job) {
        env.keep_aws_credentials();
    }
    if env.get("HOME").is_none() {
        env.set("HOME", &folders.home.to_string_lossy())?;
    }
    if let Some(file) = &config.run.run_ca_file {
        env.trust(file)?;
    }
    Ok(env)
}

impl<'c> RunContext<'c> {
    /// Opens the folders, the store and the log of a run. It sends no request yet.
    pub(crate) fn open(
        config: &'c Config,
        folders: Folders,
        connections: Connections,
        job: JobData,
        stop: Stop,
    ) -> Result<Self, StepError> {
        job.validate()?;
        let step_type = job.step_type()?;
        let store = config
            .store
            .open(&folders, connections.relaying_lease(), &job)?;
        let hooks = Hooks::load(config.run.hooks_dir.as_deref())?;
        let references = References::open(&job)?;
        let mounted_cache = mounted_cache(config, &shared_env(config, &folders, &job)?);
        let env = child_env(config, &folders, &job)?;
        for folder in [&folders.work, &folders.checkouts] {
            private_folder(folder)
                .and_then(|folder| Ok(eaccess(folder, AccessFlags::W_OK)?))
                .map_err(|source| {
                    StepError::work_folder("could not create the folder", folder, &source)
                })?;
        }
        let layout = Layout::create(LayoutConfig {
            work_dir: &folders.work,
            checkouts: &folders.checkouts,
            name: &format!("{}_{}", job.organization_id, job.workspace_id),
        })?;
        let log = open_log(config, &job, &layout, &store, references.as_ref())?;
        log.add_secrets(hooks.secrets());
        log.add_secrets(env.proxy_secrets());
        let store_watch = StoreWatch::start(&store, log.writer());
        let state_server = match store.hub() {
            Some(hub) => {
                let private = layout.private().to_owned();
                let server = StateServer::start(hub.clone(), private, log.writer(), stop.clone());
                let server = server.map_err(|source| {
                    StepError::infrastructure("could not serve the state on loopback")
                        .because(&source)
                })?;
                log.add_secrets([server.secret().expose_secret()]);
                Some(server)
            }
            None => None,
        };
        let platform_server = match connections.relayed() {
            Some(terrakube) => {
                let server = PlatformServer::start(terrakube.config(), log.writer());
                let server = server.map_err(|source| {
                    StepError::infrastructure("could not serve the platform on loopback")
                        .because(&source)
                })?;
                log.add_secrets([server.secret().expose_secret()]);
                Some(server)
            }
            None => None,
        };
        let backend = state_server.as_ref().map_or_else(
            || store.backend(&job.organization_id, &job.workspace_id),
            StateServer::settings,
        );
        Ok(Self {
            step: StepRef::of(&job),
            timer: PhaseTimer::new(connections.platform.clone()),
            connections,
            start_report_retry: OnceLock::new(),
            view: OnceLock::new(),
            commit_id: OnceLock::new(),
            role_server: OnceLock::new(),
            held_packages: Mutex::default(),
            held_tools: Mutex::default(),
            mounted_cache,
            store_volume: Volume::new(Duration::from_secs(config.tools.cache_timeout_seconds)),
            wanted: Wanted::default(),
            store,
            backend,
            state_server,
            platform_server,
            budget: Budget::of(config.run.grace_period(step_type)),
            waiting: Arc::default(),
            job,
            step_type,
            config,
            folders,
            layout,
            log,
            env,
            references,
            resolved: OnceLock::new(),
            stop,
            oom_kills: OomKills::from_now(MemoryGroup::of_this_process()),
            store_watch,
            hooks,
        })
    }

    /// The job as the tool and scripts see it: with secrets, once they are resolved.
    pub(crate) fn child_job(&self) -> &JobData {
        self.resolved
            .get()
            .map_or(&self.job, |resolved| &resolved.job)
    }

    /// What the tool and scripts see of the environment: with secrets, once they are resolved.
    pub(crate) fn child_env(&self) -> &ChildEnv {
        self.resolved
            .get()
            .map_or(&self.env, |resolved| &resolved.env)
    }

    /// Opens the live log. With a lease this waits for the claim, because another executor may write the log until then.
    pub(crate) fn open_live_log(&self, is_claimed: bool) -> Result<(), StepError> {
        let is_time = is_claimed == self.connections.platform.is_leased();
        let sink = is_time.then(|| self.connections.live_log(&self.job, &self.stop));
        if let Some(sink) = sink.flatten() {
            self.log.attach(sink)?;
        }
        Ok(())
    }

    /// The deadline of requests to the platform.
    pub(crate) fn deadline(&self) -> Deadline {
        self.connections.deadline(&self.stop, self.budget.saving)
    }

    /// The deadline of work that saves results.
    pub(crate) fn while_saving(&self, limit: Duration) -> Deadline {
        self.stop.deadline(limit, self.budget.saving)
    }

    /// Waits for the store. After a stop order, the wait ends with the time for saving.
    pub(crate) async fn stored<T>(
        &self,
        storing: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StepError> {
        // Without a stop order, the store's client limits the time.
        let deadline = self.while_saving(Duration::MAX);
        tokio::select! {
            biased;
            stored = storing => Ok(stored?),
            () = deadline.over() => Err(StepError::infrastructure(
                "the object store did not take it in time",
            )),
        }
    }

    /// Cancels repeatable work at a stop order. Nothing has been changed yet.
    pub(crate) async fn unless_stopped<T>(
        &self,
        work: impl Future<Output = Result<T, StepError>>,
    ) -> Result<T, StepError> {
        tokio::select! {
            biased;
            _ = self.stop.ordered() => Err(StepError::stopped()),
            result = work => result,
        }
    }

    /// The job context, or an empty one if it is not available. No platform needs it to run a job, and some
    /// installations do not let an executor reach it.
    pub(crate) async fn job_context(&self) -> Map<String, Value> {
        match timeout(
            CONTEXT_TIMEOUT,
            self.connections.platform.context(&self.step),
        )
        .await
        {
            Ok(Ok(context)) => return context,
            Ok(Err(error)) => warn!(
                error = chain(&error),
                "the job context is not available, the run continues without it"
            ),
            Err(_) => warn!("no job context in time, the run continues without it"),
        }
        Map::new()
    }

    /// Writes into the run's log why the run ends. The platform shows no other reason.
    pub(crate) async fn log_error(&self, error: Option<&str>, hint: Option<&str>) {
        if let Some(error) = error {
            self.log_failure(&format!("error: {error}")).await;
        }
        if let Some(hint) = hint {
            self.log.writer().line(&format!("hint: {hint}")).await;
        }
    }

    /// Writes a line about a failure into the run's log.
    pub(crate) async fn log_failure(&self, text: &str) {
        let line = self.palette().failure(text);
        self.log.writer().line(&line).await;
    }

    /// Writes the output of a command into the run's log.
    pub(crate) async fn log_output(&self, output: &[u8]) {
        let mut log = self.log.writer();
        log.write(output).await;
        log.close().await;
    }

    /// Colours of Mayfly's own lines.
    pub(crate) const fn palette(&self) -> Palette {
        Palette {
            color: self.config.run.color_output,
        }
    }

    /// Times a phase, and logs its beginning and end.
    pub(crate) async fn phase<T, E>(
        &self,
        phase: Phase,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        self.timer.time(phase, work, Result::is_ok).await
    }
}

/// Where the run's log is stored.
pub(crate) fn output_key(job: &JobData) -> ObjectKey {
    ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id)
}

fn open_log(
    config: &Config,
    job: &JobData,
    layout: &Layout,
    store: &Store,
    references: Option<&References>,
) -> Result<RunLog, StepError> {
    // A reference is no secret, and messages name it.
    let mut secrets = match references {
        Some(_) => secrets_of(&without_references(job)),
        None => secrets_of(job),
    };
    let logins = references
        .map(References::login_secrets)
        .unwrap_or_default();
    secrets.extend(
        logins
            .iter()
            .map(|secret| secret.expose_secret().to_owned()),
    );
    let own = store
        .secrets()
        .into_iter()
        .chain(config.platform.secrets())
        .chain(config.lease.secrets())
        .chain(config.redis.secrets());
    secrets.extend(own.map(|secret| secret.expose_secret().to_owned()));
    secrets.extend(handover::var(env::REPORT_KEY));
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
