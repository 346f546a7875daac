//! The fixture of tests with pools: a platform, a file of the pools, and hubs with the same database.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use integration_tests::{Gate, Repository};
use job_contract::env;
use pool_protocol::task::Task;
use pool_protocol::token::PoolToken;
use test_peers::evidence;
use test_peers::redis::RedisServer;
use test_peers::wait;
use test_platform::{Flow, NewJob, Outputs, Platform, Release, Status, Workspace};

use super::client::Client;
use test_platform::launcher::{self, Launcher};

/// A platform, a file of the pools, and settings for hubs.
pub(super) struct Fixture {
    pub(super) platform: Platform,
    redis: RedisServer,
    folder: tempfile::TempDir,
    /// Of the workspaces whose runs are scripts.
    pub(super) repository: Repository,
    /// A token of pool `eu`.
    pub(super) token: PoolToken,
    more: Vec<(&'static str, String)>,
}

impl Fixture {
    /// Starts a platform. Pool `eu` takes runs of its organization, and pool `us` of another.
    pub(super) async fn new() -> Self {
        Self::under(Release::default()).await
    }

    /// The same, with a platform that has the rules of this release.
    pub(super) async fn under(release: Release) -> Self {
        let redis = RedisServer::start().unwrap();
        let platform = Platform::builder()
            .release(release)
            .redis(&format!("redis://{}", redis.address()))
            .start()
            .await
            .unwrap();
        let fixture = Self {
            platform,
            redis,
            folder: tempfile::tempdir().unwrap(),
            repository: Repository::fixture(),
            token: PoolToken::new("eu".parse().unwrap()),
            more: Vec::new(),
        };
        // Of executors.
        evidence::keep_files(fixture.path(""), &["/log", "/diagnostics"]);
        fixture.write_pools(&[&fixture.token]);
        let outputs = Outputs::folder(&fixture.path("data/local/output"));
        fixture.platform.read_outputs(outputs);
        fixture
    }

    /// Adds a setting of hubs.
    pub(super) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.more.push((name, value.to_owned()));
        self
    }

    /// Makes the gate of its scripts.
    pub(super) fn gate(&self) -> Gate {
        Gate::new(self.path("gate"))
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces the file of the pools. Pool `eu` has these tokens, and `us` a new one.
    pub(super) fn write_pools(&self, tokens: &[&PoolToken]) {
        let organization = self.platform.organization();
        let of_eu: String = tokens
            .iter()
            .zip(0..)
            .map(|(token, number)| entry(&format!("t{number}"), token))
            .collect();
        let other = PoolToken::new("us".parse().unwrap());
        fs::write(self.path("us-token"), other.reveal()).unwrap();
        let of_us = entry("u", &other);
        let text = format!(
            "pools:\n  eu:\n    organizations: [{organization}]\n    tokens:\n{of_eu}  \
             us:\n    organizations: [another]\n    tokens:\n{of_us}"
        );
        self.replace_pools(&text);
    }

    /// Replaces the file of the pools with any text.
    pub(super) fn replace_pools(&self, text: &str) {
        fs::write(self.path("new.yaml"), text).unwrap();
        fs::rename(self.path("new.yaml"), self.path("pools.yaml")).unwrap();
    }

    /// Returns the token of pool `us`.
    pub(super) fn token_of_us(&self) -> String {
        fs::read_to_string(self.path("us-token")).unwrap()
    }

    /// Returns the command of a hub.
    pub(super) fn command(&self) -> Command {
        let mut command = launcher::hub(crate::LAUNCHER, self.folder.path());
        command
            .env(
                env::POOL_STORE,
                format!("sqlite:{}", self.path("store/pools.db").display()),
            )
            .env(env::API_URL, self.platform.url())
            .env(env::PUBLIC_API_URL, self.platform.url())
            .env(env::INTERNAL_SECRET, self.platform.secret())
            .env(env::REDIS_HOSTNAME, "127.0.0.1")
            .env(env::REDIS_PORT, self.redis.port().to_string())
            .envs(
                self.more
                    .iter()
                    .map(|(name, value)| (*name, value.as_str())),
            );
        command
    }

    /// Starts a hub. The platform dispatches to pool `eu` of this hub.
    pub(super) fn serve(&self) -> Hub {
        let hub = Hub(Launcher::start(&mut self.command()));
        self.dispatch_to(&hub, "eu");
        hub
    }

    /// Makes the platform dispatch to this pool.
    pub(super) fn dispatch_to(&self, hub: &Hub, pool: &str) {
        let url = format!("{}/pools/{pool}/api/v1/terraform-rs", hub.url());
        self.platform.dispatch_to(&url);
    }

    /// Returns a client with the token of pool `eu`.
    pub(super) fn client(&self, hub: &Hub) -> Client {
        Client::new(&hub.url(), self.token.reveal())
    }

    /// Starts a job with one plan.
    pub(super) fn start_plan(&self) -> u32 {
        let workspace = self
            .platform
            .workspace(Workspace::new("https://git.example.test/a.git"));
        self.platform
            .start_job(NewJob::new(&workspace, Flow::only("terraformPlan")))
    }

    /// Starts a job with one plan, and waits until it is dispatched.
    pub(super) async fn dispatched_plan(&self) -> u32 {
        let job = self.start_plan();
        self.platform.until_job(job, Status::Queue).await;
        job
    }

    /// Waits for the heartbeat of a job. The hub writes it beside its answer to the dispatch.
    pub(super) async fn until_alive(&self, job: u32) {
        let heartbeat = async || self.platform.heartbeat(job).await;
        wait::until(&format!("a heartbeat of job {job}"), heartbeat).await;
    }

    /// Stores the output of a step, as its executor does.
    pub(super) fn store_output(&self, task: &Task) {
        let folder = self.path("data/local/output");
        let folder = folder.join(&task.organization_id).join(&task.job_id);
        fs::create_dir_all(&folder).unwrap();
        fs::write(
            folder.join(format!("{}.tfoutput", task.step_id)),
            "No changes.\n",
        )
        .unwrap();
    }

    /// Returns the output of the first step of a job.
    pub(super) fn output(&self, job: u32) -> String {
        let step = self.platform.job(job).steps[0].id.clone();
        let found = self.platform.step_output(job, &step);
        found.unwrap_or_else(|| panic!("no output\n{}", self.platform.report()))
    }

    /// Returns how often clients have set this status for the job and its steps.
    pub(super) fn reports(&self, job: u32, status: Status) -> usize {
        let records = self.platform.records();
        let by_client = |change: &&test_platform::Transition| {
            change.job == job && change.to == status && change.by == test_platform::Actor::Client
        };
        records.transitions.iter().filter(by_client).count()
    }
}

/// Returns the entry of a token in the file of the pools.
fn entry(id: &str, token: &PoolToken) -> String {
    format!("      - {{id: {id}, sha256: {}}}\n", token.digest())
}

/// A running hub.
pub(super) struct Hub(pub(super) Launcher);

impl Hub {
    pub(super) fn url(&self) -> String {
        self.0.endpoint.url("")
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.0.endpoint.address
    }

    /// Kills it as a crash would.
    pub(super) fn crash(self) {
        self.0.crash();
    }

    pub(super) async fn get(&self, path: &str) -> String {
        let url = format!("{}{path}", self.url());
        reqwest::get(url).await.unwrap().text().await.unwrap()
    }

    /// Waits until the hub has asked its store which conditions it keeps. Tests see only the requests that follow.
    pub(super) async fn until_store_asked(&self) {
        let is_asked = async || {
            let metrics = self.get("/metrics").await;
            metrics.contains("mayfly_artifact_store_conditions{")
        };
        wait::until("the answer of the store", is_asked).await;
    }

    /// Waits until the metrics contain a line.
    pub(super) async fn until_metric(&self, line: &str) {
        let has_line = async || {
            let metrics = self.get("/metrics").await;
            let there = metrics.lines().any(|found| found == line);
            if there { Ok(()) } else { Err(metrics) }
        };
        wait::until(line, has_line).await;
    }
}
