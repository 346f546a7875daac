//! What a task has seen of a state is what it was given last, or has stored last, and nothing that came after its end.

use rstest::rstest;

use super::fixture::*;
use crate::SeenState;

/// The SHA-256 of states.
const ONE: &str = "1";
const TWO: &str = "2";
const THREE: &str = "3";

#[rstest]
#[tokio::test]
async fn a_task_has_seen_what_it_was_given_or_has_stored_last(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    let running = fixture.running("1").await;
    let task = running.grant.task;
    let seen = fixture.store.seen_state(task).await.unwrap();
    assert!(seen.is(None) && !seen.is(Some(ONE)), "it has seen none");
    assert_eq!(seen.last(), None);
    fixture.store.saw_state(task, Some(ONE)).await.unwrap();
    fixture.store.saw_state(task, Some(TWO)).await.unwrap();
    let seen = fixture.store.seen_state(task).await.unwrap();
    assert!(seen.is(Some(TWO)) && !seen.is(Some(ONE)) && !seen.is(None));

    // Nobody knows whether the store has it.
    let stores = fixture.store.stores_state(task, Some(TWO), THREE);
    stores.await.unwrap();
    fixture.reopen().await;
    let seen = fixture.store.seen_state(task).await.unwrap();
    assert!(seen.is(Some(TWO)) && seen.is(Some(THREE)) && !seen.is(Some(ONE)));
    fixture.store.kept_state(task, "a place").await.unwrap();
    let seen = fixture.store.seen_state(task).await.unwrap();
    assert_eq!(seen.kept.as_deref(), Some("a place"));
    let stored = fixture.store.stored_state(task, Some(THREE)).await;
    stored.unwrap();
    let seen = fixture.store.seen_state(task).await.unwrap();
    assert!(seen.is(Some(THREE)) && !seen.is(Some(TWO)));
    assert_eq!((seen.kept.as_deref(), seen.last()), (None, Some(THREE)));

    // The last bytes of an older state came after that.
    fixture.store.saw_state(task, Some(TWO)).await.unwrap();
    let seen = fixture.store.seen_state(task).await.unwrap();
    assert!(seen.is(Some(TWO)) && seen.is(Some(THREE)) && !seen.is(Some(ONE)));
}

#[rstest]
#[tokio::test]
async fn a_task_that_is_over_sees_nothing_more_and_still_knows_what_it_stores(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let running = fixture.running("1").await;
    let (store, task) = (&fixture.store, running.grant.task);
    store.saw_state(task, Some(ONE)).await.unwrap();
    complete(store, &running).await;
    store.saw_state(task, Some(TWO)).await.unwrap();
    let seen = store.seen_state(task).await.unwrap();
    assert!(seen.is(Some(ONE)) && !seen.is(Some(TWO)));
    store.stores_state(task, Some(ONE), THREE).await.unwrap();
    store.stored_state(task, Some(THREE)).await.unwrap();
    assert!(store.seen_state(task).await.unwrap().is(Some(THREE)));

    fixture.pass(REMEMBERED.as_secs() + 1).await;
    assert!(store.task(task).await.unwrap().is_none());
    let forgotten = store.seen_state(task).await.unwrap();
    assert_eq!(forgotten, SeenState::default());
    // Nothing is written about a task that is forgotten.
    store.kept_state(task, "a place").await.unwrap();
    assert_eq!(store.seen_state(task).await.unwrap().kept, None);
}

/// An earlier version of the hub served the state, and noted nothing.
#[rstest]
#[tokio::test]
async fn an_update_of_the_hub_refuses_no_state_of_a_run_in_progress(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.running("1").await.grant.task;
    let waiting = fixture.ready("acme", "2").await;
    let mut tx = fixture.store.begin().await.unwrap();
    for sql in [
        "DROP TABLE seen_states",
        "DROP TABLE lock_removals",
        "DELETE FROM _sqlx_migrations WHERE version >= 6",
    ] {
        tx.execute(sql, &[]).await.unwrap();
    }
    tx.commit().await.unwrap();
    fixture.reopen().await;
    let store = &fixture.store;
    assert!(store.seen_state(task).await.unwrap().is(Some(ONE)));
    assert!(!store.seen_state(waiting).await.unwrap().is(Some(ONE)));
    store.stores_state(task, Some(ONE), TWO).await.unwrap();
    assert!(!store.seen_state(task).await.unwrap().is(Some(THREE)));
}
