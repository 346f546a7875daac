//! Tasks of one workspace run one after another, and do not use the slot of an agent while they wait.

use std::time::Duration;

use pool_protocol::id::TaskId;
use pool_protocol::lease::DeclineReason;
use pool_protocol::task::TaskState;
use rstest::rstest;

use super::fixture::*;
use crate::model::{Ending, LeaseRequest, PlatformState, Submission};
use crate::view::Wait;

impl Fixture {
    /// Submits and confirms a task of a workspace.
    async fn ready_in(&self, organization: &str, workspace: &str, job: &str) -> TaskId {
        let submission = Submission {
            workspace: workspace.to_owned(),
            ..submission(organization, job)
        };
        let task = self.store.submit(submission).await.unwrap().task();
        let confirmed = self
            .store
            .apply_platform_state(task, PlatformState::Waiting);
        confirmed.await.unwrap();
        task
    }
}

#[rstest]
#[tokio::test]
async fn a_task_waits_for_the_active_one_of_its_workspace(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let first = fixture.ready_in("acme", "net", "1").await;
    let second = fixture.ready_in("acme", "net", "2").await;
    let third = fixture.ready_in("acme", "net", "3").await;
    let elsewhere = fixture.ready_in("acme", "dns", "4").await;
    let namesake = fixture.ready_in("other", "net", "5").await;
    let mut requests = Vec::new();
    for agent in ["a", "b", "c", "d", "e"] {
        requests.push(request(fixture.agent(agent).await, &[]));
    }
    // One transaction serves them all.
    let together: Vec<_> = requests.iter().collect();
    let leases = fixture.store.lease_all(&together).await.unwrap();
    let leases: Vec<_> = leases.into_iter().filter_map(Result::unwrap).collect();
    let mut leased: Vec<_> = leases.iter().map(|leased| leased.grant.task).collect();
    leased.sort();
    assert_eq!(leased, [first, elsewhere, namesake]);

    let lease = leases.iter().find(|leased| leased.grant.task == first);
    let grant = lease.unwrap().grant;
    let free = fixture.agent("free").await;
    let wait = async |task| fixture.view(task).await.wait;
    let is_behind = async || {
        assert_eq!(wait(second).await, Some(Wait::Workspace(first)));
        assert_eq!(wait(third).await, Some(Wait::Workspace(first)));
        assert!(fixture.lease(free).await.is_none());
    };
    is_behind().await;
    fixture.store.accept(grant, &holder("x")).await.unwrap();
    is_behind().await;
    // Nothing is heard of the executor. It may still write the state.
    fixture.pass(90).await;
    assert_eq!(fixture.view(first).await.state, TaskState::Orphaned);
    let free = fixture.agent("free").await;
    is_behind().await;

    let end = end_report(true);
    let ended = fixture.store.end(grant, Ending::Completed, &end);
    ended.await.unwrap();
    assert_eq!(wait(second).await, Some(Wait::Turn));
    let next = fixture.lease(free).await.unwrap();
    assert_eq!(next.grant.task, second);
    assert_eq!(wait(third).await, Some(Wait::Workspace(second)));
}

/// `ends`: the active task is over, or returns to the queue for a pause.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_request_is_woken_when_a_workspace_is_free(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
    #[values(true, false)] ends: bool,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    fixture.ready_in("acme", "net", "1").await;
    let next = fixture.ready_in("acme", "net", "2").await;
    let one = fixture.agent("one").await;
    let leased = fixture.lease(one).await.unwrap();
    let other = LeaseRequest {
        wait: Duration::from_secs(50),
        ..request(fixture.agent("other").await, &[])
    };
    let store = fixture.store.clone();
    let waits = tokio::spawn(async move { store.lease(&other).await.unwrap() });
    fixture.store.waits(&pool(), 1).await;
    if ends {
        let accepted = fixture.store.accept(leased.grant, &holder("x")).await;
        accepted.unwrap();
        complete(&fixture.store, &leased).await;
    } else {
        let decline = declined(DeclineReason::Quota, "full");
        fixture.store.decline(leased.grant, &decline).await.unwrap();
    }
    assert_eq!(waits.await.unwrap().unwrap().grant.task, next);
}

#[rstest]
#[tokio::test]
async fn a_released_lock_is_looked_for_once_more_and_one_of_a_rescue_later(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let running = fixture.running("1").await;
    let (store, task) = (&fixture.store, running.grant.task);
    let left = async || {
        let left = store.left_state_locks().await.unwrap();
        left.iter().map(|left| left.task).collect::<Vec<_>>()
    };
    let has_left = async || store.has_left_state_lock(task).await.unwrap();
    store.note_state_lock(task).await.unwrap();
    store.took_state_lock(task).await.unwrap();
    let must_lock = async |names| store.must_lock_state(task, names).await.unwrap();
    assert!(!must_lock(true).await);
    store.released_state_lock(task).await.unwrap();
    assert!(must_lock(true).await && !must_lock(false).await);
    fixture.pass(40).await;
    assert!(left().await.is_empty() && !has_left().await, "it runs");

    complete(store, &running).await;
    // Whoever wants the lock does not have to wait.
    assert!(left().await.is_empty() && has_left().await);
    fixture.pass(31).await;
    assert_eq!(left().await, [task]);
    store.forget_state_lock(task).await.unwrap();
    assert!(left().await.is_empty() && has_left().await);

    store.note_state_lock(task).await.unwrap();
    store.took_state_lock(task).await.unwrap();
    assert!(left().await.is_empty() && !has_left().await, "it rescues");
    store.forget_state_lock(task).await.unwrap();
    assert!(
        !has_left().await,
        "a look at the wrong time changes nothing"
    );
    store.released_state_lock(task).await.unwrap();
    assert_eq!(left().await, [task]);
}
