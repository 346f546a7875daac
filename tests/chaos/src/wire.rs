//! A way through HTTP on which a part of the responses is dropped, delayed or caused twice. The seed and the number of the
//! response decide.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use axum::body::{Body, Bytes, to_bytes};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::peers::lock;
use crate::random::Random;

/// How many of a thousand responses are disturbed.
const DISTURBED: usize = 50;
/// The longest delay of a response.
const LONGEST_DELAY: usize = 3000;
/// Headers that are about one connection.
const OF_CONNECTION: [header::HeaderName; 4] = [
    header::HOST,
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
];

/// What happens to a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    /// The connection ends instead.
    Dropped,
    /// It comes after this time.
    Delayed(Duration),
    /// The request arrives twice, and the second response is the one that comes.
    Duplicated,
}

impl Harm {
    /// What happens to the response with this number.
    fn of(seed: u64, number: u64) -> Option<Self> {
        let mut random = Random::new(seed.rotate_left(32) ^ number);
        if random.below(1000) >= DISTURBED {
            return None;
        }
        let delay = u64::try_from(random.below(LONGEST_DELAY)).unwrap_or_default();
        Some(random.pick(&[
            Self::Dropped,
            Self::Delayed(Duration::from_millis(delay)),
            Self::Duplicated,
        ]))
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Dropped => "dropped",
            Self::Delayed(_) => "delayed",
            Self::Duplicated => "duplicated",
        }
    }
}

/// A disturbed response.
#[derive(Clone, Debug)]
pub(crate) struct Hit {
    at: SystemTime,
    pub(crate) harm: Harm,
    status: u16,
    method: Method,
    path: String,
    /// The task of the response to a request for a task, and the job of a dispatch.
    about: Option<String>,
}

impl Hit {
    /// Whether it is about one of these.
    pub(crate) fn is_about(&self, names: &[String]) -> bool {
        let has = |name: &String| {
            self.path.split(['/', '?', '=']).any(|part| part == name)
                || self.about.as_ref() == Some(name)
        };
        names.iter().any(has)
    }
}

impl fmt::Display for Hit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {}: {} of {} {}",
            humantime::format_rfc3339_millis(self.at),
            self.harm.name(),
            self.status,
            self.method,
            self.path
        )
    }
}

/// A listening proxy.
#[derive(Debug)]
pub(crate) struct Wire {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    seed: u64,
    server: Mutex<Option<SocketAddr>>,
    client: reqwest::Client,
    responses: AtomicU64,
    /// Dispatches while there was no server.
    missed: AtomicU64,
    hits: Mutex<Vec<Hit>>,
}

/// The connection ends without a response.
#[derive(Debug)]
struct Cut;

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the connection is cut")
    }
}

impl std::error::Error for Cut {}

impl Wire {
    /// Listens on a free port. Without a server, connections end without a response.
    pub(crate) async fn start(seed: u64, server: Option<SocketAddr>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            seed,
            server: Mutex::new(server),
            client: reqwest::Client::builder()
                .no_proxy()
                .redirect(reqwest::redirect::Policy::none())
                .pool_max_idle_per_host(0)
                .build()?,
            responses: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            hits: Mutex::default(),
        });
        let inner = Arc::clone(&shared);
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(Arc::clone(&inner), stream));
            }
        });
        Ok(Self {
            address,
            shared,
            accepting,
        })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// From now on new requests go there.
    pub(crate) fn pass_on_to(&self, server: Option<SocketAddr>) {
        self.shared.missed.store(0, Ordering::SeqCst);
        *lock(&self.shared.server) = server;
    }

    /// How many dispatches came since there is no server.
    pub(crate) fn missed(&self) -> u64 {
        self.shared.missed.load(Ordering::SeqCst)
    }

    /// How many responses there were.
    pub(crate) fn responses(&self) -> u64 {
        self.shared.responses.load(Ordering::SeqCst)
    }

    /// The disturbed responses so far.
    pub(crate) fn hits(&self) -> Vec<Hit> {
        lock(&self.shared.hits).clone()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn serve(shared: Arc<Shared>, stream: TcpStream) {
    let service = service_fn(move |request| pass(Arc::clone(&shared), request));
    // A client may close its connection, and a cut ends it.
    let _ = http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

/// Passes a request on. If the client closes its connection meanwhile, the server sees that too.
async fn pass(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Response<Body>, Cut> {
    let (head, body) = request.into_parts();
    let body = to_bytes(Body::new(body), usize::MAX)
        .await
        .map_err(|_| Cut)?;
    let response = shared.ask(&head, &body).await.map_err(|_| Cut)?;
    let number = shared.responses.fetch_add(1, Ordering::SeqCst);
    let Some(harm) = Harm::of(shared.seed, number) else {
        return Ok(response.into());
    };
    let harm = match harm {
        Harm::Duplicated if !may_repeat(&head) => Harm::Dropped,
        harm => harm,
    };
    lock(&shared.hits).push(Hit {
        at: SystemTime::now(),
        harm,
        status: response.status.as_u16(),
        method: head.method.clone(),
        path: head.uri.to_string(),
        about: about(&body).or_else(|| about(&response.body)),
    });
    match harm {
        Harm::Dropped => Err(Cut),
        Harm::Delayed(time) => {
            tokio::time::sleep(time).await;
            Ok(response.into())
        }
        // A request for a task that got none would wait once more.
        Harm::Duplicated if response.status == StatusCode::NO_CONTENT => Ok(response.into()),
        Harm::Duplicated => match shared.ask(&head, &body).await {
            Ok(second) => Ok(second.into()),
            Err(_) => Err(Cut),
        },
    }
}

/// Whether a request may arrive twice. HTTP lets a proxy repeat idempotent methods; other calls say that they may be repeated,
/// or are the dispatch, which the platform itself repeats.
fn may_repeat(head: &Parts) -> bool {
    let is_idempotent =
        [Method::GET, Method::HEAD, Method::PUT, Method::DELETE].contains(&head.method);
    is_idempotent || head.headers.contains_key(pool_protocol::IDEMPOTENCY_KEY) || is_dispatch(head)
}

fn is_dispatch(head: &Parts) -> bool {
    head.uri.path().ends_with("/terraform-rs")
}

/// The task or the job that a document is about.
fn about(document: &[u8]) -> Option<String> {
    let document: Value = serde_json::from_slice(document).ok()?;
    let name = document["taskId"].as_str().or(document["jobId"].as_str())?;
    Some(name.to_owned())
}

/// A response, read to its end.
struct Whole {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl From<Whole> for Response<Body> {
    fn from(whole: Whole) -> Self {
        let mut response = Self::new(Body::from(whole.body));
        *response.status_mut() = whole.status;
        *response.headers_mut() = whole.headers;
        response
    }
}

impl Shared {
    async fn ask(&self, head: &Parts, body: &Bytes) -> io::Result<Whole> {
        let server = *lock(&self.server);
        let Some(server) = server else {
            self.missed
                .fetch_add(u64::from(is_dispatch(head)), Ordering::SeqCst);
            return Err(io::ErrorKind::ConnectionRefused.into());
        };
        let url = format!("http://{server}{}", head.uri);
        let request = self
            .client
            .request(head.method.clone(), url)
            .headers(passed_on(&head.headers))
            .body(body.clone());
        let response = request.send().await.map_err(io::Error::other)?;
        Ok(Whole {
            status: response.status(),
            headers: passed_on(response.headers()),
            body: response.bytes().await.map_err(io::Error::other)?,
        })
    }
}

fn passed_on(headers: &HeaderMap) -> HeaderMap {
    let mut headers = headers.clone();
    for name in OF_CONNECTION {
        headers.remove(name);
    }
    headers
}

#[cfg(test)]
mod tests {
    use test_peers::http::{Response, Server};

    use super::*;

    #[test]
    fn a_seed_repeats_what_happens_to_responses_and_a_twentieth_is_disturbed() {
        let harms = |seed| {
            (0..20_000)
                .map(|number| Harm::of(seed, number))
                .collect::<Vec<_>>()
        };
        assert_eq!(harms(1), harms(1));
        assert_ne!(harms(1), harms(2));
        let harms = harms(1);
        let named = |name| {
            let hits = harms.iter().flatten();
            hits.filter(|harm| harm.name() == name).count()
        };
        let counts = ["dropped", "delayed", "duplicated"].map(named);
        assert!(
            (900..1100).contains(&counts.iter().sum::<usize>()),
            "{counts:?}"
        );
        assert!(counts.into_iter().all(|count| count > 250), "{counts:?}");
    }

    #[tokio::test]
    async fn each_harm_does_what_it_says() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = Server::start(|_| Response::new(200, "{\"taskId\":\"t\"}")).unwrap();
        let wire = Wire::start(1, Some(server.address())).await.unwrap();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let (mut asked, mut answered) = (0, 0);
        let repeated = |method: &Method| *method == Method::GET;
        for number in 0..200 {
            let method = if number % 2 == 0 {
                Method::GET
            } else {
                Method::POST
            };
            let harm = Harm::of(1, number);
            let before = server.requests().len();
            let url = format!("{}/tasks/{number}", wire.url());
            let answer = client.request(method.clone(), url).send().await;
            let times = server.requests().len() - before;
            let is_twice = harm == Some(Harm::Duplicated) && repeated(&method);
            let is_lost = matches!(harm, Some(Harm::Dropped | Harm::Duplicated)) && !is_twice;
            // The client itself repeats nothing that was sent.
            assert_eq!(
                (answer.is_ok(), times),
                (!is_lost, 1 + usize::from(is_twice)),
                "{harm:?}"
            );
            asked += times;
            answered += usize::from(answer.is_ok());
        }
        assert!(asked > 200 && answered < 200, "{asked} {answered}");
        assert_eq!(wire.responses(), 200);
        let hits = wire.hits();
        assert!(hits.iter().all(|hit| hit.is_about(&["t".to_owned()])));
        assert!(
            hits.iter()
                .any(|hit| hit.to_string().contains("dropped: 200 of"))
        );
        wire.pass_on_to(None);
        assert!(client.get(wire.url()).send().await.is_err());
    }
}
