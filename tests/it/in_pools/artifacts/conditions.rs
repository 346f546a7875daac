//! Hubs whose store ignores conditions: what they say of it, and when they give a lock again.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use integration_tests::Running;
use job_contract::env;
use reqwest::StatusCode;
use test_peers::http::{Request, Response, Server, pass_on};
use test_peers::postgres::PostgresServer;
use test_peers::s3::S3;
use test_peers::skips::needed;
use test_peers::wait;

use super::{Fixture, Holder, OK, ONE, TWO, executor_of, lock_info, state};

/// An accepted lease at a hub whose store is behind a server, which may change a request, or answer it itself.
async fn behind(
    answers: impl Fn(&mut Request) -> Option<Response> + Send + Sync + 'static,
) -> (Server, Holder) {
    behind_with(&[], answers).await
}

/// The same with more settings of the hub.
async fn behind_with(
    settings: &[(&'static str, String)],
    answers: impl Fn(&mut Request) -> Option<Response> + Send + Sync + 'static,
) -> (Server, Holder) {
    let store = S3::start_open().unwrap();
    let address = store.address();
    let front = Server::start(move |request| {
        let mut request = request.clone();
        let answer = answers(&mut request);
        answer.unwrap_or_else(|| pass_on(&request, address, &address.to_string()).unwrap())
    });
    let front = front.unwrap();
    let mut fixture = Fixture::with_store(&store).await;
    fixture = fixture.with(env::AWS_ENDPOINT, &front.url());
    for (name, value) in settings {
        fixture = fixture.with(name, value);
    }
    let lease = Holder::once_asked(store, fixture, "terraformApply").await;
    lease.executor.accept(&lease.lease, "pod").await.ok();
    (front, lease)
}

impl Holder {
    /// Kills the hub. Another one takes its database.
    async fn at_next_hub(self) -> Self {
        self.hub.crash();
        let hub = self.fixture.serve();
        hub.until_store_asked().await;
        let agent = self.fixture.client(&hub);
        Self {
            executor: executor_of(&agent, &self.lease),
            agent,
            hub,
            fixture: self.fixture,
            lease: self.lease,
            store: self.store,
        }
    }

    async fn lock_by(&self, id: &str) -> StatusCode {
        self.send("POST", "state/lock", &lock_info(id)).await.0
    }

    async fn unlock_by(&self, id: &str) -> StatusCode {
        self.send("POST", "state/unlock", &lock_info(id)).await.0
    }

    /// The id of the lock in the store.
    fn locked_by(&self) -> Option<String> {
        Some(self.lock()?["ID"].as_str()?.to_owned())
    }
}

/// What a hub answers while it does not know whether a lock is deleted.
const LATER: StatusCode = StatusCode::SERVICE_UNAVAILABLE;

/// The store ignores the conditions of a request.
fn ignore_conditions(request: &mut Request) {
    let headers = &mut request.headers;
    headers.retain(|(name, _)| !name.starts_with("if-"));
}

/// Whether this deletes a lock. The store ignores the conditions of deletes.
fn deletes_lock(request: &mut Request) -> bool {
    let is_delete = request.method == "DELETE";
    if is_delete {
        ignore_conditions(request);
    }
    is_delete && request.path.ends_with(".tflock")
}

/// A store that keeps the first delete of a lock to do it late, and says only that it failed.
fn that_deletes_late(
    late: &Arc<Mutex<Option<Request>>>,
) -> impl Fn(&mut Request) -> Option<Response> + Send + Sync + use<> {
    let late = Arc::clone(late);
    move |request| {
        let is_lock = deletes_lock(request);
        let mut late = late.lock().unwrap();
        if !is_lock || late.is_some() {
            return None;
        }
        *late = Some(request.clone());
        let failure = "<Error><Code>InternalError</Code></Error>";
        Some(Response::new(500, failure))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hub_says_what_its_store_ignores_and_still_looks_before_it_writes() {
    let (_front, lease) = behind(|request| {
        ignore_conditions(request);
        None
    })
    .await;
    for change in ["create", "replace", "join", "delete"] {
        let line = format!("mayfly_artifact_store_conditions{{change=\"{change}\"}} 0");
        lease.hub.until_metric(&line).await;
    }
    let hub = lease.fixture.command();
    let variables = hub.get_envs();
    let variables = variables.filter_map(|(name, value)| Some((name, value?)));
    let mut check = Command::new(crate::LAUNCHER);
    check
        .args(["check", "--target", "none", "--pools", "any.yaml"])
        .args(["-o", "json"])
        .env_clear()
        .envs(variables);
    let checked = tokio::task::block_in_place(|| Running::start(&mut check).wait());
    let words = "are not kept for these changes";
    assert!(checked.stdout.contains(words), "{checked}");
    assert_eq!(lease.write(1, "l").await.0, OK);
    let key = lease.key().in_bucket();
    lease.store.put(&key, &state(5, "l")).unwrap();
    assert_eq!(lease.write(6, "l").await.0, StatusCode::CONFLICT);
    assert_eq!(lease.serial(), Some(5));
    let objects = lease.store.objects().unwrap();
    let of_hub = |(name, _): &(String, Vec<u8>)| name.starts_with("tfstate/mayfly/");
    assert!(!objects.iter().any(of_hub), "it has left an object");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_lock_is_given_until_the_late_delete_of_the_last_one_is_seen_done() {
    let late = Arc::default();
    let (front, mut lease) = behind(that_deletes_late(&late)).await;
    assert_eq!(lease.lock_by(ONE).await, OK);
    assert_eq!(lease.unlock_by(ONE).await, LATER);
    for is_killed in [false, true] {
        if is_killed {
            lease = lease.at_next_hub().await;
        }
        assert_eq!(lease.lock_by(ONE).await, LATER);
        let two = lock_info(TWO);
        let (status, text) = lease.send("POST", "state/lock", &two).await;
        assert_eq!(status, LATER, "{text}");
        // `force-unlock` would let the late delete remove the lock of the next run.
        for words in ["up to 20 minutes", "do not use `force-unlock`"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert_eq!(lease.unlock_by(ONE).await, LATER);
    }
    let requests = front.requests();
    let deletes = requests.into_iter().filter(|request| {
        let is_lock = request.path.ends_with(".tflock");
        request.method == "DELETE" && is_lock
    });
    assert_eq!(deletes.count(), 1);

    let request = late.lock().unwrap().clone().unwrap();
    let address = lease.store.address();
    let done = pass_on(&request, address, &address.to_string()).unwrap();
    assert_eq!((done.status, lease.locked_by()), (204, None));
    assert_eq!(lease.unlock_by(ONE).await, OK);
    assert_eq!(lease.lock_by(TWO).await, OK);
    assert_eq!(lease.locked_by().as_deref(), Some(TWO));
    assert_eq!(lease.unlock_by(TWO).await, OK);
    assert_eq!(lease.locked_by(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hub_that_was_killed_while_it_deleted_a_lock_gives_no_lock_to_its_late_delete() {
    let (arrive, arrived) = channel();
    let (go_on, goes_on) = channel::<()>();
    let (arrive, goes_on) = (Mutex::new(arrive), Mutex::new(goes_on));
    let is_held = AtomicBool::default();
    let (_front, lease) = behind(move |request| {
        if deletes_lock(request) && !is_held.swap(true, Ordering::SeqCst) {
            arrive.lock().unwrap().send(()).unwrap();
            // It ends with the sender.
            let _ = goes_on.lock().unwrap().recv();
        }
        None
    })
    .await;
    assert_eq!(lease.lock_by(ONE).await, OK);
    let one = lock_info(ONE);
    let unlock = lease.request(&lease.executor, "POST", "state/unlock", &one);
    let unlock = tokio::spawn(unlock.send());
    let arrived = || arrived.recv_timeout(wait::DEADLINE);
    tokio::task::block_in_place(arrived).unwrap();
    let lease = lease.at_next_hub().await;
    assert!(unlock.await.unwrap().is_err(), "its hub was killed");
    assert_eq!(lease.lock_by(TWO).await, LATER);
    drop(go_on);
    wait::until("the late delete", async || lease.locked_by().is_none()).await;
    assert_eq!(lease.lock_by(TWO).await, OK);
    assert_eq!(lease.locked_by().as_deref(), Some(TWO));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_hub_gives_no_lock_either() {
    let Some(postgres) = needed(PostgresServer::shared()) else {
        return;
    };
    let key = base64::engine::general_purpose::STANDARD.encode([7; 32]);
    let shared = [
        (env::POOL_STORE, postgres.database().unwrap()),
        (env::JOB_TOKEN_KEYS, key),
    ];
    let late = Arc::default();
    let (_front, lease) = behind_with(&shared, that_deletes_late(&late)).await;
    let other = lease.fixture.serve();
    other.until_store_asked().await;
    let client = lease.fixture.client(&other);
    let lock_there = async || {
        let two = lock_info(TWO);
        let request = lease.request(&client, "POST", "state/lock", &two);
        request.send().await.unwrap().status()
    };
    assert_eq!(lease.lock_by(ONE).await, OK);
    assert_eq!(lease.unlock_by(ONE).await, LATER);
    assert_eq!(lock_there().await, LATER);
    let request = late.lock().unwrap().clone().unwrap();
    let address = lease.store.address();
    pass_on(&request, address, &address.to_string()).unwrap();
    assert_eq!(lock_there().await, OK);
    assert_eq!(lease.locked_by().as_deref(), Some(TWO));
}
