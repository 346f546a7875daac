//! Tests of agents on target `process`. Neither agents nor executors have a secret of the platform.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use integration_tests::process::Stream;
use integration_tests::{Gate, Repository, Running};
use job_contract::env;
use job_contract::identity::AWS_TOKEN;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_peers::proxy::{Call, Fate, Proxy};
use test_platform::launcher;
use test_platform::{Flow, NewJob, Status, Workspace};

use super::fixture::{Fixture, Hub};
use crate::identity::write_token;

impl Fixture {
    /// Returns the command of agent `eu-1`.
    pub(super) fn agent(&self, hub: &str) -> Command {
        self.agent_named("eu-1", "data", hub)
    }

    /// An agent with a folder of its own.
    pub(super) fn agent_named(&self, name: &str, folder: &str, hub: &str) -> Command {
        let mut command = launcher::command(crate::LAUNCHER, &self.path(""));
        launcher::agent(&mut command, name, hub, self.token.reveal())
            .args(["--deploy-target", "process"])
            .env("MAYFLY_AGENT_WORKING_DIRECTORY", self.path(folder))
            .env(env::PUBLIC_API_URL, self.platform.url())
            .env(env::STATUS_POLL_SECONDS, "1");
        command
    }

    pub(super) fn start_agent(&self, hub: &Hub) -> Running {
        Running::start(&mut self.agent(&hub.url()))
    }

    /// Starts a job with one script that records its run and then waits at a gate.
    pub(super) fn start_script(&self, gate: &Gate) -> u32 {
        let workspace = self
            .platform
            .workspace(Workspace::new(&self.repository.url()));
        let script = format!(
            "echo ran >> {}; {}",
            self.path("ledger").display(),
            gate.words()
        );
        let flow = Flow::new("customScripts", 100).with_script(&script);
        self.platform.start_job(NewJob::new(&workspace, vec![flow]))
    }

    /// A job of one script, which notes that it ran.
    pub(super) fn start_note(&self) -> u32 {
        let workspace = Workspace::new(&self.repository.url());
        let workspace = self.platform.workspace(workspace);
        let script = format!("echo ran >> {}", self.path("ledger").display());
        let flow = Flow::new("customScripts", 100).with_script(&script);
        self.platform.start_job(NewJob::new(&workspace, vec![flow]))
    }

    /// How often scripts have run.
    pub(super) fn times_run(&self) -> usize {
        let ledger = fs::read_to_string(self.path("ledger")).unwrap_or_default();
        ledger.lines().count()
    }

    /// Returns the folders of current runs.
    pub(super) fn runs(&self) -> Vec<PathBuf> {
        let runs = fs::read_dir(self.path("data/launcher/agent/runs")).unwrap();
        runs.map(|run| run.unwrap().path()).collect()
    }

    /// Returns the process id of the only executor.
    pub(super) fn executor(&self) -> Pid {
        let runs = self.runs();
        assert_eq!(runs.len(), 1, "{runs:?}");
        let pid = fs::read_to_string(runs[0].join("pid")).unwrap();
        Pid::from_raw(pid.trim().parse().unwrap())
    }
}

/// The tasks that an agent took, from its log.
pub(super) fn tasks_taken(log: &str) -> Vec<Value> {
    let lines = log.lines();
    let lines = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines
        .filter(|line| line["message"] == "took a task")
        .collect()
}

/// Waits for the end of an agent, which has to be this.
pub(super) fn ends_with(agent: Running, code: i32) -> String {
    let ended = tokio::task::block_in_place(|| agent.wait());
    assert_eq!(ended.code(), code, "{ended}");
    ended.stderr
}

pub(super) fn wait_for(agent: &Running, message: &str) {
    tokio::task::block_in_place(|| agent.wait_for(Stream::Stderr, message));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_and_its_apply_run_without_a_secret_of_the_platform() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.start_agent(&hub);
    let repository = Repository::fixture();
    let workspace = fixture
        .platform
        .workspace(Workspace::new(&repository.url()));
    let job = NewJob::new(&workspace, Flow::plan_apply());
    let job = fixture.platform.start_job(job);
    let job = fixture.platform.until_job(job, Status::Completed).await;
    assert_eq!(job.step_statuses(), [Status::Completed; 2]);
    let output = fixture.output(job.id);
    assert!(output.contains("1 to add"), "{output}");
    agent.signal(Signal::SIGTERM);
    let log = ends_with(agent, 0);
    assert!(
        !log.contains(fixture.token.reveal()) && !log.contains("mfr_"),
        "{log}"
    );
    assert_eq!(fixture.runs(), Vec::<PathBuf>::new());
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="running"} 0"#)
        .await;
    fixture.platform.assert_kept().await;
}

/// There is no kubelet: something else of the machine keeps the tokens.
#[tokio::test(flavor = "multi_thread")]
async fn runs_have_the_identity_that_the_operator_names_for_the_agent() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let file = fixture.path("tokens").join(AWS_TOKEN);
    let token = write_token(&file, 60);
    let role = "arn:aws:iam::123456789012:role/deploy";
    let mut agent = fixture.agent(&hub.url());
    agent
        .env(env::IDENTITY_AWS_ROLE, role)
        .env(env::IDENTITY_DIR, fixture.path("tokens"))
        // What a cloud injects into the agent is its own.
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9/");
    let agent = Running::start(&mut agent);
    let workspace = Workspace::new(&fixture.repository.url());
    let workspace = fixture.platform.workspace(workspace);
    let look = "echo \"has=$AWS_ROLE_ARN,$AWS_WEB_IDENTITY_TOKEN_FILE,$AWS_CONTAINER_CREDENTIALS_FULL_URI\"";
    let flow = Flow::new("customScripts", 100).with_script(look);
    let job = NewJob::new(&workspace, vec![flow]);
    let job = fixture.platform.start_job(job);
    fixture.platform.until_job(job, Status::Completed).await;
    let output = fixture.output(job);
    let expected = format!("has={role},{},\n", file.display());
    assert!(output.contains(&expected), "{output}");
    agent.signal(Signal::SIGTERM);
    let log = ends_with(agent, 0);
    assert!(!log.contains(&token) && !output.contains(&token), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_of_another_hub_is_left_to_an_agent_of_that_hub() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let agent = fixture.start_agent(&hub);
    let gate = fixture.gate();
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    tokio::task::block_in_place(|| agent.kill());

    let other = Fixture::new().await;
    let its_hub = other.serve();
    let mut command = other.agent(&its_hub.url());
    let folder = fixture.path("data");
    let stranger = Running::start(command.env("MAYFLY_AGENT_WORKING_DIRECTORY", folder));
    wait_for(&stranger, "left an executor of another hub alone");
    wait_for(&stranger, "\"registered\"");
    stranger.signal(Signal::SIGTERM);
    ends_with(stranger, 0);

    // Files of earlier versions name no hub.
    let file = fixture.runs()[0].join("lease.json");
    let mut lease: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let url = lease.as_object_mut().unwrap().remove("url").unwrap();
    assert!(url.as_str().unwrap().starts_with(&hub.url()), "{url}");
    fs::write(&file, lease.to_string()).unwrap();
    let agent = fixture.start_agent(&hub);
    wait_for(&agent, "found an executor of an earlier agent");
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    assert_eq!(fixture.times_run(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_run_frees_its_slot() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let gate = fixture.gate();
    let mut command = fixture.agent(&hub.url());
    let agent = Running::start(command.env("MAYFLY_AGENT_SLOTS", "1"));
    let first = fixture.start_script(&gate);
    fixture.platform.until_streamed(first, "at-the-gate").await;
    let second = fixture.start_script(&gate);
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="available"} 1"#)
        .await;
    assert_eq!(fixture.times_run(), 1);
    gate.open().await;
    fixture.platform.until_job(first, Status::Completed).await;
    fixture.platform.until_streamed(second, "at-the-gate").await;
    gate.open().await;
    fixture.platform.until_job(second, Status::Completed).await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_agent_finds_its_run() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let gate = fixture.gate();
    let agent = fixture.start_agent(&hub);
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    agent.signal(Signal::SIGKILL);
    drop(agent);
    let agent = fixture.start_agent(&hub);
    wait_for(&agent, "found an executor of an earlier agent");
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    agent.signal(Signal::SIGTERM);
    ends_with(agent, 0);
    assert_eq!((fixture.times_run(), fixture.runs().len()), (1, 0));
    fixture.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_executor_dies_without_an_agent_fails_once() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let gate = fixture.gate();
    let agent = fixture.start_agent(&hub);
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    agent.signal(Signal::SIGKILL);
    drop(agent);
    kill(fixture.executor(), Signal::SIGKILL).unwrap();
    let agent = fixture.start_agent(&hub);
    fixture.platform.until_job(job, Status::Failed).await;
    agent.signal(Signal::SIGTERM);
    ends_with(agent, 0);
    assert_eq!((fixture.times_run(), fixture.runs().len()), (1, 0));
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="unreported"} 0"#)
        .await;
    assert_eq!(fixture.reports(job, Status::Failed), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_run_stops_and_frees_its_slot() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let gate = fixture.gate();
    let mut command = fixture.agent(&hub.url());
    let agent = Running::start(command.env("MAYFLY_AGENT_SLOTS", "1"));
    let first = fixture.start_script(&gate);
    fixture.platform.until_streamed(first, "at-the-gate").await;
    fixture.platform.cancel(first).await;
    let second = fixture.start_script(&gate);
    fixture.platform.until_streamed(second, "at-the-gate").await;
    gate.open().await;
    fixture.platform.until_job(second, Status::Completed).await;
    fixture.platform.until_job(first, Status::Cancelled).await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_response_was_lost_is_returned_again_and_runs_once() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let proxy = Proxy::of_calls(&[hub.address()]).unwrap();
    let has_task = |call: &Call| call.class.ends_with("/tasks/request") && call.status == 200;
    proxy.rule(1, move |call| has_task(call).then_some(Fate::Drop));
    let agent = Running::start(&mut fixture.agent(&proxy.url()));
    wait_for(&agent, "\"registered\"");
    let gate = fixture.gate();
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    assert_eq!(proxy.rules_left(), 0);
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    agent.signal(Signal::SIGTERM);
    let log = ends_with(agent, 0);
    let taken = tasks_taken(&log);
    assert_eq!(taken.len(), 1, "{log}");
    assert_eq!(taken[0]["attempt"], 1);
    assert_eq!(fixture.times_run(), 1);
}
