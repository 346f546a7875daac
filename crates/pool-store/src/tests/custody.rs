//! Tests of what the store keeps and for whom: encrypted documents, backups, damage, and leases of revoked tokens.

use std::fs;
use std::sync::Arc;

use pool_protocol::instance::Phase;
use pool_protocol::problem::Code;
use pool_protocol::task::TaskState;
use rstest::rstest;
use sqlx::{Connection as _, SqliteConnection};

use super::fixture::*;
use crate::db::Value;
use crate::model::PlatformState;
use crate::state::EndReason;
use crate::{DocumentKeys, Store};

/// Returns whether a file of the folder contains the secret of the payload.
fn has_secret(folder: &std::path::Path) -> bool {
    let mut files = fs::read_dir(folder).unwrap();
    files.any(|file| {
        let bytes = fs::read(file.unwrap().path()).unwrap();
        let mut windows = bytes.windows(SECRET.len());
        windows.any(|window| window == SECRET.as_bytes())
    })
}

#[rstest]
#[tokio::test]
async fn no_document_is_stored_as_it_is(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    let mut tx = fixture.store.begin().await.unwrap();
    let row = tx.row("SELECT data FROM payloads", &[]).await.unwrap();
    let data = row.unwrap().bytes("data").unwrap();
    tx.rollback().await.unwrap();
    let text = String::from_utf8_lossy(&data);
    assert!(data.len() > SECRET.len() && !text.contains(SECRET));
    if engine == Engine::Sqlite {
        assert!(!has_secret(fixture.folder()));
        fixture.reopen().await;
        assert!(!has_secret(fixture.folder()));
        let task = fixture.all().await[0].task;
        let waiting = PlatformState::Waiting;
        let confirmed = fixture.store.apply_platform_state(task, waiting).await;
        confirmed.unwrap();
    }
    assert_eq!(fixture.lease(one).await.unwrap().payload, payload());
}

#[rstest]
#[tokio::test]
async fn a_run_whose_key_was_removed_fails_with_the_reason_and_holds_up_no_other(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    let old = fixture.submit("acme", "old").await.task();
    fixture.store.close().await;
    let new_keys = Arc::new(DocumentKeys::new([[8; 32]]));
    fixture.store = open_with_keys(&fixture.url, &fixture.clock, new_keys).await;
    let one = fixture.agent("one").await;
    let new = fixture.ready("acme", "new").await;
    let confirm = async || {
        let waiting = PlatformState::Waiting;
        let confirmed = fixture.store.apply_platform_state(old, waiting).await;
        confirmed.unwrap();
    };
    confirm().await;
    let leased = fixture.lease(one).await.unwrap();
    assert_eq!(leased.grant.task, new);
    let held = [leased.grant.lease];
    // Another hub may have been given the key earlier: a few attempts pass.
    for pause in [11, 21, 41, 81] {
        fixture.pass(pause).await;
        let view = fixture.view(old).await;
        assert_eq!(view.state, TaskState::Available, "{view:?}");
        confirm().await;
        assert!(fixture.lease_beside(one, &held).await.is_none());
    }
    let end = fixture.view(old).await.end.unwrap();
    assert_eq!((end.reason, end.reported), (EndReason::Poison, false));
    assert!(
        end.diagnostic.contains("which the hub does not have"),
        "{}",
        end.diagnostic
    );
    assert_eq!(fixture.payloads().await, 1);
}

#[rstest]
#[tokio::test]
async fn documents_of_an_earlier_version_are_removed_and_their_runs_get_a_reason(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.submit("acme", "1").await.task();
    let mut tx = fixture.store.begin().await.unwrap();
    for sql in [
        "DROP INDEX tasks_of_workspace",
        "CREATE INDEX tasks_active ON tasks (pool, organization)",
        "DROP INDEX tasks_over",
        "DROP INDEX tasks_leased",
        "ALTER TABLE tasks ADD COLUMN sealed_for TEXT",
        "DROP TABLE payloads",
        "CREATE TABLE payloads (task TEXT NOT NULL PRIMARY KEY, key_id TEXT, data BYTEA NOT NULL)",
        "ALTER TABLE tasks DROP COLUMN credential",
        "DROP TABLE state_locks",
        "DROP TABLE seen_states",
        "DROP TABLE lock_removals",
        "DELETE FROM _sqlx_migrations WHERE version >= 2",
    ] {
        tx.execute(sql, &[]).await.unwrap();
    }
    let sql = "INSERT INTO payloads (task, data) VALUES ($1, $2)";
    let row = [Value::text(task), Value::Bytes(payload().0)];
    tx.execute(sql, &row).await.unwrap();
    tx.commit().await.unwrap();
    fixture.reopen().await;
    if engine == Engine::Sqlite {
        assert!(!has_secret(fixture.folder()));
    }
    let waiting = PlatformState::Waiting;
    let confirmed = fixture.store.apply_platform_state(task, waiting).await;
    confirmed.unwrap();
    let one = fixture.agent("one").await;
    assert!(fixture.lease(one).await.is_none());
    let view = fixture.view(task).await;
    assert!(view.reasons[0].contains("an earlier version"), "{view:?}");
}

#[rstest]
#[tokio::test]
async fn a_sealed_document_of_an_earlier_version_is_removed_and_another_is_kept(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    let sealed = fixture.submit("acme", "sealed").await.task();
    let plain = fixture.submit("acme", "plain").await.task();
    let mut tx = fixture.store.begin().await.unwrap();
    for sql in [
        "DROP INDEX tasks_of_workspace",
        "CREATE INDEX tasks_active ON tasks (pool, organization)",
        "DROP INDEX tasks_over",
        "DROP INDEX tasks_leased",
        "ALTER TABLE tasks ADD COLUMN sealed_for TEXT",
        "ALTER TABLE payloads ADD COLUMN key_id TEXT",
        "DROP TABLE state_locks",
        "DROP TABLE seen_states",
        "DROP TABLE lock_removals",
        "DELETE FROM _sqlx_migrations WHERE version >= 3",
    ] {
        tx.execute(sql, &[]).await.unwrap();
    }
    let sql = "UPDATE payloads SET key_id = '9f31c2aa' WHERE task = $1";
    tx.execute(sql, &[Value::text(sealed)]).await.unwrap();
    tx.commit().await.unwrap();
    fixture.reopen().await;
    let waiting = PlatformState::Waiting;
    for task in [sealed, plain] {
        let confirmed = fixture.store.apply_platform_state(task, waiting).await;
        confirmed.unwrap();
    }
    let one = fixture.agent("one").await;
    let leased = fixture.lease(one).await.unwrap();
    assert_eq!((leased.grant.task, leased.payload), (plain, payload()));
    let view = fixture.view(sealed).await;
    assert!(view.reasons[0].contains("an earlier version"), "{view:?}");
}

#[rstest]
#[tokio::test]
async fn a_lease_ends_with_the_token_that_renewed_it_last(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let running = fixture.running("1").await;
    let task = running.grant.task;
    assert_eq!(
        fixture.view(task).await.credential.as_deref(),
        Some(CREDENTIAL)
    );
    // The agent has a new token before the old one is removed.
    let one = fixture.view(task).await.instance.unwrap();
    let named = beats(vec![held(&running, Phase::Running)]);
    let renewed = fixture.store.heartbeat(&pool(), "new", one, &named).await;
    assert!(renewed.unwrap().stale.is_empty());
    let state = fixture.store.revoke(task, CREDENTIAL).await.unwrap();
    assert_eq!(state, TaskState::Running);
    fixture.store.revoke(task, "new").await.unwrap();
    let end = fixture.view(task).await.end.unwrap();
    assert_eq!((end.reason, end.reported), (EndReason::Revoked, false));
    let sent = fixture
        .store
        .lease_heartbeat(running.grant, &beat("x"))
        .await;
    assert_eq!(code(sent), Code::TaskAlreadyTerminal);
    assert_eq!(fixture.store.to_report(10).await.unwrap()[0].task, task);

    // Nothing has happened yet under this lease, so another agent gets the task.
    let waiting = fixture.ready("acme", "2").await;
    let leased = fixture.lease(one).await.unwrap();
    fixture.store.revoke(waiting, CREDENTIAL).await.unwrap();
    let accepted = fixture.store.accept(leased.grant, &holder("y")).await;
    assert_eq!(code(accepted), Code::LeaseExpired);
    let sent = fixture
        .store
        .lease_heartbeat(leased.grant, &beat("y"))
        .await;
    assert_eq!(code(sent), Code::LeaseExpired);
    let view = fixture.view(waiting).await;
    assert_eq!((view.state, view.attempts), (TaskState::Available, 0));
}

#[tokio::test]
async fn a_running_store_can_be_backed_up_with_any_sqlite() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let tasks = [
        fixture.submit("acme", "1").await.task(),
        fixture.submit("acme", "2").await.task(),
    ];
    let mut other = SqliteConnection::connect(&fixture.url).await.unwrap();
    let target = fixture.folder().join("backup.db");
    sqlx::query("VACUUM INTO $1")
        .bind(target.to_str().unwrap())
        .execute(&mut other)
        .await
        .unwrap();
    fixture.submit("acme", "later").await;
    let backup = open(
        &format!("sqlite:{}", target.display()),
        &TestClock::default(),
    )
    .await;
    for task in tasks {
        assert!(backup.task(task).await.unwrap().is_some());
    }
}

/// Opens a copy of the file without its log.
async fn copy_alone(fixture: &Fixture, name: &str) -> Store {
    let target = fixture.folder().join(name);
    fs::copy(fixture.folder().join("hub.db"), &target).unwrap();
    assert!(
        fs::metadata(&target).unwrap().len() > 0,
        "it has its tables"
    );
    open(
        &format!("sqlite:{}", target.display()),
        &TestClock::default(),
    )
    .await
}

#[tokio::test]
async fn the_file_alone_has_all_but_the_last_minute() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    copy_alone(&fixture, "new.db").await;
    let task = fixture.submit("acme", "1").await.task();
    fixture.pass(70).await;
    let copy = copy_alone(&fixture, "later.db").await;
    assert!(copy.task(task).await.unwrap().is_some());
}
