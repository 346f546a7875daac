//! Tests of the views for the status page and metrics.

use pool_protocol::id::PoolName;
use pool_protocol::lease::DeclineReason;
use pool_protocol::task::TaskState;
use rstest::rstest;

use super::fixture::*;
use crate::model::PlatformState;
use crate::view::{Page, TaskFilter, Wait};

#[rstest]
#[tokio::test]
async fn a_pool_view_counts_tasks_by_state(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    assert!(fixture.store.pools().await.unwrap().is_empty());
    fixture.running("1").await;
    fixture.ready("acme", "2").await;
    let one = fixture.agent("one").await;
    fixture.lease(one).await.unwrap();
    fixture.ready("acme", "3").await;
    fixture.pass(20).await;
    let cancelled = fixture.submit("acme", "4").await.task();
    fixture.store.request_cancel(cancelled).await.unwrap();
    fixture.submit("acme", "5").await;
    let pools = fixture.store.pools().await.unwrap();
    assert_eq!(pools.len(), 1);
    let view = &pools[0];
    assert_eq!((view.online, view.capacity, view.free), (1, 10, 10));
    assert_eq!((view.unconfirmed, view.available, view.leased), (1, 1, 1));
    assert_eq!((view.running, view.orphaned, view.unreported), (1, 0, 1));
    assert_eq!(view.oldest.unwrap().as_secs(), 20);
}

#[rstest]
#[tokio::test]
async fn a_task_view_has_the_reason_for_waiting(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.ready("acme", "1").await;
    let wait = async || fixture.view(task).await.wait;
    assert_eq!(wait().await, Some(Wait::NoInstance));
    let one = fixture.agent("one").await;
    assert_eq!(wait().await, Some(Wait::Turn));
    let mut full = beats(vec![]);
    full.available_capacity = 0;
    fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, one, &full)
        .await
        .unwrap();
    assert_eq!(wait().await, Some(Wait::NoCapacity));
    let leased = fixture.lease(one).await.unwrap();
    assert_eq!(wait().await, None);
    let decline = declined(DeclineReason::Quota, "the quota of ns is used up");
    fixture.store.decline(leased.grant, &decline).await.unwrap();
    assert!(matches!(wait().await, Some(Wait::Pause(_))));
    let view = fixture.view(task).await;
    assert!(view.reasons[0].contains("the quota of ns is used up"));
    fixture.pass(31).await;
    assert_eq!(wait().await, Some(Wait::Unconfirmed));
    fixture
        .store
        .apply_platform_state(task, PlatformState::Waiting)
        .await
        .unwrap();
    assert_eq!(wait().await, Some(Wait::NoInstance));
    // Tasks that were submitted later are behind it.
    let behind = fixture.ready("acme", "2").await;
    assert_eq!(fixture.store.position(task).await.unwrap(), Some(0));
    assert_eq!(fixture.store.position(behind).await.unwrap(), Some(1));
    fixture.store.request_cancel(task).await.unwrap();
    assert_eq!(fixture.store.position(task).await.unwrap(), None);
    assert_eq!(fixture.store.position(behind).await.unwrap(), Some(0));
}

#[rstest]
#[tokio::test]
async fn the_history_of_a_task_is_recorded(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let leased = fixture.running("1").await;
    fixture
        .store
        .lease_heartbeat(leased.grant, &beat("x"))
        .await
        .unwrap();
    complete(&fixture.store, &leased).await;
    let events = fixture.events(leased.grant.task).await;
    let named: Vec<_> = events
        .iter()
        .map(|event| (event.from, event.to, event.actor.as_str()))
        .collect();
    assert_eq!(
        named,
        [
            (None, "submitted", "platform"),
            (Some("submitted"), "available", "platform"),
            (Some("available"), "leased", "agent one"),
            (Some("leased"), "running", "executor pod-x"),
            (Some("running"), "completed", "executor pod-x or agent one"),
        ]
    );
    if engine == Engine::Sqlite {
        let since = events[0].at.duration_since(std::time::UNIX_EPOCH);
        assert_eq!(since.unwrap().as_secs(), 2_000_000_000);
    }
}

#[rstest]
#[tokio::test]
async fn lists_come_in_pages(#[values(Engine::Sqlite, Engine::Postgres)] engine: Engine) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    for job in ["0", "later"] {
        let done = fixture.running(job).await;
        complete(&fixture.store, &done).await;
    }
    for job in 1..=4 {
        fixture.ready("acme", &job.to_string()).await;
    }
    let mut page = Page {
        after: None,
        limit: 3,
    };
    let first = fixture
        .store
        .tasks(None, TaskFilter::Open, page)
        .await
        .unwrap();
    page.after = first.last().map(|task| task.task);
    let second = fixture
        .store
        .tasks(Some(&pool()), TaskFilter::Open, page)
        .await
        .unwrap();
    let jobs: Vec<_> = first
        .iter()
        .chain(&second)
        .map(|task| task.job.as_str())
        .collect();
    assert_eq!((first.len(), jobs), (3, vec!["1", "2", "3", "4"]));
    let page = Page::first();
    let over = fixture
        .store
        .tasks(None, TaskFilter::Latest, page)
        .await
        .unwrap();
    assert_eq!((over.len(), over[1].state), (2, TaskState::Completed));
    // The newest tasks first, one per page.
    let mut one = Page { limit: 1, ..page };
    for job in ["later", "0"] {
        let pool = pool();
        let latest = fixture.store.tasks(Some(&pool), TaskFilter::Latest, one);
        let latest = latest.await.unwrap();
        assert_eq!(latest[0].job, job);
        one.after = Some(latest[0].task);
    }
    let us: PoolName = "us".parse().unwrap();
    assert!(
        fixture
            .store
            .tasks(Some(&us), TaskFilter::All, page)
            .await
            .unwrap()
            .is_empty()
    );
    let none = Page { limit: 0, ..page };
    assert!(
        fixture
            .store
            .tasks(None, TaskFilter::All, none)
            .await
            .unwrap()
            .is_empty()
    );
    let agents = ["b", "c", "d"];
    for agent in agents {
        fixture.agent(agent).await;
    }
    let mut page = Page {
        after: None,
        limit: 2,
    };
    let mut names = Vec::new();
    for _ in 0..2 {
        let instances = fixture.store.instances(Some(&pool()), page).await.unwrap();
        page.after = instances.last().map(|view| view.instance);
        names.extend(instances.into_iter().map(|view| view.agent.to_string()));
    }
    assert_eq!(names, ["one", "b", "c", "d"]);
}

#[rstest]
#[tokio::test]
async fn no_view_contains_the_payload(#[values(Engine::Sqlite, Engine::Postgres)] engine: Engine) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let leased = fixture.lease(one).await.unwrap();
    let bytes = String::from_utf8(leased.payload.0.clone()).unwrap();
    assert!(bytes.contains(SECRET));
    let page = Page::first();
    let shown = format!(
        "{leased:?} {:?} {:?} {:?} {:?} {:?} {:?}",
        submission("acme", "1"),
        fixture.view(task).await,
        fixture.all().await,
        fixture.events(task).await,
        fixture.store.instances(None, page).await.unwrap(),
        fixture.store.pools().await.unwrap(),
    );
    // The secret also does not appear as a list of numbers.
    let numbers = format!("{:?}", SECRET.as_bytes());
    assert!(!shown.contains(SECRET) && !shown.contains(numbers.trim_matches(['[', ']'])));
}
