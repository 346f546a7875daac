//! Kills a hub before each of its statements in turn. What the hub has acknowledged is stored afterwards, and nothing
//! happens twice.

use std::collections::HashMap;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};

use pool_protocol::id::PoolName;
use pool_protocol::lease::{DeclineReason, LeaseRef};
use pool_protocol::task::TaskState;

use super::failpoint::KILL_AT;
use super::fixture::*;
use crate::model::{Ending, LeaseRequest, PlatformState, Submission};
use crate::view::{Page, TaskFilter};
use crate::{Rules, Store};

const URL: &str = "POOL_STORE_TEST_URL";
const POOL: &str = "POOL_STORE_TEST_POOL";
/// The smallest number of statements of a complete run.
const STATEMENTS: u32 = 60;

fn in_pool(pool: &PoolName, job: &str) -> Submission {
    Submission {
        pool: pool.clone(),
        job: format!("{pool} {job}"),
        ..submission("acme", job)
    }
}

/// Records on standard output that the hub has responded.
fn acknowledge(what: &str) {
    let mut output = std::io::stdout();
    writeln!(output, "ACK {what}").unwrap();
    output.flush().unwrap();
}

/// Runs all operations of a hub. It may be repeated from the start, because the platform, agents and executors also
/// repeat their requests.
async fn work(store: &Store, pool: &PoolName) {
    for job in ["a", "b"] {
        let task = store.submit(in_pool(pool, job)).await.unwrap().task();
        acknowledge(&format!("submitted {job}"));
        store
            .apply_platform_state(task, PlatformState::Waiting)
            .await
            .unwrap();
    }
    let registered = store
        .register(pool, CREDENTIAL, &registration("one"))
        .await
        .unwrap();
    let request_for_task = LeaseRequest {
        pool: pool.clone(),
        ..request(registered.instance, &[])
    };
    if let Some(leased) = store.lease(&request_for_task).await.unwrap() {
        acknowledge(&format!("leased {}", leased.task.job));
        let grant = leased.grant;
        store.started(grant, "ns/job").await.unwrap();
        store.accept(grant, &holder("x")).await.unwrap();
        acknowledge(&format!("accepted {}", leased.task.job));
        store.lease_heartbeat(grant, &beat("x")).await.unwrap();
        store
            .end(grant, Ending::Completed, &end_report(false))
            .await
            .unwrap();
        acknowledge(&format!("ended {}", leased.task.job));
    }
    if let Some(leased) = store.lease(&request_for_task).await.unwrap() {
        let draining = declined(DeclineReason::Draining, "it stops");
        store.decline(leased.grant, &draining).await.unwrap();
    }
    store.sweep().await.unwrap();
    for task in store.to_report(10).await.unwrap() {
        if task.pool == *pool {
            store.reported(task.task).await.unwrap();
            acknowledge(&format!("reported {}", task.job));
        }
    }
}

/// Runs as the hub that is killed, in a process of its own. Without the variables it does nothing.
#[tokio::test]
async fn hub() {
    let (Ok(url), Ok(pool)) = (std::env::var(URL), std::env::var(POOL)) else {
        return;
    };
    let store = Store::open(&url, Rules::default(), keys()).await.unwrap();
    work(&store, &pool.parse().unwrap()).await;
    store.close().await;
}

/// Runs a hub that is killed before a statement. Returns what it has acknowledged, and whether it was killed.
fn run_hub(url: &str, pool: &PoolName, kill_at: u32) -> (Vec<String>, bool) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tests::kill::hub", "--nocapture"])
        .env(URL, url)
        .env(POOL, pool.as_str())
        .env(KILL_AT, kill_at.to_string())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let killed = output.status.signal() == Some(9);
    assert!(killed || output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    let acknowledged = said.lines().filter_map(|line| line.split_once("ACK "));
    (
        acknowledged.map(|(_, what)| what.to_owned()).collect(),
        killed,
    )
}

async fn tasks_of(store: &Store, pool: &PoolName) -> HashMap<String, crate::TaskView> {
    let page = Page::first();
    let tasks = store
        .tasks(Some(pool), TaskFilter::All, page)
        .await
        .unwrap();
    let count = tasks.len();
    let by_job: HashMap<_, _> = tasks
        .into_iter()
        .map(|task| (task.job.clone(), task))
        .collect();
    assert_eq!(by_job.len(), count, "a step is stored twice");
    by_job
}

/// Checks that everything acknowledged is stored.
async fn check(store: &Store, pool: &PoolName, acknowledged: &[String]) {
    let tasks = tasks_of(store, pool).await;
    for what in acknowledged {
        let (what, job) = what.split_once(' ').unwrap();
        if what == "submitted" {
            assert!(tasks.contains_key(&format!("{pool} {job}")), "{what} {job}");
            continue;
        }
        let task = &tasks[job];
        match what {
            "leased" => assert!(task.fencing_token > 0, "{task:?}"),
            "accepted" => assert!(
                matches!(task.state, TaskState::Running | TaskState::Completed),
                "{task:?}"
            ),
            "ended" => assert_eq!(task.state, TaskState::Completed),
            "reported" => assert!(task.end.as_ref().unwrap().reported, "{task:?}"),
            other => panic!("{other}"),
        }
    }
}

/// Finishes all tasks. The platform, the agent and the executor repeat what was not acknowledged.
async fn finish(store: &Store, pool: &PoolName) {
    for job in ["a", "b"] {
        let task = store.submit(in_pool(pool, job)).await.unwrap().task();
        store
            .apply_platform_state(task, PlatformState::Waiting)
            .await
            .unwrap();
    }
    let instance = store
        .register(pool, CREDENTIAL, &registration("one"))
        .await
        .unwrap();
    let request_for_task = LeaseRequest {
        pool: pool.clone(),
        ..request(instance.instance, &[])
    };
    for task in tasks_of(store, pool).await.into_values() {
        let exists = task.executor.is_some() && !task.state.is_terminal();
        if exists {
            let grant = LeaseRef {
                task: task.task,
                lease: task.lease.unwrap(),
                fencing_token: task.fencing_token,
            };
            store.accept(grant, &holder("x")).await.unwrap();
            store
                .end(grant, Ending::Completed, &end_report(false))
                .await
                .unwrap();
        }
    }
    // PostgreSQL may still hold the row locks of the killed hub.
    let open = async || {
        let tasks = tasks_of(store, pool).await;
        tasks.values().any(|task| task.end.is_none())
    };
    while open().await {
        let Some(leased) = store.lease(&request_for_task).await.unwrap() else {
            continue;
        };
        store.accept(leased.grant, &holder("x")).await.unwrap();
        store
            .end(leased.grant, Ending::Completed, &end_report(false))
            .await
            .unwrap();
    }
    let unreported = tasks_of(store, pool).await.into_values();
    for task in unreported.filter(|task| !task.end.as_ref().unwrap().reported) {
        store.reported(task.task).await.unwrap();
    }
}

/// Checks that each task was accepted once, ended once and reported once.
async fn check_the_end(store: &Store, pool: &PoolName) {
    let tasks = tasks_of(store, pool).await;
    assert_eq!(tasks.len(), 2);
    for task in tasks.values() {
        assert_eq!(task.state, TaskState::Completed, "{task:?}");
        let count = async |from: &[Option<&str>], to| {
            let events = store.events(task.task).await.unwrap();
            let wanted = events.iter().filter(|event| from.contains(&event.from));
            wanted.filter(|event| event.to == to).count()
        };
        let accepted = count(&[Some("leased"), Some("started")], "running").await;
        let ended = count(&[Some("running")], "completed").await;
        let reported = count(&[Some("completed")], "completed").await;
        assert_eq!((accepted, ended, reported), (1, 1, 1), "{task:?}");
    }
}

/// Kills a hub before one statement, and checks the result. Returns whether it was killed.
async fn kill_at(url: &str, statement: u32, survivor: Option<&Store>) -> bool {
    let pool: PoolName = format!("p{statement}").parse().unwrap();
    let (acknowledged, killed) = run_hub(url, &pool, statement);
    if !killed {
        assert_eq!(acknowledged.len(), 6, "{acknowledged:?}");
    }
    let restarted = match survivor {
        Some(_) => None,
        None => Some(Store::open(url, Rules::default(), keys()).await.unwrap()),
    };
    let store = survivor.or(restarted.as_ref()).unwrap();
    check(store, &pool, &acknowledged).await;
    finish(store, &pool).await;
    check_the_end(store, &pool).await;
    if let Some(store) = restarted {
        store.close().await;
    }
    killed
}

#[tokio::test]
async fn a_hub_on_sqlite_can_be_killed_before_any_statement() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("hub.db").display());
    let mut statement = 1;
    while kill_at(&url, statement, None).await {
        statement += 1;
    }
    assert!(statement > STATEMENTS, "{statement}");
}

/// The other hub keeps running. The statements are those of the test with SQLite, so every fifth is enough.
#[tokio::test]
async fn one_of_two_hubs_on_postgresql_can_be_killed_before_any_statement() {
    let server = test_peers::postgres::PostgresServer::shared();
    let Some(server) = test_peers::skips::needed(server) else {
        return;
    };
    let url = server.database().unwrap();
    let survivor = Store::open(&url, Rules::default(), keys()).await.unwrap();
    let mut statement = 1;
    while kill_at(&url, statement, Some(&survivor)).await {
        statement += 5;
    }
    assert!(statement > STATEMENTS, "{statement}");
}
