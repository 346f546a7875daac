//! Tests of pools with a key: the hub stores no job document that it can read.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use integration_tests::process::Stream;
use integration_tests::{Repository, Running};
use nix::sys::signal::Signal;
use serde_json::json;
use test_platform::{Flow, NewJob, Status, Workspace};

use super::agent::ends_with;
use super::fixture::{Fixture, Hub};

const SECRETS: usize = 20;

fn secret(number: usize) -> String {
    format!("planted-{number}-secret")
}

/// A fixture with a key in the agents' folder.
struct SealingFixture {
    fixture: Fixture,
    public: String,
    repository: Repository,
}

impl SealingFixture {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        fs::create_dir(fixture.path("keys")).unwrap();
        let made = keygen(&fixture.path("keys"));
        assert!(made.status.success(), "{made:?}");
        let public = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        let shown = String::from_utf8(made.stderr).unwrap();
        let private = shown
            .split(['/', '.'])
            .find(|part| part.len() == 8)
            .unwrap();
        let text = fs::read_to_string(fixture.path(&format!("keys/{private}.key"))).unwrap();
        assert!(!shown.contains(text.trim()), "{shown}");
        Self {
            fixture,
            public,
            repository: Repository::fixture(),
        }
    }

    /// Gives pool `eu` these keys.
    fn write_pools(&self, keys: &[&str]) {
        let token = json!({"id": "t", "sha256": self.fixture.token.digest()});
        let organization = self.fixture.platform.organization();
        let eu = json!({"organizations": [organization], "tokens": [token], "public_keys": keys});
        self.fixture
            .replace_pools(&json!({"pools": {"eu": eu}}).to_string());
    }

    /// Dispatches a job whose document contains the secrets.
    async fn dispatched(&self) -> u32 {
        let secrets: Vec<String> = (0..SECRETS).map(secret).collect();
        let ledger = self.fixture.path("ledger");
        let script = format!("# {}\necho ran >> {}", secrets.join(" "), ledger.display());
        let flow = Flow::new("customScripts", 100).with_script(&script);
        let workspace = Workspace::new(&self.repository.url());
        let workspace = self.fixture.platform.workspace(workspace);
        let job = NewJob::new(&workspace, vec![flow]);
        let job = self.fixture.platform.start_job(job);
        self.fixture.platform.until_job(job, Status::Queue).await;
        job
    }

    fn agent(&self, hub: &Hub) -> Command {
        let mut command = self.fixture.agent(&hub.url());
        command.env("MAYFLY_AGENT_PRIVATE_KEY_DIR", self.fixture.path("keys"));
        command
    }

    /// Returns the files of the store that contain a secret.
    fn found(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.fixture.path("store")).unwrap();
        let files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        assert!(
            files.iter().any(|file| file.ends_with("pools.db-wal")),
            "{files:?}"
        );
        files
            .into_iter()
            .filter(|file| has_secret(&fs::read(file).unwrap()))
            .collect()
    }
}

fn keygen(folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_launcher_under_test"))
        .args(["pool", "keygen", "--directory"])
        .arg(folder)
        .output()
        .unwrap()
}

fn has_secret(bytes: &[u8]) -> bool {
    (0..SECRETS).any(|number| {
        let secret = secret(number);
        bytes
            .windows(secret.len())
            .any(|window| window == secret.as_bytes())
    })
}

/// Stops the hub, and returns its log.
fn log_of(hub: Hub) -> String {
    let running = hub.0.into_running();
    running.signal(Signal::SIGTERM);
    tokio::task::block_in_place(|| running.wait()).stderr
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hub_with_a_key_stores_no_secret_and_its_agent_runs_the_job() {
    let sealing = SealingFixture::new().await;
    sealing.write_pools(&[&sealing.public]);
    let hub = sealing.fixture.serve();
    let job = sealing.dispatched().await;
    assert_eq!(sealing.found(), Vec::<PathBuf>::new());
    let agent = Running::start(&mut sealing.agent(&hub));
    sealing
        .fixture
        .platform
        .until_job(job, Status::Completed)
        .await;
    agent.signal(Signal::SIGTERM);
    let log = ends_with(agent, 0);
    assert!(!has_secret(log.as_bytes()), "{log}");
    assert_eq!(sealing.found(), Vec::<PathBuf>::new());
    assert_eq!(sealing.fixture.times_run(), 1);
    let log = log_of(hub);
    assert!(!has_secret(log.as_bytes()), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_waits_for_an_agent_that_has_the_key() {
    let sealing = SealingFixture::new().await;
    sealing.write_pools(&[&sealing.public]);
    let hub = sealing.fixture.serve();
    let job = sealing.dispatched().await;
    let agent = sealing.fixture.start_agent(&hub);
    tokio::task::block_in_place(|| {
        hub.0
            .running
            .wait_for(Stream::Stderr, "the agent has no key");
    });
    drop(agent);
    let agent = Running::start(&mut sealing.agent(&hub));
    sealing
        .fixture
        .platform
        .until_job(job, Status::Completed)
        .await;
    drop(agent);
    assert_eq!(sealing.fixture.times_run(), 1);
}
