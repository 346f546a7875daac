//! `api-launcher agent`: takes tasks of a pool from a hub and runs their executors here. It needs nothing of the platform: it
//! speaks to the hub alone, and so do its executors.
//!
//! `session` registers, says that the agent lives, and waits for tasks. `supervise` carries one task from its lease to its
//! end. A [`target::Target`] starts executors. The cluster or the folder of the executors is the only record: an agent that
//! starts again finds there what runs.

mod client;
pub(crate) mod config;
mod configure;
mod health;
mod kubernetes;
pub(crate) mod lease;
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
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use uuid::Uuid;

use self::client::HubClient;
use self::client::answer::Failure;
pub(crate) use self::config::args::AgentArgs;
use self::config::{Settings, TargetSettings};
use self::kubernetes::KubernetesTarget;
use self::lease::{Leases, Stop, StopOrder, StoppedBy};
use self::process::{OpenProcessError, ProcessTarget};
use self::stop::{StopMode, StopSignals};
use self::supervise::TaskOutcome;
use self::target::SharedTarget;
use crate::http;
use crate::kubernetes::cluster::ConnectError;
use crate::serve::refuse;
use crate::shutdown::stop_with_parent;

/// How long executors that are ended at once, and calls in progress, are waited for.
const LAST_CALLS_TIMEOUT: Duration = Duration::from_secs(10);
/// Far more than there are probes.
const HEALTH_CONNECTIONS: usize = 32;

/// Why the agent ended by itself.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
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
    #[error("the task was handed back: its executor could not be started here")]
    HandedBack,
}

impl AgentError {
    fn exit(&self) -> Exit {
        match self {
            Self::Unsupported(_) => Exit::BadConfiguration,
            Self::Process(error) => error.exit(),
            Self::Connect(error) => error.exit(),
            // The one run of `single_run` was not there to fail.
            Self::Rejected(_) | Self::HandedBack => Exit::StepFailed,
            _ => Exit::Infrastructure,
        }
    }
}

/// One process of the agent.
#[derive(Debug)]
pub(crate) struct Agent {
    settings: config::AgentSettings,
    client: HubClient,
    target: SharedTarget,
    leases: Leases,
    /// Names this process to the hub.
    system_id: String,
    registered: Mutex<Option<Registered>>,
    /// What the hub has ordered last.
    action: watch::Sender<Action>,
    /// The hub has to hear something soon.
    beat_now: Notify,
    /// No task is taken any more.
    leaving: CancellationToken,
    /// What was not started yet is handed back.
    detaching: CancellationToken,
    /// How the last task went.
    last_outcome: watch::Sender<Option<TaskOutcome>>,
}

/// Runs until a signal or an order ends it, and returns the exit code.
pub(crate) fn run(args: &AgentArgs) -> u8 {
    if let Some(configure) = args.configure() {
        return configure::run(configure);
    }
    // The tokens stay in this process's memory and environment, out of reach of what runs beside it.
    let hardened = runtime::hardening::process();
    // One provider for the whole process; an earlier one stays.
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
    // Its path is in the first line.
    if let Some(path) = &settings.file {
        info!(path = %path.display(), "read the configuration");
    } else {
        info!("there is no configuration file: the environment alone counts");
    }
    for warning in &settings.warnings {
        warn!("{warning}");
    }
    hardened.report();
    match run_settings(settings) {
        Ok(()) => Exit::Done.code(),
        Err(failure) => {
            let cause = std::error::Error::source(&failure).map(ToString::to_string);
            error!(cause, "{failure}");
            failure.exit().code()
        }
    }
}

fn run_settings(settings: Settings) -> Result<(), AgentError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(AgentError::Runtime)?;
    let result = runtime.block_on(run_in(settings));
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn run_in(settings: Settings) -> Result<(), AgentError> {
    let signals = StopSignals::listen(settings.agent.on_stop).map_err(AgentError::Signals)?;
    stop_with_parent();
    let target: SharedTarget = match settings.target {
        TargetSettings::Process(process) => Arc::new(ProcessTarget::open(process)?),
        TargetSettings::Kubernetes(kubernetes) => {
            let name = settings.agent.name.clone();
            Arc::new(KubernetesTarget::connect(*kubernetes, name).await?)
        }
    };
    let client =
        HubClient::new(&settings.agent.service_url, settings.token).map_err(AgentError::Client)?;
    let listen = settings.agent.listen;
    let agent = Arc::new(Agent {
        settings: settings.agent,
        client,
        target,
        leases: Leases::default(),
        system_id: Uuid::new_v4().to_string(),
        registered: Mutex::default(),
        action: watch::Sender::new(Action::None),
        beat_now: Notify::new(),
        leaving: CancellationToken::new(),
        detaching: CancellationToken::new(),
        last_outcome: watch::Sender::new(None),
    });
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
    let served = async {
        match health {
            Some(listener) => {
                let router = health::router(Arc::clone(&agent));
                http::serve(
                    listener,
                    router,
                    HEALTH_CONNECTIONS,
                    CancellationToken::new(),
                )
                .await;
            }
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        result = agent.work(signals) => result,
        () = served => Ok(()),
    }
}

impl Agent {
    /// Whether no task is taken any more.
    fn is_leaving(&self) -> bool {
        self.leaving.is_cancelled()
    }

    /// Works until a stop signal. Then it stops as its settings say.
    async fn work(self: &Arc<Self>, mut signals: StopSignals) -> Result<(), AgentError> {
        let (sender, mut unknown) = mpsc::unbounded_channel();
        let found = self.target.find().await.map_err(AgentError::Find)?;
        for found in found {
            self.adopt(found);
        }
        // What is still under way when it ends, as a registration, must not be in the way of the last call.
        let result = {
            let mut target_work = std::pin::pin!(self.target.work(sender));
            let mut beat = std::pin::pin!(self.beat());
            let mut run = std::pin::pin!(self.take_and_leave(&mut signals));
            loop {
                tokio::select! {
                    result = &mut run => break result,
                    failed = &mut beat => break failed,
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

    async fn take_and_leave(self: &Arc<Self>, signals: &mut StopSignals) -> Result<(), AgentError> {
        let mut action = self.action.subscribe();
        let ends = |action: &Action| matches!(action, Action::Drain | Action::Disconnect);
        let mode = tokio::select! {
            polled = self.poll() => {
                polled?;
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
        self.leaving.cancel();
        self.beat_now.notify_one();
        self.leave(mode, signals).await;
        let handed_back = *self.last_outcome.borrow() == Some(TaskOutcome::HandedBack);
        if mode.is_none() && self.settings.single_run && handed_back {
            return Err(AgentError::HandedBack);
        }
        Ok(())
    }

    /// Returns once nothing has run here for the time that is set.
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

    /// Sees to what runs, each mode in its way. Without a mode, it waits for all runs. A signal leads to the next mode.
    async fn leave(&self, mut mode: Option<StopMode>, signals: &mut StopSignals) {
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
