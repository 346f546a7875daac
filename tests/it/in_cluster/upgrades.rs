//! A rolling upgrade under load: launchers are replaced one after the other behind an address that follows their readiness
//! late, as endpoints do, and no dispatch is lost.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use integration_tests::{Repository, job};
use job_contract::{JobData, env};
use nix::sys::signal::Signal;
use test_peers::proxy::Proxy;
use test_peers::wait;
use test_platform::Secret;
use test_platform::launcher::{Endpoint, Launcher, READINESS};
use tokio::task::JoinSet;

use super::Fixture;

const RESTARTS: usize = 3;
const SENDERS: usize = 4;
/// Between two dispatches of a sender.
const PACE: Duration = Duration::from_millis(60);
/// How long after a launcher has left service connections are still led to it.
const LATE: Duration = Duration::from_secs(1);
const PROBE: Duration = Duration::from_millis(100);
/// What launchers are told to give the balancer; the rest of it is for a busy machine.
const DRAIN_SECONDS: &str = "10";

/// Leads to the launcher once it is ready, and no more some time after it is told to end and is not. Before that, it may be
/// unready for a moment here, because the API server of a busy machine is slow.
async fn follow(balancer: &Arc<Proxy>, endpoint: &Endpoint) -> Arc<AtomicBool> {
    let address = endpoint.address;
    wait::until("the launcher is ready", async || is_ready(endpoint).await).await;
    balancer.servers().push(address);
    let (balancer, endpoint) = (Arc::clone(balancer), endpoint.clone());
    let told = Arc::<AtomicBool>::default();
    let is_told = Arc::clone(&told);
    tokio::spawn(async move {
        while !is_told.load(Ordering::SeqCst) || is_ready(&endpoint).await {
            tokio::time::sleep(PROBE).await;
        }
        tokio::time::sleep(LATE).await;
        balancer.servers().retain(|server| *server != address);
    });
    told
}

async fn is_ready(endpoint: &Endpoint) -> bool {
    endpoint
        .get(READINESS)
        .await
        .is_ok_and(|status| status == 200)
}

/// Who posts one dispatch after the other, over connections that are kept as long as they may be.
struct Senders {
    posted: Arc<Mutex<Vec<(JobData, String)>>>,
    over: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

impl Senders {
    fn start(endpoint: &Endpoint, step: &JobData) -> Self {
        let posted = Arc::<Mutex<Vec<_>>>::default();
        let over = Arc::<AtomicBool>::default();
        let number = Arc::new(AtomicUsize::new(1000));
        let mut tasks = JoinSet::new();
        for _ in 0..SENDERS {
            let (endpoint, step) = (endpoint.clone(), step.clone());
            let (posted, over) = (Arc::clone(&posted), Arc::clone(&over));
            let number = Arc::clone(&number);
            tasks.spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    let number = number.fetch_add(1, Ordering::SeqCst);
                    let step = job::in_job(&step, &number.to_string());
                    let answer = match endpoint.post(&step).await {
                        Ok(status) => status.to_string(),
                        Err(error) => format!("{error:?}"),
                    };
                    posted.lock().unwrap().push((step, answer));
                    tokio::time::sleep(PACE).await;
                }
            });
        }
        Self {
            posted,
            over,
            tasks,
        }
    }

    fn count(&self) -> usize {
        self.posted.lock().unwrap().len()
    }

    /// Every dispatch, with its answer.
    async fn stop(mut self) -> Vec<(JobData, String)> {
        self.over.store(true, Ordering::SeqCst);
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
        std::mem::take(&mut self.posted.lock().unwrap())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn three_restarts_under_load_lose_no_dispatch() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let serve = || -> Launcher {
        let settings = [(env::DRAIN_SECONDS, DRAIN_SECONDS)];
        tokio::task::block_in_place(|| fixture.serve_with(&settings))
    };
    let balancer = Arc::new(Proxy::start(&[]).unwrap());
    let mut launchers = Vec::new();
    for _ in 0..2 {
        let launcher = serve();
        let told = follow(&balancer, &launcher.endpoint.clone()).await;
        launchers.push((launcher, told));
    }
    let endpoint = Endpoint::new(balancer.address(), Secret::long());
    let senders = Senders::start(&endpoint, &job::plan(&Repository::fixture()));

    for _ in 0..RESTARTS {
        let next = serve();
        let told = follow(&balancer, &next.endpoint.clone()).await;
        launchers.push((next, told));
        let before = senders.count();
        let (old, told) = launchers.remove(0);
        let old = old.running;
        told.store(true, Ordering::SeqCst);
        old.signal(Signal::SIGTERM);
        let finished = tokio::task::block_in_place(|| old.wait());
        assert_eq!(finished.code(), 0, "{finished}");
        assert!(senders.count() > before, "nobody posted meanwhile");
    }

    let posted = senders.stop().await;
    // Each launcher accepted connections as long as they were led to it.
    assert_eq!(balancer.passed_over(), 0);
    let lost: Vec<_> = posted
        .iter()
        .filter(|(_, answer)| answer != "202")
        .collect();
    let answers: Vec<_> = lost.iter().map(|(_, answer)| answer).collect();
    assert!(
        lost.is_empty(),
        "{} of {}: {answers:#?}",
        lost.len(),
        posted.len()
    );
    let jobs: Vec<_> = posted.into_iter().map(|(step, _)| step).collect();
    fixture.assert_exactly_one_each(&jobs).await;
}
