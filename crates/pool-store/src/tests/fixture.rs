//! A store with a clock that only tests move, and helpers for tests.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pool_protocol::id::{InstanceId, LeaseId, PoolName, TaskId};
use pool_protocol::instance::{
    InstanceHeartbeat, InstanceLease, InstanceState, Phase, Registration,
};
use pool_protocol::lease::{Acceptance, Decline, DeclineReason, End, Holder};
use pool_protocol::problem::Code;
use tempfile::TempDir;
use test_peers::clock::{HeldClock, hold_clock};
use test_peers::postgres::PostgresServer;
use test_peers::skips::needed;

use crate::clock::{Clock, Millis, millis};
use crate::model::{
    Content, Ending, LeaseRequest, LeasedTask, Payload, PlatformState, Submission, Submitted,
};
use crate::view::{EventView, Page, TaskFilter, TaskView};
use crate::{DocumentKeys, Error, Rules, Store};

/// A secret in the payload. No view may show it.
pub(crate) const SECRET: &str = "planted-secret";

/// The credential of all agents.
pub(crate) const CREDENTIAL: &str = "digest of a token";

/// Short limits, because sweeping through hours and days takes too long.
pub(crate) const REMEMBERED: Duration = Duration::from_mins(10);
pub(crate) const LISTED: Duration = Duration::from_mins(12);
pub(crate) const QUEUED: Duration = Duration::from_mins(15);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    Sqlite,
    Postgres,
}

/// A clock that tests move.
#[derive(Clone, Debug, Default)]
pub(crate) struct TestClock {
    elapsed: Arc<AtomicU64>,
    wall: Arc<AtomicI64>,
    /// The time of PostgreSQL at its first query.
    database: Arc<OnceLock<Millis>>,
}

impl TestClock {
    /// Moves both clocks.
    pub(crate) fn pass(&self, seconds: u64) {
        self.elapsed.fetch_add(seconds, Ordering::SeqCst);
        self.jump(i64::try_from(seconds).unwrap());
    }

    /// Changes the wall clock only.
    pub(crate) fn jump(&self, seconds: i64) {
        self.wall.fetch_add(seconds, Ordering::SeqCst);
    }
}

impl Clock for TestClock {
    fn elapsed(&self) -> Duration {
        Duration::from_secs(self.elapsed.load(Ordering::SeqCst))
    }

    fn wall(&self) -> SystemTime {
        let now = 2_000_000_000 + self.wall.load(Ordering::SeqCst);
        UNIX_EPOCH + Duration::from_secs(u64::try_from(now).unwrap())
    }

    fn database(&self, now: Millis) -> Millis {
        let began = *self.database.get_or_init(|| now);
        began + millis(self.elapsed())
    }
}

/// Stops the time in which calls of the database are measured and limited, until the result is dropped.
#[must_use]
pub(crate) fn freeze_clock() -> HeldClock {
    tokio::time::pause();
    hold_clock()
}

enum Database {
    File(TempDir),
    Server(Arc<PostgresServer>),
}

/// A store with its clock and database.
pub(crate) struct Fixture {
    pub(crate) store: Store,
    pub(crate) clock: TestClock,
    pub(crate) url: String,
    database: Database,
}

impl Fixture {
    /// Returns an empty store, or `None` if the engine is missing.
    pub(crate) async fn open(engine: Engine) -> Option<Self> {
        let (database, url) = match engine {
            Engine::Sqlite => {
                let folder = tempfile::tempdir().unwrap();
                let url = url_in(&folder, "hub.db");
                (Database::File(folder), url)
            }
            Engine::Postgres => {
                let server = needed(PostgresServer::shared())?;
                let url = server.database().unwrap();
                (Database::Server(server), url)
            }
        };
        let clock = TestClock::default();
        let store = open(&url, &clock).await;
        Some(Self {
            store,
            clock,
            url,
            database,
        })
    }

    /// Returns the folder of the SQLite file.
    pub(crate) fn folder(&self) -> &std::path::Path {
        match &self.database {
            Database::File(folder) => folder.path(),
            Database::Server(_) => panic!("PostgreSQL has no folder here"),
        }
    }

    /// Restarts the hub.
    pub(crate) async fn reopen(&mut self) {
        self.store.close().await;
        let url = std::mem::take(&mut self.url);
        self.replace(url).await;
    }

    /// Makes a backup, and restarts the hub.
    pub(crate) async fn backup(&mut self) -> String {
        self.store.close().await;
        let url = std::mem::take(&mut self.url);
        let backup = match &self.database {
            Database::File(folder) => {
                // The database is one file when no process has it open.
                let from = folder.path().join("hub.db");
                assert!(!folder.path().join("hub.db-wal").exists());
                std::fs::copy(from, folder.path().join("backup.db")).unwrap();
                url_in(folder, "backup.db")
            }
            Database::Server(server) => server.copy(&url).unwrap(),
        };
        self.replace(url).await;
        backup
    }

    /// Restarts the hub with a backup.
    pub(crate) async fn restore(&mut self, backup: String) {
        self.store.close().await;
        self.replace(backup).await;
    }

    async fn replace(&mut self, url: String) {
        self.store = open(&url, &self.clock).await;
        self.url = url;
    }

    /// Moves the clocks, and sweeps as often as a hub does. Returns the tasks that have changed.
    pub(crate) async fn pass(&self, seconds: u64) -> Vec<TaskView> {
        let mut changed = Vec::new();
        let mut left = seconds;
        loop {
            let step = left.min(10);
            self.clock.pass(step);
            left -= step;
            loop {
                let swept = self.store.sweep().await.unwrap();
                assert!(!swept.resumed);
                changed.extend(swept.changed);
                if !swept.more {
                    break;
                }
            }
            if left == 0 {
                return changed;
            }
        }
    }

    /// Submits and confirms a task of an organization.
    pub(crate) async fn ready(&self, organization: &str, job: &str) -> TaskId {
        let task = self.submit(organization, job).await.task();
        self.store
            .apply_platform_state(task, PlatformState::Waiting)
            .await
            .unwrap();
        task
    }

    pub(crate) async fn submit(&self, organization: &str, job: &str) -> Submitted {
        let submission = submission(organization, job);
        self.store.submit(submission).await.unwrap()
    }

    /// Registers an instance of an agent.
    pub(crate) async fn agent(&self, name: &str) -> InstanceId {
        let registered = self
            .store
            .register(&pool(), CREDENTIAL, &registration(name))
            .await;
        registered.unwrap().instance
    }

    /// Requests a task for an instance that has no lease. Does not wait.
    pub(crate) async fn lease(&self, instance: InstanceId) -> Option<LeasedTask> {
        self.lease_beside(instance, &[]).await
    }

    pub(crate) async fn lease_beside(
        &self,
        instance: InstanceId,
        holding: &[LeaseId],
    ) -> Option<LeasedTask> {
        self.store.lease(&request(instance, holding)).await.unwrap()
    }

    /// Returns a task that an executor named `x` has accepted.
    pub(crate) async fn running(&self, job: &str) -> LeasedTask {
        self.ready("acme", job).await;
        let instance = self.agent("one").await;
        let leased = self.lease(instance).await.unwrap();
        self.store.accept(leased.grant, &holder("x")).await.unwrap();
        leased
    }

    pub(crate) async fn view(&self, task: TaskId) -> TaskView {
        self.store.task(task).await.unwrap().unwrap()
    }

    /// Returns the number of stored payloads.
    pub(crate) async fn payloads(&self) -> i64 {
        let mut tx = self.store.begin().await.unwrap();
        let sql = "SELECT count(*) AS payloads FROM payloads";
        let row = tx.row(sql, &[]).await.unwrap().unwrap();
        tx.rollback().await.unwrap();
        row.int("payloads").unwrap()
    }

    pub(crate) async fn events(&self, task: TaskId) -> Vec<EventView> {
        self.store.events(task).await.unwrap()
    }

    pub(crate) async fn all(&self) -> Vec<TaskView> {
        let page = Page::first();
        self.store.tasks(None, TaskFilter::All, page).await.unwrap()
    }
}

pub(crate) async fn open(url: &str, clock: &TestClock) -> Store {
    open_with_keys(url, clock, keys()).await
}

pub(crate) async fn open_with_keys(url: &str, clock: &TestClock, keys: Arc<DocumentKeys>) -> Store {
    let rules = Rules {
        remembered_for: REMEMBERED,
        listed_for: LISTED,
        queue_timeout: QUEUED,
        ..Rules::default()
    };
    Store::open_with(url, rules, keys, clock.clone())
        .await
        .unwrap()
}

fn url_in(folder: &TempDir, name: &str) -> String {
    format!("sqlite:{}", folder.path().join(name).display())
}

pub(crate) fn keys() -> Arc<DocumentKeys> {
    Arc::new(DocumentKeys::new([[7; 32]]))
}

pub(crate) fn pool() -> PoolName {
    "eu".parse().unwrap()
}

pub(crate) fn submission(organization: &str, job: &str) -> Submission {
    Submission {
        task: TaskId::new(),
        pool: pool(),
        organization: organization.to_owned(),
        workspace: format!("net-{job}"),
        job: job.to_owned(),
        step: "a".to_owned(),
        kind: "terraformPlan".to_owned(),
        traceparent: Some("00-1-2-01".to_owned()),
        content: Content::Payload(payload()),
    }
}

/// A submission with a document of this many bytes.
pub(crate) fn large(job: &str, bytes: usize) -> Submission {
    let content = Content::Payload(Payload(vec![b'x'; bytes]));
    Submission {
        content,
        ..submission("acme", job)
    }
}

pub(crate) fn payload() -> Payload {
    Payload(format!("\0\u{ff}{SECRET}").into_bytes())
}

pub(crate) fn registration(name: &str) -> Registration {
    Registration {
        system_id: format!("{name}-1"),
        name: name.parse().unwrap(),
        executor_version: "0.1.0".to_owned(),
        protocol_min_version: 1,
        protocol_max_version: 1,
        operating_system: "linux".to_owned(),
        architecture: "amd64".to_owned(),
        capacity: 10,
        tags: vec!["gpu".to_owned()],
        installation: format!("cluster of {name}"),
        target: "kubernetes".to_owned(),
        leases: Vec::new(),
    }
}

pub(crate) fn request(instance: InstanceId, holding: &[LeaseId]) -> LeaseRequest {
    LeaseRequest {
        pool: pool(),
        credential: CREDENTIAL.to_owned(),
        instance,
        holding: holding.to_vec(),
        wait: Duration::ZERO,
    }
}

pub(crate) fn beats(leases: Vec<InstanceLease>) -> InstanceHeartbeat {
    InstanceHeartbeat {
        state: InstanceState::Online,
        available_capacity: 9,
        leases,
    }
}

pub(crate) fn held(leased: &LeasedTask, phase: Phase) -> InstanceLease {
    InstanceLease {
        task_id: leased.grant.task,
        lease_id: leased.grant.lease,
        fencing_token: leased.grant.fencing_token,
        phase,
        reason: None,
    }
}

pub(crate) fn holder(uid: &str) -> Holder {
    Holder {
        uid: uid.to_owned(),
        name: format!("pod-{uid}"),
    }
}

pub(crate) fn beat(uid: &str) -> Acceptance {
    Acceptance {
        holder: holder(uid),
        phase: Some("plan".to_owned()),
    }
}

pub(crate) fn declined(reason: DeclineReason, diagnostic: &str) -> Decline {
    Decline {
        reason,
        diagnostic: diagnostic.to_owned(),
        delay_seconds: None,
    }
}

pub(crate) fn end_report(reported: bool) -> End {
    End {
        exit_code: Some(0),
        final_log_sequence: Some(7),
        diagnostic: "no changes".to_owned(),
        verdict: None,
        reported,
        report: None,
    }
}

pub(crate) async fn complete(store: &Store, leased: &LeasedTask) {
    store
        .end(leased.grant, Ending::Completed, &end_report(true))
        .await
        .unwrap();
}

pub(crate) fn code<T: std::fmt::Debug>(result: Result<T, Error>) -> Code {
    result.unwrap_err().code()
}
