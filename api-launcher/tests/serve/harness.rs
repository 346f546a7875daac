//! A data directory, a git repository, and launchers over them.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};

use job_contract::JobData;
use job_contract::status::{JobStatus, StepStatus};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use platform::StepRef;
use platform::local::{JobRecord, LocalPlatform};
use serde_json::{Value, json};
use test_peers::gate::Gate;
use test_peers::port::Port;
use test_peers::process::{Running, Stream};
use test_peers::repository::Repository;
use test_peers::wait::{until, until_blocking};
use test_platform::Secret;
use test_platform::launcher::{self, DISPATCH, Endpoint};

const MODULE: &str = r#"
resource "terraform_data" "greeting" {
  input = "hello"
}
output "greeting" {
  value = terraform_data.greeting.output
}
"#;

/// A place for launchers, one after the other at one address: executors that outlive one find the next.
pub(crate) struct Fixture {
    temp: tempfile::TempDir,
    pub(crate) repository: Repository,
    port: Port,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        // Some tests have no other client than the one this serves.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let temp = tempfile::tempdir().unwrap();
        let port = Port::take().unwrap();
        fs::create_dir(temp.path().join("data")).unwrap();
        Self {
            temp,
            repository: Repository::module(MODULE),
            port,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.path("data")
    }

    /// A launcher with these settings.
    pub(crate) fn serve(&self, settings: &[(&str, &str)]) -> Launcher {
        let mut command = Command::new(env!("CARGO_BIN_EXE_api-launcher"));
        self.configure(&mut command);
        command.envs(settings.iter().copied());
        self.start(&mut command)
    }

    /// Starts a launcher on this data directory.
    pub(crate) fn start(&self, command: &mut Command) -> Launcher {
        Launcher::start(command, self.platform())
    }

    /// Arguments and environment of a launcher on this data directory.
    pub(crate) fn configure(&self, command: &mut Command) {
        launcher::serve(launcher::at_home(command, self.temp.path()), "process")
            .env("InternalSecret", Secret::long().text())
            .env("MAYFLY_LISTEN", self.port.address().to_string())
            .env("MAYFLY_DATA_DIR", self.data())
            .env("MAYFLY_CONCURRENCY", "4");
    }

    /// A job of one step on the repository.
    pub(crate) fn job(&self, job: usize, step: &str, step_type: &str) -> Value {
        json!({
            "type": step_type,
            "organizationId": "org",
            "workspaceId": "ws",
            "jobId": job.to_string(),
            "stepId": step,
            "terraformVersion": ">=1.4.0",
            "source": self.repository.url(),
            "branch": "main",
            "folder": "/",
            "vcsType": "PUBLIC",
            "environmentVariables": {"TF_IN_AUTOMATION": "1"},
            "variables": {},
        })
    }

    /// A step that runs this Bash script, and notes in the ledger that it did.
    pub(crate) fn script(&self, job: usize, script: &str) -> Value {
        let ledger = self.path("ledger");
        let mut document = self.job(job, "step", "customScripts");
        let script = format!("echo {job} >> {}\n{script}", ledger.display());
        document["commandList"] =
            json!([{"runtime": "BASH", "script": script, "priority": 1, "before": true}]);
        document
    }

    /// How often the script of a job has run.
    pub(crate) fn times_run(&self, job: usize) -> usize {
        let ledger = fs::read_to_string(self.path("ledger")).unwrap_or_default();
        let job = job.to_string();
        ledger.lines().filter(|line| *line == job).count()
    }

    /// A gate for scripts.
    pub(crate) fn gate(&self) -> Gate {
        Gate::new(self.path("gate"))
    }

    pub(crate) fn platform(&self) -> LocalPlatform {
        LocalPlatform::new(self.data())
    }

    pub(crate) fn record(&self, job: usize) -> JobRecord {
        self.platform().job(&job.to_string()).unwrap().unwrap()
    }

    pub(crate) fn step_status(&self, job: usize, step: &str) -> StepStatus {
        self.record(job).step(step).unwrap().status
    }

    pub(crate) fn output(&self, job: usize, step: &str) -> String {
        let path = format!("local/output/org/{job}/{step}.tfoutput");
        fs::read_to_string(self.data().join(path)).unwrap()
    }

    /// The folder of a run in progress.
    pub(crate) fn run_folder(&self, job: usize) -> PathBuf {
        let run = format!("{job}/step");
        let is_of_job = |folder: &PathBuf| {
            let lease = fs::read(folder.join("lease.json")).unwrap_or_default();
            let lease: Value = serde_json::from_slice(&lease).unwrap_or_default();
            lease["run"] == run.as_str()
        };
        let mut folders = self.run_folders().into_iter();
        folders.find(is_of_job).expect("the run is in progress")
    }

    fn run_folders(&self) -> Vec<PathBuf> {
        let folders = fs::read_dir(self.data().join("launcher/agent/runs")).unwrap();
        folders.map(|folder| folder.unwrap().path()).collect()
    }

    /// The process of a running executor.
    pub(crate) fn executor(&self, job: usize) -> Pid {
        let text = fs::read_to_string(self.run_folder(job).join("pid")).unwrap();
        Pid::from_raw(text.trim().parse().unwrap())
    }

    /// Waits until nothing is left of runs that are over.
    pub(crate) fn until_no_folders(&self) {
        let is_empty = || self.run_folders().is_empty().then_some(());
        until_blocking("the folders of runs are removed", is_empty);
    }
}

pub(crate) fn step_ref(document: &Value) -> StepRef {
    let job: JobData = serde_json::from_value(document.clone()).unwrap();
    StepRef {
        organization_id: job.organization_id,
        workspace_id: job.workspace_id,
        job_id: job.job_id,
        step_id: job.step_id,
        step_type: job.step_type.unwrap(),
    }
}

/// A launcher that serves.
pub(crate) struct Launcher {
    running: Running,
    endpoint: Endpoint,
    records: LocalPlatform,
}

impl Launcher {
    fn start(command: &mut Command, records: LocalPlatform) -> Self {
        // Executors end with a launcher that is asked to stop.
        let running = Running::start(command).terminated_when_dropped();
        let address = launcher::address(&running);
        let launcher = Self {
            endpoint: Endpoint::new(address, Secret::long()),
            running,
            records,
        };
        let listening = launcher.wait_for("listening", |_| true);
        assert_eq!(listening["dispatch_target"], "process");
        assert_eq!(listening["version"], env!("CARGO_PKG_VERSION"));
        launcher
    }

    /// The first line of the log with that message that fits.
    pub(crate) fn wait_for(&self, message: &str, fits: impl Fn(&Value) -> bool) -> Value {
        self.running.find_line(Stream::Stderr, message, |line| {
            Some(parsed(line)).filter(|line| line["message"] == message && fits(line))
        })
    }

    /// Waits until the platform has the outcome of a step and of its job.
    pub(crate) fn wait_for_end(&self, job: usize, step: &str) {
        let is_over = || {
            let record = self.records.job(&job.to_string()).ok()??;
            let status = record.step(step)?.status;
            let is_open = matches!(status, StepStatus::Pending | StepStatus::Running)
                || matches!(record.status, JobStatus::Queue | JobStatus::Running);
            (!is_open).then_some(())
        };
        until_blocking(&format!("step {step} of job {job} ends"), is_over);
    }

    /// How many lines so far have that message.
    pub(crate) fn count(&self, message: &str) -> usize {
        let log = self.log();
        let lines = log.lines().map(parsed);
        lines.filter(|line| line["message"] == message).count()
    }

    /// What the launcher has logged so far.
    pub(crate) fn log(&self) -> String {
        self.running.text(Stream::Stderr)
    }

    pub(crate) fn url(&self, path: &str) -> String {
        self.endpoint.url(path)
    }

    pub(crate) fn request(&self, document: &Value) -> reqwest::RequestBuilder {
        self.request_at(DISPATCH, document)
    }

    pub(crate) fn request_at(&self, path: &str, document: &Value) -> reqwest::RequestBuilder {
        self.endpoint.request(path, document.to_string())
    }

    pub(crate) async fn post(&self, document: &Value) {
        let answer = self.request(document).send().await.unwrap();
        assert_eq!(answer.status(), 202, "{:?}", answer.text().await);
        assert_eq!(answer.headers()["content-type"], "application/json");
        assert_eq!(answer.text().await.unwrap(), "{}");
    }

    pub(crate) async fn get(&self, path: &str) -> String {
        let request = self.endpoint.client.get(self.url(path));
        let answer = request.send().await.unwrap();
        answer.text().await.unwrap()
    }

    /// Waits until the end of a log on the status page has a text.
    pub(crate) async fn until_log(&self, text: &str) {
        let runs: Value = serde_json::from_str(&self.get("/pools/local/runs").await).unwrap();
        let run = runs["runs"][0]["run"].as_str().unwrap();
        let path = format!("/pools/local/runs/{run}/log");
        let has_text = async || {
            let log = self.get(&path).await;
            if log.contains(text) { Ok(()) } else { Err(log) }
        };
        until(text, has_text).await;
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.running.signal(signal);
    }

    /// Kills it as a crash would, with everything it is doing.
    pub(crate) fn crash(self) {
        self.running.kill();
    }

    pub(crate) fn end(self) -> ExitStatus {
        self.running.wait().status
    }
}

/// A line of the log. What is no JSON is a message.
fn parsed(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|_| json!({ "message": line }))
}
