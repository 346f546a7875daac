//! `api-launcher agent` takes tasks of a pool from a hub, and starts executors for them. The agent and its executors
//! connect to the hub only. They need no secret of the platform.
//!
//! - [`run`] is the command, with the options of [`AgentArgs`]. [`Agent::of_this_machine`] is an agent beside its hub in one process.
//! - `session` registers, sends heartbeats and waits for tasks. `supervise` handles one task from its lease to its end.
//! - A target starts executors: as processes ([`ProcessTarget`]) or as Jobs. Only the Jobs or run folders are kept. A
//!   restarted agent finds running executors there.
//!
//! An agent must not know its hub, except by its answers, nor the platform, nor the HTTP service of dispatches.

mod args;
mod check;
mod client;
mod config;
mod configure;
mod health;
mod kubernetes;
mod lease;
mod process;
mod session;
mod stop;
mod supervise;
mod target;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use job_contract::Exit;
use pool_protocol::instance::{Action, Phase, Registered};
use runtime::hardening::Hardened;
use secrecy::SecretString;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use url::Url;
use uuid::Uuid;

pub use self::args::AgentArgs;
pub use self::client::answer::Failure;
use self::client::token::PoolTokenSource;
use self::client::{AgentToken, HubClient};
pub use self::config::AgentSettings;
use self::config::{Settings, TargetSettings};
use self::kubernetes::KubernetesTarget;
use self::lease::{Leases, Stop, StopOrder, StoppedBy};
pub use self::process::{OpenProcessError, ProcessSettings, ProcessTarget};
pub use self::stop::{StopMode, StopSignals};
use self::supervise::TaskOutcome;
use self::target::{FoundExecutor, SharedTarget};
use cluster::ConnectError;
use cluster::check::CheckResult;
use http_service::diagnostics::refuse;
use processes::executor::prepare_for_processes;

/// How long a stopping agent waits for killed executors and for its last calls.
const LAST_CALLS_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the agent ended without a stop signal.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("could not start the runtime")]
    Runtime(#[source] io::Error),
    #[error("could not listen for signals")]
    Signals(#[source] io::Error),
    #[error("could not listen on `{address}`")]
    Listen {
        address: std::net::SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("could not make the client of the hub")]
    Client(#[source] reqwest::Error),
    #[error(transparent)]
    Process(#[from] OpenProcessError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("could not look for the executors of an earlier agent: {0}")]
    Find(String),
    #[error(transparent)]
    Unsupported(Failure),
    #[error(transparent)]
    Rejected(Failure),
    #[error("the task was declined: its executor could not be started here")]
    Declined,
}

impl AgentError {
    /// Returns the exit code.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Unsupported(_) => Exit::BadConfiguration,
            Self::Process(error) => error.exit(),
            Self::Connect(error) => error.exit(),
            // With `single_run`, there is no run whose failure could be reported.
            Self::Rejected(_) | Self::Declined => Exit::StepFailed,
            _ => Exit::Infrastructure,
        }
    }
}

/// One process of the agent.
#[derive(Debug)]
pub struct Agent {
    settings: AgentSettings,
    client: HubClient,
    target: SharedTarget,
    leases: Leases,
    /// The id of this process at the hub.
    system_id: String,
    registered: Mutex<Option<Registered>>,
    /// The last action that the hub ordered.
    action: watch::Sender<Action>,
    /// Notified when a heartbeat must be sent at once.
    heartbeat_now: Notify,
    /// Cancelled when the agent takes no more tasks.
    stopping: CancellationToken,
    /// Cancelled when tasks whose executor was not started must be declined.
    detaching: CancellationToken,
    /// The outcome of the last task.
    last_outcome: watch::Sender<Option<TaskOutcome>>,
}

/// Runs the agent until a signal or an order stops it, and returns the exit code. `show` shows what a check has found.
pub fn run(args: &AgentArgs, hardened: &Hardened, show: impl FnOnce(&[CheckResult]) -> Exit) -> u8 {
    if let Some(configure) = args.configure() {
        return configure::run(configure);
    }
    // Installs the provider for the whole process, unless there is one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let telemetry = args.telemetry.resolve();
    let settings = args.resolve();
    let (format, filter, settings) = match (telemetry, settings) {
        (Ok((format, filter)), Ok(settings)) => (format, filter, settings),
        (telemetry, settings) => {
            let mut errors = settings.err().unwrap_or_default();
            errors.extend(telemetry.err().unwrap_or_default());
            return refuse(&errors);
        }
    };
    runtime::telemetry::subscribe(format, filter);
    // The first line of the log names the file.
    if let Some(path) = &settings.file {
        info!(path = %path.display(), "read the configuration");
    } else {
        info!("there is no configuration file: the environment alone counts");
    }
    for warning in &settings.warnings {
        warn!("{warning}");
    }
    if matches!(settings.target, TargetSettings::Process(_)) {
        prepare_for_processes(hardened);
    }
    hardened.report();
    let done = if args.is_check() {
        in_runtime(check::check(settings)).map(|results| show(&results))
    } else {
        in_runtime(run_in(settings)).map(|()| Exit::Done)
    };
    match done {
        Ok(exit) => exit.code(),
        Err(failure) => {
            let cause = std::error::Error::source(&failure).map(ToString::to_string);
            error!(cause, "{failure}");
            failure.exit().code()
        }
    }
}

fn in_runtime<T>(work: impl Future<Output = Result<T, AgentError>>) -> Result<T, AgentError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(AgentError::Runtime)?;
    let result = runtime.block_on(work);
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn run_in(settings: Settings) -> Result<(), AgentError> {
    let signals = StopSignals::listen(settings.agent.on_stop).map_err(AgentError::Signals)?;
    let target: SharedTarget = match settings.target {
        TargetSettings::Process(process) => Arc::new(ProcessTarget::open(process)?),
        TargetSettings::Kubernetes(kubernetes) => {
            let name = settings.agent.name.clone();
            Arc::new(KubernetesTarget::connect(*kubernetes, name).await?)
        }
    };
    let listen = settings.agent.listen;
    let agent = Arc::new(Agent::new(settings.agent, settings.token, target)?);
    let health = match listen {
        Some(address) => {
            let listen = |source| AgentError::Listen { address, source };
            let listener = TcpListener::bind(address).await.map_err(listen)?;
            let address = listener.local_addr().map_err(listen)?;
            info!(%address, "answers health checks");
            Some(listener)
        }
        None => None,
    };
    let served = http_service::serve_health(health, health::router(Arc::clone(&agent)));
    tokio::select! {
        result = agent.work(signals) => result,
        never = served => match never {},
    }
}

impl Agent {
    /// Creates an agent that starts processes, for a hub in the same process. It sends no request yet.
    ///
    /// # Errors
    /// Fails without a client of the hub.
    pub fn of_this_machine(
        settings: AgentSettings,
        token: SecretString,
        processes: ProcessTarget,
    ) -> Result<Self, AgentError> {
        let token = AgentToken::Pool(PoolTokenSource::Given(token));
        Self::new(settings, token, Arc::new(processes))
    }

    /// Returns why the agent takes no tasks: it has not reached its hub yet, or not for a while, or is not accepted.
    pub fn problem(&self) -> Option<String> {
        health::problem(self)
    }

    fn new(
        settings: AgentSettings,
        token: AgentToken,
        target: SharedTarget,
    ) -> Result<Self, AgentError> {
        let client = HubClient::new(&settings.service_url, settings.hub_is_here, token);
        Ok(Self {
            settings,
            client: client.map_err(AgentError::Client)?,
            target,
            leases: Leases::default(),
            system_id: Uuid::new_v4().to_string(),
            registered: Mutex::default(),
            action: watch::Sender::new(Action::None),
            heartbeat_now: Notify::new(),
            stopping: CancellationToken::new(),
            detaching: CancellationToken::new(),
            last_outcome: watch::Sender::new(None),
        })
    }

    fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    /// Works until a stop signal, and then stops according to its settings.
    pub async fn work(self: &Arc<Self>, mut signals: StopSignals) -> Result<(), AgentError> {
        let (sender, mut unknown) = mpsc::unbounded_channel();
        let found = self.target.find().await.map_err(AgentError::Find)?;
        for found in found {
            match self.other_hub(&found) {
                None => self.adopt(found),
                Some(hub) => {
                    let (run, executor) = (&found.run, found.executor.name());
                    warn!(run, executor, %hub, "left an executor of another hub alone: an agent of that hub follows it");
                }
            }
        }
        // The scope ends calls in progress, for example a registration, so that they do not block the last call.
        let result = {
            let mut target_work = std::pin::pin!(self.target.work(sender));
            let mut heartbeats = std::pin::pin!(self.send_heartbeats());
            let mut run = std::pin::pin!(self.run_until_stop(&mut signals));
            loop {
                tokio::select! {
                    result = &mut run => break result,
                    failed = &mut heartbeats => break failed,
                    () = &mut target_work => {}
                    Some(found) = unknown.recv() => self.adopt(found),
                }
            }
        };
        if self.settings.disconnect_on_stop && result.is_ok() {
            let _ = tokio::time::timeout(LAST_CALLS_TIMEOUT, self.disconnect()).await;
        }
        if result.is_ok() {
            info!(leases = self.leases.len(), "stopped");
        }
        result
    }

    /// Returns the hub of an executor, if it is another one: this agent's hub would stop the run, and get what is not its own. The
    /// hub in this process has the same runs at each address.
    fn other_hub(&self, found: &FoundExecutor) -> Option<Url> {
        let url = found
            .url
            .as_deref()
            .filter(|_| !self.settings.hub_is_here)?;
        self.client.other_hub(&found.lease, url)
    }

    async fn run_until_stop(self: &Arc<Self>, signals: &mut StopSignals) -> Result<(), AgentError> {
        let mut action = self.action.subscribe();
        let ends = |action: &Action| matches!(action, Action::Drain | Action::Disconnect);
        let mode = tokio::select! {
            result = self.take_tasks() => {
                result?;
                None
            }
            () = self.idle() => {
                info!("no task has come for a while: stopping");
                None
            }
            mode = signals.next() => Some(mode),
            Ok(ordered) = action.wait_for(ends) => match *ordered {
                Action::Disconnect => Some(StopMode::Detach),
                _ => None,
            },
        };
        self.stopping.cancel();
        self.heartbeat_now.notify_one();
        self.stop_runs(mode, signals).await;
        let declined = *self.last_outcome.borrow() == Some(TaskOutcome::Declined);
        if mode.is_none() && self.settings.single_run && declined {
            return Err(AgentError::Declined);
        }
        Ok(())
    }

    /// Returns when there was no run for `idle_timeout`.
    async fn idle(&self) {
        let Some(timeout) = self.settings.idle_timeout else {
            return std::future::pending().await;
        };
        loop {
            self.leases.fewer_than(1).await;
            tokio::select! {
                () = tokio::time::sleep(timeout) => return,
                () = self.leases.at_least_one() => {}
            }
        }
    }

    /// Waits for the runs or stops them, according to the mode. Without a mode, waits for all runs. A signal leads to
    /// the next mode.
    async fn stop_runs(&self, mut mode: Option<StopMode>, signals: &mut StopSignals) {
        loop {
            info!(
                ?mode,
                runs = self.leases.len(),
                "stopping: no task is taken any more"
            );
            let all_ended = self.leases.fewer_than(1);
            let limit = match mode {
                None => None,
                Some(StopMode::Drain) => Some(self.settings.drain_timeout),
                Some(StopMode::Grace) => {
                    self.leases.order_all(stop_order(Stop::Terminate));
                    Some(self.settings.grace_timeout)
                }
                Some(StopMode::Force) => {
                    self.leases.order_all(stop_order(Stop::Kill));
                    Some(LAST_CALLS_TIMEOUT)
                }
                Some(StopMode::Detach) => {
                    self.detaching.cancel();
                    let prepared = self.leases.none_in(Phase::Preparing);
                    tokio::select! {
                        _ = tokio::time::timeout(LAST_CALLS_TIMEOUT, prepared) => {}
                        _ = signals.next() => {}
                    }
                    return;
                }
            };
            let limit = async {
                match limit {
                    Some(limit) => tokio::time::sleep(limit).await,
                    None => std::future::pending().await,
                }
            };
            mode = tokio::select! {
                () = all_ended => return,
                () = limit => match mode.and_then(StopMode::next) {
                    Some(next) => Some(next),
                    None => return,
                },
                ordered = signals.next() => match mode {
                    None => Some(ordered),
                    Some(mode) => match mode.next() {
                        Some(next) => Some(next),
                        None => return,
                    },
                },
            };
        }
    }
}

const fn stop_order(stop: Stop) -> StopOrder {
    StopOrder {
        stop,
        by: StoppedBy::Agent,
    }
}
