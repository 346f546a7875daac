//! Accepts connections, limits their number and time, and ends them gracefully. axum's own server has no such limits.
//!
//! - [`places`] limits the connections of each client address, and of all.
//! - [`stream`] ends a connection whose peer does not read.

mod places;
mod stream;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use runtime::open_files::allow_open_files;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;
use tracing::{debug, warn};

use self::places::{Place, Places};
use self::stream::WriteTimeout;

/// The largest head of a request, and how much of a response waits in memory for a slow peer.
const MAX_BUFFER_BYTES: usize = 16 * 1024;
/// The same in the kernel. A fast peer does not notice it.
#[cfg(target_os = "linux")]
const MAX_UNSENT_BYTES: u32 = 16 * 1024;
/// Open files for everything except connections.
const OTHER_FILES: u64 = 512;
/// How long to wait if the system cannot accept a connection, for example without a free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The shortest time between two warnings about refused connections.
const WARNING_INTERVAL: Duration = Duration::from_mins(1);

/// The limits of a listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most connections.
    connections: usize,
    /// Those of one client address.
    of_client: usize,
    /// How long the first head of a request may take.
    first_head: Duration,
    /// How long a connection may be idle between two requests, with the head of the next.
    idle: Duration,
    /// How long a peer may read nothing of a response.
    unread: Duration,
}

impl Limits {
    /// For probes and scrapers.
    const HEALTH: Self = Self::of(64, 8);

    const fn of(connections: usize, of_client: usize) -> Self {
        Self {
            connections,
            of_client,
            first_head: Duration::from_secs(10),
            idle: Duration::from_secs(30),
            unread: Duration::from_secs(30),
        }
    }

    /// For a launcher alone: far more than a platform opens.
    pub fn of_launcher() -> Self {
        Self::within_open_files(512)
    }

    /// For a hub: an agent has a connection that waits for a task, and each executor of a pool has some.
    pub fn of_hub() -> Self {
        Self::within_open_files(8192)
    }

    /// Raises the limit of open files for so many connections. Makes them fewer where the system does not allow it.
    fn within_open_files(connections: u64) -> Self {
        // The hub may open a connection to the platform for each connection of an executor.
        let files = allow_open_files(2 * connections + OTHER_FILES);
        let possible = files.saturating_sub(OTHER_FILES) / 2;
        let connections = connections.min(possible.max(64));
        let connections = usize::try_from(connections).unwrap_or(usize::MAX);
        // A proxy has one address for all its clients, so a small share would be too few.
        Self::of(connections, connections / 2)
    }
}

/// Serves until `stop`, then completes open requests.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits, stop: CancellationToken) {
    let graceful = GracefulShutdown::new();
    let places = Places::new(limits.connections, limits.of_client);
    let mut warned: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if let Some(place) = places.enter(peer.ip()) {
            let router = router.clone();
            let watcher = graceful.watcher();
            tokio::spawn(handle(stream, peer, place, router, limits, watcher));
        } else if warned.is_none_or(|warned| warned.elapsed() >= WARNING_INTERVAL) {
            warned = Some(Instant::now());
            warn!(
                client = %peer.ip(),
                limit = limits.connections,
                "too many connections with requests in progress: closing new ones"
            );
        }
    }
    drop(listener);
    graceful.shutdown().await;
}

/// Serves health checks, if there is a listener for them. Never returns: the answers matter until the process ends.
pub async fn serve_health(listener: Option<TcpListener>, router: Router) -> Infallible {
    if let Some(listener) = listener {
        serve(listener, router, Limits::HEALTH, CancellationToken::new()).await;
    }
    std::future::pending().await
}

/// Handles the requests of a connection until it ends or exceeds a limit.
async fn handle(
    stream: TcpStream,
    peer: SocketAddr,
    place: Place,
    router: Router,
    limits: Limits,
    watcher: Watcher,
) {
    set_options(&stream);
    let place = Arc::new(place);
    let of_requests = Arc::clone(&place);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let busy = of_requests.begin_request();
        request.extensions_mut().insert(ConnectInfo(peer));
        let response = router.clone().oneshot(request);
        async move {
            let response: Response<Body> = response.await?;
            // The connection is busy until the whole body was taken.
            Ok::<_, Infallible>(response.map(|body| {
                body.map_err(move |error| {
                    let _ = &busy;
                    error
                })
            }))
        }
    });
    let stream = TokioIo::new(WriteTimeout::new(stream, limits.unread));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.idle)
        .max_buf_size(MAX_BUFFER_BYTES)
        .serve_connection(stream, service);
    let first_head_late = async {
        tokio::time::sleep(limits.first_head).await;
        if place.had_request() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        biased;
        () = place.lost() => debug!(%peer, "closed an idle connection: another one needs its place"),
        () = first_head_late => debug!(%peer, "no request has come"),
        ended = watcher.watch(connection) => if let Err(error) = ended {
            debug!(%peer, %error, "a connection ended early");
        },
    }
}

fn set_options(stream: &TcpStream) {
    // Waiting to fill a packet would delay small responses.
    let _ = stream.set_nodelay(true);
    // Bounds the memory of the kernel for a peer that does not read. It also makes small progress of a slow peer visible.
    #[cfg(target_os = "linux")]
    let _ = socket2::SockRef::from(stream).set_tcp_notsent_lowat(MAX_UNSENT_BYTES);
}
