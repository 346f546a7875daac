//! `api-launcher serve`: puts configuration, target and HTTP service together, and takes them apart again when
//! it is told to stop.

pub mod config;

use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use job_contract::report::ReportKey;
use job_contract::{Exit, env};
use platform::report_key;
use tokio::net::TcpListener;
use tracing::{error, info, warn};

use self::config::{PlatformSetupError, Problem, ServeArgs, Settings, TargetSettings};
use crate::cluster::{Cluster, ConnectError};
use crate::dispatch::Target;
use crate::dispatch::kubernetes::KubernetesTarget;
use crate::dispatch::process::{OpenError, ProcessTarget};
use crate::dispatch::reporter::PlatformReporter;
use crate::http::{self, AppState, Gate};
use crate::metrics::Metrics;
use crate::run::data::{DataDir, DataError};
use crate::shutdown::Shutdown;

/// Why the service ended before it was told to.
#[derive(Debug, thiserror::Error)]
enum ServeError {
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
    #[error(transparent)]
    Target(#[from] OpenError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Platform(#[from] PlatformSetupError),
}

impl ServeError {
    fn exit(&self) -> Exit {
        match self {
            Self::Connect(error) => error.exit(),
            Self::Target(error) => error.exit(),
            Self::Data(error) => error.exit(),
            _ => Exit::Infrastructure,
        }
    }

    /// What to do about it.
    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Data(error) | Self::Target(OpenError::Data(error)) => error.hint(),
            _ => None,
        }
    }
}

/// Serves until a signal says otherwise, and returns the exit code.
pub fn serve(args: &ServeArgs) -> u8 {
    // The secret stays in this process's memory and environment, out of reach of what runs beside it.
    let hardened = runtime::hardening::process();
    // One provider for the whole process; an earlier one stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let telemetry = args.telemetry.resolve();
    // Read here and nowhere else; it reaches no argument, no log and no child.
    let secret = std::env::var(env::INTERNAL_SECRET).ok();
    let key = report_key::from_lookup(|name| std::env::var(name).ok());
    let settings = args.resolve(secret.as_deref());
    let (format, filter, settings, key) = match (telemetry, settings, key) {
        (Ok((format, filter)), Ok(settings), Ok(key)) => (format, filter, settings, key),
        (telemetry, settings, key) => {
            let mut problems = settings.err().unwrap_or_default();
            problems.extend(telemetry.err().unwrap_or_default());
            problems.extend(key.err().map(|problem| Problem {
                variable: problem.variable.clone(),
                text: problem.text,
            }));
            return refuse(&problems);
        }
    };
    runtime::telemetry::subscribe(format, filter);
    hardened.report();
    match run(settings, key) {
        Ok(()) => Exit::Done.code(),
        Err(failure) => {
            let cause = std::error::Error::source(&failure).map(ToString::to_string);
            // Without one the field is left out.
            error!(cause, hint = failure.hint(), "{failure}");
            failure.exit().code()
        }
    }
}

fn refuse(problems: &[Problem]) -> u8 {
    let mut text = String::from("error: the configuration cannot be used\n");
    for problem in problems {
        text = format!("{text}  {problem}\n");
    }
    let _ = io::stderr().write_all(text.as_bytes());
    Exit::BadConfiguration.code()
}

fn run(settings: Settings, key: Option<ReportKey>) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(ServeError::Runtime)?;
    let result = runtime.block_on(run_in(settings, key));
    // Requests and files still at work after the bound are not waited for.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn run_in(settings: Settings, key: Option<ReportKey>) -> Result<(), ServeError> {
    let shutdown = Shutdown::default();
    shutdown
        .on_signals(settings.drain)
        .map_err(ServeError::Signals)?;
    let metrics = Metrics::default();
    let target = open(settings.target, key, &metrics, &shutdown).await?;
    let listen = |source| ServeError::Listen {
        address: settings.listen,
        source,
    };
    let listener = TcpListener::bind(settings.listen).await.map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;
    let target = Arc::new(target);
    let unauthenticated = settings.secret.is_none();
    let state = AppState::new(
        Gate::new(settings.secret, SystemTime::now),
        settings.routing,
        Arc::clone(&target),
        metrics,
        shutdown.draining.clone(),
    );
    info!(
        %address,
        // `target` is the name of the module in every line.
        dispatch_target = target.name(),
        version = env!("CARGO_PKG_VERSION"),
        "listening"
    );
    if unauthenticated {
        warn!("requests are accepted without a token");
    }
    let service = http::serve(listener, http::router(state), shutdown.graceful.clone());
    let work = async {
        tokio::join!(service, target.work());
        // Only now nobody can be promised anything more.
        target.keep_promises().await;
    };
    tokio::select! {
        () = work => info!("stopped"),
        () = bound(&shutdown, settings.shutdown) => {
            warn!("stopped before everything had ended: what is accepted is kept for the next start");
        }
    }
    Ok(())
}

async fn open(
    settings: TargetSettings,
    key: Option<ReportKey>,
    metrics: &Metrics,
    shutdown: &Shutdown,
) -> Result<Target, ServeError> {
    Ok(match settings {
        TargetSettings::Kubernetes {
            deployment,
            watching,
            platform,
            data_dir,
        } => {
            for warning in &deployment.warnings {
                warn!("{warning}");
            }
            if key.is_none() {
                warn!(
                    hint = format!("give launcher and executors the same {}", env::REPORT_KEY),
                    "final reports cannot be verified: runs are judged by exit codes alone"
                );
            }
            let cluster = Cluster::connect(Some(deployment.namespace.clone())).await?;
            let cluster = cluster.with_report_key(key);
            let reporter = match platform {
                Some(platform) => Some(platform.open()?),
                None => match data_dir {
                    Some(path) => {
                        let data = DataDir::locate(Some(&path))?.create()?;
                        Some(PlatformReporter::local(data.path()))
                    }
                    None => None,
                },
            };
            let target = KubernetesTarget::new(
                cluster,
                *deployment,
                *watching,
                reporter,
                metrics.clone(),
                shutdown.clone(),
            );
            Target::Kubernetes(Box::new(target))
        }
        TargetSettings::Process(settings) => Target::Process(ProcessTarget::open(
            settings,
            key,
            metrics.clone(),
            shutdown.clone(),
        )?),
    })
}

/// The end of patience: the second signal, or so long after the first.
async fn bound(shutdown: &Shutdown, patience: Duration) {
    shutdown.draining.cancelled().await;
    tokio::select! {
        () = shutdown.immediate.cancelled() => {}
        () = tokio::time::sleep(patience) => {}
    }
}
