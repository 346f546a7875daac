//! Restarts, backups, clocks and full disks.

use std::time::Duration;

use pool_protocol::problem::Code;
use pool_protocol::task::TaskState;
use rstest::rstest;

use super::site::*;
use crate::model::{Found, LeasedTask};
use crate::state::EndReason;
use crate::view::{Condition, Page};
use crate::{OpenError, Rules, Store};

/// A task in each state, with the last word of each just now.
struct Everywhere {
    waiting: pool_protocol::id::TaskId,
    leased: LeasedTask,
    started: LeasedTask,
    running: LeasedTask,
    orphaned: LeasedTask,
}

async fn everywhere(site: &Site) -> Everywhere {
    let orphaned = site.running("5").await;
    site.pass(95).await;
    let running = site.running("4").await;
    let one = site.agent("one").await;
    site.ready("acme", "3").await;
    let started = site.lease(one).await.unwrap();
    site.store.started(started.grant, "ns/job").await.unwrap();
    site.ready("acme", "2").await;
    let leased = site.lease(one).await.unwrap();
    let waiting = site.ready("acme", "1").await;
    Everywhere {
        waiting,
        leased,
        started,
        running,
        orphaned,
    }
}

async fn states(site: &Site) -> Vec<TaskState> {
    site.all().await.iter().map(|task| task.state).collect()
}

const AS_THEY_WERE: [TaskState; 5] = [
    TaskState::Orphaned,
    TaskState::Running,
    TaskState::Leased,
    TaskState::Leased,
    TaskState::Available,
];

#[rstest]
#[tokio::test]
async fn a_backup_that_is_restored_a_day_later_starts_nothing(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut site) = Site::open(engine).await else {
        return;
    };
    let over = site.ready("acme", "1").await;
    let runs = site.ready("acme", "2").await;
    let waits = site.ready("acme", "3").await;
    let one = site.agent("one").await;
    let backup = site.backup().await;
    for task in [over, runs, waits] {
        site.store.found(task, Found::Waiting).await.unwrap();
    }
    let first = site.lease(one).await.unwrap();
    site.store.accept(first.grant, &holder("x")).await.unwrap();
    complete(&site.store, &first).await;
    let second = site.lease(one).await.unwrap();
    site.store.accept(second.grant, &holder("y")).await.unwrap();
    assert_eq!((first.grant.task, second.grant.task), (over, runs));

    site.clock.pass(24 * 3600);
    site.restore(backup).await;
    assert_eq!(states(&site).await, [TaskState::Available; 3]);
    assert!(site.lease(one).await.is_none(), "nothing is confirmed");
    assert!(site.pass(20).await.is_empty(), "the day does not count");
    // What the platform says is what counts.
    site.store.found(over, Found::Over).await.unwrap();
    site.store.found(runs, Found::Running).await.unwrap();
    site.store.found(waits, Found::Waiting).await.unwrap();
    let leased = site.lease(one).await.unwrap();
    assert_eq!(leased.grant.task, waits);
    assert!(
        site.lease_beside(one, &[leased.grant.lease])
            .await
            .is_none()
    );
    let end = site.view(over).await.end.unwrap();
    assert_eq!(end.reason, EndReason::Superseded);
    // Its executor is still there.
    site.store.beat(second.grant, &beat("y")).await.unwrap();
    let view = site.view(runs).await;
    assert_eq!(view.holder.as_deref(), Some("pod-y"));
    assert_eq!(view.lease, Some(second.grant.lease));
    assert_eq!(
        site.submit("acme", "1").await.task(),
        site.all().await[2].task
    );
}

#[rstest]
#[tokio::test]
async fn a_backup_from_before_a_task_was_accepted_does_not_give_it_out(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut site) = Site::open(engine).await else {
        return;
    };
    let task = site.ready("acme", "1").await;
    let one = site.agent("one").await;
    let leased = site.lease(one).await.unwrap();
    let backup = site.backup().await;
    site.store.accept(leased.grant, &holder("x")).await.unwrap();
    site.clock.pass(3600);
    site.restore(backup).await;
    // It beats every 15 s, and the lease holds 30 s from the start of the hub.
    assert!(site.pass(15).await.is_empty());
    site.store.beat(leased.grant, &beat("x")).await.unwrap();
    assert_eq!(site.view(task).await.state, TaskState::Running);
    let other = site.store.accept(leased.grant, &holder("y")).await;
    assert_eq!(code(other), Code::LeaseSuperseded);
    assert!(site.lease(one).await.is_none());
}

#[rstest]
#[tokio::test]
async fn a_wall_clock_that_jumps_ends_nothing_early_and_keeps_nothing(
    #[values(Engine::Sqlite)] engine: Engine,
    #[values(3600, -3600)] jump: i64,
    #[values(false, true)] restarts: bool,
) {
    let Some(mut site) = Site::open(engine).await else {
        return;
    };
    everywhere(&site).await;
    site.clock.jump(jump);
    if restarts {
        site.reopen().await;
    }
    assert!(site.pass(29).await.is_empty());
    assert_eq!(states(&site).await, AS_THEY_WERE);
    site.clock.jump(-jump);
    if restarts {
        site.reopen().await;
        assert!(site.pass(29).await.is_empty());
    }
    // Each ends at its bound: the lease, the silence, the start, the loss.
    let ended = async |seconds: u64, job: &str| {
        let changed = site.pass(seconds).await;
        let jobs: Vec<_> = changed.iter().map(|task| task.job.as_str()).collect();
        assert!(jobs.contains(&job), "{jobs:?} {job}");
    };
    ended(2, "2").await;
    ended(60, "4").await;
    ended(210, "3").await;
    ended(300, "5").await;
    ended(QUEUED.as_secs(), "1").await;
    assert!(site.all().await.iter().all(|task| task.end.is_some()));
}

#[rstest]
#[tokio::test]
async fn the_time_without_a_hub_does_not_count(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut site) = Site::open(engine).await else {
        return;
    };
    let before = everywhere(&site).await;
    site.store.close().await;
    site.clock.pass(7200);
    site.reopen().await;
    assert!(site.pass(29).await.is_empty());
    assert_eq!(states(&site).await, AS_THEY_WERE);
    let page = Page::first();
    let instances = site.store.instances(None, page).await.unwrap();
    assert_eq!(instances[0].condition, Condition::Online);
    // The executor that existed may still accept, and the other one lives.
    site.store
        .accept(before.started.grant, &holder("z"))
        .await
        .unwrap();
    site.store
        .beat(before.orphaned.grant, &beat("x"))
        .await
        .unwrap();
    site.store
        .beat(before.running.grant, &beat("x"))
        .await
        .unwrap();
    let one = instances[0].instance;
    let again = site.lease(one).await.unwrap();
    assert_eq!(again.grant, before.leased.grant);
    site.store
        .found(before.waiting, Found::Waiting)
        .await
        .unwrap();
    let known = [again.grant.lease];
    assert!(site.lease_beside(one, &known).await.is_some());
}

#[rstest]
#[tokio::test]
async fn the_time_in_which_nothing_could_be_stored_does_not_count(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    everywhere(&site).await;
    site.pass(10).await;
    site.clock.pass(7200);
    let swept = site.store.sweep().await.unwrap();
    assert!(swept.resumed && swept.changed.is_empty());
    assert!(site.pass(29).await.is_empty());
    assert_eq!(states(&site).await, AS_THEY_WERE);
}

#[tokio::test]
async fn a_full_disk_stores_nothing_says_so_and_is_over_when_there_is_room() {
    let site = Site::open(Engine::Sqlite).await.unwrap();
    let pages = async |sql: &'static str| {
        let mut tx = site.store.begin().await.unwrap();
        let row = tx.row(sql, &[]).await.unwrap().unwrap();
        tx.rollback().await.unwrap();
        row.int("max_page_count").unwrap()
    };
    let kept = site.submit("acme", "kept").await.task();
    let enough = pages("PRAGMA max_page_count").await;
    // Fewer than there are: no page can be added.
    assert!(pages("PRAGMA max_page_count = 1").await < enough);
    let mut stored = 1;
    let error = loop {
        let submission = submission("acme", &format!("{stored}"));
        match site.store.submit(submission).await {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), Code::StoreUnavailable);
    assert!(error.to_string().contains("full"), "{error}");
    // The connection is a new one, which knows no limit.
    assert_eq!(site.all().await.len(), stored);
    assert_eq!(site.view(kept).await.job, "kept");
    assert!(matches!(
        site.submit("acme", &format!("{stored}")).await,
        crate::Submitted::New(_)
    ));
}

#[tokio::test]
async fn a_second_hub_on_one_file_is_refused_until_the_first_ends() {
    let site = Site::open(Engine::Sqlite).await.unwrap();
    let second = Store::open(&site.url, Rules::default()).await;
    assert!(matches!(second.unwrap_err(), OpenError::InUse(_)));
    site.store.close().await;
    Store::open(&site.url, Rules::default()).await.unwrap();
}

#[tokio::test]
async fn a_url_of_another_kind_is_refused_and_no_error_has_a_password() {
    let other = Store::open("mysql://hub:planted@db/x", Rules::default()).await;
    assert!(matches!(other, Err(OpenError::Url)));
    for url in [
        "postgres://hub:planted@127.0.0.1:1/x",
        "postgres://hub:planted@127.0.0.1:port/x",
    ] {
        let error = Store::open(url, Rules::default()).await.unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(!text.contains("planted"), "{text}");
    }
}

#[rstest]
#[tokio::test]
async fn calls_that_wait_end_when_the_store_is_closed(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    let one = site.agent("one").await;
    let mut request = request(one, &[]);
    request.wait = Duration::from_secs(50);
    let waits = site.store.lease(&request);
    let closes = async {
        site.store.waits(&pool(), 1).await;
        site.store.close().await;
    };
    let (leased, ()) = tokio::join!(waits, closes);
    // It may be told by the closed connection.
    assert!(!matches!(leased, Ok(Some(_))));
}
