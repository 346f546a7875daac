//! A lock that is removed from an artifact store is noted until that is seen done, for all hubs and after a kill.

use rstest::rstest;

use super::fixture::*;

#[rstest]
#[tokio::test]
async fn one_removal_of_a_workspace_is_noted_until_it_ends_or_can_no_longer_be_done(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(mut fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.running("1").await.grant.task;
    let task = fixture.view(task).await;
    let mut elsewhere = task.clone();
    elsewhere.workspace.push('x');
    let begun = fixture.store.begin_lock_removal(&task, "one").await;
    let first = begun.unwrap().unwrap();
    fixture.reopen().await;
    let store = &fixture.store;
    let second = store.begin_lock_removal(&task, "two").await.unwrap();
    assert_eq!(second, None);
    assert_eq!(store.lock_removal(&task).await.unwrap().unwrap(), first);
    assert_eq!(store.lock_removal(&elsewhere).await.unwrap(), None);
    let other = store.begin_lock_removal(&elsewhere, "two").await.unwrap();
    assert!(other.is_some());

    fixture.pass(19 * 60).await;
    let second = store.begin_lock_removal(&task, "two").await.unwrap();
    assert_eq!(second, None);
    fixture.pass(61).await;
    assert!(store.lock_removal(&task).await.unwrap().unwrap().is_over);
    let second = store.begin_lock_removal(&task, "two").await.unwrap();
    let second = second.unwrap();
    // Whoever has begun the first one was frozen.
    store.end_lock_removal(&task, &first).await.unwrap();
    assert_eq!(
        store.lock_removal(&task).await.unwrap(),
        Some(second.clone())
    );
    store.end_lock_removal(&task, &second).await.unwrap();
    assert_eq!(store.lock_removal(&task).await.unwrap(), None);
}
