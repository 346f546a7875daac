//! A data directory, a git repository, and launchers over them.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::mpsc;
use std::thread;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use job_contract::JobData;
use job_contract::status::StepStatus;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use platform::local::{JobRecord, LocalPlatform};
use platform::{Claim, Holder};
use platform::{Platform, StepRef};
use serde_json::{Value, json};
use test_peers::process::{DEADLINE, Running, Stream};

const SECRET: [u8; 64] = [0xfb; 64];
const MODULE: &str = r#"
resource "terraform_data" "greeting" {
  input = "hello"
}
output "greeting" {
  value = terraform_data.greeting.output
}
"#;

/// A place for launchers, one after the other.
pub(crate) struct Fixture {
    temp: tempfile::TempDir,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        // Some tests have no other client than the one this serves.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let temp = tempfile::tempdir().unwrap();
        let fixture = Self { temp };
        for folder in ["data", "repository"] {
            fs::create_dir(fixture.path(folder)).unwrap();
        }
        fs::write(fixture.path("repository/main.tf"), MODULE).unwrap();
        for words in [
            "init --quiet --initial-branch=main",
            "add --all",
            "-c user.name=F -c user.email=f@example.test commit --quiet -m fixture",
        ] {
            let status = Command::new("git")
                .args(words.split_whitespace())
                .current_dir(fixture.path("repository"))
                .env("GIT_CONFIG_GLOBAL", "/dev/null")
                .env("GIT_CONFIG_NOSYSTEM", "1")
                .status();
            assert!(status.unwrap().success(), "git {words}");
        }
        fixture
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.path("data")
    }

    /// A launcher that listens on a free port.
    pub(crate) fn serve(&self, settings: &[(&str, &str)]) -> Launcher {
        let mut command = Command::new(env!("CARGO_BIN_EXE_api-launcher"));
        self.configure(&mut command);
        command.envs(settings.iter().copied());
        Launcher::start(&mut command)
    }

    /// Arguments and environment of a launcher on this data directory.
    pub(crate) fn configure(&self, command: &mut Command) {
        command
            .args(["serve", "--target", "process"])
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("HOME", self.temp.path())
            .env("InternalSecret", secret())
            .env("MAYFLY_LISTEN", "127.0.0.1:0")
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
            "source": format!("file://{}", self.path("repository").display()),
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

    /// A pipe that a script waits on until the test lets it go.
    pub(crate) fn barrier(&self, name: &str) -> Barrier {
        let path = self.path(name);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        Barrier { path }
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

    /// Takes the step, as its executor does.
    pub(crate) async fn claim(&self, document: &Value) {
        let holder = Holder {
            pod: "executor".to_owned(),
            uid: "1".to_owned(),
            since: "now".to_owned(),
        };
        let platform = Platform::Local(self.platform());
        let claim = platform.claim(&step_ref(document), &holder).await;
        assert_eq!(claim.unwrap(), Claim::Granted);
    }

    pub(crate) fn claims(&self) -> usize {
        let names = fs::read_dir(self.data().join("platform/claims")).unwrap();
        names.count()
    }

    /// The process of a running executor.
    pub(crate) fn executor(&self, job: usize) -> Pid {
        let path = format!("launcher/queue/runs/{job}_step/pid");
        let text = fs::read_to_string(self.data().join(path)).unwrap();
        Pid::from_raw(text.trim().parse().unwrap())
    }

    /// Waits until the executor of a job has printed something: its output is a file, which announces nothing.
    pub(crate) fn wait_for_log(&self, job: usize, text: &str) {
        let path = self
            .data()
            .join(format!("launcher/queue/runs/{job}_step/log"));
        let deadline = Instant::now() + DEADLINE;
        while !fs::read_to_string(&path).is_ok_and(|log| log.contains(text)) {
            assert!(
                Instant::now() < deadline,
                "`{text}` never appeared in {}",
                path.display()
            );
            std::thread::yield_now();
        }
    }

    /// What is left of accepted runs: documents and folders.
    pub(crate) fn leftovers(&self) -> Vec<PathBuf> {
        ["entries", "runs"]
            .iter()
            .flat_map(|folder| {
                fs::read_dir(self.data().join("launcher/queue").join(folder)).unwrap()
            })
            .map(|entry| entry.unwrap().path())
            .collect()
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

pub(crate) struct Barrier {
    path: PathBuf,
}

impl Barrier {
    /// Words of a script that says it has come here, and waits.
    pub(crate) fn wait(&self) -> String {
        let path = self.path.display();
        format!("echo here > {path}; read -r _ < {path}")
    }

    /// Returns when the script is there.
    pub(crate) fn reached(&self) {
        let (send, reached) = mpsc::channel();
        let path = self.path.clone();
        thread::spawn(move || send.send(fs::read_to_string(path)));
        let text = reached.recv_timeout(DEADLINE).expect("no script came");
        assert_eq!(text.unwrap(), "here\n");
    }

    pub(crate) fn open(&self) {
        fs::write(&self.path, "go\n").unwrap();
    }
}

pub(crate) fn secret() -> String {
    base64::engine::general_purpose::STANDARD.encode(SECRET)
}

/// A token as the platform makes it for a secret of that length.
pub(crate) fn token() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let claims = json!({
        "iss": "TERRAKUBE_INTERNAL",
        "aud": ["TERRAKUBE_INTERNAL"],
        "iat": now.as_secs(),
        "exp": now.as_secs() + 10,
    });
    let key = EncodingKey::from_secret(&SECRET);
    jsonwebtoken::encode(&Header::new(Algorithm::HS512), &claims, &key).unwrap()
}

/// A launcher that serves.
pub(crate) struct Launcher {
    running: Running,
    address: String,
    client: reqwest::Client,
}

impl Launcher {
    pub(crate) fn start(command: &mut Command) -> Self {
        // Executors end with a launcher that is asked to stop.
        let mut launcher = Self {
            running: Running::start(command).terminated_when_dropped(),
            address: String::new(),
            client: reqwest::Client::builder().no_proxy().build().unwrap(),
        };
        let listening = launcher.wait_for("listening", |_| true);
        assert_eq!(listening["dispatch_target"], "process");
        assert_eq!(listening["version"], env!("CARGO_PKG_VERSION"));
        launcher
            .address
            .push_str(listening["address"].as_str().unwrap());
        launcher
    }

    /// The first line of the log with that message that fits.
    pub(crate) fn wait_for(&self, message: &str, fits: impl Fn(&Value) -> bool) -> Value {
        self.running.find_line(Stream::Stderr, message, |line| {
            Some(parsed(line)).filter(|line| line["message"] == message && fits(line))
        })
    }

    pub(crate) fn wait_for_end(&self, job: usize, step: &str) {
        let run = format!("{job}_{step}");
        self.wait_for("a run has ended", |line| line["run"] == run.as_str());
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
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn request(&self, document: &Value) -> reqwest::RequestBuilder {
        self.client
            .post(self.url("/api/v1/terraform-rs"))
            .bearer_auth(token())
            .header("content-type", "application/json")
            .body(document.to_string())
    }

    pub(crate) async fn post(&self, document: &Value) {
        let answer = self.request(document).send().await.unwrap();
        assert_eq!(answer.status(), 202, "{:?}", answer.text().await);
        assert_eq!(answer.headers()["content-type"], "application/json");
        assert_eq!(answer.text().await.unwrap(), "{}");
    }

    pub(crate) async fn get(&self, path: &str) -> String {
        let answer = self.client.get(self.url(path)).send().await.unwrap();
        answer.text().await.unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.running.signal(signal);
    }

    /// Kills it as a crash would, with everything it is doing.
    pub(crate) fn crash(self) {
        self.signal(Signal::SIGKILL);
        self.running.wait();
    }

    pub(crate) fn end(self) -> ExitStatus {
        self.running.wait().status
    }
}

/// A line of the log. What is no JSON is a message.
fn parsed(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|_| json!({ "message": line }))
}
