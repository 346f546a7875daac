//! A hub with agents, whose executors are processes of this machine. Proxies before and behind the hub disturb responses. A fault
//! puts a second hub beside it. Both serve until they are killed.

pub(crate) mod faults;
pub(crate) mod front;
mod orphans;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use job_contract::env;
use pool_protocol::token::PoolToken;
use pool_store::{DocumentKeys, EventView, Page, Rules, Store, TaskFilter, TaskView};
use serde_json::Value;
use test_peers::postgres::PostgresServer;
use test_peers::proxy::Proxy;
use test_platform::launcher;
use tokio::sync::Mutex;

use self::front::StoreFront;
use crate::check::RemovedLock;
use crate::facts::lines_with;
use crate::files::write_script;
use crate::peers::holds;
use crate::process::{Process, listening};
use crate::wire::{Hit, Wire, lock_id};

/// The pool of the runs.
const POOL: &str = "eu";
/// Agents of the pool.
const AGENTS: usize = 3;
/// The pool of the runs whose agent is cut off, so that no other run is.
const APART: &str = "apart";
/// The number of its agent.
const APART_AGENT: usize = AGENTS;
/// Runs of an agent at once.
const SLOTS: &str = "8";
/// What executors and agents seal reports with.
const REPORT_KEY: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
/// What hubs sign with, all of them.
const TOKEN_KEY: &str = "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=";
/// How long the hub waits for an agent and its executor. An executor that does not reach the hub stops after half of it, and no
/// other fault keeps it from the hub for so long.
const LOST_AFTER: Duration = Duration::from_mins(2);
/// What the hub writes into a lock before the task that has it.
const LOCKED_BY: &str = "mayfly task ";
/// The states of a task that is over.
const ENDS: [&str; 3] = ["completed", "failed", "cancelled"];
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
    /// The token of the agent in the pool apart.
    token_apart: PoolToken,
    /// Between that agent, with its executors, and the proxy before the hub.
    network_apart: Proxy,
    /// Between platform, agents and executors, and the hub.
    before_hub: Wire,
    /// Between the hub and the platform.
    behind_hub: Wire,
    /// Between the hub and the artifact store.
    front: StoreFront,
    programs: Mutex<Programs>,
    /// What the store of the hub holds at the end.
    records: OnceLock<Vec<Record>>,
    store_url: String,
    _postgres: Arc<PostgresServer>,
}

#[derive(Debug, Default)]
struct Programs {
    hubs: Vec<(Process, SocketAddr)>,
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
        front: StoreFront,
    ) -> Result<Self> {
        let platform = settings.get(env::API_URL).context("no platform")?;
        let platform: SocketAddr = platform.trim_start_matches("http://").parse()?;
        let behind_hub = Wire::start(seed.wrapping_mul(2), &[platform])?;
        settings.insert(env::API_URL.to_owned(), behind_hub.url());
        let before_hub = Wire::start(seed.wrapping_mul(2) + 1, &[])?;
        let (token, token_apart) = (
            PoolToken::new(POOL.parse()?),
            PoolToken::new(APART.parse()?),
        );
        let pool = |name: &str, token: &PoolToken| {
            format!(
                "  {name}:\n    organizations: [{organization}]\n    tokens:\n      \
                 - {{id: one, sha256: {}}}\n",
                token.digest()
            )
        };
        let pools = [pool(POOL, &token), pool(APART, &token_apart)].concat();
        fs::write(folder.join("pools.yaml"), format!("pools:\n{pools}"))?;
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
        let postgres = PostgresServer::shared()?;
        let side = Self {
            folder: folder.to_owned(),
            settings,
            token,
            token_apart,
            network_apart: Proxy::start(&[before_hub.address()])?,
            before_hub,
            behind_hub,
            front,
            programs: Mutex::default(),
            records: OnceLock::new(),
            store_url: postgres.database()?,
            _postgres: postgres,
        };
        side.start_missing().await?;
        Ok(side)
    }

    /// The URL to which the platform dispatches.
    pub(crate) fn dispatch_url(&self) -> String {
        let hub = self.before_hub.url();
        format!("{hub}/pools/{POOL}/api/v1/terraform-rs")
    }

    /// The URL of the pool whose agent can be cut off alone.
    pub(crate) fn apart_url(&self) -> String {
        format!("{}/pools/{APART}", self.before_hub.url())
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
        if programs.hubs.is_empty() {
            let hub = self.start_hub(&mut programs).await?;
            self.before_hub.pass_on_to(&[hub]);
        }
        for number in 0..=APART_AGENT {
            if !programs.agents.contains_key(&number) {
                programs.agents_started += 1;
                let name = format!("agent-{number}-{}.log", programs.agents_started);
                let agent = Process::start(&mut self.agent(number), &self.folder.join(name))?;
                programs.agents.insert(number, agent);
            }
        }
        Ok(())
    }

    /// Starts a hub beside those that run. Returns its address.
    async fn start_hub(&self, programs: &mut Programs) -> Result<SocketAddr> {
        programs.hubs_started += 1;
        let log = self
            .folder
            .join(format!("hub-{}.log", programs.hubs_started));
        let process = Process::start(&mut self.hub(), &log)?;
        let address = listening(&log).await?;
        programs.hubs.push((process, address));
        Ok(address)
    }

    /// Kills the hub as a crash does, and the one beside it.
    pub(crate) async fn kill_hub(&self) {
        let hubs = std::mem::take(&mut self.programs.lock().await.hubs);
        drop(hubs);
        self.before_hub.pass_on_to(&[]);
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
            .env(env::POOL_STORE, &self.store_url)
            .env(env::POOL_LOST_SECONDS, LOST_AFTER.as_secs().to_string())
            .env(env::JOB_TOKEN_KEYS, TOKEN_KEY)
            .envs(&self.settings);
        command
    }

    fn agent(&self, number: usize) -> Command {
        let shared = self.settings.iter();
        let shared = shared.filter(|(name, _)| !OF_THE_HUB.contains(&name.as_str()));
        let (pool, token, hub) = if number == APART_AGENT {
            (APART, &self.token_apart, self.network_apart.url())
        } else {
            (POOL, &self.token, self.before_hub.url())
        };
        let name = format!("{pool}-{number}");
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = launcher::command(self.program(), &self.folder.join("home"));
        launcher::agent(&mut command, &name, &hub, token.reveal())
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
        for agent in 0..=APART_AGENT {
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
        let (_, address) = programs.hubs.first().context("no hub runs")?;
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
        let store = Store::open(&self.store_url, Rules::default(), keys).await?;
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

    /// The locks of a workspace that the hub has removed, and whether it had a reason.
    pub(crate) fn removed_locks(&self, workspace: &str) -> Vec<RemovedLock> {
        let removals = self.front.removals(workspace).into_iter();
        let removed = removals.map(|removal| {
            let task = holder(&removal.info).unwrap_or_default();
            let id = lock_id(removal.info.as_bytes()).unwrap_or_default();
            RemovedLock {
                is_asked_for: self.before_hub.has_unlocked(&task, &id, removal.at),
                is_over: self.was_over(&task, removal.at),
                info: removal.info,
            }
        });
        removed.collect()
    }

    /// Whether a task was over at this time.
    fn was_over(&self, task: &str, at: SystemTime) -> bool {
        let records = self.records.get().into_iter().flatten();
        let mut events = records
            .filter(|record| record.task.task.to_string() == task)
            .flat_map(|record| &record.events);
        events.any(|event| event.at <= at && ENDS.contains(&event.to))
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

/// The task that has a lock, as its hub has written it.
fn holder(info: &str) -> Option<String> {
    let info: Value = serde_json::from_str(info).ok()?;
    let task = info["Info"].as_str()?.strip_prefix(LOCKED_BY)?;
    Some(task.to_owned())
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
