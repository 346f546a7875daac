//! `api-launcher serve`: starts the target and the HTTP service that the settings describe, and stops both.

pub mod config;
mod machine;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http_service::diagnostics::refuse;
use http_service::{Limits, Shutdown};
use hub::Hub;
use job_contract::report::ReportKey;
use job_contract::{Exit, chain, env};
use platform::report_key;
use processes::executor::prepare_for_processes;
use runtime::handover;
use runtime::hardening::Hardened;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use self::config::{ServeArgs, Settings, TargetSettings};
use self::machine::Machine;
use crate::dispatch::DispatchTarget;
use crate::dispatch::no_target::NoTarget;
use crate::failure::Failure;
use crate::http::{self, AppState, Gate, StatusPage};
use crate::kubernetes::dispatch_target::KubernetesTarget;
use crate::metrics::Metrics;

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
        if let Err(error) = handover::remove_file() {
            warn!(%error, "runs can read the platform's secret");
        }
    }
    hardened.report();
    match run(settings, key) {
        Ok(()) => Exit::Done.code(),
        Err(failure) => {
            let (message, whole) = (failure.to_string(), chain(&failure));
            // Without one the field is left out.
            let cause = whole[message.len()..].strip_prefix(": ");
            error!(cause, hint = failure.hint, "{message}");
            failure.exit.code()
        }
    }
}

fn run(settings: Settings, key: Option<ReportKey>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| failed("could not start the runtime", error))?;
    let result = runtime.block_on(run_in(settings, key));
    // Requests and files still at work after the bound are not waited for.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn run_in(settings: Settings, key: Option<ReportKey>) -> Result<(), Failure> {
    let shutdown = Shutdown::default();
    shutdown
        .on_signals(settings.drain)
        .map_err(|error| failed("could not listen for signals", error))?;
    let metrics = Metrics::default();
    let mut serving = shutdown.clone();
    if matches!(settings.target, TargetSettings::Process(_)) {
        // The agent of this machine ends before its hub, because the executors that it stops report to the hub.
        serving.graceful = CancellationToken::new();
    }
    let opened = open(settings.target, key, &metrics, &shutdown).await?;
    let hub = match settings.hub {
        Some(hub) => {
            let hub = Hub::open(*hub, metrics.registry(), serving.clone()).await;
            Some(Arc::new(
                hub.map_err(|error| Failure::of(error.exit(), error))?,
            ))
        }
        None => None,
    };
    let (target, machine) = opened.over(hub.as_ref())?;
    let (listener, address) = listen(settings.http.listen).await?;
    let health = match settings.http.health_listen {
        Some(address) => Some(listen(address).await?),
        None => None,
    };
    let (unauthenticated, open) = (settings.http.secret.is_none(), settings.http.open_page);
    // Without a file of pools, there are no tokens that show it.
    let page = hub.clone().filter(|_| open || settings.has_pools_file);
    let page = page.map(|hub| StatusPage { hub, open });
    let state = AppState::new(
        Gate::new(settings.http.secret, SystemTime::now),
        settings.routing,
        Arc::clone(&target),
        hub.clone(),
        page.clone(),
        metrics,
        shutdown.draining.clone(),
    )
    .with_allowed(settings.http.allowed);
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
    // The executors of a hub have connections too, also those of this machine.
    let limits = match &hub {
        Some(_) => Limits::of_hub(),
        None => Limits::of_launcher(),
    };
    let stop = serving.graceful.clone();
    let router = http::router(state.clone(), health.is_none());
    let service = http_service::serve(listener, router, limits, stop);
    let health = health.map(|(listener, _)| listener);
    let health_checks = http_service::serve_health(health, http::health_router(state));
    let hub_work = async {
        if let Some(hub) = &hub {
            hub.work().await;
        }
    };
    let agent_work = async {
        let Some(machine) = machine else {
            return Ok(());
        };
        let worked = machine
            .work(on_this_machine(address), shutdown.graceful.clone())
            .await;
        serving.graceful.cancel();
        worked
    };
    let work = async {
        let (worked, ..) = tokio::join!(agent_work, service, target.work(), hub_work);
        if let Some(hub) = &hub {
            hub.close().await;
        }
        // The service has ended, so no response starts another task.
        target.finish_background_tasks().await;
        worked
    };
    tokio::select! {
        worked = work => {
            worked.map_err(|error| {
                Failure::new(error.exit(), "the agent of this machine ended").because(error)
            })?;
            info!("stopped");
        }
        () = bound(&shutdown, settings.shutdown) => {
            warn!("stopped before all runs had ended: accepted runs are kept for the next start");
        }
        never = health_checks => match never {},
    }
    Ok(())
}

async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), Failure> {
    let failed = |error| failed(&format!("could not listen on `{address}`"), error);
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

fn failed(text: &str, error: io::Error) -> Failure {
    Failure::new(Exit::Infrastructure, text).because(error)
}

/// A target that is open. That of this machine still needs its hub.
enum OpenTarget {
    Whole(Arc<dyn DispatchTarget>),
    Machine(Box<Machine>),
}

async fn open(
    settings: TargetSettings,
    key: Option<ReportKey>,
    metrics: &Metrics,
    shutdown: &Shutdown,
) -> Result<OpenTarget, Failure> {
    Ok(match settings {
        TargetSettings::Kubernetes(settings) => {
            let (metrics, shutdown) = (metrics.clone(), shutdown.clone());
            let target = KubernetesTarget::connect(*settings, key, metrics, shutdown);
            OpenTarget::Whole(Arc::new(target.await?))
        }
        TargetSettings::Process(settings) => {
            OpenTarget::Machine(Box::new(Machine::open(*settings, key)?))
        }
        TargetSettings::None => OpenTarget::Whole(Arc::new(NoTarget)),
    })
}

/// What takes dispatches, and the agent of this machine.
type TargetAndAgent = (Arc<dyn DispatchTarget>, Option<Box<Machine>>);

impl OpenTarget {
    fn over(self, hub: Option<&Arc<Hub>>) -> Result<TargetAndAgent, Failure> {
        match (self, hub) {
            (Self::Whole(target), _) => Ok((target, None)),
            (Self::Machine(machine), Some(hub)) => {
                Ok((Arc::new(machine.target(hub)), Some(machine)))
            }
            // The settings of a machine have those of its hub.
            (Self::Machine(_), None) => {
                let text = "target `process` has no hub to take its dispatches";
                Err(Failure::new(Exit::Defect, text))
            }
        }
    }
}

/// An address that a client on this machine can open.
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

#[cfg(test)]
mod tests {
    use super::*;
    use runtime::setting::from_variables;

    #[test]
    fn a_machine_without_a_hub_does_not_serve() {
        let folder = tempfile::tempdir().unwrap();
        let args: ServeArgs = from_variables(&[
            (env::TARGET, "process"),
            (env::DATA_DIR, folder.path().to_str().unwrap()),
            (env::ALLOW_UNAUTHENTICATED, "true"),
        ]);
        let TargetSettings::Process(settings) = args.resolve(None).unwrap().target else {
            panic!("another target");
        };
        let machine = OpenTarget::Machine(Box::new(Machine::open(*settings, None).unwrap()));
        let failure = machine.over(None).map(drop).unwrap_err();
        assert_eq!(failure.exit, Exit::Defect);
    }
}
