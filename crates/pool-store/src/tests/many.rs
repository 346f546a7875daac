//! Tests with many tasks, many agents and several hubs.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use pool_protocol::id::{InstanceId, TaskId};
use pool_protocol::problem::Code;
use rstest::rstest;
use tokio::task::JoinSet;

use super::fixture::*;
use crate::model::{LeaseRequest, PlatformState};

#[rstest]
#[tokio::test]
async fn a_burst_of_one_organization_does_not_delay_another(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let one = fixture.agent("one").await;
    for job in 0..50 {
        fixture.ready("burst", &format!("b{job}")).await;
    }
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(fixture.lease_beside(one, &held).await.unwrap().grant.lease);
    }
    let late = fixture.ready("late", "l").await;
    let next = fixture.lease_beside(one, &held).await.unwrap();
    assert_eq!(next.grant.task, late);
    held.push(next.grant.lease);
    // Tasks of one organization are leased in the order of their submission.
    let next = fixture.lease_beside(one, &held).await.unwrap();
    assert_eq!(next.task.job, "b5");
}

/// Leases tasks until there are none. Returns them with their organizations.
async fn take(store: crate::Store, instance: InstanceId) -> Vec<(TaskId, String)> {
    let mut taken = Vec::new();
    let mut holding = Vec::new();
    loop {
        let leased = store.lease(&request(instance, &holding)).await.unwrap();
        let Some(leased) = leased else {
            return taken;
        };
        assert!(!leased.redelivered);
        holding.push(leased.grant.lease);
        taken.push((leased.grant.task, leased.task.organization));
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn agents_of_two_hubs_lease_each_task_once_and_organizations_get_equal_shares(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let hubs = match engine {
        Engine::Sqlite => vec![fixture.store.clone()],
        // The second hub opens first, because waiting tasks must be confirmed again when a hub starts.
        Engine::Postgres => vec![
            fixture.store.clone(),
            open(&fixture.url, &fixture.clock).await,
        ],
    };
    for job in 0..30 {
        fixture.ready("large", &format!("l{job}")).await;
        fixture.ready("large", &format!("m{job}")).await;
        fixture.ready("middle", &format!("n{job}")).await;
        fixture.ready("small", &format!("s{job}")).await;
    }
    let mut agents = JoinSet::new();
    for number in 0..8 {
        let instance = fixture.agent(&format!("agent-{number}")).await;
        agents.spawn(take(hubs[number % hubs.len()].clone(), instance));
    }
    let taken: Vec<_> = agents.join_all().await.into_iter().flatten().collect();
    assert_eq!(taken.len(), 120);
    let tasks: HashSet<_> = taken.iter().map(|(task, _)| *task).collect();
    assert_eq!(tasks.len(), 120, "a task was given out twice");
    // No organization with waiting tasks is served more often than another.
    let mut order = fixture.all().await;
    order.sort_by_key(|task| task.lease);
    let mut served: HashMap<&str, u32> = HashMap::new();
    let first: Vec<_> = order
        .iter()
        .map(|task| task.organization.as_str())
        .collect();
    for organization in &first[..90] {
        *served.entry(organization).or_default() += 1;
    }
    let most = served.values().max().unwrap();
    let least = served.values().min().unwrap();
    assert!(most - least <= 2, "{served:?}");
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn only_one_of_many_executors_accepts_a_task(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let hubs = match engine {
        Engine::Sqlite => vec![fixture.store.clone()],
        Engine::Postgres => vec![
            fixture.store.clone(),
            open(&fixture.url, &fixture.clock).await,
        ],
    };
    fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let grant = fixture.lease(one).await.unwrap().grant;
    let mut executors = JoinSet::new();
    for number in 0..8 {
        let store = hubs[number % hubs.len()].clone();
        let holder = holder(&number.to_string());
        executors.spawn(async move { store.accept(grant, &holder).await });
    }
    let accepted = executors.join_all().await;
    assert_eq!(accepted.iter().filter(|result| result.is_ok()).count(), 1);
    for refused in accepted.into_iter().filter(Result::is_err) {
        assert_eq!(code(refused), Code::LeaseSuperseded);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_new_task_wakes_one_waiting_request(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let here = fixture.store.clone();
    let there = match engine {
        Engine::Sqlite => here.clone(),
        Engine::Postgres => open(&fixture.url, &fixture.clock).await,
    };
    let mut waits = JoinSet::new();
    for number in 0..6 {
        let request = LeaseRequest {
            wait: Duration::from_secs(50),
            ..request(fixture.agent(&format!("agent-{number}")).await, &[])
        };
        let store = if number % 2 == 0 { &here } else { &there }.clone();
        waits.spawn(async move { store.lease(&request).await.unwrap() });
    }
    // All six wait at one hub, or three at each of two.
    let waiting = if engine == Engine::Sqlite { 6 } else { 3 };
    here.waits(&pool(), waiting).await;
    there.waits(&pool(), waiting).await;
    for job in ["1", "2", "3"] {
        let task = fixture.ready("acme", job).await;
        let leased = waits.join_next().await.unwrap().unwrap().unwrap();
        assert_eq!(leased.grant.task, task);
    }
    assert_eq!(waits.len(), 3, "the others still wait");
    // A dropped request gets no task.
    waits.shutdown().await;
    let task = fixture.ready("acme", "4").await;
    let one = fixture.agent("agent-0").await;
    let known: Vec<_> = fixture
        .all()
        .await
        .iter()
        .filter_map(|task| task.lease)
        .collect();
    // The database may still end what the dropped requests have begun.
    let request = LeaseRequest {
        wait: Duration::from_secs(50),
        ..request(one, &known)
    };
    let leased = fixture.store.lease(&request).await.unwrap().unwrap();
    assert_eq!(leased.grant.task, task);
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_pause_wakes_a_waiting_request(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let leased = fixture.lease(one).await.unwrap();
    let decline = declined(pool_protocol::lease::DeclineReason::Quota, "full");
    fixture.store.decline(leased.grant, &decline).await.unwrap();
    fixture
        .store
        .apply_platform_state(task, PlatformState::Waiting)
        .await
        .unwrap();
    let store = fixture.store.clone();
    let waits = tokio::spawn(async move {
        let request = LeaseRequest {
            wait: Duration::from_secs(50),
            ..request(one, &[])
        };
        store.lease(&request).await.unwrap().unwrap()
    });
    fixture.store.waits(&pool(), 1).await;
    fixture.pass(11).await;
    assert_eq!(waits.await.unwrap().grant.task, task);
}

#[tokio::test]
async fn a_wait_ends_without_a_task_when_its_time_is_over() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let request = LeaseRequest {
        wait: Duration::from_millis(20),
        ..request(fixture.agent("one").await, &[])
    };
    let began = std::time::Instant::now();
    assert!(fixture.store.lease(&request).await.unwrap().is_none());
    assert!(began.elapsed() >= request.wait);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hubs_sweep_one_task_once() {
    let Some(fixture) = Fixture::open(Engine::Postgres).await else {
        return;
    };
    let other = open(&fixture.url, &fixture.clock).await;
    let mut tasks = Vec::new();
    for job in 0..20 {
        tasks.push(fixture.ready("acme", &job.to_string()).await);
    }
    let one = fixture.agent("one").await;
    take(fixture.store.clone(), one).await;
    fixture.pass(25).await;
    fixture.clock.pass(10);
    let (here, there) = tokio::join!(fixture.store.sweep(), other.sweep());
    let changed = here.unwrap().changed.len() + there.unwrap().changed.len();
    assert_eq!(changed, 20);
    for task in tasks {
        assert_eq!(fixture.view(task).await.attempts, 1);
    }
}
