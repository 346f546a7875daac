//! Tests of leases: requests, repetitions, expiry and fencing.

use pool_protocol::id::LeaseId;
use pool_protocol::instance::{Phase, SignalKind};
use pool_protocol::lease::{DeclineReason, LeaseRef};
use pool_protocol::problem::Code;
use pool_protocol::task::TaskState;
use rstest::rstest;

use super::fixture::*;
use crate::model::{Ending, PlatformState};
use crate::state::EndReason;

#[rstest]
#[tokio::test]
async fn a_lease_whose_response_was_lost_is_returned_again(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    fixture.ready("acme", "1").await;
    let [one, other] = [fixture.agent("one").await, fixture.agent("two").await];
    let lost = fixture.lease(one).await.unwrap();
    assert!(
        fixture.lease(other).await.is_none(),
        "the lease belongs to another agent"
    );
    let again = fixture.lease(one).await.unwrap();
    assert!(again.redelivered && !lost.redelivered);
    assert_eq!((again.grant, again.attempt), (lost.grant, 1));
    assert_eq!(again.payload, payload());
    let none = fixture.lease_beside(one, &[lost.grant.lease]).await;
    assert!(none.is_none());
}

#[rstest]
#[tokio::test]
async fn another_instance_of_the_agent_gets_the_lease_of_a_removed_one(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    fixture.ready("acme", "1").await;
    let first = fixture.agent("one").await;
    let lost = fixture.lease(first).await.unwrap();
    let mut replica = registration("one");
    replica.system_id = "one-2".to_owned();
    let second = fixture
        .store
        .register(&pool(), CREDENTIAL, &replica)
        .await
        .unwrap();
    let (pool, heartbeat) = (pool(), beats(Vec::new()));
    let sent = fixture
        .store
        .heartbeat(&pool, CREDENTIAL, first, &heartbeat);
    sent.await.unwrap();
    assert!(
        fixture.lease(second.instance).await.is_none(),
        "the first instance is online"
    );
    fixture.store.remove(&pool, first).await.unwrap();
    let again = fixture.lease(second.instance).await.unwrap();
    assert_eq!(again.grant, lost.grant);
    assert_eq!(
        fixture.view(again.grant.task).await.instance,
        Some(second.instance)
    );
}

#[rstest]
#[tokio::test]
async fn a_lease_of_an_agent_that_starts_again_is_given_to_it_at_once(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    fixture.ready("acme", "1").await;
    let first = fixture.agent("one").await;
    let lost = fixture.lease(first).await.unwrap();
    let mut next = registration("one");
    next.system_id = "one-2".to_owned();
    let next = fixture
        .store
        .register(&pool(), CREDENTIAL, &next)
        .await
        .unwrap();
    let again = fixture.lease(next.instance).await.unwrap();
    assert_eq!((again.grant, again.attempt), (lost.grant, 1));
}

#[rstest]
#[tokio::test]
async fn a_silent_agent_loses_its_lease_to_the_next(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let first = fixture.lease(one).await.unwrap();
    // A heartbeat that does not name the lease does not renew it.
    fixture.pass(20).await;
    fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, one, &beats(vec![]))
        .await
        .unwrap();
    assert_eq!(fixture.pass(15).await.len(), 1);
    fixture
        .store
        .apply_platform_state(task, PlatformState::Waiting)
        .await
        .unwrap();
    let two = fixture.agent("two").await;
    assert!(fixture.lease(two).await.is_none(), "there is a pause");
    fixture.pass(11).await;
    let second = fixture.lease(two).await.unwrap();
    assert_eq!((second.grant.fencing_token, second.attempt), (2, 2));
    assert_ne!(second.grant.lease, first.grant.lease);
    let late = fixture.store.accept(first.grant, &holder("x")).await;
    assert_eq!(code(late), Code::LeaseSuperseded);
    fixture
        .store
        .accept(second.grant, &holder("y"))
        .await
        .unwrap();
}

#[rstest]
#[tokio::test]
async fn heartbeats_that_name_a_lease_renew_it(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let leased = fixture.lease(one).await.unwrap();
    for _ in 0..10 {
        assert!(fixture.pass(20).await.is_empty());
        let named = beats(vec![held(&leased, Phase::Preparing)]);
        let orders = fixture
            .store
            .heartbeat(&pool(), CREDENTIAL, one, &named)
            .await
            .unwrap();
        assert!(orders.stale.is_empty() && orders.signals.is_empty());
    }
    // The agent's heartbeats were lost.
    assert_eq!(fixture.pass(35).await.len(), 1);
    let named = beats(vec![held(&leased, Phase::Preparing)]);
    let orders = fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, one, &named)
        .await
        .unwrap();
    assert_eq!(orders.stale, [leased.grant.lease]);
}

#[rstest]
#[tokio::test]
async fn a_started_lease_expires_after_300_s_and_not_before(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let leased = fixture.lease(one).await.unwrap();
    let status = fixture
        .store
        .started(leased.grant, "ns/job-1")
        .await
        .unwrap();
    assert_eq!(
        (status.state, status.expires_in.as_secs()),
        (TaskState::Leased, 300)
    );
    let view = fixture.view(leased.grant.task).await;
    assert_eq!(view.executor.as_deref(), Some("ns/job-1"));
    assert!(fixture.pass(295).await.is_empty());
    assert_eq!(fixture.pass(10).await.len(), 1);
    let late = fixture.store.accept(leased.grant, &holder("x")).await;
    assert_eq!(code(late), Code::LeaseExpired);
}

#[rstest]
#[tokio::test]
async fn the_history_of_a_task_that_is_always_declined_has_a_limit(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let store = &fixture.store;
    let task = fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let draining = declined(DeclineReason::Draining, "it stops");
    for round in 0..50 {
        let grant = fixture.lease(one).await.unwrap().grant;
        store.decline(grant, &draining).await.unwrap();
        fixture.pass(5).await;
        let waiting = PlatformState::Waiting;
        let confirmed = store.apply_platform_state(task, waiting).await;
        confirmed.unwrap();
        let agent = beats(vec![]);
        store
            .heartbeat(&pool(), CREDENTIAL, one, &agent)
            .await
            .unwrap();
        let kept = fixture.events(task).await.len();
        assert!(kept <= 103 && kept >= (3 * round).min(100), "{kept}");
    }
}

#[rstest]
#[tokio::test]
async fn one_executor_accepts_a_task_and_its_payload_is_deleted(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let leased = fixture.running("1").await;
    let task = leased.grant.task;
    assert_eq!(fixture.payloads().await, 0);
    let again = fixture
        .store
        .accept(leased.grant, &holder("x"))
        .await
        .unwrap();
    assert_eq!(again.state, TaskState::Running);
    let other = fixture.store.accept(leased.grant, &holder("y")).await;
    assert_eq!(code(other), Code::LeaseSuperseded);
    let decline = declined(DeclineReason::Failed, "gone");
    let declined = fixture.store.decline(leased.grant, &decline).await;
    assert_eq!(code(declined), Code::LeaseAccepted);
    fixture
        .store
        .lease_heartbeat(leased.grant, &beat("x"))
        .await
        .unwrap();
    let view = fixture.view(task).await;
    assert_eq!(view.holder.as_deref(), Some("pod-x"));
    assert_eq!(view.phase.as_deref(), Some("plan"));
    let one = fixture.agent("one").await;
    assert!(fixture.lease(one).await.is_none());
}

#[rstest]
#[tokio::test]
async fn calls_of_old_leases_change_nothing_and_have_stable_codes(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let store = &fixture.store;
    let task = fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let old = fixture.lease(one).await.unwrap().grant;
    let draining = declined(DeclineReason::Draining, "it stops");
    store.decline(old, &draining).await.unwrap();
    store
        .apply_platform_state(task, PlatformState::Waiting)
        .await
        .unwrap();
    let new = fixture.lease(one).await.unwrap().grant;
    let replay = async |grant: LeaseRef| {
        [
            code(store.started(grant, "ns/job").await),
            code(store.decline(grant, &draining).await),
            code(store.accept(grant, &holder("x")).await),
            code(store.lease_heartbeat(grant, &beat("x")).await),
            code(store.end(grant, Ending::Completed, &end_report(true)).await),
            code(store.end(grant, Ending::Failed, &end_report(true)).await),
            code(store.end(grant, Ending::Cancelled, &end_report(true)).await),
        ]
    };
    let unchanged = async || (fixture.view(task).await, fixture.events(task).await);
    let mut before = unchanged().await;
    assert_eq!(replay(old).await, [Code::LeaseSuperseded; 7]);
    assert_eq!(unchanged().await.1, before.1);
    store.accept(new, &holder("y")).await.unwrap();
    before = unchanged().await;
    assert_eq!(replay(old).await, [Code::LeaseSuperseded; 7]);
    // Another executor uses the current lease.
    assert_eq!(
        code(store.accept(new, &holder("x")).await),
        Code::LeaseSuperseded
    );
    assert_eq!(unchanged().await.1, before.1);
    store
        .end(new, Ending::Completed, &end_report(false))
        .await
        .unwrap();
    before = unchanged().await;
    assert_eq!(replay(old).await, [Code::TaskAlreadyTerminal; 7]);
    let codes = [
        code(store.started(new, "ns/job").await),
        code(store.decline(new, &draining).await),
        code(store.accept(new, &holder("y")).await),
        code(store.lease_heartbeat(new, &beat("y")).await),
        code(store.end(new, Ending::Failed, &end_report(true)).await),
    ];
    assert_eq!(codes, [Code::TaskAlreadyTerminal; 5]);
    // The same end may be repeated.
    let ended = store.end(new, Ending::Completed, &end_report(false)).await;
    assert_eq!(ended.unwrap(), TaskState::Completed);
    assert_eq!(unchanged().await.1, before.1);
}

#[rstest]
#[tokio::test]
async fn a_lease_is_valid_for_its_own_task_only(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let store = &fixture.store;
    let (a, b) = (fixture.running("1").await, fixture.running("2").await);
    for grant in [
        LeaseRef {
            task: b.grant.task,
            ..a.grant
        },
        LeaseRef {
            lease: LeaseId::new(),
            ..b.grant
        },
    ] {
        let codes = [
            code(store.accept(grant, &holder("z")).await),
            code(store.lease_heartbeat(grant, &beat("z")).await),
            code(store.end(grant, Ending::Completed, &end_report(true)).await),
        ];
        assert_eq!(codes, [Code::LeaseSuperseded; 3]);
    }
    assert_eq!(fixture.view(b.grant.task).await.state, TaskState::Running);
}

#[rstest]
#[tokio::test]
async fn a_task_fails_with_all_reasons_after_five_attempts(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.ready("acme", "poison").await;
    let one = fixture.agent("one").await;
    for attempt in 1..=5 {
        let leased = fixture.lease(one).await.unwrap();
        assert_eq!(
            (leased.task.job.as_str(), leased.attempt),
            ("poison", attempt)
        );
        let decline = declined(DeclineReason::Failed, &format!("error {attempt}"));
        fixture.store.decline(leased.grant, &decline).await.unwrap();
        if attempt == 5 {
            break;
        }
        fixture
            .store
            .apply_platform_state(task, PlatformState::Waiting)
            .await
            .unwrap();
        // Meanwhile the pool serves other tasks.
        let other = fixture.ready("acme", &format!("other {attempt}")).await;
        let leased = fixture.lease(one).await.unwrap();
        assert_eq!(leased.grant.task, other);
        fixture
            .store
            .accept(leased.grant, &holder("x"))
            .await
            .unwrap();
        complete(&fixture.store, &leased).await;
        let pause = 5 << attempt;
        fixture.pass(pause - 1).await;
        assert!(fixture.lease(one).await.is_none(), "{attempt}");
        fixture.pass(2).await;
    }
    let end = fixture.view(task).await.end.unwrap();
    assert_eq!(end.reason, EndReason::Poison);
    for attempt in 1..=5 {
        let reason = format!("error {attempt}");
        assert!(end.diagnostic.contains(&reason), "{}", end.diagnostic);
    }
    assert_eq!(fixture.store.to_report(10).await.unwrap().len(), 1);
}

#[rstest]
#[tokio::test]
async fn a_cancelled_lease_gets_a_signal_and_cannot_be_accepted(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let leased = fixture.lease(one).await.unwrap();
    let state = fixture.store.request_cancel(task).await.unwrap();
    assert_eq!(state, TaskState::Leased);
    let named = beats(vec![held(&leased, Phase::Started)]);
    let orders = fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, one, &named)
        .await
        .unwrap();
    assert_eq!(orders.signals.len(), 1);
    assert_eq!(orders.signals[0].signal, SignalKind::Cancel);
    assert_eq!(orders.signals[0].lease_id, leased.grant.lease);
    let accepted = fixture.store.accept(leased.grant, &holder("x")).await;
    assert_eq!(code(accepted), Code::TaskCancelled);
    let end = end_report(true);
    let ended = fixture.store.end(leased.grant, Ending::Cancelled, &end);
    assert_eq!(ended.await.unwrap(), TaskState::Cancelled);
    let orders = fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, one, &named)
        .await
        .unwrap();
    assert!(orders.signals.is_empty());
    assert_eq!(orders.stale, [leased.grant.lease]);
}

#[rstest]
#[tokio::test]
async fn the_heartbeat_of_a_running_task_returns_its_cancellation(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let leased = fixture.running("1").await;
    fixture
        .store
        .request_cancel(leased.grant.task)
        .await
        .unwrap();
    let status = fixture
        .store
        .lease_heartbeat(leased.grant, &beat("x"))
        .await
        .unwrap();
    assert!(status.cancel_requested);
    let view = fixture.view(leased.grant.task).await;
    assert!(view.cancel_requested && view.state == TaskState::Running);
}

#[rstest]
#[tokio::test]
async fn a_run_survives_five_minutes_of_silence_and_fails_once_after_ten(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let leased = fixture.running("1").await;
    let changed = fixture.pass(300).await;
    assert_eq!(changed.len(), 1, "one change");
    assert_eq!(changed[0].state, TaskState::Orphaned);
    assert!(fixture.store.to_report(10).await.unwrap().is_empty());
    let status = fixture
        .store
        .lease_heartbeat(leased.grant, &beat("x"))
        .await
        .unwrap();
    assert_eq!(status.state, TaskState::Running);
    assert!(fixture.pass(85).await.is_empty());
    // The executor never returns.
    let changed = fixture.pass(600).await;
    let states: Vec<_> = changed.iter().map(|task| task.state).collect();
    assert_eq!(states, [TaskState::Orphaned, TaskState::Failed]);
    let end = changed[1].end.as_ref().unwrap();
    assert_eq!(end.reason, EndReason::Lost);
    assert!(end.diagnostic.contains("agent one"), "{}", end.diagnostic);
    assert_eq!(fixture.store.to_report(10).await.unwrap().len(), 1);
    let late = fixture
        .store
        .lease_heartbeat(leased.grant, &beat("x"))
        .await;
    assert_eq!(code(late), Code::TaskAlreadyTerminal);
    // The executor may have to save the state, so its lease is not stale.
    let one = fixture.agent("one").await;
    let named = beats(vec![held(&leased, Phase::Running)]);
    let orders = fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, one, &named)
        .await
        .unwrap();
    assert!(orders.stale.is_empty());
}
