//! A hub and an agent for one run: child processes on this machine, which run its steps as those of a pool. They end with this
//! process.

mod companion;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use job_contract::report::FinalReport;
use job_contract::status::JobStatus;
use job_contract::{Document, Exit, env};
use nix::sys::signal::Signal;
use platform::StepRef;
use platform::local::LocalPlatform;
use pool_protocol::id::{PoolName, TaskId};
use pool_protocol::token::PoolToken;
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use uuid::Uuid;

use self::companion::Companion;
use super::artifacts;
use super::error::RunError;
use super::event::{Event, Level};
use super::signals::Signals;
use super::view::View;
use crate::agent::process::runs_folder;
use crate::data::{DataDir, WorkFolder};
use crate::http::auth::platform_token;
use crate::local::detached::{DetachedExecutor, kill_after};
use crate::local::environment;
use crate::local::executor::Ended;
use crate::local::run_folder::RunFolder;

const POOL: &str = "local";
const AGENT: &str = "this-machine";
/// How often the hub is asked about the run.
const POLL: Duration = Duration::from_millis(100);
/// How long an answer of the hub may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a hub may take to start.
const START_TIMEOUT: Duration = Duration::from_mins(1);
/// How long the end of a run may take after its agent ended, or after the run was done.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a token of the platform is valid.
const TOKEN_LIFETIME: Duration = Duration::from_mins(1);
/// Seconds for which the hub still answers when this process is gone, so that executors store what they have.
const HUB_DRAIN: &str = "60";
const HUB_SHUTDOWN: &str = "65";
/// The state of a task whose step is done.
const COMPLETED: &str = "COMPLETED";

/// The hub and its agent.
#[derive(Debug)]
pub(crate) struct LocalPool {
    hub: Companion,
    agent: Companion,
    /// The data directory.
    data: PathBuf,
    /// The folder with the folders of the agent's runs.
    runs: PathBuf,
    url: String,
    http: reqwest::Client,
    /// The secret that the hub shares with its platform.
    secret: SecretString,
    token: PoolToken,
    /// What hub and agent say.
    events: mpsc::UnboundedReceiver<Event>,
}

/// Why a run could not go through a pool of its own.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PoolError {
    #[error("could not prepare the hub")]
    Prepare(#[source] io::Error),
    #[error("could not make the client of the hub")]
    Client(#[source] reqwest::Error),
    #[error("the {name} ended{}", because(said))]
    Ended {
        name: &'static str,
        said: String,
        /// Whether an executor of the agent still runs.
        is_running: bool,
    },
    #[error("the hub did not start within a minute")]
    Slow,
    #[error("the hub did not take the run: {0}")]
    Refused(String),
}

impl PoolError {
    pub(crate) const EXIT: Exit = Exit::Infrastructure;

    /// What to do about it.
    pub(crate) const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Ended {
                is_running: true, ..
            } => Some(
                "an executor of the run still runs and may change something: wait for its end, and plan again before \
                 anything else",
            ),
            Self::Ended { .. } | Self::Slow => Some(
                "--verbose shows what hub and agent say; one run with --with-hub uses a data directory at a time",
            ),
            Self::Prepare(_) | Self::Client(_) | Self::Refused(_) => None,
        }
    }
}

fn because(said: &str) -> String {
    if said.is_empty() {
        String::new()
    } else {
        format!(": {said}")
    }
}

/// A list of runs, as the hub shows them.
#[derive(Debug, Deserialize)]
struct Runs {
    runs: Vec<RunState>,
}

/// What the hub says of a run.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RunState {
    run: TaskId,
    job_id: String,
    step_id: String,
    state: String,
    agent: Option<String>,
    end: Option<TaskEnd>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TaskEnd {
    reason: String,
    diagnostic: String,
    exit_code: Option<i32>,
    /// Whether the platform has the outcome.
    reported: bool,
}

/// The run of a step, as far as it is known.
#[derive(Debug, Default)]
struct Progress {
    id: Option<TaskId>,
    state: String,
    /// How much of the log was shown.
    log: u64,
    /// A line that has not ended.
    rest: String,
}

impl LocalPool {
    /// Starts a hub with its queue and its records in the data directory, and an agent.
    pub(crate) async fn start(
        data: &DataDir,
        work: &WorkFolder,
        executor: Option<&Path>,
        view: &mut View,
        signals: &mut Signals,
    ) -> Result<Self, RunError> {
        // One provider for the whole process; an earlier one stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let pool: PoolName = POOL.parse().expect("a name of a pool");
        let token = PoolToken::new(pool);
        let secret = BASE64_STANDARD
            .encode([*Uuid::new_v4().as_bytes(), *Uuid::new_v4().as_bytes()].concat());
        let folder = work.subfolder("hub")?;
        let (pools, config) = (folder.join("pools.yaml"), folder.join("agent.yaml"));
        let text = format!(
            "pools: {{{POOL}: {{organizations: [\"*\"], tokens: [{{id: run, sha256: {}}}]}}}}\n",
            token.digest()
        );
        fs::write(&pools, text).map_err(PoolError::Prepare)?;
        // No file of the user counts.
        fs::write(&config, "{}\n").map_err(PoolError::Prepare)?;
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(ANSWER_TIMEOUT)
            .build()
            .map_err(PoolError::Client)?;

        let (sender, events) = mpsc::unbounded_channel();
        let settings: [(&str, &OsStr); 10] = [
            (env::TARGET, "none".as_ref()),
            (env::POOLS_FILE, pools.as_os_str()),
            (env::DATA_DIR, data.path().as_os_str()),
            (env::RECORDS, "shared".as_ref()),
            (env::LISTEN, "127.0.0.1:0".as_ref()),
            (env::ALLOW_UNAUTHENTICATED, "page".as_ref()),
            (env::INTERNAL_SECRET, secret.as_ref()),
            (env::DRAIN_SECONDS, HUB_DRAIN.as_ref()),
            (env::SHUTDOWN_SECONDS, HUB_SHUTDOWN.as_ref()),
            (env::LOG_FILTER, "info".as_ref()),
        ];
        let mut hub = Companion::start("hub", "serve", environment_of(&settings), sender.clone())?;
        let forwarded = environment::forwarded(|name| std::env::var_os(name)).join(" ");
        let grace = kill_after().as_secs().to_string();
        let start_agent = |url: &str| {
            let mut settings: Vec<(&str, &OsStr)> = vec![
                (env::AGENT_CONFIG, config.as_os_str()),
                (env::AGENT_SERVICE_URL, url.as_ref()),
                (env::AGENT_TOKEN, token.reveal().as_ref()),
                (env::AGENT_NAME, AGENT.as_ref()),
                (env::AGENT_SLOTS, "1".as_ref()),
                (env::AGENT_DEPLOY_TARGET, "process".as_ref()),
                (env::AGENT_ON_STOP, "grace".as_ref()),
                (env::AGENT_GRACE_TIMEOUT, grace.as_ref()),
                (env::AGENT_ENV_FORWARD_ALLOWLIST, forwarded.as_ref()),
                (env::AGENT_WORKING_DIRECTORY, data.path().as_os_str()),
                (env::PUBLIC_API_URL, url.as_ref()),
                (env::STATE_TYPE, "LocalTerraformStateImpl".as_ref()),
                (env::LOG_FILTER, "info".as_ref()),
            ];
            settings.extend(executor.map(|path| (env::EXECUTOR, path.as_os_str())));
            Companion::start("agent", "agent", environment_of(&settings), sender)
        };
        let address = tokio::select! {
            address = timeout(START_TIMEOUT, hub.address()) => {
                let address = address.map_err(|_| PoolError::Slow).flatten();
                address.map_err(RunError::from)
            }
            signal = signals.next() => Err(RunError::Stopped(signal)),
        };
        let started = address.and_then(|address| {
            let url = format!("http://{address}");
            view.show(Event::HubStarted {
                page: format!("{url}/ui"),
            });
            Ok((start_agent(&url)?, url))
        });
        let (agent, url) = match started {
            Ok(started) => started,
            Err(error) => {
                hub.stop().await;
                return Err(error);
            }
        };
        Ok(Self {
            hub,
            agent,
            data: data.path().to_owned(),
            runs: runs_folder(data),
            url,
            http,
            secret: secret.into(),
            token,
            events,
        })
    }

    /// Gives the step to the hub, and shows it until its end.
    pub(crate) async fn run_step(
        &mut self,
        job: &Document,
        records: &LocalPlatform,
        view: &mut View,
        signals: &mut Signals,
    ) -> Result<(Ended, FinalReport), RunError> {
        self.dispatch(job).await?;
        let mut progress = Progress::default();
        let mut stopped_by = None;
        let mut hub_said: Option<String> = None;
        let mut give_up_at: Option<Instant> = None;
        let mut poll = interval(POLL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let end = loop {
            tokio::select! {
                biased;
                signal = signals.next() => {
                    self.stop(view, signal, stopped_by.is_some() || hub_said.is_some());
                    stopped_by.get_or_insert(signal);
                }
                Some(event) = self.events.recv() => view.show(event),
                said = self.hub.ended(), if hub_said.is_none() => {
                    view.show(Event::warning(
                        "the hub ended: the agent stops the executor gracefully, and the state is stored; \
                         another signal kills the executor",
                    ));
                    // The agent kills the executor after a second signal.
                    if stopped_by.is_none() {
                        self.agent.terminate();
                    }
                    hub_said = Some(said);
                }
                said = self.agent.ended(), if give_up_at.is_none() || hub_said.is_some() => {
                    let is_running = self.has_executor();
                    if let Some(said) = hub_said {
                        return Err(PoolError::Ended { name: "hub", said, is_running }.into());
                    }
                    if stopped_by.is_none() {
                        return Err(PoolError::Ended { name: "agent", said, is_running }.into());
                    }
                    // What the agent had not taken must not run later.
                    cancel(job, records)?;
                    give_up_at = Some(Instant::now() + END_TIMEOUT);
                }
                _ = poll.tick() => {
                    if hub_said.is_some() {
                        // Without an executor, the agent would only wait for the hub to report an end.
                        if !self.has_executor() {
                            self.agent.terminate();
                        }
                        continue;
                    }
                    let is_late = give_up_at.is_some_and(|at| at <= Instant::now());
                    match self.look(job, &mut progress, view).await {
                        // The hub is about to report an outcome that the executor could not report.
                        Some(end) if !end.reported && progress.state == COMPLETED && !is_late => {
                            give_up_at.get_or_insert(Instant::now() + END_TIMEOUT);
                        }
                        Some(end) => break Some(end),
                        None if is_late => break None,
                        None => {}
                    }
                }
            }
        };
        Ok(conclude(&progress.state, end, stopped_by))
    }

    async fn dispatch(&self, job: &Document) -> Result<(), PoolError> {
        let url = format!("{}/pools/{POOL}/api/v1/terraform-rs", self.url);
        let secret = self.secret.expose_secret();
        let token = platform_token(secret, SystemTime::now(), TOKEN_LIFETIME)
            .expect("a secret of 32 bytes");
        let request = self
            .http
            .post(url)
            .bearer_auth(token)
            .header("content-type", "application/json")
            .body(job.json().to_vec());
        let refused = |error: reqwest::Error| PoolError::Refused(error.without_url().to_string());
        let response = request.send().await.map_err(refused)?;
        if response.status().is_success() {
            return Ok(());
        }
        Err(PoolError::Refused(
            response.text().await.unwrap_or_default(),
        ))
    }

    /// Shows what is new. Returns the end of the run. A question that is not answered is asked again.
    async fn look(
        &self,
        job: &Document,
        progress: &mut Progress,
        view: &mut View,
    ) -> Option<TaskEnd> {
        let id = match progress.id {
            Some(id) => id,
            None => *progress.id.insert(self.find(job).await?),
        };
        let run: RunState = self.get(&format!("/{id}")).await?.json().await.ok()?;
        if run.state != progress.state {
            view.show(said(&run));
            progress.state.clone_from(&run.state);
        }
        let log = self
            .get(&format!("/{id}/log?from={}", progress.log))
            .await?;
        let offset = |name: &str| log.headers().get(name)?.to_str().ok()?.parse::<u64>().ok();
        let (start, end) = (offset("log-start")?, offset("log-end")?);
        let text = log.text().await.ok()?;
        if let Some(gap) = start.checked_sub(progress.log).filter(|gap| *gap > 0) {
            progress.rest.clear();
            view.show(Event::warning(format!(
                "{gap} bytes of the log are not shown here: the whole log is in `{}` after the step",
                artifacts::stored_log(&self.data, job).display()
            )));
        }
        progress.rest += &text;
        progress.log = end;
        let mut lines: Vec<&str> = progress.rest.split('\n').collect();
        let rest = lines.pop().unwrap_or_default().to_owned();
        let line = |line: &str| Event::Log {
            line: line.to_owned(),
        };
        view.show_all(lines.into_iter().map(line).collect());
        progress.rest = rest;
        run.end
    }

    async fn find(&self, job: &Document) -> Option<TaskId> {
        for state in ["open", "over"] {
            let runs = self.get(&format!("?state={state}")).await?;
            let runs: Runs = runs.json().await.ok()?;
            let mut runs = runs.runs.into_iter();
            let found = runs.find(|run| run.job_id == job.job_id && run.step_id == job.step_id);
            if let Some(found) = found {
                return Some(found.run);
            }
        }
        None
    }

    async fn get(&self, path: &str) -> Option<reqwest::Response> {
        let url = format!("{}/pools/{POOL}/runs{path}", self.url);
        let request = self.http.get(url).bearer_auth(self.token.reveal());
        request.send().await.ok()?.error_for_status().ok()
    }

    fn stop(&self, view: &mut View, signal: Signal, again: bool) {
        self.agent.terminate();
        view.show(Event::warning(match (again, signal) {
            (true, _) => {
                "killed: what was being changed may exist without being in the state; \
                 plan again before anything else, and unlock the state if the tool asks for it"
            }
            (false, Signal::SIGINT) => {
                "stopping: asked the agent to stop the executor gracefully and store the state; \
                 press Ctrl-C again to kill it"
            }
            (false, _) => {
                "stopping: asked the agent to stop the executor gracefully and store the state; \
                 another signal kills it"
            }
        }));
    }

    /// Returns whether an executor of the agent runs.
    fn has_executor(&self) -> bool {
        let folders = fs::read_dir(&self.runs).into_iter().flatten().flatten();
        let mut folders = folders.map(|folder| RunFolder::new(folder.path()));
        folders.any(|folder| DetachedExecutor::find(&folder).is_some())
    }

    /// Stops both. The agent gets one signal, because the second one kills an executor.
    pub(crate) async fn close(mut self, signals: &mut Signals) {
        self.agent.terminate();
        loop {
            tokio::select! {
                _ = self.agent.ended() => break,
                _ = signals.next() => self.agent.terminate(),
            }
        }
        self.hub.stop().await;
    }
}

/// The settings, and of this process's environment what an agent needs and passes on.
fn environment_of(settings: &[(&str, &OsStr)]) -> Vec<(OsString, OsString)> {
    let mut variables = environment::of_agent(|name| std::env::var_os(name));
    for name in ["no_proxy", "NO_PROXY"] {
        let known = variables.iter().position(|(known, _)| known == name);
        let mut value = known.map_or_else(OsString::new, |at| variables.swap_remove(at).1);
        if !value.is_empty() {
            value.push(",");
        }
        value.push("127.0.0.1");
        variables.push((name.into(), value));
    }
    for (name, value) in settings {
        variables.retain(|(known, _)| known != name);
        variables.push((name.into(), (*value).to_owned()));
    }
    variables.push((env::LOG_FORMAT.into(), "json".into()));
    variables.push((
        env::PARENT_PID.into(),
        std::process::id().to_string().into(),
    ));
    variables
}

fn cancel(job: &Document, records: &LocalPlatform) -> Result<(), RunError> {
    records.update_job(&StepRef::of(job), |record| {
        if !record.status.is_over() {
            record.status = JobStatus::Cancelled;
        }
    })?;
    Ok(())
}

/// What happens to the run, for those who want to know.
fn said(run: &RunState) -> Event {
    let agent = run.agent.as_deref().unwrap_or(AGENT);
    let message = match run.state.as_str() {
        "AVAILABLE" => format!("the run waits in pool `{POOL}`"),
        "LEASED" => format!("agent `{agent}` has taken the run"),
        "RUNNING" => "an executor has accepted the run".to_owned(),
        state => format!("the run is {}", state.to_lowercase()),
    };
    Event::Diagnostic {
        level: Level::Info,
        message,
    }
}

fn conclude(state: &str, end: Option<TaskEnd>, stopped_by: Option<Signal>) -> (Ended, FinalReport) {
    let code = match &end {
        // Its executor ends with another code if it could not report the outcome.
        Some(_) if state == COMPLETED => Exit::Done.code().into(),
        Some(TaskEnd {
            exit_code: Some(code),
            ..
        }) => *code,
        Some(end) if end.reason == "finished" || end.reason == "lost" => {
            Exit::StepFailed.code().into()
        }
        _ => Exit::Infrastructure.code().into(),
    };
    let told = end.map(|end| end.diagnostic).unwrap_or_default();
    let report = FinalReport {
        error: Some(told).filter(|told| !told.is_empty()),
        ..FinalReport::default()
    };
    let ended = Ended {
        status: ExitStatus::from_raw(code << 8),
        stopped_by,
    };
    (ended, report)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::local::executor;

    #[rstest]
    #[case("COMPLETED", "finished", Some(0), None, 0)]
    #[case("COMPLETED", "finished", Some(1), None, 0)]
    #[case("COMPLETED", "finished", Some(143), Some(Signal::SIGINT), 0)]
    #[case("FAILED", "finished", Some(1), None, 1)]
    #[case("FAILED", "finished", Some(143), Some(Signal::SIGINT), 130)]
    #[case("FAILED", "lost", None, None, 1)]
    #[case("FAILED", "poison", None, None, 75)]
    #[case("FAILED", "expired", None, None, 75)]
    #[case("CANCELLED", "cancelled", None, Some(Signal::SIGTERM), 143)]
    fn the_end_of_a_run_is_that_of_an_executor(
        #[case] state: &str,
        #[case] reason: &str,
        #[case] exit_code: Option<i32>,
        #[case] stopped_by: Option<Signal>,
        #[case] expected: u8,
    ) {
        let end = TaskEnd {
            reason: reason.to_owned(),
            diagnostic: "because".to_owned(),
            exit_code,
            reported: true,
        };
        let (ended, report) = conclude(state, Some(end), stopped_by);
        assert_eq!(executor::judge(ended).0.code(), expected);
        assert_eq!(report.error.as_deref(), Some("because"));
    }

    #[test]
    fn a_proxy_is_not_asked_for_this_machine_and_no_setting_of_a_platform_is_passed_on() {
        let variables = environment_of(&[(env::AGENT_NAME, "a".as_ref())]);
        let value = |name: &str| {
            let mut found = variables.iter().filter(|(known, _)| known == name);
            let value = found.next().map(|(_, value)| value.to_string_lossy());
            assert!(found.next().is_none(), "{name} twice");
            value
        };
        assert!(value("no_proxy").unwrap().ends_with("127.0.0.1"));
        assert_eq!(value(env::AGENT_NAME).unwrap(), "a");
        assert_eq!(value(env::LOG_FORMAT).unwrap(), "json");
        assert_eq!(value(env::API_URL), None);
    }
}
