//! Tests of submissions, confirmations, cancellations and reports.

use pool_protocol::lease::End;
use pool_protocol::problem::Code;
use pool_protocol::task::TaskState;
use rstest::rstest;
use serde_json::json;

use super::fixture::*;
use crate::model::{Content, Ending, Payload, PlatformState, Submitted};
use crate::state::EndReason;
use crate::view::Wait;

#[rstest]
#[tokio::test]
async fn a_step_is_stored_once(#[values(Engine::Sqlite, Engine::Postgres)] engine: Engine) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let Submitted::New(task) = fixture.submit("acme", "1").await else {
        panic!("it is new");
    };
    assert_eq!(
        fixture.submit("acme", "1").await,
        Submitted::Duplicate(task)
    );
    assert_eq!(fixture.all().await.len(), 1);
    // A task that is over is also a duplicate.
    fixture.store.request_cancel(task).await.unwrap();
    assert_eq!(
        fixture.submit("acme", "1").await,
        Submitted::Duplicate(task)
    );
}

#[rstest]
#[tokio::test]
async fn a_task_is_not_leased_before_the_platform_confirms_it(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.submit("acme", "1").await.task();
    let instance = fixture.agent("one").await;
    assert!(fixture.lease(instance).await.is_none());
    assert_eq!(fixture.view(task).await.wait, Some(Wait::Unconfirmed));
    let state = fixture
        .store
        .apply_platform_state(task, PlatformState::Waiting)
        .await
        .unwrap();
    assert_eq!(state, TaskState::Available);
    assert_eq!(fixture.view(task).await.wait, Some(Wait::Turn));
    let leased = fixture.lease(instance).await.unwrap();
    assert_eq!((leased.grant.task, leased.attempt), (task, 1));
    assert_eq!(leased.payload, payload());
    assert_eq!(leased.task.traceparent.as_deref(), Some("00-1-2-01"));
    assert_eq!(leased.expires_in.as_secs(), 30);
    // A late answer changes nothing.
    fixture
        .store
        .apply_platform_state(task, PlatformState::Over)
        .await
        .unwrap();
    assert_eq!(fixture.view(task).await.state, TaskState::Leased);
}

#[rstest]
#[tokio::test]
async fn a_long_queue_does_not_hold_up_those_that_wait_to_be_confirmed(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    for job in 0..40 {
        fixture.ready("acme", &format!("q{job}")).await;
    }
    fixture.pass(6).await;
    let mut new = Vec::new();
    for job in 0..3 {
        new.push(fixture.submit("acme", &format!("n{job}")).await.task());
    }
    fixture.pass(1).await;
    let mut asked = Vec::new();
    for round in 0..5 {
        let due = fixture.store.to_check(64).await.unwrap();
        assert_eq!(due.len(), if round == 0 { 11 } else { 8 });
        asked.extend(due.into_iter().map(|task| task.task));
    }
    assert_eq!(asked[..3], new);
    asked.sort();
    asked.dedup();
    assert_eq!(asked.len(), 43, "each of the queue has its turn");
}

#[rstest]
#[tokio::test]
async fn what_was_superseded_can_be_submitted_again(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let first = fixture.submit("acme", "1").await.task();
    fixture
        .store
        .apply_platform_state(first, PlatformState::Over)
        .await
        .unwrap();
    let end = fixture.view(first).await.end.unwrap();
    assert_eq!((end.reason, end.reported), (EndReason::Superseded, true));
    assert!(fixture.store.to_report(10).await.unwrap().is_empty());
    let Submitted::New(second) = fixture.submit("acme", "1").await else {
        panic!("it is new again");
    };
    fixture
        .store
        .apply_platform_state(second, PlatformState::Waiting)
        .await
        .unwrap();
    let instance = fixture.agent("one").await;
    assert_eq!(fixture.lease(instance).await.unwrap().grant.task, second);
    assert_eq!(fixture.all().await.len(), 1);
}

#[rstest]
#[tokio::test]
async fn checks_are_due_soon_and_then_every_5_s(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let due = async || fixture.store.to_check(10).await.unwrap().len();
    let task = fixture.submit("acme", "1").await.task();
    assert_eq!(due().await, 0, "the platform has not committed it yet");
    fixture.pass(1).await;
    assert_eq!((due().await, due().await), (1, 0));
    fixture.pass(1).await;
    assert_eq!((due().await, due().await), (1, 0));
    fixture
        .store
        .apply_platform_state(task, PlatformState::Waiting)
        .await
        .unwrap();
    fixture.pass(3).await;
    assert_eq!(due().await, 0);
    fixture.pass(3).await;
    assert_eq!(due().await, 1);
    let instance = fixture.agent("one").await;
    let leased = fixture.lease(instance).await.unwrap();
    fixture.pass(6).await;
    assert_eq!(due().await, 1, "it may have been cancelled");
    fixture
        .store
        .accept(leased.grant, &holder("x"))
        .await
        .unwrap();
    fixture.pass(6).await;
    assert_eq!(
        due().await,
        0,
        "the executor checks for a cancellation itself"
    );
}

#[rstest]
#[tokio::test]
async fn a_report_is_due_until_the_platform_has_the_outcome(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    let leased = fixture.running("1").await;
    let report = |text: &str| {
        json!({"unreportedStep": {"plan": text}})
            .as_object()
            .cloned()
    };
    let end = End {
        report: report(&"x".repeat(20_000)),
        ..end_report(false)
    };
    let refused = fixture.store.end(leased.grant, Ending::Failed, &end);
    assert_eq!(code(refused.await), Code::RequestInvalid);
    let end = End {
        report: report("/plan\0"),
        ..end
    };
    let ended = fixture.store.end(leased.grant, Ending::Failed, &end);
    assert_eq!(ended.await.unwrap(), TaskState::Failed);
    let given = fixture.store.to_report(10).await.unwrap();
    let end = given[0].end.as_ref().unwrap();
    assert_eq!((given[0].job.as_str(), end.exit_code), ("1", Some(0)));
    assert_eq!(
        (end.diagnostic.as_str(), end.final_log_sequence),
        ("no changes", Some(7))
    );
    let stored = end.report.as_deref().map(serde_json::from_str);
    assert_eq!(stored.unwrap().ok(), report("/plan\0"));
    assert!(fixture.store.to_report(10).await.unwrap().is_empty());
    fixture.pass(31).await;
    assert_eq!(fixture.store.to_report(10).await.unwrap().len(), 1);
    fixture.reopen().await;
    fixture.pass(120).await;
    assert_eq!(fixture.store.to_report(10).await.unwrap().len(), 1);
    // It is not deleted before it is reported.
    fixture.pass(REMEMBERED.as_secs() + 60).await;
    fixture.store.reported(leased.grant.task).await.unwrap();
    fixture.store.reported(leased.grant.task).await.unwrap();
    assert!(fixture.store.to_report(10).await.unwrap().is_empty());
    fixture.pass(10).await;
    assert!(
        fixture
            .store
            .task(leased.grant.task)
            .await
            .unwrap()
            .is_none()
    );
    assert!(fixture.events(leased.grant.task).await.is_empty());
}

#[rstest]
#[tokio::test]
async fn no_report_is_due_for_an_outcome_that_the_executor_reported(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let leased = fixture.running("1").await;
    complete(&fixture.store, &leased).await;
    assert!(fixture.store.to_report(10).await.unwrap().is_empty());
    assert_eq!(
        fixture.submit("acme", "1").await,
        Submitted::Duplicate(leased.grant.task)
    );
    fixture.pass(REMEMBERED.as_secs() + 10).await;
    assert!(matches!(
        fixture.submit("acme", "1").await,
        Submitted::New(_)
    ));
}

#[rstest]
#[tokio::test]
async fn a_refused_task_is_over_at_once(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let mut submission = submission("acme", "1");
    submission.content = Content::Refused("acme may not use pool eu".to_owned());
    let task = fixture.store.submit(submission).await.unwrap().task();
    let given = fixture.store.to_report(10).await.unwrap();
    assert!(given.is_empty(), "the platform has not committed it yet");
    fixture.pass(1).await;
    let given = fixture.store.to_report(10).await.unwrap();
    let end = given[0].end.as_ref().unwrap();
    assert_eq!((given[0].task, end.reason), (task, EndReason::Refused));
    assert_eq!(end.diagnostic, "acme may not use pool eu");
    fixture.pass(1).await;
    assert_eq!(fixture.store.to_report(10).await.unwrap().len(), 1);
    fixture.pass(10).await;
    assert!(fixture.store.to_check(10).await.unwrap().is_empty());
}

#[rstest]
#[tokio::test]
async fn a_waiting_task_that_is_cancelled_is_never_leased(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let unconfirmed = fixture.submit("acme", "1").await.task();
    let waiting = fixture.ready("acme", "2").await;
    let instance = fixture.agent("one").await;
    for task in [unconfirmed, waiting] {
        let state = fixture.store.request_cancel(task).await.unwrap();
        assert_eq!(state, TaskState::Cancelled);
        fixture
            .store
            .apply_platform_state(task, PlatformState::Waiting)
            .await
            .unwrap();
    }
    assert!(fixture.lease(instance).await.is_none());
    assert_eq!(fixture.store.to_report(10).await.unwrap().len(), 2);
}

#[rstest]
#[tokio::test]
async fn a_task_that_waits_too_long_expires(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.ready("acme", "1").await;
    assert!(fixture.pass(QUEUED.as_secs() - 1).await.is_empty());
    let expired = fixture.pass(1).await;
    assert_eq!(expired[0].task, task);
    let end = expired[0].end.as_ref().unwrap();
    assert_eq!(end.reason, EndReason::Expired);
}

#[rstest]
#[tokio::test]
async fn a_submission_beyond_the_limits_is_refused_and_not_stored(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let long = submission(&"o".repeat(257), "1");
    let nul = submission("a\0b", "1");
    let mut large = submission("acme", "1");
    large.content = Content::Payload(Payload(vec![0; 10 << 20]));
    for submission in [long, nul, large] {
        let result = fixture.store.submit(submission).await;
        assert_eq!(code(result), Code::RequestInvalid);
    }
    assert!(fixture.all().await.is_empty());
}

#[rstest]
#[tokio::test]
async fn operations_on_a_missing_task_are_refused(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = pool_protocol::id::TaskId::new();
    assert_eq!(
        code(fixture.store.request_cancel(task).await),
        Code::TaskNotFound
    );
    assert_eq!(
        code(
            fixture
                .store
                .apply_platform_state(task, PlatformState::Over)
                .await
        ),
        Code::TaskNotFound
    );
    assert_eq!(code(fixture.store.reported(task).await), Code::TaskNotFound);
    assert!(fixture.store.task(task).await.unwrap().is_none());
}
