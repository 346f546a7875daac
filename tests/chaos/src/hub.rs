//! A hub with agents, whose executors are processes of this machine. Proxies before and behind the hub disturb responses.

pub(crate) mod faults;
mod orphans;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use job_contract::env;
use pool_protocol::token::PoolToken;
use pool_store::{DocumentKeys, EventView, Page, Rules, Store, TaskFilter, TaskView};
use serde_json::Value;
use test_platform::launcher;
use tokio::sync::Mutex;

use crate::facts::lines_with;
use crate::files::write_script;
use crate::peers::holds;
use crate::process::{Process, listening};
use crate::wire::{Hit, Wire};

/// The only pool.
const POOL: &str = "eu";
/// Agents of the pool.
const AGENTS: usize = 3;
/// Runs of an agent at once.
const SLOTS: &str = "8";
/// What executors and agents seal reports with.
const REPORT_KEY: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
/// Settings that only the hub has: the way to the platform.
const OF_THE_HUB: [&str; 5] = [
    env::API_URL,
    env::INTERNAL_SECRET,
    env::ENABLE_SECURITY,
    env::REDIS_HOSTNAME,
    env::REDIS_PORT,
];

/// The hub and its agents.
#[derive(Debug)]
pub(crate) struct HubSide {
    folder: PathBuf,
    settings: BTreeMap<String, String>,
    /// The token of the agents.
    token: PoolToken,
    /// Between platform, agents and executors, and the hub.
    before_hub: Wire,
    /// Between the hub and the platform.
    behind_hub: Wire,
    programs: Mutex<Programs>,
    /// What the store of the hub holds at the end.
    records: OnceLock<Vec<Record>>,
}

#[derive(Debug, Default)]
struct Programs {
    hub: Option<(Process, SocketAddr)>,
    agents: BTreeMap<usize, Process>,
    hubs_started: u32,
    agents_started: u32,
}

/// A task and its history.
#[derive(Debug)]
struct Record {
    task: TaskView,
    events: Vec<EventView>,
}

impl HubSide {
    /// Starts the hub and its agents. The seed decides which responses are disturbed.
    pub(crate) async fn start(
        folder: &Path,
        seed: u64,
        organization: &str,
        mut settings: BTreeMap<String, String>,
    ) -> Result<Self> {
        let platform = settings.get(env::API_URL).context("no platform")?;
        let platform: SocketAddr = platform.trim_start_matches("http://").parse()?;
        let behind_hub = Wire::start(seed.wrapping_mul(2), Some(platform))?;
        settings.insert(env::API_URL.to_owned(), behind_hub.url());
        let token = PoolToken::new(POOL.parse()?);
        fs::write(
            folder.join("pools.yaml"),
            format!(
                "pools:\n  {POOL}:\n    organizations: [{organization}]\n    tokens:\n      \
                 - {{id: one, sha256: {}}}\n",
                token.digest()
            ),
        )?;
        fs::create_dir(folder.join("containers"))?;
        // The folder of a run is removed with its log, so that the log gets a second name.
        write_script(
            &folder.join("process"),
            &format!(
                "run=${{{0}%/work}}\nln \"$run/log\" '{1}/containers/'\"${{run##*/}}\"\n\
                 exec '{1}/programs/executor'\n",
                env::WORK_DIR,
                folder.display(),
            ),
        )?;
        let side = Self {
            folder: folder.to_owned(),
            settings,
            token,
            before_hub: Wire::start(seed.wrapping_mul(2) + 1, None)?,
            behind_hub,
            programs: Mutex::default(),
            records: OnceLock::new(),
        };
        side.start_missing().await?;
        Ok(side)
    }

    /// The URL to which the platform dispatches.
    pub(crate) fn dispatch_url(&self) -> String {
        let hub = self.before_hub.url();
        format!("{hub}/pools/{POOL}/api/v1/terraform-rs")
    }

    /// How many programs of each kind were started so far.
    pub(crate) async fn started(&self) -> BTreeMap<&'static str, u32> {
        let programs = self.programs.lock().await;
        [
            ("hubs", programs.hubs_started),
            ("agents", programs.agents_started),
        ]
        .into()
    }

    /// How many responses there were, and how many were disturbed in which way.
    pub(crate) fn responses(&self) -> BTreeMap<&'static str, u64> {
        let all = self.before_hub.responses() + self.behind_hub.responses();
        let mut counts = BTreeMap::from([("all", all)]);
        for hit in self.hits() {
            *counts.entry(hit.harm.name()).or_default() += 1;
        }
        counts
    }

    fn hits(&self) -> Vec<Hit> {
        let mut hits = self.before_hub.hits();
        hits.extend(self.behind_hub.hits());
        hits
    }

    /// Starts the programs that do not run.
    pub(crate) async fn start_missing(&self) -> Result<()> {
        let mut programs = self.programs.lock().await;
        if programs.hub.is_none() {
            programs.hubs_started += 1;
            let log = self
                .folder
                .join(format!("hub-{}.log", programs.hubs_started));
            let process = Process::start(&mut self.hub(), &log)?;
            let address = listening(&log).await?;
            programs.hub = Some((process, address));
            self.before_hub.pass_on_to(Some(address));
        }
        for number in 0..AGENTS {
            if !programs.agents.contains_key(&number) {
                programs.agents_started += 1;
                let name = format!("agent-{number}-{}.log", programs.agents_started);
                let agent = Process::start(&mut self.agent(number), &self.folder.join(name))?;
                programs.agents.insert(number, agent);
            }
        }
        Ok(())
    }

    /// Kills the hub as a crash does.
    pub(crate) async fn kill_hub(&self) {
        let hub = self.programs.lock().await.hub.take();
        drop(hub);
        self.before_hub.pass_on_to(None);
    }

    /// Kills an agent as a crash does.
    async fn kill_agent(&self, number: usize) {
        self.programs.lock().await.agents.remove(&number);
    }

    async fn kill_agents(&self) {
        self.programs.lock().await.agents.clear();
    }

    fn program(&self) -> PathBuf {
        self.folder.join("programs/launcher")
    }

    fn hub(&self) -> Command {
        let mut command = launcher::hub(self.program(), &self.folder);
        command
            .env(env::POOL_STORE, self.store_url())
            .envs(&self.settings);
        command
    }

    fn agent(&self, number: usize) -> Command {
        let shared = self.settings.iter();
        let shared = shared.filter(|(name, _)| !OF_THE_HUB.contains(&name.as_str()));
        let (name, hub) = (format!("{POOL}-{number}"), self.before_hub.url());
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = launcher::command(self.program(), &self.folder.join("home"));
        launcher::agent(&mut command, &name, &hub, self.token.reveal())
            .args(["--deploy-target", "process"])
            .env("PATH", format!("{}/bin:{path}", self.folder.display()))
            .env("MAYFLY_AGENT_SLOTS", SLOTS)
            .env("MAYFLY_AGENT_WORKING_DIRECTORY", self.data_of(number))
            .env(env::EXECUTOR, self.folder.join("process"))
            .env(env::REPORT_KEY, REPORT_KEY)
            .env(env::STATUS_POLL_SECONDS, "1")
            .envs(shared);
        command
    }

    fn data_of(&self, agent: usize) -> PathBuf {
        self.folder.join(format!("agent-{agent}"))
    }

    fn store_url(&self) -> String {
        format!("sqlite:{}/pools.db", self.folder.display())
    }

    /// What executors printed.
    pub(crate) fn logs(&self) -> Result<Vec<String>> {
        let mut logs = Vec::new();
        for log in fs::read_dir(self.folder.join("containers"))? {
            logs.push(String::from_utf8_lossy(&fs::read(log?.path())?).into_owned());
        }
        Ok(logs)
    }

    /// Waits until nothing of the runs is left, stops all programs, and returns what is left.
    pub(crate) async fn until_empty(&self, limit: Duration) -> Result<Vec<String>> {
        let nothing = || async {
            let left = self.left().await?;
            ensure!(left.is_empty(), "{left:?}");
            Ok(())
        };
        holds(limit, "nothing is left", nothing).await;
        let left = self.left().await?;
        self.kill_agents().await;
        self.kill_hub().await;
        self.read_store().await?;
        Ok(left.into_iter().chain(self.unfinished()).collect())
    }

    async fn left(&self) -> Result<Vec<String>> {
        let mut left = self.remaining()?;
        left.extend(self.open_tasks().await?);
        Ok(left)
    }

    /// Processes and folders of runs.
    fn remaining(&self) -> Result<Vec<String>> {
        let mut left: Vec<String> = orphans::processes(&self.folder)?
            .into_iter()
            .map(|process| format!("process {process}"))
            .collect();
        for agent in 0..AGENTS {
            for run in self.runs_of(agent)? {
                left.push(format!("folder {}", run.display()));
            }
        }
        Ok(left)
    }

    /// The folders of an agent's runs.
    fn runs_of(&self, agent: usize) -> Result<Vec<PathBuf>> {
        let folder = self.data_of(agent).join("launcher/agent/runs");
        match fs::read_dir(folder) {
            // It has had none.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            runs => runs?.map(|run| Ok(run?.path())).collect(),
        }
    }

    /// The gauges of tasks that are not over, or that the platform does not know to be over.
    async fn open_tasks(&self) -> Result<Vec<String>> {
        let programs = self.programs.lock().await;
        let (_, address) = programs.hub.as_ref().context("no hub runs")?;
        let metrics = reqwest::get(format!("http://{address}/metrics")).await?;
        let metrics = metrics.error_for_status()?.text().await?;
        let tasks = metrics.lines();
        let mut tasks = tasks
            .filter(|line| line.starts_with("mayfly_pool_tasks{"))
            .peekable();
        ensure!(tasks.peek().is_some(), "the hub counts no tasks: {metrics}");
        let open = tasks.filter(|line| !line.ends_with(" 0"));
        Ok(open.map(str::to_owned).collect())
    }

    /// Reads all tasks. The hub does not run any more.
    async fn read_store(&self) -> Result<()> {
        // No document is read.
        let keys = Arc::new(DocumentKeys::new([]));
        let store = Store::open(&self.store_url(), Rules::default(), keys).await?;
        let (mut records, mut page) = (Vec::new(), Page::first());
        loop {
            let tasks = store.tasks(None, TaskFilter::All, page).await?;
            let Some(last) = tasks.last() else { break };
            page.after = Some(last.task);
            for task in tasks {
                let events = store.events(task.task).await?;
                records.push(Record { task, events });
            }
        }
        store.close().await;
        // The programs are stopped once.
        let _ = self.records.set(records);
        Ok(())
    }

    /// Tasks that are not over, or that were not reported.
    fn unfinished(&self) -> Vec<String> {
        let records = self.records.get().into_iter().flatten();
        let unfinished = records.filter(|record| {
            let end = record.task.end.as_ref();
            !record.task.state.is_terminal() || end.is_none_or(|end| !end.reported)
        });
        let name = |record: &Record| {
            let task = &record.task;
            let reported = task.end.as_ref().is_some_and(|end| end.reported);
            let (state, job) = (task.state, &task.job);
            format!(
                "task {} of job {job}: {state:?}, reported: {reported}",
                task.task
            )
        };
        unfinished.map(name).collect()
    }

    /// The evidence of a job: the history of its tasks, the disturbed responses, and log lines of hubs and agents.
    pub(crate) fn evidence(&self, job: u32) -> Result<String> {
        let mut text = String::new();
        let job = job.to_string();
        let mut names = vec![job.clone()];
        let mut words = vec![format!("\"job_id\":\"{job}\""), format!("\"run\":\"{job}/")];
        // Writing to a string does not fail.
        let records = self.records.get().into_iter().flatten();
        for record in records.filter(|record| record.task.job == job) {
            let task = &record.task;
            names.push(task.task.to_string());
            words.push(task.task.to_string());
            let _ = writeln!(text, "--- task {} of job {job}, {}", task.task, task.kind);
            for event in &record.events {
                let at = humantime::format_rfc3339_millis(event.at);
                let (from, to) = (event.from.unwrap_or("-"), event.to);
                let _ = writeln!(text, "{at} {from} -> {to}: {}: {}", event.actor, event.note);
            }
            let _ = writeln!(text, "{:?}", task.end);
        }
        let _ = writeln!(text, "--- disturbed responses of job {job}");
        for hit in self.hits().iter().filter(|hit| hit.is_about(&names)) {
            let _ = writeln!(text, "{hit}");
        }
        let lines = lines_with(&self.folder, &words)?;
        let _ = writeln!(
            text,
            "--- hubs and agents on job {job}\n{}",
            lines.trim_end()
        );
        Ok(text)
    }
}

/// A file in a run's folder. `None` if it does not exist yet, or not any more.
fn file_of(run: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    match fs::read(run.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        content => Ok(Some(content?)),
    }
}

/// The step of the lease in a run's folder, as job and step.
fn step_of(run: &Path) -> Result<Option<String>> {
    let Some(lease) = file_of(run, "lease.json")? else {
        return Ok(None);
    };
    let lease: Value = serde_json::from_slice(&lease)?;
    let step = lease["run"].as_str().context("a lease without a run")?;
    Ok(Some(step.to_owned()))
}
