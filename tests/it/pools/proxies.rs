//! Agents behind proxies that cut connections, hold answers back, or answer with pages of their own.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use integration_tests::Running;
use nix::sys::signal::Signal;
use test_peers::http::{Request, Response, Server, pass_on};
use test_platform::Status;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::agent::{Gate, ends_with, tasks_taken, wait_for};
use super::fixture::{Fixture, Hub};
use crate::in_cluster::PATIENCE;

/// As 55 s are for requests of 50 s, but less than the request for a task waits.
const CUT_AFTER: Duration = Duration::from_secs(1);

/// A proxy of connections, which go to the hubs in turn.
pub(super) struct Proxy {
    address: SocketAddr,
    cuts: watch::Receiver<usize>,
}

impl Proxy {
    /// A proxy before these hubs. It cuts each connection after the time, if there is one.
    pub(super) async fn start(hubs: &[&Hub], cut_after: Option<Duration>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let hubs: Vec<_> = hubs.iter().map(|hub| hub.address()).collect();
        let (cut, cuts) = watch::channel(0);
        tokio::spawn(async move {
            let next = AtomicUsize::new(0);
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                let first = next.fetch_add(1, Ordering::Relaxed);
                let (hubs, cut) = (hubs.clone(), cut.clone());
                tokio::spawn(async move {
                    let Some(mut hub) = connect(&hubs, first).await else {
                        return;
                    };
                    let pass = tokio::io::copy_bidirectional(&mut client, &mut hub);
                    let time = cut_after.unwrap_or(Duration::MAX);
                    if tokio::time::timeout(time, pass).await.is_err() {
                        cut.send_modify(|cuts| *cuts += 1);
                    }
                });
            }
        });
        Self { address, cuts }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Waits until this many more connections were cut.
    async fn cut(&self, more: usize) {
        let mut cuts = self.cuts.clone();
        let enough = *cuts.borrow() + more;
        let wait = cuts.wait_for(|cuts| *cuts >= enough);
        tokio::time::timeout(PATIENCE, wait).await.unwrap().unwrap();
    }
}

/// A connection to the first hub in turn that accepts one.
async fn connect(hubs: &[SocketAddr], first: usize) -> Option<TcpStream> {
    for turn in 0..hubs.len() {
        let hub = hubs[(first + turn) % hubs.len()];
        if let Ok(connection) = TcpStream::connect(hub).await {
            return Some(connection);
        }
    }
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_cuts_every_connection_loses_no_run() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let proxy = Proxy::start(&[&hub], Some(CUT_AFTER)).await;
    let agent = Running::start(&mut fixture.agent(&proxy.url()));
    wait_for(&agent, "\"registered\"");
    proxy.cut(2).await;
    let gate = Gate::new(&fixture);
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    proxy.cut(2).await;
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    agent.signal(Signal::SIGTERM);
    let log = ends_with(agent, 0);
    assert!(
        log.contains("a request for a task failed, trying again")
            && log.contains("the hub cannot be reached")
            && log.contains("connection closed before message completed"),
        "{log}"
    );
    assert_eq!(tasks_taken(&log).len(), 1, "{log}");
    assert_eq!(fixture.times_run(), 1);
    fixture.platform.assert_kept().await;
}

/// A proxy that reads each request and each answer to its end before it passes them on, unless it has an answer itself.
fn buffering_proxy(
    hub: &Hub,
    own: impl Fn(&Request) -> Option<Response> + Send + Sync + 'static,
) -> Server {
    let hub = hub.address();
    let answer = move |request: &Request| {
        own(request).unwrap_or_else(|| {
            let answer = pass_on(request, hub, &hub.to_string());
            answer.unwrap_or_else(|_| Response::new(504, "<html>the server is slow</html>"))
        })
    };
    Server::start(answer).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_buffers_answers_loses_no_run() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let proxy = buffering_proxy(&hub, |_| None);
    let agent = Running::start(&mut fixture.agent(&proxy.url()));
    let gate = Gate::new(&fixture);
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    agent.signal(Signal::SIGTERM);
    assert_eq!(tasks_taken(&ends_with(agent, 0)).len(), 1);
    assert_eq!(fixture.times_run(), 1);
    fixture.platform.assert_kept().await;
}

/// What a request asks for, without what names one run or one agent.
fn kind(request: &Request) -> String {
    let has_digit = |part: &&str| part.contains(|letter: char| letter.is_ascii_digit());
    let parts = request.path.split('/').filter(|part| !has_digit(part));
    format!("{} {}", request.method, parts.collect::<Vec<_>>().join("/"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_answers_with_pages_loses_no_run() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let seen = Arc::<Mutex<HashSet<String>>>::default();
    let pages = Arc::clone(&seen);
    // The first request of each kind gets a page instead of an answer, with status 200.
    let proxy = buffering_proxy(&hub, move |request| {
        let is_first = pages.lock().unwrap().insert(kind(request));
        let page = "<!doctype html><title>Please sign in</title>";
        is_first.then(|| Response::new(200, page).with_header("Content-Type", "text/html"))
    });
    let agent = Running::start(&mut fixture.agent(&proxy.url()));
    let gate = Gate::new(&fixture);
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="running"} 0"#)
        .await;
    agent.signal(Signal::SIGTERM);
    let log = ends_with(agent, 0);
    let cause = "the answer with status 200 is not the hub's: a proxy may have written it";
    for call in ["could not register", "a heartbeat", "a request for a task"] {
        let names_cause = |line: &&str| line.contains(call) && line.contains(cause);
        assert!(log.lines().any(|line| names_cause(&line)), "{call}: {log}");
    }
    let seen = seen.lock().unwrap().clone();
    let writes = seen.iter().filter(|kind| kind.starts_with("PATCH"));
    assert_eq!(writes.count(), 2, "of job and step: {seen:?}");
    assert_eq!(tasks_taken(&log).len(), 1, "{log}");
    assert_eq!(fixture.times_run(), 1);
    fixture.platform.assert_kept().await;
}
