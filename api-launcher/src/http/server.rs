//! Accepts connections, limits their number and time, and ends them gracefully. axum's own server waits without a limit for
//! the head of a request.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;
use tracing::{debug, warn};

/// Far more than a platform opens; few enough for the usual limit of open files.
pub(crate) const FEW_CONNECTIONS: usize = 512;
/// An agent has one that waits for a task, and each executor of a pool has some.
pub(crate) const MANY_CONNECTIONS: usize = 8192;
/// The largest head of a request.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// How long the head of a request may take, and an idle connection stay open.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to rest when the system has no connection to give, as when file descriptors are used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stop`, then lets open requests end.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    max_connections: usize,
    stop: CancellationToken,
) {
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(max_connections));
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = next(&listener, &places) => accepted,
        };
        let (stream, peer, place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let router = router
            .clone()
            .map_request(move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(ConnectInfo(peer));
                request
            });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!(%error, "a connection ended early");
            }
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

async fn next(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let place = Arc::clone(places)
        .acquire_owned()
        .await
        .map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    // Answers are small: waiting to fill a packet would only delay them.
    let _ = stream.set_nodelay(true);
    Ok((stream, peer, place))
}
