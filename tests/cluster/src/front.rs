//! What every client of a test talks to: plain HTTP, on loopback if a test does not say otherwise, in front of the API server.
//!
//! It knows who asks, records what is asked, lets requests go wrong as a test asks, and answers `pods/log`, because the
//! containers are its own cluster's. Everything else is the business of the API server behind it.

pub(crate) mod faults;
pub(crate) mod logs;
pub(crate) mod recorder;
mod request;
mod status;
pub(crate) mod upstream;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, Request, Response, header};
use faults::{Fault, Faults};
use futures_util::{StreamExt as _, stream};
use hyper::body::Incoming;
use logs::Logs;
use recorder::Recorder;
use request::{Query, Target};
use serde_json::{Value, json};
use status::{ApiError, json_response};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use upstream::Upstream;

use crate::clock;
use crate::rights::ADMIN;

const TOKEN: &str = "token-of-";

/// The bearer token of an identity.
pub(crate) fn token(identity: &str) -> String {
    format!("{TOKEN}{identity}")
}

/// A request that gets no answer: its connection ends.
#[derive(Debug, thiserror::Error)]
#[error("connection dropped")]
struct Dropped;

/// The listener and what it keeps of requests.
#[derive(Debug)]
pub(crate) struct Front {
    pub(crate) upstream: Upstream,
    pub(crate) recorder: Recorder,
    pub(crate) faults: Faults,
    pub(crate) logs: Arc<Logs>,
    address: SocketAddr,
    /// Changes when watches are cut.
    cuts: watch::Sender<u64>,
    /// Seconds by which the dates of responses are late.
    ahead: AtomicU64,
    stop: CancellationToken,
}

impl Front {
    /// Listens on a free port of an address until `stop`.
    pub(crate) async fn start(
        upstream: Upstream,
        address: IpAddr,
        stop: CancellationToken,
    ) -> io::Result<Arc<Self>> {
        let listener = TcpListener::bind((address, 0)).await?;
        let front = Arc::new(Self {
            upstream,
            recorder: Recorder::default(),
            faults: Faults::default(),
            logs: Arc::default(),
            address: listener.local_addr()?,
            cuts: watch::Sender::new(0),
            ahead: AtomicU64::new(0),
            stop,
        });
        tokio::spawn(Arc::clone(&front).accept(listener));
        Ok(front)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    async fn accept(self: Arc<Self>, listener: TcpListener) {
        loop {
            let connection = tokio::select! {
                connection = listener.accept() => connection,
                () = self.stop.cancelled() => return,
            };
            let Ok((stream, _)) = connection else {
                continue;
            };
            let front = Arc::clone(&self);
            tokio::spawn(async move {
                let stop = front.stop.clone();
                let service = hyper::service::service_fn(move |request| {
                    // What has come is finished and recorded, even when its client does not live to see it.
                    let served = tokio::spawn(Arc::clone(&front).serve(request));
                    async move { served.await.map_err(|_| Dropped)? }
                });
                let io = hyper_util::rt::TokioIo::new(stream);
                let serving =
                    hyper::server::conn::http1::Builder::new().serve_connection(io, service);
                tokio::select! {
                    // A client that goes away is no concern of the server.
                    _ = serving => {}
                    () = stop.cancelled() => {}
                }
            });
        }
    }

    async fn serve(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Dropped> {
        let identity = match identity(&request) {
            Ok(identity) => identity,
            Err(error) => return Ok(error.response()),
        };
        let path = request.uri().path().to_owned();
        let query = request.uri().query().unwrap_or("").to_owned();
        let target = request::target(request.method(), &path, &Query::parse(&query));
        let target = target.unwrap_or_default();
        let entry = entry(&identity, &path, &query, &target);
        let fault = self.faults.take(&entry);
        let at = self.recorder.begin(recorder::Request {
            ordered: fault.is_some(),
            ..entry
        });
        let mut response = match fault {
            Some(Fault::Hang) => {
                self.stop.cancelled().await;
                return Err(Dropped);
            }
            Some(Fault::DropBefore) => return Err(Dropped),
            Some(Fault::DropAfter) => {
                let _ = self.answer(&identity, request, &target).await;
                return Err(Dropped);
            }
            Some(Fault::Expired) if target.verb == "watch" => expired_watch(),
            Some(fault) => refusal(&fault).response(),
            None => self.answer(&identity, request, &target).await?,
        };
        self.recorder.answered(at, response.status().as_u16());
        let ahead = self.ahead.load(Ordering::Relaxed);
        if ahead > 0
            && let Ok(date) = HeaderValue::from_str(&clock::date(Duration::from_secs(ahead)))
        {
            response.headers_mut().insert(header::DATE, date);
        }
        if target.verb == "watch" && identity != crate::CONTROLLERS {
            return Ok(self.cuttable(response));
        }
        Ok(response)
    }

    /// From now on, responses are dated later by so much.
    pub(crate) fn set_ahead(&self, by: Duration) {
        self.ahead.store(by.as_secs(), Ordering::Relaxed);
    }

    /// Ends the watches of all clients but the cluster's own, in the middle of their streams.
    pub(crate) fn cut_watches(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    fn cuttable(&self, response: Response<Body>) -> Response<Body> {
        let (head, body) = response.into_parts();
        let start = Some((body.into_data_stream(), self.cuts.subscribe()));
        let chunks = stream::unfold(start, |state| async move {
            let (mut chunks, mut cuts) = state?;
            tokio::select! {
                chunk = chunks.next() => Some((chunk?, Some((chunks, cuts)))),
                Ok(()) = cuts.changed() => Some((Err(axum::Error::new(Dropped)), None)),
            }
        });
        Response::from_parts(head, Body::from_stream(chunks))
    }

    async fn answer(
        &self,
        identity: &str,
        request: Request<Incoming>,
        target: &Target,
    ) -> Result<Response<Body>, Dropped> {
        if is_log(target) {
            return self.log(identity, request, target).await;
        }
        // Without an answer behind there is none in front.
        let answer = self.upstream.answer(identity, request).await;
        answer.map_err(|_| Dropped)
    }

    async fn log(
        &self,
        identity: &str,
        request: Request<Incoming>,
        target: &Target,
    ) -> Result<Response<Body>, Dropped> {
        let pod = self.upstream.pod_of_log(identity, target).await;
        let pod: Result<Value, ApiError> = pod.map_err(|_| Dropped)?;
        let query = Query::parse(request.uri().query().unwrap_or(""));
        let answer = pod.and_then(|pod| logs::answer(&self.logs, &query, &pod));
        Ok(answer.unwrap_or_else(|error| error.response()))
    }
}

fn is_log(target: &Target) -> bool {
    target.verb == "get" && target.resource == "pods" && target.subresource == "log"
}

/// Who asks. kubectl sends no token over plain HTTP, so that a request without one is the admin's.
fn identity(request: &Request<Incoming>) -> Result<String, ApiError> {
    let given = request.headers().get(header::AUTHORIZATION);
    let given = given.and_then(|value| value.to_str().ok()).unwrap_or("");
    if given.is_empty() {
        return Ok(ADMIN.to_owned());
    }
    let identity = given
        .strip_prefix("Bearer ")
        .and_then(|token| token.strip_prefix(TOKEN));
    identity
        .map(str::to_owned)
        .ok_or_else(ApiError::unauthorized)
}

fn entry(identity: &str, path: &str, query: &str, target: &Target) -> recorder::Request {
    let mark = if query.is_empty() { "" } else { "?" };
    let verb = if target.resource.is_empty() {
        "get"
    } else {
        target.verb
    };
    recorder::Request {
        identity: identity.to_owned(),
        verb: verb.to_owned(),
        group: target.group.clone(),
        resource: target.resource.clone(),
        subresource: target.subresource.clone(),
        namespace: target.namespace.clone(),
        name: target.name.clone(),
        path: format!("{path}{mark}{query}"),
        ordered: false,
        status: 0,
    }
}

fn refusal(fault: &Fault) -> ApiError {
    match fault {
        Fault::TooManyRequests(seconds) => ApiError::too_many_requests(*seconds),
        Fault::Unavailable => ApiError::new(
            503,
            "ServiceUnavailable",
            "the server is currently unable to handle the request",
        ),
        Fault::Expired => expired(),
        _ => ApiError::internal("a test asked for it"),
    }
}

fn expired() -> ApiError {
    ApiError::new(410, "Expired", "too old resource version: 1 (2)")
}

/// An API server begins to answer, and says so in an event.
fn expired_watch() -> Response<Body> {
    json_response(200, &json!({"type": "ERROR", "object": expired().status()}))
}
