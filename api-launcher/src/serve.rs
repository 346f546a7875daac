//! `api-launcher serve`: starts the target and the HTTP service that the settings describe, and stops both.

pub mod config;

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use job_contract::report::ReportKey;
use job_contract::{Exit, env};
use platform::report_key;
use runtime::handover;
use runtime::hardening::Hardened;
use runtime::setting::SettingError;
use tokio::net::TcpListener;
use tracing::{error, info, warn};

use self::config::{ServeArgs, Settings, TargetSettings};
use crate::dispatch::DispatchTarget;
use crate::dispatch::no_target::NoTarget;
use crate::http::{self, AppState, Gate, Limits, StatusPage};
use crate::hub::page::Source;
use crate::hub::{Hub, HubError};
use crate::kubernetes::dispatch_target::{KubernetesTarget, KubernetesTargetError};
use crate::local::dispatch_target::journal::Journal;
use crate::local::dispatch_target::{OpenError, ProcessTarget};
use crate::local::executor::prepare_for_processes;
use crate::metrics::Metrics;
use crate::shutdown::{Shutdown, stop_with_parent};

/// Why the service ended before it was told to.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("could not start the runtime")]
    Runtime(#[source] io::Error),
    #[error("could not listen for signals")]
    Signals(#[source] io::Error),
    #[error("could not listen on `{address}`")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Kubernetes(#[from] KubernetesTargetError),
    #[error(transparent)]
    Process(#[from] OpenError),
    #[error(transparent)]
    Hub(#[from] HubError),
}

impl ServeError {
    fn exit(&self) -> Exit {
        match self {
            Self::Kubernetes(KubernetesTargetError::Connect(error)) => error.exit(),
            Self::Kubernetes(KubernetesTargetError::Data(error)) => error.exit(),
            Self::Process(error) => error.exit(),
            Self::Hub(error) => error.exit(),
            _ => Exit::Infrastructure,
        }
    }

    /// What to do about it.
    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Kubernetes(KubernetesTargetError::Data(error))
            | Self::Process(OpenError::Data(error)) => error.hint(),
            _ => None,
        }
    }
}

/// Serves until a signal says otherwise, and returns the exit code.
pub fn serve(args: &ServeArgs, hardened: &Hardened) -> u8 {
    // One provider for the whole process; an earlier one stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let telemetry = args.telemetry.resolve();
    // Read here and nowhere else; it reaches no argument, no log and no child.
    let secret = handover::var(env::INTERNAL_SECRET);
    let key = report_key::from_lookup(handover::var);
    let settings = args.resolve(secret.as_deref());
    let (format, filter, settings, key) = match (telemetry, settings, key) {
        (Ok((format, filter)), Ok(settings), Ok(key)) => (format, filter, settings, key),
        (telemetry, settings, key) => {
            let mut errors = settings.err().unwrap_or_default();
            errors.extend(telemetry.err().unwrap_or_default());
            errors.extend(key.err());
            return refuse(&errors);
        }
    };
    runtime::telemetry::subscribe(format, filter);
    if matches!(settings.target, TargetSettings::Process(_)) {
        prepare_for_processes(hardened);
    }
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

/// Prints the wrong settings, and returns the exit code.
pub(crate) fn refuse(errors: &[SettingError]) -> u8 {
    let mut text = String::from("error: the configuration cannot be used\n");
    for error in errors {
        text = format!("{text}  {} {}\n", error.variable, error.text);
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
    stop_with_parent();
    let metrics = Metrics::default();
    let (target, journal) = open(settings.target, key, &metrics, &shutdown).await?;
    let hub = match settings.hub {
        Some(hub) => Some(Arc::new(Hub::open(*hub, &metrics, shutdown.clone()).await?)),
        None => None,
    };
    let (listener, address) = listen(settings.http.listen).await?;
    let health = match settings.http.health_listen {
        Some(address) => Some(listen(address).await?),
        None => None,
    };
    let unauthenticated = settings.http.secret.is_none();
    let open = settings.http.open_page;
    let page = match (&hub, journal) {
        (Some(hub), _) => Some(Source::Hub(Arc::clone(hub))),
        // There are no tokens that show it.
        (None, journal) => journal.filter(|_| open).map(Source::Machine),
    };
    let page = page.map(|source| StatusPage { source, open });
    let state = AppState::new(
        Gate::new(settings.http.secret, SystemTime::now),
        settings.routing,
        Arc::clone(&target),
        hub.clone(),
        page.clone(),
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
    if page.is_some() {
        info!(url = %format_args!("http://{}/ui", on_this_machine(address)), "status page");
    }
    if let Some((_, address)) = &health {
        info!(%address, "answers health checks and serves metrics");
    }
    if unauthenticated {
        warn!("requests are accepted without a token");
    }
    let limits = match &hub {
        Some(_) => Limits::of_hub(),
        None => Limits::of_launcher(),
    };
    let stop = shutdown.graceful.clone();
    let router = http::router(state.clone(), health.is_none());
    let service = http::serve(listener, router, limits, stop);
    let health = health.map(|(listener, _)| listener);
    let health_checks = http::serve_health(health, http::health_router(state));
    let hub_work = async {
        if let Some(hub) = &hub {
            hub.work().await;
        }
    };
    let work = async {
        tokio::join!(service, target.work(), hub_work);
        if let Some(hub) = &hub {
            hub.close().await;
        }
        // The service has ended, so no response starts another task.
        target.finish_background_tasks().await;
    };
    tokio::select! {
        () = work => info!("stopped"),
        () = bound(&shutdown, settings.shutdown) => {
            warn!("stopped before all runs had ended: accepted runs are kept for the next start");
        }
        never = health_checks => match never {},
    }
    Ok(())
}

async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ServeError> {
    let failed = |source| ServeError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

async fn open(
    settings: TargetSettings,
    key: Option<ReportKey>,
    metrics: &Metrics,
    shutdown: &Shutdown,
) -> Result<(Arc<dyn DispatchTarget>, Option<Arc<Journal>>), ServeError> {
    let (metrics, shutdown) = (metrics.clone(), shutdown.clone());
    Ok(match settings {
        TargetSettings::Kubernetes(settings) => {
            let target = KubernetesTarget::connect(*settings, key, metrics, shutdown).await?;
            (Arc::new(target), None)
        }
        TargetSettings::Process(settings) => {
            let target = ProcessTarget::open(settings, key, metrics, shutdown)?;
            let journal = target.journal();
            (Arc::new(target), Some(journal))
        }
        TargetSettings::None => (Arc::new(NoTarget), None),
    })
}

/// An address that a browser on this machine can open.
fn on_this_machine(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

/// Waits for the second signal, or for the timeout after the first.
async fn bound(shutdown: &Shutdown, timeout: Duration) {
    shutdown.draining.cancelled().await;
    tokio::select! {
        () = shutdown.immediate.cancelled() => {}
        () = tokio::time::sleep(timeout) => {}
    }
}
