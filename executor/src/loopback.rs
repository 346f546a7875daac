//! A server for the programs of one run, on loopback. Other users of the machine can reach it too, so each service has a password.

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, TryStreamExt as _};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};
use uuid::Uuid;

/// The pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections at a time. Other users of the machine can open them too.
const CONNECTIONS: usize = 64;
/// How long a request may take until its headers have come.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// A running server. It ends with its connections when it is dropped.
#[derive(Debug)]
pub(crate) struct Loopback {
    address: SocketAddr,
    _task: AbortOnDropHandle<()>,
}

pub(crate) type BodyError = Box<dyn Error + Send + Sync>;
pub(crate) type Body = UnsyncBoxBody<Bytes, BodyError>;

impl Loopback {
    /// Starts a server on a free port.
    pub(crate) fn start<A, F>(answer: A) -> io::Result<Self>
    where
        A: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
        F: Future<Output = Response<Body>> + Send + 'static,
    {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let task = tokio::spawn(accept(listener, answer));
        Ok(Self {
            address,
            _task: AbortOnDropHandle::new(task),
        })
    }

    /// Where it listens.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }
}

async fn accept<A, F>(listener: tokio::net::TcpListener, answer: A)
where
    A: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        while connections.len() >= CONNECTIONS {
            connections.join_next().await;
        }
        while connections.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "a connection of a program of the run could not be accepted");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let answer = answer.clone();
        connections.spawn(async move {
            let service = service_fn(move |request| {
                let answered = answer(request);
                async move { Ok::<_, Infallible>(answered.await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                debug!(%error, "a connection of a program of the run broke off");
            }
        });
    }
}

/// A password that nobody can guess.
pub(crate) fn new_password() -> SecretString {
    Uuid::new_v4().simple().to_string().into()
}

/// Compares in constant time, because code of the run could measure it.
pub(crate) fn is_same(given: &[u8], own: &SecretString) -> bool {
    let own = own.expose_secret().as_bytes();
    given.len() == own.len()
        && given
            .iter()
            .zip(own)
            .fold(0, |differs, (given, own)| differs | (given ^ own))
            == 0
}

/// An empty answer.
pub(crate) fn status(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(whole(Bytes::new()));
    *response.status_mut() = status;
    response
}

/// A body that is in memory.
pub(crate) fn whole(bytes: Bytes) -> Body {
    let body = Full::new(bytes);
    body.map_err(|never: Infallible| match never {})
        .boxed_unsync()
}

/// A body that is passed on as it comes.
pub(crate) fn streamed<S>(chunks: S) -> Body
where
    S: Stream<Item = Result<Bytes, BodyError>> + Send + 'static,
{
    StreamBody::new(chunks.map_ok(Frame::data)).boxed_unsync()
}
