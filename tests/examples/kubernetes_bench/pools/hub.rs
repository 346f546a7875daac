//! The hub under measurement: `serve --pools`, as a process, before a platform that waits for every run.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use integration_tests::WaitingPlatform;
use integration_tests::process::Running;
use job_contract::{JobData, env};
use nix::unistd::Pid;
use pool_protocol::token::PoolToken;
use serde_json::{Map, Value, json};
use test_peers::wait;
use test_platform::launcher::{self, DISPATCH, Endpoint, Launcher};

use crate::launcher::memory_of;

/// Nothing that works takes so long.
pub(super) const PATIENCE: Duration = Duration::from_mins(5);
/// The pools: of agents as processes, of many runs, of many agents that wait, and of an agent that stays idle.
const POOLS: [&str; 4] = ["eu", "load", "empty", "idle"];

/// A hub; killed when dropped.
pub(super) struct Hub {
    /// In a lock, because clients in other threads share the hub.
    _running: Mutex<Running>,
    process: Pid,
    endpoint: Endpoint,
    tokens: Vec<(&'static str, PoolToken)>,
    _platform: WaitingPlatform,
    store: &'static str,
    next: AtomicUsize,
    folder: tempfile::TempDir,
}

impl Hub {
    /// Starts one. It uses the store that the environment names, or SQLite.
    pub(super) async fn start(program: &str) -> Result<Self> {
        let (platform, folder) = (WaitingPlatform::start().await, tempfile::tempdir()?);
        let tokens = POOLS.map(|pool| (pool, PoolToken::new(pool.parse().unwrap())));
        let pools = tokens.iter().map(|(pool, token)| {
            let token = json!({"id": "t", "sha256": token.digest()});
            let settings = json!({"organizations": ["*"], "tokens": [token]});
            ((*pool).to_owned(), settings)
        });
        let pools: Map<String, Value> = pools.collect();
        let file = folder.path().join("pools.yaml");
        fs::write(&file, json!({"pools": pools}).to_string())?;
        let store = std::env::var(env::POOL_STORE).ok();
        let key = STANDARD.encode([7; 32]);
        let mut command = launcher::hub(program, folder.path());
        command
            .envs(platform.settings())
            .envs(store.as_ref().map(|store| (env::POOL_STORE, store)))
            // On PostgreSQL, the hub makes no key of its own.
            .envs(store.as_ref().map(|_| (env::JOB_TOKEN_KEYS, &key)));
        let hub = Launcher::start(&mut command);
        Ok(Self {
            process: hub.running.pid(),
            _running: Mutex::new(hub.running),
            endpoint: hub.endpoint,
            tokens: tokens.into(),
            _platform: platform,
            store: match store {
                Some(url) if url.starts_with("postgres") => "PostgreSQL",
                _ => "SQLite",
            },
            next: AtomicUsize::new(1),
            folder,
        })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.endpoint.address
    }

    pub(super) fn url(&self) -> String {
        self.endpoint.url("")
    }

    pub(super) fn store(&self) -> &'static str {
        self.store
    }

    /// For files of the bench.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The token of a pool.
    pub(super) fn token(&self, pool: &str) -> &str {
        let mut tokens = self.tokens.iter();
        let found = tokens.find(|(name, _)| *name == pool);
        found.expect("one of the pools").1.reveal()
    }

    /// The run of a job that is not used yet.
    pub(super) fn job(&self) -> JobData {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        WaitingPlatform::plan("one", number)
    }

    /// Posts a run of an organization, which must be accepted. Returns how long that took.
    pub(super) async fn post(
        &self,
        pool: &str,
        organization: &str,
        job: &JobData,
    ) -> Result<Duration> {
        let job = JobData {
            organization_id: organization.to_owned(),
            ..job.clone()
        };
        let path = format!("/pools/{pool}{DISPATCH}");
        let request = self.endpoint.request(&path, serde_json::to_string(&job)?);
        let began = Instant::now();
        let status = request.send().await?.status();
        ensure!(status.as_u16() == 202, "a dispatch was answered {status}");
        Ok(began.elapsed())
    }

    /// Waits until the queue of a pool has so many runs that can be leased.
    pub(super) async fn until_available(&self, pool: &str, count: usize) -> Result<()> {
        self.until_line(&format!(
            r#"mayfly_pool_tasks{{pool="{pool}",state="available"}} {count}"#
        ))
        .await
    }

    /// Waits until a line is in the metrics.
    pub(super) async fn until_line(&self, line: &str) -> Result<()> {
        let has_line = || async {
            let metrics = self.endpoint.client.get(self.endpoint.url("/metrics"));
            let metrics = metrics.send().await?.text().await?;
            ensure!(metrics.lines().any(|found| found == line), "{metrics}");
            Ok(())
        };
        Ok(wait::within(PATIENCE, line, has_line).await?)
    }

    /// A memory figure of the kernel, in bytes.
    pub(super) fn memory(&self, figure: &str) -> Result<u64> {
        memory_of(self.process, figure)
    }
}
