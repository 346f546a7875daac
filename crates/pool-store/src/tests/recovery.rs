//! Tests of restarts, backups, clocks and full disks.

use std::time::Duration;

use pool_protocol::instance::Phase;
use pool_protocol::problem::Code;
use pool_protocol::task::TaskState;
use rstest::rstest;

use super::fixture::*;
use crate::model::{LeasedTask, PlatformState};
use crate::state::EndReason;
use crate::view::{Condition, Page};
use crate::{OpenError, Rules, Store};

/// One task in each state, with a request just now.
struct TaskInEachState {
    waiting: pool_protocol::id::TaskId,
    leased: LeasedTask,
    started: LeasedTask,
    running: LeasedTask,
    orphaned: LeasedTask,
}

async fn task_in_each_state(fixture: &Fixture) -> TaskInEachState {
    let orphaned = fixture.running("5").await;
    fixture.pass(95).await;
    let running = fixture.running("4").await;
    let one = fixture.agent("one").await;
    fixture.ready("acme", "3").await;
    let started = fixture.lease(one).await.unwrap();
    fixture
        .store
        .started(started.grant, "ns/job")
        .await
        .unwrap();
    fixture.ready("acme", "2").await;
    let leased = fixture.lease(one).await.unwrap();
    let waiting = fixture.ready("acme", "1").await;
    TaskInEachState {
        waiting,
        leased,
        started,
        running,
        orphaned,
    }
}

async fn states(fixture: &Fixture) -> Vec<TaskState> {
    fixture.all().await.iter().map(|task| task.state).collect()
}

const UNCHANGED: [TaskState; 5] = [
    TaskState::Orphaned,
    TaskState::Running,
    TaskState::Leased,
    TaskState::Leased,
    TaskState::Available,
];

#[rstest]
#[tokio::test]
async fn a_backup_restored_a_day_later_leases_no_task_that_is_over(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    let over = fixture.ready("acme", "1").await;
    let runs = fixture.ready("acme", "2").await;
    let waits = fixture.ready("acme", "3").await;
    let one = fixture.agent("one").await;
    let backup = fixture.backup().await;
    for task in [over, runs, waits] {
        fixture
            .store
            .apply_platform_state(task, PlatformState::Waiting)
            .await
            .unwrap();
    }
    let first = fixture.lease(one).await.unwrap();
    fixture
        .store
        .accept(first.grant, &holder("x"))
        .await
        .unwrap();
    complete(&fixture.store, &first).await;
    let second = fixture.lease(one).await.unwrap();
    fixture
        .store
        .accept(second.grant, &holder("y"))
        .await
        .unwrap();
    assert_eq!((first.grant.task, second.grant.task), (over, runs));

    fixture.clock.pass(24 * 3600);
    fixture.restore(backup).await;
    assert_eq!(states(&fixture).await, [TaskState::Available; 3]);
    assert!(fixture.lease(one).await.is_none(), "nothing is confirmed");
    assert!(fixture.pass(20).await.is_empty(), "the day does not count");
    // The state at the platform decides.
    fixture
        .store
        .apply_platform_state(over, PlatformState::Over)
        .await
        .unwrap();
    fixture
        .store
        .apply_platform_state(runs, PlatformState::Running)
        .await
        .unwrap();
    fixture
        .store
        .apply_platform_state(waits, PlatformState::Waiting)
        .await
        .unwrap();
    let leased = fixture.lease(one).await.unwrap();
    assert_eq!(leased.grant.task, waits);
    assert!(
        fixture
            .lease_beside(one, &[leased.grant.lease])
            .await
            .is_none()
    );
    let end = fixture.view(over).await.end.unwrap();
    assert_eq!(end.reason, EndReason::Superseded);
    // The executor is still running.
    fixture
        .store
        .lease_heartbeat(second.grant, &beat("y"))
        .await
        .unwrap();
    let view = fixture.view(runs).await;
    assert_eq!(view.holder.as_deref(), Some("pod-y"));
    assert_eq!(view.lease, Some(second.grant.lease));
    assert_eq!(
        fixture.submit("acme", "1").await.task(),
        fixture.all().await[2].task
    );
}

#[rstest]
#[tokio::test]
async fn a_backup_from_before_an_acceptance_does_not_lease_the_task_again(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let leased = fixture.lease(one).await.unwrap();
    let backup = fixture.backup().await;
    fixture
        .store
        .accept(leased.grant, &holder("x"))
        .await
        .unwrap();
    fixture.clock.pass(3600);
    fixture.restore(backup).await;
    // The executor sends a heartbeat every 15 s, and the lease lasts 30 s from the start of the hub.
    assert!(fixture.pass(15).await.is_empty());
    fixture
        .store
        .lease_heartbeat(leased.grant, &beat("x"))
        .await
        .unwrap();
    assert_eq!(fixture.view(task).await.state, TaskState::Running);
    let other = fixture.store.accept(leased.grant, &holder("y")).await;
    assert_eq!(code(other), Code::LeaseSuperseded);
    assert!(fixture.lease(one).await.is_none());
}

#[rstest]
#[tokio::test]
async fn a_jump_of_the_wall_clock_neither_shortens_nor_extends_a_time_limit(
    #[values(Engine::Sqlite)] engine: Engine,
    #[values(3600, -3600)] jump: i64,
    #[values(false, true)] restarts: bool,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    task_in_each_state(&fixture).await;
    fixture.clock.jump(jump);
    if restarts {
        fixture.reopen().await;
    }
    assert!(fixture.pass(29).await.is_empty());
    assert_eq!(states(&fixture).await, UNCHANGED);
    fixture.clock.jump(-jump);
    if restarts {
        fixture.reopen().await;
        assert!(fixture.pass(29).await.is_empty());
    }
    // Each task times out at its own limit.
    let ended = async |seconds: u64, job: &str| {
        let changed = fixture.pass(seconds).await;
        let jobs: Vec<_> = changed.iter().map(|task| task.job.as_str()).collect();
        assert!(jobs.contains(&job), "{jobs:?} {job}");
    };
    ended(2, "2").await;
    ended(60, "4").await;
    ended(210, "3").await;
    ended(300, "5").await;
    ended(QUEUED.as_secs(), "1").await;
    assert!(fixture.all().await.iter().all(|task| task.end.is_some()));
}

#[rstest]
#[tokio::test]
async fn time_without_a_hub_does_not_count(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    let before = task_in_each_state(&fixture).await;
    fixture.store.close().await;
    fixture.clock.pass(7200);
    fixture.reopen().await;
    assert!(fixture.pass(29).await.is_empty());
    assert_eq!(states(&fixture).await, UNCHANGED);
    let page = Page::first();
    let instances = fixture.store.instances(None, page).await.unwrap();
    assert_eq!(instances[0].condition, Condition::Online);
    // The executor that existed may still accept its task. The other executor is still running.
    fixture
        .store
        .accept(before.started.grant, &holder("z"))
        .await
        .unwrap();
    fixture
        .store
        .lease_heartbeat(before.orphaned.grant, &beat("x"))
        .await
        .unwrap();
    fixture
        .store
        .lease_heartbeat(before.running.grant, &beat("x"))
        .await
        .unwrap();
    let one = instances[0].instance;
    let again = fixture.lease(one).await.unwrap();
    assert_eq!(again.grant, before.leased.grant);
    assert!(again.expires_in > Duration::ZERO);
    fixture
        .store
        .apply_platform_state(before.waiting, PlatformState::Waiting)
        .await
        .unwrap();
    let known = [again.grant.lease];
    assert!(fixture.lease_beside(one, &known).await.is_some());
}

#[rstest]
#[tokio::test]
async fn time_in_which_nothing_could_be_stored_does_not_count(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let leased = task_in_each_state(&fixture).await.leased;
    fixture.pass(10).await;
    fixture.clock.pass(7200);
    let swept = fixture.store.sweep().await.unwrap();
    assert!(swept.resumed && swept.changed.is_empty());
    assert!(fixture.pass(29).await.is_empty());
    assert_eq!(states(&fixture).await, UNCHANGED);
    // A heartbeat renews the lease, as if there had been no gap.
    let instance = fixture.view(leased.grant.task).await.instance.unwrap();
    let heartbeat = beats(vec![held(&leased, Phase::Preparing)]);
    let eu = pool();
    let renewed = fixture
        .store
        .heartbeat(&eu, CREDENTIAL, instance, &heartbeat);
    assert!(renewed.await.unwrap().stale.is_empty());
    fixture.pass(20).await;
    let view = fixture.view(leased.grant.task).await;
    assert_eq!((view.state, view.attempts), (TaskState::Leased, 0));
}

#[tokio::test]
async fn a_full_disk_is_reported_and_the_store_works_once_there_is_space() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let pages = async |sql: &'static str| {
        let mut tx = fixture.store.begin().await.unwrap();
        let row = tx.row(sql, &[]).await.unwrap().unwrap();
        tx.rollback().await.unwrap();
        row.int("max_page_count").unwrap()
    };
    let kept = fixture.submit("acme", "kept").await.task();
    let enough = pages("PRAGMA max_page_count").await;
    // This is less than the number of pages in use, so no page can be added.
    assert!(pages("PRAGMA max_page_count = 1").await < enough);
    let mut stored = 1;
    let error = loop {
        let submission = submission("acme", &format!("{stored}"));
        match fixture.store.submit(submission).await {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), Code::StoreUnavailable);
    assert!(error.to_string().contains("full"), "{error}");
    // The next connection is a new one without the limit.
    assert_eq!(fixture.all().await.len(), stored);
    assert_eq!(fixture.view(kept).await.job, "kept");
    assert!(matches!(
        fixture.submit("acme", &format!("{stored}")).await,
        crate::Submitted::New(_)
    ));
}

#[tokio::test]
async fn a_file_has_one_hub_at_a_time() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let second = Store::open(&fixture.url, Rules::default(), keys()).await;
    assert!(matches!(second.unwrap_err(), OpenError::InUse(_)));
    fixture.store.close().await;
    Store::open(&fixture.url, Rules::default(), keys())
        .await
        .unwrap();
}

#[tokio::test]
async fn an_unknown_url_scheme_is_refused_and_no_error_contains_a_password() {
    let other = Store::open("mysql://hub:planted@db/x", Rules::default(), keys()).await;
    assert!(matches!(other, Err(OpenError::Url)));
    for url in [
        "postgres://hub:planted@127.0.0.1:1/x",
        "postgres://hub:planted@127.0.0.1:port/x",
    ] {
        let error = Store::open(url, Rules::default(), keys())
            .await
            .unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(!text.contains("planted"), "{text}");
    }
}

#[rstest]
#[tokio::test]
async fn waiting_requests_end_when_the_store_is_closed(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let one = fixture.agent("one").await;
    let mut request = request(one, &[]);
    request.wait = Duration::from_secs(50);
    let waits = fixture.store.lease(&request);
    let closes = async {
        fixture.store.waits(&pool(), 1).await;
        fixture.store.close().await;
    };
    let (leased, ()) = tokio::join!(waits, closes);
    // The closed connection may also end the request with an error.
    assert!(!matches!(leased, Ok(Some(_))));
}
