//! Agents as processes, whose executors tell the bench that they run and wait for their end.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use integration_tests::process::{Running, Stream};
use job_contract::env;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::Pid;
use nix::unistd::mkfifo;
use pool_protocol::IDEMPOTENCY_KEY;
use pool_protocol::id::LeaseId;
use pool_protocol::path::LeaseCall;
use pool_protocol::version;
use serde_json::{Value, json};
use test_platform::launcher;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::sync::{Mutex, mpsc};

use super::hub::{Hub, PATIENCE};
use crate::server::RUNS;

/// An agent; killed when dropped.
pub(super) struct Agent(Running);

impl Agent {
    /// Starts an agent of target `process`. Without `starts` it gets no run.
    pub(super) fn start(
        program: &str,
        hub: &Hub,
        pool: &str,
        name: &str,
        slots: usize,
        url: &str,
        starts: Option<&Starts>,
    ) -> Result<Self> {
        let mut command = command(program, hub, pool, name, url);
        command
            .args(["--deploy-target", "process", "--slots", &slots.to_string()])
            .env(
                "MAYFLY_AGENT_WORKING_DIRECTORY",
                hub.folder().join(format!("agent-{name}")),
            );
        if let Some(starts) = starts {
            command.env("MAYFLY_EXECUTOR", starts.executor(name)?);
        }
        Ok(Self(Running::start(&mut command)))
    }

    /// Starts an agent of target `kubernetes`.
    pub(super) fn in_cluster(program: &str, hub: &Hub, kubeconfig: &str) -> Self {
        let mut command = command(program, hub, "eu", "cluster", &hub.url());
        command
            .args(["--deploy-target", "kubernetes", "--slots", "1000"])
            .env("KUBECONFIG", kubeconfig)
            .env(env::NAMESPACE, RUNS);
        Self(Running::start(&mut command))
    }

    /// Waits until it has registered. Returns when that was seen.
    pub(super) fn registered(&self) -> Instant {
        tokio::task::block_in_place(|| self.0.wait_for(Stream::Stderr, "\"registered\""));
        Instant::now()
    }

    /// Stops it.
    pub(super) fn stop(self) -> Result<()> {
        self.0.signal(Signal::SIGTERM);
        let ended = tokio::task::block_in_place(|| self.0.wait());
        ensure!(ended.status.success(), "an agent ended so: {ended}");
        Ok(())
    }
}

fn command(program: &str, hub: &Hub, pool: &str, name: &str, url: &str) -> Command {
    let mut command = launcher::command(program, hub.folder());
    launcher::agent(&mut command, name, url, hub.token(pool)).env("MAYFLY_AGENT_ON_STOP", "drain");
    command
}

/// Executors that start.
pub(super) struct Starts {
    folder: PathBuf,
    next: Mutex<mpsc::UnboundedReceiver<Started>>,
}

/// An executor that waits for its end.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) at: Instant,
    agent: String,
    /// URL and token of its lease.
    url: String,
    token: String,
    pid: Pid,
    client: reqwest::Client,
}

impl Starts {
    pub(super) fn new(folder: &Path) -> Result<Self> {
        let pipe = folder.join("starts");
        mkfifo(&pipe, Mode::S_IRWXU)?;
        // Open for both, so that it has no end.
        let pipe = tokio::net::unix::pipe::OpenOptions::new()
            .read_write(true)
            .open_receiver(pipe)?;
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(PATIENCE)
            .build()?;
        let (sender, next) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut lines = BufReader::new(pipe).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let at = Instant::now();
                let words: Vec<_> = line.split(' ').collect();
                let [agent, url, token, pid] = words[..] else {
                    return;
                };
                let started = Started {
                    at,
                    agent: agent.to_owned(),
                    url: url.to_owned(),
                    token: token.to_owned(),
                    pid: Pid::from_raw(pid.parse().unwrap()),
                    client: client.clone(),
                };
                if sender.send(started).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            folder: folder.to_owned(),
            next: Mutex::new(next),
        })
    }

    /// The executor of an agent: it says that it runs, and waits.
    fn executor(&self, agent: &str) -> Result<PathBuf> {
        let path = self.folder.join(format!("executor-{agent}"));
        let script = format!(
            "#!/bin/sh\ntrap 'kill $! 2>/dev/null; exit 0' TERM\n\
             chmod 400 /dev/fd/$MAYFLY_SECRETS_DESCRIPTOR\n\
             token=$(tr '\\0' '\\n' < /dev/fd/$MAYFLY_SECRETS_DESCRIPTOR | sed -n 's/^{}=//p')\n\
             echo \"{agent} ${} $token $$\" > '{}'\nsleep 3600 &\nwait\n",
            env::LEASE_TOKEN,
            env::LEASE_URL,
            self.folder.join("starts").display()
        );
        fs::write(&path, script)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// The next executor that starts.
    pub(super) async fn next(&self) -> Result<Started> {
        let mut next = self.next.lock().await;
        let next = tokio::time::timeout(PATIENCE, next.recv()).await;
        next.context("no executor started in time")?
            .context("the pipe has ended")
    }

    /// Seconds from each dispatch to the start of its executor, beside those to the answer. The agent is idle.
    pub(super) async fn one_by_one(
        &self,
        hub: &Hub,
        pool: &str,
        count: usize,
    ) -> Result<Vec<Value>> {
        let mut times = Vec::new();
        for number in 0..=count {
            let job = hub.job();
            let began = Instant::now();
            let answered = hub.post(pool, "one", &job).await?;
            let started = self.next().await?;
            let time = started.at - began;
            started.end().await?;
            // Once unmeasured, so that there is a connection.
            if number > 0 {
                times.push(
                    json!({"started": time.as_secs_f64(), "answered": answered.as_secs_f64()}),
                );
            }
        }
        Ok(times)
    }

    /// Seconds from the end of an executor to the start of the next one, in the only slot.
    pub(super) async fn in_turn(&self, hub: &Hub, pool: &str, count: usize) -> Result<Vec<f64>> {
        for _ in 0..=count {
            hub.post(pool, "one", &hub.job()).await?;
        }
        hub.until_available(pool, count).await?;
        let mut times = Vec::new();
        let mut running = self.next().await?;
        for _ in 0..count {
            running.end().await?;
            let ended = Instant::now();
            running = self.next().await?;
            times.push(running.at.saturating_duration_since(ended).as_secs_f64());
        }
        running.end().await?;
        Ok(times)
    }

    /// Posts many runs at once to several agents. Returns how long it takes until all slots are busy, and fails if a run
    /// is taken twice or an agent has more than its slots.
    pub(super) async fn burst(
        &self,
        program: &str,
        hub: &Hub,
        runs: usize,
        agents: usize,
        slots: usize,
    ) -> Result<Value> {
        let mut fleet = Vec::new();
        for number in 1..=agents {
            let name = format!("fleet-{number}");
            let agent = Agent::start(program, hub, "eu", &name, slots, &hub.url(), Some(self))?;
            agent.registered();
            fleet.push(agent);
        }
        let began = Instant::now();
        let jobs: Vec<_> = (0..runs).map(|_| hub.job()).collect();
        futures_util::future::try_join_all(jobs.iter().map(|job| hub.post("eu", "one", job)))
            .await?;
        let posted = began.elapsed();
        let mut busy: HashMap<String, usize> = HashMap::new();
        let mut leases = HashSet::new();
        let mut running = Vec::new();
        while running.len() < agents * slots {
            let started = self.next().await?;
            let of_agent = busy.entry(started.agent.clone()).or_default();
            *of_agent += 1;
            ensure!(*of_agent <= slots, "{} has {of_agent} runs", started.agent);
            ensure!(
                leases.insert(task_of(&started.url)),
                "a run was taken twice"
            );
            running.push(started);
        }
        let all_busy = running
            .last()
            .map_or(Duration::ZERO, |last| last.at - began);
        while let Some(done) = running.pop() {
            done.end().await?;
            if leases.len() < runs {
                let started = self.next().await?;
                ensure!(
                    leases.insert(task_of(&started.url)),
                    "a run was taken twice"
                );
                running.push(started);
            }
        }
        let drained = began.elapsed();
        for agent in fleet {
            agent.stop()?;
        }
        Ok(json!({
            "runs": runs, "agents": agents, "slots": slots,
            "posted": posted.as_secs_f64(),
            "all_busy": all_busy.as_secs_f64(),
            "drained": drained.as_secs_f64(),
        }))
    }
}

/// The task in the URL of a lease.
fn task_of(url: &str) -> String {
    let task = url.split("/tasks/").nth(1).unwrap_or_default();
    task.split('/').next().unwrap_or_default().to_owned()
}

impl Started {
    /// Does what an executor does that succeeds.
    pub(super) async fn end(self) -> Result<()> {
        let holder = json!({"holder": {"uid": self.pid.to_string(), "name": "bench"}});
        self.call(LeaseCall::Accept, holder).await?;
        let end = json!({"exitCode": 0, "reported": true});
        self.call(LeaseCall::Complete, end).await?;
        kill(self.pid, Signal::SIGTERM)?;
        Ok(())
    }

    async fn call(&self, call: LeaseCall, body: Value) -> Result<()> {
        let request = self
            .client
            .post(format!("{}/{}", self.url, call.name()))
            .bearer_auth(&self.token)
            .header(version::HEADER, version::VERSION)
            .header(IDEMPOTENCY_KEY, LeaseId::new().to_string())
            .json(&body);
        let status = request.send().await?.status();
        ensure!(status.is_success(), "{} was answered {status}", call.name());
        Ok(())
    }
}
