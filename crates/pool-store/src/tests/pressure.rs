//! Tests with one pool that asks for too much.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use pool_protocol::id::{PoolName, TaskId};
use pool_protocol::instance::Phase;
use pool_protocol::problem::Code;
use rstest::rstest;
use tokio::task::JoinSet;

use super::fixture::*;
use crate::db::{Tx, Value};
use crate::model::{LeaseRequest, LeasedTask, PlatformState, Submission};
use crate::state::EndReason;

fn other_pool() -> PoolName {
    "us".parse().unwrap()
}

fn in_other_pool(job: &str) -> Submission {
    Submission {
        pool: other_pool(),
        ..submission("acme", job)
    }
}

#[tokio::test]
async fn a_busy_pool_leaves_another_its_part_of_the_time() {
    const MANY: usize = 300;
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let _frozen = freeze_clock();
    let busy = fixture.agent("one").await;
    let us = other_pool();
    let registered = fixture
        .store
        .register(&us, CREDENTIAL, &registration("one"))
        .await;
    let calm = registered.unwrap().instance;
    let task = fixture
        .store
        .submit(in_other_pool("1"))
        .await
        .unwrap()
        .task();
    let waiting = PlatformState::Waiting;
    fixture
        .store
        .apply_platform_state(task, waiting)
        .await
        .unwrap();
    let request = LeaseRequest {
        pool: other_pool(),
        ..request(calm, &[])
    };
    let grant = fixture.store.lease(&request).await.unwrap().unwrap().grant;
    fixture.store.accept(grant, &holder("x")).await.unwrap();

    let held = fixture.store.begin().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut calls = JoinSet::new();
    for _ in 0..MANY {
        let (store, order) = (fixture.store.clone(), Arc::clone(&order));
        calls.spawn(async move {
            let heartbeat = beats(Vec::new());
            let sent = store.heartbeat(&pool(), CREDENTIAL, busy, &heartbeat).await;
            order.lock().unwrap().push("busy");
            sent.unwrap();
        });
    }
    while fixture.store.calls_waiting() < MANY {
        tokio::task::yield_now().await;
    }
    let (store, done) = (fixture.store.clone(), Arc::clone(&order));
    calls.spawn(async move {
        let beat = beat("x");
        let sent = store.lease_heartbeat(grant, &beat).await;
        done.lock().unwrap().push("executor");
        sent.unwrap();
    });
    while fixture.store.calls_waiting() < MANY + 1 {
        tokio::task::yield_now().await;
    }
    let (store, done) = (fixture.store.clone(), Arc::clone(&order));
    calls.spawn(async move {
        let heartbeat = beats(Vec::new());
        let sent = store
            .heartbeat(&other_pool(), CREDENTIAL, calm, &heartbeat)
            .await;
        done.lock().unwrap().push("agent");
        sent.unwrap();
    });
    while fixture.store.calls_waiting() < MANY + 2 {
        tokio::task::yield_now().await;
    }
    held.rollback().await.unwrap();
    calls.join_all().await;
    let order = order.lock().unwrap();
    assert_eq!(order.len(), MANY + 2);
    let at = |who| order.iter().position(|found| *found == who).unwrap();
    // The clock stands still, so no line has used more time than another one, and they take turns.
    let last = at("executor").max(at("agent"));
    assert!(last < MANY / 4, "{last}");
}

#[tokio::test]
async fn too_many_calls_of_one_pool_are_refused_and_those_of_another_are_not() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let _frozen = freeze_clock();
    let one = fixture.agent("one").await;
    let held = fixture.store.begin().await.unwrap();
    let mut calls = JoinSet::new();
    for _ in 0..=crate::turns::MAX_WAITING {
        let store = fixture.store.clone();
        calls.spawn(async move {
            let heartbeat = beats(Vec::new());
            store.heartbeat(&pool(), CREDENTIAL, one, &heartbeat).await
        });
    }
    let first = calls.join_next().await.unwrap().unwrap();
    assert_eq!(code(first), Code::RateLimited);
    let store = fixture.store.clone();
    let other = tokio::spawn(async move { store.submit(in_other_pool("1")).await });
    while fixture.store.calls_waiting() <= crate::turns::MAX_WAITING {
        tokio::task::yield_now().await;
    }
    held.rollback().await.unwrap();
    other.await.unwrap().unwrap();
    assert!(calls.join_all().await.iter().all(Result::is_ok));
}

#[tokio::test]
async fn calls_of_a_pool_about_unknown_tasks_are_not_in_the_way_of_others() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let _frozen = freeze_clock();
    let task = fixture.ready("acme", "1").await;
    let held = fixture.store.begin().await.unwrap();
    let mut calls = JoinSet::new();
    for _ in 0..crate::turns::MAX_WAITING {
        let store = fixture.store.clone();
        calls.spawn(async move { store.task_of(&pool(), TaskId::new()).await });
    }
    while fixture.store.calls_waiting() < crate::turns::MAX_WAITING {
        tokio::task::yield_now().await;
    }
    // The first call with a job token, and one of another pool.
    let store = fixture.store.clone();
    let first = tokio::spawn(async move { store.task(TaskId::new()).await });
    let store = fixture.store.clone();
    let other = tokio::spawn(async move { store.task_of(&other_pool(), task).await });
    while fixture.store.calls_waiting() < crate::turns::MAX_WAITING + 2 {
        assert!(!first.is_finished() && !other.is_finished(), "refused");
        tokio::task::yield_now().await;
    }
    held.rollback().await.unwrap();
    assert!(first.await.unwrap().unwrap().is_none());
    assert!(other.await.unwrap().unwrap().is_none(), "not its task");
    let calls = calls.join_all().await;
    assert!(calls.iter().all(|found| matches!(found, Ok(None))));
    let found = fixture.store.task_of(&pool(), task).await.unwrap();
    assert_eq!(found.unwrap().task, task);
}

#[tokio::test]
async fn a_heartbeat_that_names_a_lease_many_times_writes_it_once() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let leased = fixture.lease(one).await.unwrap();
    let changes = async || {
        let mut tx = fixture.store.begin().await.unwrap();
        let changes = changes(&mut tx).await;
        tx.rollback().await.unwrap();
        changes
    };
    let before = changes().await;
    let heartbeat = beats(vec![held(&leased, Phase::Started); 1000]);
    let pool = pool();
    let sent = fixture.store.heartbeat(&pool, CREDENTIAL, one, &heartbeat);
    assert!(sent.await.unwrap().stale.is_empty());
    assert_eq!(changes().await - before, 2, "the task and the instance");
}

#[tokio::test]
async fn a_statement_that_does_not_end_is_given_up() {
    let Some(fixture) = Fixture::open(Engine::Postgres).await else {
        return;
    };
    let mut tx = fixture.store.begin().await.unwrap();
    assert!(tx.limit.is_some_and(|limit| limit.as_secs() <= 30));
    tx.limit = Some(Duration::from_millis(300));
    let slept = tx.rows("SELECT pg_sleep(20)", &[]).await;
    let error = slept.err().unwrap().to_string();
    assert!(error.contains("did not answer a statement"), "{error}");
    drop(tx);
    fixture.ready("acme", "1").await;
}

#[tokio::test]
async fn the_log_of_a_large_document_shrinks_again() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let log = || {
        let path = fixture.folder().join("hub.db-wal");
        path.metadata().unwrap().len()
    };
    fixture.store.submit(large("1", 2 << 20)).await.unwrap();
    assert!(log() > 2 << 20, "{}", log());
    fixture.submit("acme", "2").await;
    assert!(log() <= 1 << 20, "{}", log());
}

#[rstest]
#[tokio::test]
async fn a_run_of_a_pool_whose_runs_wait_with_too_many_bytes_fails_and_delays_no_other_pool(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let first = fixture.ready("acme", "1").await;
    let mut tx = fixture.store.begin().await.unwrap();
    let sql = "UPDATE payloads SET size = $1";
    tx.execute(sql, &[Value::from(256_i64 << 20)])
        .await
        .unwrap();
    tx.commit().await.unwrap();
    let refused = fixture.submit("acme", "2").await.task();
    let end = fixture.view(refused).await.end.unwrap();
    assert_eq!(end.reason, EndReason::Refused);
    assert!(end.diagnostic.contains("wait in pool `eu`"), "{end:?}");
    let due = fixture.store.to_report(10).await.unwrap();
    assert!(due.is_empty(), "the platform records the dispatch first");
    fixture.pass(1).await;
    let due = fixture.store.to_report(10).await.unwrap();
    assert_eq!(due[0].task, refused);
    assert_eq!(fixture.submit("acme", "1").await.task(), first);
    fixture.store.submit(in_other_pool("3")).await.unwrap();
    let one = fixture.agent("one").await;
    let leased = fixture.lease(one).await.unwrap();
    fixture
        .store
        .accept(leased.grant, &holder("x"))
        .await
        .unwrap();
    let taken = fixture.submit("acme", "4").await.task();
    assert_eq!(fixture.view(taken).await.end, None);
}

#[tokio::test]
async fn the_hub_does_not_wait_for_a_busy_pool() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let _frozen = freeze_clock();
    let task = fixture.running("1").await.grant.task;
    let one = fixture.agent("one").await;
    let credentials = fixture.store.credentials().await.unwrap();
    assert_eq!(credentials, [(pool(), CREDENTIAL.to_owned())]);
    let held = fixture.store.begin().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut calls = JoinSet::new();
    for _ in 0..crate::turns::MAX_WAITING {
        let (store, order) = (fixture.store.clone(), Arc::clone(&order));
        calls.spawn(async move {
            let heartbeat = beats(Vec::new());
            let sent = store.heartbeat(&pool(), CREDENTIAL, one, &heartbeat).await;
            order.lock().unwrap().push("pool");
            sent.unwrap();
        });
    }
    while fixture.store.calls_waiting() < crate::turns::MAX_WAITING {
        tokio::task::yield_now().await;
    }
    let (store, done) = (fixture.store.clone(), Arc::clone(&order));
    calls.spawn(async move {
        assert!(store.task_for_hub(task).await.unwrap().is_some());
        store.submit(submission("acme", "2")).await.unwrap();
        store.revoke(task, CREDENTIAL).await.unwrap();
        done.lock().unwrap().push("hub");
    });
    while fixture.store.calls_waiting() <= crate::turns::MAX_WAITING {
        tokio::task::yield_now().await;
    }
    held.rollback().await.unwrap();
    calls.join_all().await;
    let order = std::mem::take(&mut *order.lock().unwrap());
    let at = order.iter().position(|found| *found == "hub").unwrap();
    assert!(at <= 12, "{:?}", &order[..=at]);
    assert_eq!(
        fixture.view(task).await.end.unwrap().reason,
        EndReason::Revoked
    );
}

#[rstest]
#[tokio::test]
async fn a_transaction_leases_few_large_documents_and_all_requests_are_served(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let submit = async |job: &str| -> TaskId {
        let task = fixture
            .store
            .submit(large(job, 4 << 20))
            .await
            .unwrap()
            .task();
        let waiting = PlatformState::Waiting;
        fixture
            .store
            .apply_platform_state(task, waiting)
            .await
            .unwrap();
        task
    };
    for job in ["1", "2", "3"] {
        submit(job).await;
    }
    let mut requests = Vec::new();
    for agent in ["one", "two", "three"] {
        requests.push(request(fixture.agent(agent).await, &[]));
    }
    let three: Vec<_> = requests.iter().collect();
    let leased = fixture.store.lease_all(&three).await.unwrap();
    assert_eq!(leased.len(), 2, "8 MiB are enough for one transaction");
    // Two get their lease again, and the third one its first.
    let mut others = JoinSet::new();
    for request in requests {
        let store = fixture.store.clone();
        others.spawn(async move { store.lease(&request).await });
    }
    let others = others.join_all().await;
    assert!(others.iter().all(|leased| matches!(leased, Ok(Some(_)))));
}

#[tokio::test]
async fn requests_of_a_pool_with_many_leases_do_not_share_one_long_transaction() {
    const LEASES: usize = 40;
    const REQUESTS: usize = 64;
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let one = fixture.agent("one").await;
    let mut holding = Vec::new();
    for job in 0..LEASES {
        fixture.ready("acme", &job.to_string()).await;
        let leased = fixture.lease_beside(one, &holding).await.unwrap();
        holding.push(leased.grant.lease);
    }
    // Each request looks through all of them, and gets the last one again.
    holding.pop();
    let request = request(one, &holding);
    let leased = fixture.store.lease_all(&[&request; REQUESTS]).await;
    let leased = leased.unwrap();
    assert!((2..REQUESTS).contains(&leased.len()), "{}", leased.len());
    let again = |leased: &LeasedTask| leased.redelivered;
    assert!(
        leased
            .iter()
            .all(|leased| leased.as_ref().unwrap().as_ref().is_some_and(again))
    );
}

#[tokio::test]
async fn a_heartbeat_with_many_leases_lets_other_pools_in_between() {
    const LEASES: usize = 70;
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let _frozen = freeze_clock();
    let one = fixture.agent("one").await;
    let mut holding = Vec::new();
    let mut named = Vec::new();
    for job in 0..LEASES {
        fixture.ready("acme", &job.to_string()).await;
        let leased = fixture.lease_beside(one, &holding).await.unwrap();
        holding.push(leased.grant.lease);
        named.push(held(&leased, Phase::Preparing));
    }
    let mut turn = fixture.store.begin().await.unwrap();
    let before = changes(&mut turn).await;
    let store = fixture.store.clone();
    let beat = async move {
        store
            .heartbeat(&pool(), CREDENTIAL, one, &beats(named))
            .await
    };
    let beat = tokio::spawn(beat);
    while fixture.store.calls_waiting() < 1 {
        tokio::task::yield_now().await;
    }
    let store = fixture.store.clone();
    let other = tokio::spawn(async move {
        let mut seen = Vec::new();
        // The first turn may come before the pool's.
        for _ in 0..2 {
            let mut tx = store.begin().await.unwrap();
            seen.push(changes(&mut tx).await - before);
            tx.rollback().await.unwrap();
        }
        seen
    });
    while fixture.store.calls_waiting() < 2 {
        tokio::task::yield_now().await;
    }
    turn.rollback().await.unwrap();
    let seen = other.await.unwrap();
    let all = i64::try_from(LEASES).unwrap();
    assert!(
        seen.iter().any(|renewed| (1..all).contains(renewed)),
        "{seen:?}"
    );
    assert_eq!(beat.await.unwrap().unwrap().stale, []);
    let mut turn = fixture.store.begin().await.unwrap();
    assert!(changes(&mut turn).await - before > all, "with its instance");
}

#[tokio::test]
async fn a_caller_that_leaves_costs_no_connection_and_changes_nothing() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let task = fixture.ready("acme", "1").await;
    let begin = async || fixture.store.begin().await.unwrap();
    let mut tx = begin().await;
    // It is seen by its connection alone, and is gone with it.
    let mark = "CREATE TEMP TABLE mark (at INTEGER)";
    tx.execute(mark, &[]).await.unwrap();
    tx.commit().await.unwrap();

    let delete = "DELETE FROM tasks";
    let mut between_statements = begin().await;
    between_statements.execute(delete, &[]).await.unwrap();
    drop(between_statements);
    // Each of these is almost always cut off.
    let mut in_a_statement = begin().await;
    let _ = in_a_statement.execute(delete, &[]).now_or_never();
    drop(in_a_statement);
    drop(fixture.store.begin().now_or_never());
    let _ = begin().await.commit().now_or_never();

    let mut tx = begin().await;
    let marks = tx.rows("SELECT * FROM mark", &[]).await;
    tx.rollback().await.unwrap();
    assert!(marks.is_ok(), "the connection was closed");
    assert_eq!(fixture.view(task).await.task, task);
}

/// Returns the number of all changes of the only connection.
async fn changes(tx: &mut Tx) -> i64 {
    let row = tx.row("SELECT total_changes() AS changes", &[]).await;
    row.unwrap().unwrap().int("changes").unwrap()
}

#[tokio::test]
async fn a_lease_whose_response_was_lost_is_found_among_many() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let one = fixture.agent("one").await;
    let mut holding = Vec::new();
    for job in 0..5 {
        fixture.ready("acme", &job.to_string()).await;
        let leased = fixture.lease_beside(one, &holding).await.unwrap();
        holding.push(leased.grant.lease);
    }
    for lost in 0..holding.len() {
        let mut known = holding.clone();
        let lost = known.remove(lost);
        let again = fixture.lease_beside(one, &known).await.unwrap();
        assert!(again.redelivered);
        assert_eq!(again.grant.lease, lost);
    }
    assert!(fixture.lease_beside(one, &holding).await.is_none());
}

#[tokio::test]
async fn calls_about_open_tasks_wait_in_the_line_of_their_pool_after_a_restart_too() {
    let mut fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let _frozen = freeze_clock();
    let leased = fixture.running("1").await;
    fixture.reopen().await;
    // The hub lists all open tasks.
    fixture.all().await;
    let held = fixture.store.begin().await.unwrap();
    let mut calls = JoinSet::new();
    for _ in 0..crate::turns::MAX_WAITING {
        let store = fixture.store.clone();
        // Calls with tokens of tasks that the store has forgotten.
        calls.spawn(async move { store.task(TaskId::new()).await });
    }
    while fixture.store.calls_waiting() < crate::turns::MAX_WAITING {
        tokio::task::yield_now().await;
    }
    let store = fixture.store.clone();
    let call = tokio::spawn(async move { store.lease_heartbeat(leased.grant, &beat("x")).await });
    while fixture.store.calls_waiting() < crate::turns::MAX_WAITING + 1 {
        assert!(!call.is_finished(), "refused");
        tokio::task::yield_now().await;
    }
    held.rollback().await.unwrap();
    call.await.unwrap().unwrap();
    calls.join_all().await;
}
