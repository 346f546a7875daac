//! State is never lost: an apply or a destroy with the real tool and a real remote backend, stopped or broken in the
//! middle in every way there is. What is asserted is what is in the bucket afterwards, whether the state can be used by
//! the next run, and that the report tells what was done and what was not.

mod encryption;
mod interrupts;
mod locks;
mod publishing;
mod rescue;

use std::process::Command;

use artifact_store::{
    Handover, HttpUrl, S3Credentials, S3Settings, StaticKeys, Store, StoreSettings,
};
use integration_tests::machine::{ExecutorRun, RunningExecutor};
use integration_tests::process::Stream;
use integration_tests::repository::chain;
use integration_tests::{Finished, Gate, Machine, Outcome, Repository, Running, job};
use job_contract::keys::ObjectKey;
use job_contract::report::StateStatus;
use job_contract::{JobData, Tool, env};
use nix::unistd::Pid;
use secrecy::SecretString;
use serde_json::Value;
use test_peers::http_proxy::HttpProxy;
use test_peers::s3::{self, S3};
use url::Url;

use crate::machine;

/// A bucket in which the tool locks its state, behind an endpoint.
pub(crate) struct Bucket {
    _server: S3,
    pub(crate) endpoint: HttpProxy,
    store: Store,
}

impl Bucket {
    pub(crate) fn new() -> Self {
        // A second installation leaves the first in force.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = S3::start_open().unwrap();
        let host = server.address().to_string();
        let store = Store::open(&StoreSettings::S3(S3Settings {
            bucket: s3::BUCKET.to_owned(),
            region: s3::REGION.to_owned(),
            endpoint: Some(HttpUrl {
                url: Url::parse(&server.url()).unwrap(),
                text: server.url(),
            }),
            endpoint_region: None,
            path_style: true,
            credentials: S3Credentials::Keys(StaticKeys {
                access_key: SecretString::from("key"),
                secret_key: SecretString::from("secret-of-the-store"),
            }),
            role: None,
            handover: Handover::Outside,
            use_lockfile: true,
        }));
        Self {
            endpoint: HttpProxy::to(server.address(), &host).unwrap(),
            store: store.unwrap(),
            _server: server,
        }
    }

    pub(crate) fn settings(&self) -> [(&'static str, String); 7] {
        [
            (env::STATE_TYPE, "AwsTerraformStateImpl".to_owned()),
            (env::AWS_BUCKET, s3::BUCKET.to_owned()),
            (env::AWS_REGION, s3::REGION.to_owned()),
            (env::AWS_ENDPOINT, self.endpoint.url()),
            (env::AWS_ACCESS_KEY, "key".to_owned()),
            (env::AWS_SECRET_KEY, "secret-of-the-store".to_owned()),
            (env::AWS_USE_LOCKFILE, "true".to_owned()),
        ]
    }

    fn executor<'s>(&self, machine: &'s Machine, job: &JobData) -> ExecutorRun<'s> {
        let run = machine.executor(job).env(env::GRACE_PERIOD_SECONDS, "60");
        let settings = self.settings().into_iter();
        settings.fold(run, |run, (name, value)| run.env(name, value))
    }

    /// `api-launcher state`, with the settings of the store that executors have.
    pub(crate) fn state_command(&self, machine: &Machine, words: &[&str]) -> Finished {
        self.state_command_at(machine, words, &self.endpoint.url())
    }

    /// The same with another address of the store.
    fn state_command_at(&self, machine: &Machine, words: &[&str], endpoint: &str) -> Finished {
        let workspace = format!("{}/{}", job::ORGANIZATION, job::WORKSPACE);
        let mut command = Command::new(crate::LAUNCHER);
        command
            .arg("state")
            .args(words)
            .arg(workspace)
            .env_clear()
            .env(env::DATA_DIR, machine.data_dir())
            .envs(self.settings())
            .env(env::AWS_ENDPOINT, endpoint);
        Running::start(&mut command).wait()
    }

    fn bytes(&self, key: &ObjectKey) -> Option<Vec<u8>> {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let bytes = runtime.block_on(self.store.read(key)).unwrap()?;
        Some(bytes.to_vec())
    }

    fn read(&self, key: &ObjectKey) -> Option<Value> {
        Some(serde_json::from_slice(&self.bytes(key)?).expect("half an object"))
    }

    fn write(&self, key: &ObjectKey, text: String) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(self.store.put(key, text)).unwrap();
    }

    /// What the tool's backend holds.
    fn state(&self) -> Option<Value> {
        self.read(&state_key())
    }

    pub(crate) fn lock(&self) -> Option<Value> {
        self.read(&lock_key())
    }

    pub(crate) fn resources(&self) -> Vec<String> {
        let state = self.state().unwrap_or_default();
        let resources = state["resources"].as_array().cloned().unwrap_or_default();
        resources
            .iter()
            .map(|resource| resource["name"].as_str().unwrap().to_owned())
            .collect()
    }
}

fn state_key() -> ObjectKey {
    ObjectKey::backend_state(job::ORGANIZATION, job::WORKSPACE)
}

fn lock_key() -> ObjectKey {
    let state = state_key();
    ObjectKey {
        path: format!("{}.tflock", state.path),
        ..state
    }
}

pub(crate) fn is_state(path: &str) -> bool {
    path.ends_with("/terraform.tfstate")
}

pub(crate) fn is_lock(path: &str) -> bool {
    path.ends_with(".tflock")
}

/// The tool shows the command before it runs it, and there the two words are in quotes.
const AT_THE_GATE: &str = "at-the-gate tool-";

/// Three resources in a row, the second of which waits at the gate.
fn gated(gate: &Gate) -> Repository {
    gated_when(gate, "")
}

/// The provisioner of the second resource runs then.
fn gated_when(gate: &Gate, when: &str) -> Repository {
    let command = format!(
        "echo at-the-gate' 'tool-$PPID.; exec cat {}",
        gate.path().display()
    );
    Repository::module(&chain(&format!("{when}command = \"{command}\"")))
}

/// Waits until the tool is at the gate, and returns its process id.
fn tool_at_the_gate(run: &RunningExecutor) -> Pid {
    let line = run.running.line_with(Stream::Stdout, AT_THE_GATE);
    let (_, rest) = line.split_once(AT_THE_GATE).unwrap();
    Pid::from_raw(rest.split('.').next().unwrap().parse().unwrap())
}

/// An apply that comes to its gate.
struct Journey {
    bucket: Bucket,
    machine: Machine,
    gate: Gate,
    repository: Repository,
    apply: JobData,
}

impl Journey {
    /// Of a plan that was reviewed.
    fn planned(tool: Tool) -> Self {
        Self::that(tool, true)
    }

    /// Of whatever the tool finds to be done.
    fn unplanned(tool: Tool) -> Self {
        Self::that(tool, false)
    }

    fn that(tool: Tool, is_planned: bool) -> Self {
        let (bucket, machine) = (Bucket::new(), machine());
        let gate = machine.gate();
        let repository = gated(&gate);
        let plan = job::plan_by(tool, &repository);
        let apply = job::apply_after(&plan);
        if is_planned {
            machine.queue(&[&plan, &apply]);
            bucket.executor(&machine, &plan).run().expect_code(0);
            assert!(bucket.lock().is_none(), "a plan gives its lock back");
        } else {
            machine.queue(&[&apply]);
        }
        Self {
            bucket,
            machine,
            gate,
            repository,
            apply,
        }
    }

    fn executor(&self) -> ExecutorRun<'_> {
        self.bucket.executor(&self.machine, &self.apply)
    }

    /// What holds however the tool was interrupted in the middle and saved its state itself.
    #[track_caller]
    fn assert_saved(&self, outcome: &Outcome) {
        let resources = self.bucket.resources();
        assert!(resources.contains(&"first".to_owned()), "{outcome}");
        assert!(!resources.contains(&"third".to_owned()), "{outcome}");
        self.assert_published(outcome);
        let report = outcome.report();
        assert_eq!(report.state, Some(StateStatus::Stored), "{outcome}");
        let progress = report.progress.as_ref().expect("an account");
        assert_eq!((progress.applied, progress.not_begun), (1, Some(1)));
        let middle = [&*progress.failed, &*progress.unfinished].concat();
        assert_eq!(middle, ["terraform_data.second"], "{outcome}");
        for words in [
            "1 of 3 changes was made",
            "(terraform_data.second)",
            "1 was not begun; the state is stored",
        ] {
            assert!(outcome.error().contains(words), "{words}: {outcome}");
            assert!(outcome.log().contains(words), "{words}: {outcome}");
        }
    }

    /// The tool could not store the state of what it had made; it is stored, and published.
    #[track_caller]
    fn assert_rescued(&self, outcome: &Outcome) {
        let status = outcome.report().state;
        assert_eq!(status, Some(StateStatus::Rescued), "{outcome}");
        assert_eq!(self.bucket.resources().len(), 3, "{outcome}");
        self.assert_published(outcome);
    }

    /// The copies are those of the state, and it is not locked any more.
    #[track_caller]
    fn assert_published(&self, outcome: &Outcome) {
        assert!(self.bucket.lock().is_none(), "still locked: {outcome}");
        let history = self.machine.record(&self.apply).history;
        assert_eq!(history.len(), 1, "{outcome}");
        let state = self.bucket.state().unwrap();
        assert_eq!(history[0].serial, state["serial"].as_u64().unwrap());
        let (_, name) = history[0].output.rsplit_once('/').unwrap();
        let name = name.strip_suffix(".json").unwrap();
        let raw = ObjectKey::state_raw(job::ORGANIZATION, job::WORKSPACE, name);
        assert_eq!(self.bucket.read(&raw), Some(state), "{outcome}");
        assert!(outcome.left_behind.is_empty(), "{outcome}");
    }
}

#[track_caller]
fn assert_interrupted_once(outcome: &Outcome) {
    let count = |words: &str| outcome.log().matches(words).count();
    assert_eq!(count("Interrupt received"), 1, "{outcome}");
    assert_eq!(count("Two interrupts received"), 0, "{outcome}");
    assert_eq!(outcome.report().lock, None, "{outcome}");
}
