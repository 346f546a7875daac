//! Agents behind proxies that cut connections, hold answers back, or answer with pages of their own.

use std::time::Duration;

use integration_tests::Running;
use nix::sys::signal::Signal;
use test_peers::http::{Response, Server, pass_on};
use test_peers::proxy::{Call, Fate, Moment, Proxy, Trouble};
use test_peers::wait::until;
use test_platform::Status;

use super::agent::{ends_with, tasks_taken, wait_for};
use super::fixture::Fixture;

/// As 55 s are for requests of 50 s, but less than the request for a task waits.
const CUT_AFTER: Duration = Duration::from_secs(1);
/// More connections than a test makes.
const MANY: usize = 1000;

/// Waits until the proxy has cut two more connections.
async fn until_cut(proxy: &Proxy) {
    let before = proxy.troubled();
    until("two cuts", async || proxy.troubled() >= before + 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_cuts_every_connection_loses_no_run() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let proxy = Proxy::start(&[hub.address()]).unwrap();
    proxy.next(MANY, Trouble::CutAfter(CUT_AFTER));
    let agent = Running::start(&mut fixture.agent(&proxy.url()));
    wait_for(&agent, "\"registered\"");
    until_cut(&proxy).await;
    let gate = fixture.gate();
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    until_cut(&proxy).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_buffers_answers_loses_no_run() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let address = hub.address();
    // It reads each request and each answer to its end before it passes them on.
    let proxy = Server::start(move |request| {
        let answer = pass_on(request, address, &address.to_string());
        answer.unwrap_or_else(|_| Response::new(504, "<html>the server is slow</html>"))
    });
    let proxy = proxy.unwrap();
    let agent = Running::start(&mut fixture.agent(&proxy.url()));
    let gate = fixture.gate();
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    agent.signal(Signal::SIGTERM);
    assert_eq!(tasks_taken(&ends_with(agent, 0)).len(), 1);
    assert_eq!(fixture.times_run(), 1);
    fixture.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_answers_with_pages_loses_no_run() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let proxy = Proxy::of_calls(&[hub.address()]).unwrap();
    // The first request of each class gets a page instead of an answer, with status 200.
    let is_first = |call: &Call| call.number == 1 && call.moment() == Moment::Sent;
    proxy.rule(usize::MAX, move |call| is_first(call).then(Fate::page));
    let agent = Running::start(&mut fixture.agent(&proxy.url()));
    let gate = fixture.gate();
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
    let calls = proxy.calls().into_iter().map(|call| call.class);
    let mut writes: Vec<_> = calls.filter(|class| class.starts_with("PATCH")).collect();
    writes.sort();
    writes.dedup();
    assert_eq!(writes.len(), 2, "of job and step: {writes:?}");
    assert_eq!(tasks_taken(&log).len(), 1, "{log}");
    assert_eq!(fixture.times_run(), 1);
    fixture.platform.assert_kept().await;
}
