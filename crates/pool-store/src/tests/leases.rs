//! Leases: given once, given again, accepted once, fenced.

use pool_protocol::id::LeaseId;
use pool_protocol::instance::{Phase, SignalKind};
use pool_protocol::lease::DeclineReason;
use pool_protocol::problem::Code;
use pool_protocol::task::TaskState;
use pool_protocol::token::JobGrant;
use rstest::rstest;

use super::site::*;
use crate::model::{Ending, Found};
use crate::state::EndReason;

#[rstest]
#[tokio::test]
async fn a_lease_whose_response_was_lost_is_given_again(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    site.ready("acme", "1").await;
    let [one, other] = [site.agent("one").await, site.agent("two").await];
    let lost = site.lease(one).await.unwrap();
    assert!(site.lease(other).await.is_none(), "it is not theirs");
    let again = site.lease(one).await.unwrap();
    assert!(again.redelivered && !lost.redelivered);
    assert_eq!((again.grant, again.attempt), (lost.grant, 1));
    assert_eq!(again.payload, payload());
    let none = site.lease_beside(one, &[lost.grant.lease]).await;
    assert!(none.is_none());
}

#[rstest]
#[tokio::test]
async fn a_lease_of_an_instance_that_has_gone_is_given_to_its_agent(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    site.ready("acme", "1").await;
    let first = site.agent("one").await;
    let lost = site.lease(first).await.unwrap();
    let mut replica = registration("one");
    replica.system_id = "one-2".to_owned();
    let second = site.store.register(&pool(), &replica).await.unwrap();
    assert!(
        site.lease(second.instance).await.is_none(),
        "the first lives"
    );
    site.store.remove(&pool(), first).await.unwrap();
    let again = site.lease(second.instance).await.unwrap();
    assert_eq!(again.grant, lost.grant);
    assert_eq!(
        site.view(again.grant.task).await.instance,
        Some(second.instance)
    );
}

#[rstest]
#[tokio::test]
async fn a_silent_agent_loses_its_lease_to_the_next(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    let task = site.ready("acme", "1").await;
    let one = site.agent("one").await;
    let first = site.lease(one).await.unwrap();
    // A heartbeat that does not name the lease does not renew it.
    site.pass(20).await;
    site.store
        .heartbeat(&pool(), one, &beats(vec![]))
        .await
        .unwrap();
    assert_eq!(site.pass(15).await.len(), 1);
    site.store.found(task, Found::Waiting).await.unwrap();
    let two = site.agent("two").await;
    assert!(site.lease(two).await.is_none(), "there is a pause");
    site.pass(11).await;
    let second = site.lease(two).await.unwrap();
    assert_eq!((second.grant.fencing_token, second.attempt), (2, 2));
    assert_ne!(second.grant.lease, first.grant.lease);
    let late = site.store.accept(first.grant, &holder("x")).await;
    assert_eq!(code(late), Code::LeaseSuperseded);
    site.store.accept(second.grant, &holder("y")).await.unwrap();
}

#[rstest]
#[tokio::test]
async fn a_named_lease_holds_as_long_as_its_instance_lives(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    site.ready("acme", "1").await;
    let one = site.agent("one").await;
    let leased = site.lease(one).await.unwrap();
    for _ in 0..10 {
        assert!(site.pass(20).await.is_empty());
        let named = beats(vec![held(&leased, Phase::Preparing)]);
        let orders = site.store.heartbeat(&pool(), one, &named).await.unwrap();
        assert!(orders.stale.is_empty() && orders.signals.is_empty());
    }
    // An agent whose answer was lost for good.
    assert_eq!(site.pass(35).await.len(), 1);
    let named = beats(vec![held(&leased, Phase::Preparing)]);
    let orders = site.store.heartbeat(&pool(), one, &named).await.unwrap();
    assert_eq!(orders.stale, [leased.grant.lease]);
}

#[rstest]
#[tokio::test]
async fn a_started_task_is_given_away_after_300_s_and_not_before(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    site.ready("acme", "1").await;
    let one = site.agent("one").await;
    let leased = site.lease(one).await.unwrap();
    let status = site.store.started(leased.grant, "ns/job-1").await.unwrap();
    assert_eq!(
        (status.state, status.expires_in.as_secs()),
        (TaskState::Leased, 300)
    );
    let view = site.view(leased.grant.task).await;
    assert_eq!(view.executor.as_deref(), Some("ns/job-1"));
    assert!(site.pass(295).await.is_empty());
    assert_eq!(site.pass(10).await.len(), 1);
    let late = site.store.accept(leased.grant, &holder("x")).await;
    assert_eq!(code(late), Code::LeaseExpired);
}

#[rstest]
#[tokio::test]
async fn one_executor_accepts_a_task_and_its_payload_goes(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    let leased = site.running("1").await;
    let task = leased.grant.task;
    assert_eq!(site.payloads().await, 0);
    let again = site.store.accept(leased.grant, &holder("x")).await.unwrap();
    assert_eq!(again.state, TaskState::Running);
    let other = site.store.accept(leased.grant, &holder("y")).await;
    assert_eq!(code(other), Code::LeaseSuperseded);
    let decline = declined(DeclineReason::Failed, "gone");
    let declined = site.store.decline(leased.grant, &decline).await;
    assert_eq!(code(declined), Code::LeaseAccepted);
    site.store.beat(leased.grant, &beat("x")).await.unwrap();
    let view = site.view(task).await;
    assert_eq!(view.holder.as_deref(), Some("pod-x"));
    assert_eq!(view.phase.as_deref(), Some("plan"));
    let one = site.agent("one").await;
    assert!(site.lease(one).await.is_none());
}

#[rstest]
#[tokio::test]
async fn old_calls_change_nothing_and_have_stable_codes(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    let store = &site.store;
    let task = site.ready("acme", "1").await;
    let one = site.agent("one").await;
    let old = site.lease(one).await.unwrap().grant;
    let draining = declined(DeclineReason::Draining, "it stops");
    store.decline(old, &draining).await.unwrap();
    store.found(task, Found::Waiting).await.unwrap();
    let new = site.lease(one).await.unwrap().grant;
    let replay = async |grant: JobGrant| {
        [
            code(store.started(grant, "ns/job").await),
            code(store.decline(grant, &draining).await),
            code(store.accept(grant, &holder("x")).await),
            code(store.beat(grant, &beat("x")).await),
            code(store.end(grant, Ending::Completed, &told(true)).await),
            code(store.end(grant, Ending::Failed, &told(true)).await),
            code(store.end(grant, Ending::Cancelled, &told(true)).await),
        ]
    };
    let unchanged = async || (site.view(task).await, site.events(task).await);
    let mut before = unchanged().await;
    assert_eq!(replay(old).await, [Code::LeaseSuperseded; 7]);
    assert_eq!(unchanged().await.1, before.1);
    store.accept(new, &holder("y")).await.unwrap();
    before = unchanged().await;
    assert_eq!(replay(old).await, [Code::LeaseSuperseded; 7]);
    // Another executor with a good lease.
    assert_eq!(
        code(store.accept(new, &holder("x")).await),
        Code::LeaseSuperseded
    );
    assert_eq!(unchanged().await.1, before.1);
    store
        .end(new, Ending::Completed, &told(false))
        .await
        .unwrap();
    before = unchanged().await;
    assert_eq!(replay(old).await, [Code::TaskAlreadyTerminal; 7]);
    let codes = [
        code(store.started(new, "ns/job").await),
        code(store.decline(new, &draining).await),
        code(store.accept(new, &holder("y")).await),
        code(store.beat(new, &beat("y")).await),
        code(store.end(new, Ending::Failed, &told(true)).await),
    ];
    assert_eq!(codes, [Code::TaskAlreadyTerminal; 5]);
    // The same end again is the same end.
    let ended = store.end(new, Ending::Completed, &told(false)).await;
    assert_eq!(ended.unwrap(), TaskState::Completed);
    assert_eq!(unchanged().await.1, before.1);
}

#[rstest]
#[tokio::test]
async fn a_lease_is_good_for_its_own_task(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    let store = &site.store;
    let (a, b) = (site.running("1").await, site.running("2").await);
    for grant in [
        JobGrant {
            task: b.grant.task,
            ..a.grant
        },
        JobGrant {
            lease: LeaseId::new(),
            ..b.grant
        },
    ] {
        let codes = [
            code(store.accept(grant, &holder("z")).await),
            code(store.beat(grant, &beat("z")).await),
            code(store.end(grant, Ending::Completed, &told(true)).await),
        ];
        assert_eq!(codes, [Code::LeaseSuperseded; 3]);
    }
    assert_eq!(site.view(b.grant.task).await.state, TaskState::Running);
}

#[rstest]
#[tokio::test]
async fn a_task_that_fails_everywhere_is_given_up_with_all_reasons(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    let task = site.ready("acme", "poison").await;
    let one = site.agent("one").await;
    for attempt in 1..=5 {
        let leased = site.lease(one).await.unwrap();
        assert_eq!((leased.job.as_str(), leased.attempt), ("poison", attempt));
        let decline = declined(DeclineReason::Failed, &format!("error {attempt}"));
        site.store.decline(leased.grant, &decline).await.unwrap();
        if attempt == 5 {
            break;
        }
        site.store.found(task, Found::Waiting).await.unwrap();
        // The pool serves others meanwhile.
        let other = site.ready("acme", &format!("other {attempt}")).await;
        let leased = site.lease(one).await.unwrap();
        assert_eq!(leased.grant.task, other);
        site.store.accept(leased.grant, &holder("x")).await.unwrap();
        complete(&site.store, &leased).await;
        let pause = 5 << attempt;
        site.pass(pause - 1).await;
        assert!(site.lease(one).await.is_none(), "{attempt}");
        site.pass(2).await;
    }
    let end = site.view(task).await.end.unwrap();
    assert_eq!(end.reason, EndReason::Poison);
    for attempt in 1..=5 {
        let reason = format!("error {attempt}");
        assert!(end.diagnostic.contains(&reason), "{}", end.diagnostic);
    }
    assert_eq!(site.store.to_report(10).await.unwrap().len(), 1);
}

#[rstest]
#[tokio::test]
async fn a_cancelled_lease_is_signalled_not_accepted_and_ended(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    let task = site.ready("acme", "1").await;
    let one = site.agent("one").await;
    let leased = site.lease(one).await.unwrap();
    let state = site.store.request_cancel(task).await.unwrap();
    assert_eq!(state, TaskState::Leased);
    let named = beats(vec![held(&leased, Phase::Started)]);
    let orders = site.store.heartbeat(&pool(), one, &named).await.unwrap();
    assert_eq!(orders.signals.len(), 1);
    assert_eq!(orders.signals[0].signal, SignalKind::Cancel);
    assert_eq!(orders.signals[0].lease_id, leased.grant.lease);
    let accepted = site.store.accept(leased.grant, &holder("x")).await;
    assert_eq!(code(accepted), Code::TaskCancelled);
    let end = told(true);
    let ended = site.store.end(leased.grant, Ending::Cancelled, &end);
    assert_eq!(ended.await.unwrap(), TaskState::Cancelled);
    let orders = site.store.heartbeat(&pool(), one, &named).await.unwrap();
    assert!(orders.signals.is_empty());
    assert_eq!(orders.stale, [leased.grant.lease]);
}

#[rstest]
#[tokio::test]
async fn a_running_task_learns_that_it_is_cancelled(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    let leased = site.running("1").await;
    site.store.request_cancel(leased.grant.task).await.unwrap();
    let status = site.store.beat(leased.grant, &beat("x")).await.unwrap();
    assert!(status.cancel_requested);
    let view = site.view(leased.grant.task).await;
    assert!(view.cancel_requested && view.state == TaskState::Running);
}

#[rstest]
#[tokio::test]
async fn five_minutes_of_silence_end_no_run_and_ten_minutes_end_it_once(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(site) = Site::open(engine).await else {
        return;
    };
    let leased = site.running("1").await;
    let changed = site.pass(300).await;
    assert_eq!(changed.len(), 1, "one line of news");
    assert_eq!(changed[0].state, TaskState::Orphaned);
    assert!(site.store.to_report(10).await.unwrap().is_empty());
    let status = site.store.beat(leased.grant, &beat("x")).await.unwrap();
    assert_eq!(status.state, TaskState::Running);
    assert!(site.pass(85).await.is_empty());
    // For ever.
    let changed = site.pass(600).await;
    let states: Vec<_> = changed.iter().map(|task| task.state).collect();
    assert_eq!(states, [TaskState::Orphaned, TaskState::Failed]);
    let end = changed[1].end.as_ref().unwrap();
    assert_eq!(end.reason, EndReason::Lost);
    assert!(end.diagnostic.contains("agent one"), "{}", end.diagnostic);
    assert_eq!(site.store.to_report(10).await.unwrap().len(), 1);
    let late = site.store.beat(leased.grant, &beat("x")).await;
    assert_eq!(code(late), Code::TaskAlreadyTerminal);
    // It may have to save the state.
    let one = site.agent("one").await;
    let named = beats(vec![held(&leased, Phase::Running)]);
    let orders = site.store.heartbeat(&pool(), one, &named).await.unwrap();
    assert!(orders.stale.is_empty());
}
