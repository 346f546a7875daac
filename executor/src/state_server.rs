//! Serves the tool's `http` backend on loopback, and passes its requests on to the hub of the lease. The tool gets address and
//! password in its environment, so that a stored plan names neither.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;

use artifact_store::{BackendSettings, HubStore, StateLocked, StoreError};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::TryStreamExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use job_contract::chain;
use run_log::LogWriter;
use secrecy::{ExposeSecret as _, SecretString};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};
use uuid::Uuid;

use crate::terraform::raw_state::MAX_DOCUMENT_BYTES;

/// The user of the backend.
pub(crate) const USER: &str = "mayfly";

/// The server of one run. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct StateServer {
    address: SocketAddr,
    password: SecretString,
    _task: AbortOnDropHandle<()>,
}

type Body = UnsyncBoxBody<Bytes, StoreError>;

impl StateServer {
    /// Starts the server on a free port.
    pub(crate) fn start(hub: HubStore, log: LogWriter) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let password = Uuid::new_v4().simple().to_string();
        let credentials = STANDARD.encode(format!("{USER}:{password}"));
        let backend = Arc::new(Backend {
            hub,
            log,
            authorization: format!("Basic {credentials}").into(),
        });
        let task = tokio::spawn(accept(listener, backend));
        Ok(Self {
            address,
            password: password.into(),
            _task: AbortOnDropHandle::new(task),
        })
    }

    /// What the tool needs to use it.
    pub(crate) fn settings(&self) -> BackendSettings {
        BackendSettings::Http {
            address: format!("http://{}/state", self.address),
            user: USER.to_owned(),
            password: self.password.clone(),
        }
    }

    /// The password, which must never appear in a log.
    pub(crate) const fn secret(&self) -> &SecretString {
        &self.password
    }
}

async fn accept(listener: tokio::net::TcpListener, backend: Arc<Backend>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "a connection of the tool could not be accepted");
                tokio::task::yield_now().await;
                continue;
            }
        };
        let backend = Arc::clone(&backend);
        tokio::spawn(async move {
            let answer = service_fn(move |request| {
                let backend = Arc::clone(&backend);
                async move { Ok::<_, Infallible>(backend.answer(request).await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), answer);
            if let Err(error) = connection.await {
                debug!(%error, "a connection of the tool broke off");
            }
        });
    }
}

/// The backend of the tool.
struct Backend {
    hub: HubStore,
    log: LogWriter,
    authorization: SecretString,
}

impl Backend {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let given = request.headers().get(AUTHORIZATION);
        let is_own = given.is_some_and(|given| is_same(given.as_bytes(), &self.authorization));
        if !is_own {
            return status(StatusCode::UNAUTHORIZED);
        }
        if request.uri().path() != "/state" {
            return status(StatusCode::NOT_FOUND);
        }
        let method = request.method().as_str().to_owned();
        match self.pass_on(&method, request).await {
            Ok(response) => response,
            Err(Failure::Unread) => status(StatusCode::BAD_REQUEST),
            Err(Failure::Method) => status(StatusCode::METHOD_NOT_ALLOWED),
            Err(Failure::Store(error)) => {
                warn!(
                    method,
                    error = chain(&error),
                    "the hub did not do what the tool asked for"
                );
                // The tool shows only the status.
                let text = format!("The state could not be used: {}.", chain(&error));
                self.log.line(&text).await;
                status(match error {
                    StoreError::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
                    _ => StatusCode::CONFLICT,
                })
            }
        }
    }

    async fn pass_on(
        &self,
        method: &str,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Failure> {
        match method {
            "GET" => match self.hub.state().await? {
                None => Ok(status(StatusCode::NO_CONTENT)),
                Some(state) => {
                    let frames = state.chunks.map_ok(Frame::data);
                    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
                    let length = state.size_bytes.into();
                    response.headers_mut().insert(CONTENT_LENGTH, length);
                    Ok(response)
                }
            },
            "POST" => {
                let lock = lock_of(&request);
                let state = read(request).await?;
                self.hub.put_state(&state, lock.as_deref()).await?;
                Ok(status(StatusCode::OK))
            }
            "DELETE" => {
                self.hub.delete_state().await?;
                Ok(status(StatusCode::OK))
            }
            "LOCK" => {
                let info = read(request).await?;
                Ok(locked(self.hub.lock_state(&info).await?))
            }
            "UNLOCK" => {
                let info = read(request).await?;
                Ok(locked(self.hub.unlock_state(&info).await?))
            }
            _ => Err(Failure::Method),
        }
    }
}

/// Why a request is not answered as the tool wants it.
enum Failure {
    Unread,
    Method,
    Store(StoreError),
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Compares in constant time, because code of the run could measure it.
fn is_same(given: &[u8], own: &SecretString) -> bool {
    let own = own.expose_secret().as_bytes();
    given.len() == own.len()
        && given
            .iter()
            .zip(own)
            .fold(0, |differs, (given, own)| differs | (given ^ own))
            == 0
}

/// The id of the tool's lock, which it adds to its writes.
fn lock_of(request: &Request<Incoming>) -> Option<String> {
    let query = request.uri().query()?;
    let mut pairs = url::form_urlencoded::parse(query.as_bytes());
    let id = pairs.find(|(name, _)| name == "ID");
    id.map(|(_, id)| id.into_owned())
}

async fn read(request: Request<Incoming>) -> Result<Bytes, Failure> {
    let body = Limited::new(request.into_body(), MAX_DOCUMENT_BYTES)
        .collect()
        .await;
    body.map(|body| body.to_bytes())
        .map_err(|_| Failure::Unread)
}

fn locked(answer: StateLocked) -> Response<Body> {
    match answer {
        StateLocked::Yes => status(StatusCode::OK),
        StateLocked::By(holder) => {
            let mut response = Response::new(whole(holder));
            *response.status_mut() = StatusCode::LOCKED;
            response
        }
    }
}

fn status(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(whole(Bytes::new()));
    *response.status_mut() = status;
    response
}

fn whole(bytes: Bytes) -> Body {
    let body = Full::new(bytes);
    body.map_err(|never: Infallible| match never {})
        .boxed_unsync()
}
