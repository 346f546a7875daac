//! Executors that reach their store through a hub, beside executors that have its keys.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use integration_tests::{Repository, job};
use job_contract::report::FinalReport;
use job_contract::{JobData, StepType, encoding, env};
use pool_protocol::id::TaskId;
use pool_protocol::path;
use pool_protocol::task::LeasedTask;
use pool_protocol::token::PoolToken;
use pool_protocol::{IDEMPOTENCY_KEY, version};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use test_peers::s3::{self, S3};
use test_platform::launcher::{self, DISPATCH, Launcher};

/// What the tool evaluates. It takes about half a second, as the pipeline's module.
const USUAL: &str = r#"
locals {
  work = length([for a in range(60) : length([for b in range(1000) : sha256("${a} ${b}")])])
}
resource "terraform_data" "item" {
  count = 20
  input = "${local.work} ${count.index}"
}
"#;
/// Its state has 20 MB: what goes in comes out again.
const LARGE: &str = r#"
resource "terraform_data" "large" {
  input = join("", [for a in range(160) : join("", [for b in range(1000) : sha256("${a} ${b}")])])
}
"#;

/// A hub without a platform, the store behind it, and an agent that is this program.
struct Bench {
    executor: PathBuf,
    store: S3,
    hub: Launcher,
    client: reqwest::Client,
    token: PoolToken,
    instance: Value,
    folder: tempfile::TempDir,
    next: u32,
}

/// Measures plan and apply of both modules.
pub(crate) async fn measure(program: &str, executor: &str, count: usize) -> Result<Value> {
    let mut bench = Bench::start(program, executor).await?;
    let mut taken = json!({});
    for (name, module) in [("usual", USUAL), ("large", LARGE)] {
        let repository = Repository::module(module);
        let mut pairs = Vec::new();
        for number in 0..=count {
            let direct = bench.direct(&repository)?;
            let relayed = bench.relayed(&repository).await?;
            // Once unmeasured each, so that both find warm caches.
            if number > 0 {
                pairs.push(json!([relayed.as_secs_f64(), direct.as_secs_f64()]));
            }
        }
        taken[name] = pairs.into();
    }
    Ok(taken)
}

impl Bench {
    async fn start(program: &str, executor: &str) -> Result<Self> {
        let (folder, store) = (tempfile::tempdir()?, S3::start()?);
        let token = PoolToken::new("eu".parse()?);
        let known = json!([{"id": "t", "sha256": token.digest()}]);
        let pools = json!({"pools": {"eu": {"organizations": ["*"], "tokens": known}}});
        fs::write(folder.path().join("pools.yaml"), pools.to_string())?;
        let mut command = launcher::hub(program, folder.path());
        command
            .env(env::INTERNAL_SECRET, test_platform::Secret::long().text())
            .env(env::RECORDS, "shared")
            .envs(settings(&store));
        let client = reqwest::Client::builder().no_proxy().build()?;
        let mut bench = Self {
            executor: executor.into(),
            hub: Launcher::start(&mut command),
            store,
            client,
            token,
            instance: Value::Null,
            folder,
            next: 0,
        };
        let registration = json!({
            "systemId": "bench", "name": "bench", "executorVersion": "1", "protocolMinVersion": 1,
            "protocolMaxVersion": 1, "platform": "linux", "architecture": "amd64", "capacity": 10,
            "installation": "bench",
        });
        let registered: Value = bench.call(path::REGISTER, &registration).await?;
        bench.instance = registered["instanceId"].clone();
        Ok(bench)
    }

    async fn call<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let request = self
            .client
            .post(self.hub.endpoint.url(path))
            .header(version::HEADER, version::VERSION)
            .header(IDEMPOTENCY_KEY, TaskId::new().to_string())
            .bearer_auth(self.token.reveal())
            .json(body);
        let answer = request.send().await?;
        let (status, text) = (answer.status(), answer.text().await?);
        ensure!(status.is_success(), "{path} was answered {status}: {text}");
        serde_json::from_str(&text).with_context(|| format!("{path} was answered {text}"))
    }

    /// Plan and apply of a workspace that no run has had.
    fn steps(&mut self, repository: &Repository) -> [JobData; 2] {
        self.next += 1;
        let new = |step| JobData {
            workspace_id: format!("bench-{}", self.next),
            job_id: self.next.to_string(),
            ..job::step(step, repository)
        };
        [new(StepType::Plan), new(StepType::Apply)]
    }

    /// With the keys of the store. Its records are on this machine.
    fn direct(&mut self, repository: &Repository) -> Result<Duration> {
        let steps = self.steps(repository);
        let data = self.folder.path().join(format!("data-{}", self.next));
        let jobs = data.join("platform/jobs");
        fs::create_dir_all(&jobs)?;
        let of = |step: &JobData| json!({"id": step.step_id, "type": step.step_type, "status": "pending"});
        let record = json!({
            "organizationId": steps[0].organization_id, "workspaceId": steps[0].workspace_id,
            "status": "queue", "steps": steps.each_ref().map(of),
        });
        fs::write(jobs.join(format!("{}.json", self.next)), record.to_string())?;
        let mut time = Duration::ZERO;
        for step in &steps {
            let mut command = self.command(&encoding::encode(step))?;
            command
                .env(env::DATA_DIR, &data)
                .envs(settings(&self.store));
            time += self.run(&mut command)?;
        }
        Ok(time)
    }

    /// With the token of a lease.
    async fn relayed(&mut self, repository: &Repository) -> Result<Duration> {
        let mut time = Duration::ZERO;
        for step in self.steps(repository) {
            let path = format!("/pools/eu{DISPATCH}");
            let dispatch = self
                .hub
                .endpoint
                .request(&path, serde_json::to_string(&step)?);
            let status = dispatch.send().await?.status();
            ensure!(status.as_u16() == 202, "a dispatch was answered {status}");
            let request =
                json!({"instanceId": self.instance, "availableCapacity": 1, "waitSeconds": 20});
            let leased: LeasedTask = self.call(path::REQUEST_TASK, &request).await?;
            let relay = path::relay(leased.task_id, leased.lease_id);
            let url = relay.trim_end_matches("/platform");
            let mut command = self.command(&encoding::encode(&step))?;
            command
                .env(env::LEASE_URL, self.hub.endpoint.url(url))
                .env(env::LEASE_TOKEN, &leased.job_token)
                .env(env::PUBLIC_API_URL, "https://platform.example.test");
            time += self.run(&mut command)?;
        }
        Ok(time)
    }

    fn command(&self, job: &str) -> Result<Command> {
        let mut command = Command::new(&self.executor);
        let home = self.folder.path().join("home");
        fs::create_dir_all(&home)?;
        command
            .env_clear()
            .env(
                "PATH",
                std::env::var_os("PATH")
                    .as_deref()
                    .unwrap_or(OsStr::new("")),
            )
            .env("HOME", home)
            .env(env::BATCH, "true")
            .env(env::JOB_DATA, job)
            .env(env::WORK_DIR, self.folder.path().join("work"))
            .env(env::OUTCOME_EXIT_CODE, "true")
            .env(env::TOOL_SELECTION, "installed")
            .env(env::TERMINATION_LOG, self.folder.path().join("termination"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Ok(command)
    }

    fn run(&self, command: &mut Command) -> Result<Duration> {
        let began = Instant::now();
        let status = command.status()?;
        let time = began.elapsed();
        let path = self.folder.path().join("termination");
        let said = fs::read_to_string(&path).context("the executor wrote no final report")?;
        fs::remove_file(path)?;
        let report: FinalReport =
            serde_json::from_str(&said).with_context(|| format!("no final report: {said}"))?;
        ensure!(
            status.success() && report.outcome == 0,
            "the executor ended with {status}: {said}"
        );
        Ok(time)
    }
}

fn settings(store: &S3) -> [(&'static str, String); 6] {
    [
        (env::STATE_TYPE, "AwsTerraformStateImpl".to_owned()),
        (env::AWS_BUCKET, s3::BUCKET.to_owned()),
        (env::AWS_REGION, s3::REGION.to_owned()),
        (env::AWS_ENDPOINT, store.url()),
        (env::AWS_ACCESS_KEY, store.access_key().to_owned()),
        (env::AWS_SECRET_KEY, store.secret_key().to_owned()),
    ]
}
