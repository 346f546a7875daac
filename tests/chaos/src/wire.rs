//! A way through HTTP on which a part of the responses is dropped, delayed or caused twice. The seed and the number of the
//! response decide.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use serde_json::Value;
use test_peers::http::Request;
use test_peers::proxy::{Call, Fate, Moment, Proxy};

use crate::peers::lock;
use crate::random::Random;

/// How many of a thousand responses are disturbed.
const DISTURBED: usize = 50;
/// The longest delay of a response.
const LONGEST_DELAY: usize = 3000;
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
    method: String,
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

/// A request of an executor to release the lock of its state.
#[derive(Debug)]
struct Unlock {
    at: SystemTime,
    path: String,
    /// The id of the lock. `None`: any lock of the task.
    id: Option<String>,
}

/// A proxy that disturbs responses.
#[derive(Debug)]
pub(crate) struct Wire {
    proxy: Proxy,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    seed: u64,
    /// Whether there is no server.
    is_away: AtomicBool,
    responses: AtomicU64,
    /// Dispatches while there was no server.
    missed: AtomicU64,
    hits: Mutex<Vec<Hit>>,
    unlocks: Mutex<Vec<Unlock>>,
}

impl Wire {
    /// Listens on a free port. Requests go to the servers in turn. Without a server, connections end without a response.
    pub(crate) fn start(seed: u64, servers: &[SocketAddr]) -> io::Result<Self> {
        let proxy = Proxy::of_calls(&[])?;
        let shared = Arc::new(Shared {
            seed,
            ..Shared::default()
        });
        let inner = Arc::clone(&shared);
        proxy.rule(usize::MAX, move |call| inner.fate(call));
        let wire = Self { proxy, shared };
        wire.pass_on_to(servers);
        Ok(wire)
    }

    pub(crate) fn url(&self) -> String {
        self.proxy.url()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.proxy.address()
    }

    /// From now on new requests go there.
    pub(crate) fn pass_on_to(&self, servers: &[SocketAddr]) {
        self.shared.missed.store(0, Ordering::SeqCst);
        *self.proxy.servers() = servers.to_vec();
        self.shared
            .is_away
            .store(servers.is_empty(), Ordering::SeqCst);
    }

    /// Ends the requests that are in progress.
    pub(crate) fn cut_open(&self) {
        self.proxy.cut_open();
    }

    /// Whether the executor of a task had asked by this time to release the lock with this id.
    pub(crate) fn has_unlocked(&self, task: &str, id: &str, by: SystemTime) -> bool {
        let is_it = |unlock: &Unlock| {
            unlock.at <= by
                && unlock.path.split('/').any(|part| part == task)
                && unlock.id.as_deref().is_none_or(|own| own == id)
        };
        lock(&self.shared.unlocks).iter().any(is_it)
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

impl Shared {
    fn fate(&self, call: &Call) -> Option<Fate> {
        let request = &call.request;
        if call.moment() == Moment::Sent {
            let is_missed = is_dispatch(request) && self.is_away.load(Ordering::SeqCst);
            self.missed
                .fetch_add(u64::from(is_missed), Ordering::SeqCst);
            if request.path.ends_with("/state/unlock") {
                lock(&self.unlocks).push(Unlock {
                    at: SystemTime::now(),
                    path: request.path.clone(),
                    id: lock_id(&request.body),
                });
            }
            return None;
        }
        let number = self.responses.fetch_add(1, Ordering::SeqCst);
        let harm = match Harm::of(self.seed, number)? {
            Harm::Duplicated if !may_repeat(request) => Harm::Dropped,
            harm => harm,
        };
        lock(&self.hits).push(Hit {
            at: SystemTime::now(),
            harm,
            status: call.status,
            method: request.method.clone(),
            path: request.target(),
            about: about(&request.body).or_else(|| about(&call.answer)),
        });
        match harm {
            Harm::Dropped => Some(Fate::Drop),
            Harm::Delayed(time) => Some(Fate::Delay(time)),
            // A request for a task that got none would wait once more.
            Harm::Duplicated if call.status == 204 => None,
            Harm::Duplicated => Some(Fate::Repeat),
        }
    }
}

/// Whether a request may arrive twice. HTTP lets a proxy repeat idempotent methods; other calls say that they may be repeated,
/// or are the dispatch, which the platform itself repeats.
fn may_repeat(request: &Request) -> bool {
    let is_idempotent = ["GET", "HEAD", "PUT", "DELETE"].contains(&&*request.method);
    is_idempotent
        || request.header(pool_protocol::IDEMPOTENCY_KEY).is_some()
        || is_dispatch(request)
}

fn is_dispatch(request: &Request) -> bool {
    request.path.ends_with("/terraform-rs")
}

/// The id in what the tool writes into a lock.
pub(crate) fn lock_id(info: &[u8]) -> Option<String> {
    let info: Value = serde_json::from_slice(info).ok()?;
    info["ID"].as_str().map(str::to_owned)
}

/// The task or the job that a document is about.
fn about(document: &[u8]) -> Option<String> {
    let document: Value = serde_json::from_slice(document).ok()?;
    let name = document["taskId"].as_str().or(document["jobId"].as_str())?;
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use reqwest::Method;
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
        let wire = Wire::start(1, &[server.address()]).unwrap();
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
        wire.pass_on_to(&[]);
        assert!(client.get(wire.url()).send().await.is_err());
    }

    #[tokio::test]
    async fn a_request_for_the_release_of_a_lock_is_noted_with_its_task() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = Server::start(|_| Response::new(204, "")).unwrap();
        let wire = Wire::start(1, &[server.address()]).unwrap();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let before = SystemTime::now();
        for (task, body) in [("one", "{\"ID\":\"a\"}"), ("any", "")] {
            let url = format!("{}/tasks/{task}/leases/l/state/unlock", wire.url());
            // The response may be disturbed.
            let _ = client.post(url).body(body).send().await;
        }
        let now = SystemTime::now();
        for (task, id, by, is_asked) in [
            ("one", "a", now, true),
            ("one", "b", now, false),
            ("any", "b", now, true),
            ("other", "a", now, false),
            ("one", "a", before, false),
        ] {
            assert_eq!(wire.has_unlocked(task, id, by), is_asked, "{task} {id}");
        }
    }
}
