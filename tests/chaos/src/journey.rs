//! A journey: it makes the runs of a schedule, several at once, each with its fault. Then it checks the rules.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use serde_json::json;
use test_platform::{Flow, NewJob, Status, Variable, Workspace};

use crate::check::{Ending, check};
use crate::facts;
use crate::faults::Target;
use crate::files::STORE_MARK;
use crate::peers::{Gate, Peers, holds};
use crate::schedule::{Fault, InjectionPoint, Kind, Run, Through, schedule};
use crate::side::Side;
use crate::summary::Summary;

/// How long the launchers may need after the last run for leases, reports and the removal of Jobs.
const CLEANUP_TIMEOUT: Duration = Duration::from_mins(5);

/// Options of a journey.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of every random decision.
    pub seed: u64,
    /// Number of runs.
    pub runs: u32,
    /// Number of runs at once.
    pub at_once: usize,
    /// What takes the dispatches.
    pub through: Through,
    /// Number of the only run to make.
    pub only: Option<u32>,
    /// The program that is launcher and executor. The name decides which.
    pub program: PathBuf,
    /// Start no run after this time.
    pub within: Option<Duration>,
    /// Keep journals, logs and programs of the journey.
    pub keep: bool,
}

impl Options {
    /// A journey with this program as launcher and executor.
    pub fn new(through: Through, seed: u64, runs: u32, program: &Path) -> Self {
        Self {
            seed,
            runs,
            at_once: 8,
            through,
            only: None,
            program: program.to_owned(),
            within: None,
            keep: false,
        }
    }

    /// The runs of the journey.
    pub fn schedule(&self) -> Vec<Run> {
        let mut runs = schedule(self.through, self.seed, self.runs);
        runs.retain(|run| self.only.is_none_or(|only| run.number == only));
        runs
    }
}

/// A finished run.
#[derive(Clone, Debug)]
pub(crate) struct FinishedRun {
    pub(crate) run: Run,
    pub(crate) workspace: String,
    /// The platform's jobs, in order. The last one got the fault.
    pub(crate) jobs: Vec<u32>,
    pub(crate) fault_happened: bool,
    /// Whether Redis lost its data during the run, because of the fault of any run.
    pub(crate) redis_lost_data: bool,
    pub(crate) accepted_bad: Vec<String>,
}

impl FinishedRun {
    /// The outcomes a job of the run may have if the store works.
    pub(crate) fn permitted(&self, job: u32) -> BTreeSet<Ending> {
        let is_last = self.jobs.last() == Some(&job);
        let own = match self.run.kind {
            Kind::FailingPlan | Kind::FailingApply | Kind::BadSetting | Kind::BadFolder => {
                Ending::Failed
            }
            _ => Ending::Completed,
        };
        match self.run.fault.filter(|_| is_last) {
            Some(Fault::Cancel) => [Ending::Cancelled].into(),
            // If another fault has killed the agent too, the run is given out again.
            Some(Fault::ExecutorEarly) => [Ending::Failed, own].into(),
            Some(fault) if fault.ends() => [Ending::Failed].into(),
            _ => [own].into(),
        }
    }

    /// Whether the output of the job's containers is lost: Redis has lost the live log, and the container log was deleted
    /// with its node or pod.
    pub(crate) fn log_is_lost(&self, job: u32) -> bool {
        let goes = matches!(
            self.run.fault,
            // A hub never has the container log.
            Some(Fault::NodeLost | Fault::Deleted | Fault::Executor | Fault::AgentAndExecutor)
        );
        self.jobs.last() == Some(&job) && goes && self.redis_lost_data
    }

    /// Whether the output of the job has lines twice: the hub has stored what it got before it gave the run up, and the
    /// executor appends its own log when it reaches the hub again.
    pub(crate) fn log_is_stored_twice(&self, job: u32) -> bool {
        self.jobs.last() == Some(&job) && self.run.fault == Some(Fault::AgentCutOff)
    }

    /// Whether a failed step of the run has printed all its lines, because its own failure comes last.
    pub(crate) fn prints_all_lines_if_it_fails(&self) -> bool {
        let is_ended = self.run.fault.is_some_and(Fault::ends);
        self.run.kind == Kind::FailingApply && !is_ended
    }

    /// Whether a connection to the store was the run's, from what its client had sent first: an executor names workspace or
    /// job in each path, and the tool names the run.
    pub(crate) fn has_sent(&self, sent: &str, organization: &str) -> bool {
        let mark = format!("{STORE_MARK}{};", self.run.number);
        let output = |job: &u32| sent.contains(&format!("/{organization}/{job}/"));
        sent.contains(&mark)
            || self.jobs.iter().any(output)
            || !self.workspace.is_empty() && sent.contains(&self.workspace)
    }

    /// Whether the job's tool was killed.
    pub(crate) fn tool_was_killed(&self, job: u32) -> bool {
        self.jobs.last() == Some(&job) && self.run.fault.is_some_and(Fault::kills_the_tool)
    }
}

/// Makes a journey. Launchers need the kubeconfig of a cluster. `print` gets a line for every finished run.
///
/// # Errors
/// The journey could not be made. Violations are no error: the summary lists them.
pub async fn run_journey(
    options: &Options,
    kubeconfig: Option<&Path>,
    print: impl Fn(&str),
) -> Result<Summary> {
    let began = Instant::now();
    let runs = options.schedule();
    let kubeconfig = kubeconfig.filter(|_| options.through == Through::Launcher);
    if options.through == Through::Launcher {
        ensure!(kubeconfig.is_some(), "launchers need a cluster");
    }
    let peers = Peers::start(&options.program, options.seed, kubeconfig).await?;
    let peers = Arc::new(peers);
    let permits = Arc::new(Semaphore::new(options.at_once));
    let report = |run, before| report_finished(run, &peers, runs.len(), before, &print);
    let mut tasks = JoinSet::new();
    let mut finished = Vec::new();
    for run in &runs {
        if options
            .within
            .is_some_and(|within| began.elapsed() > within)
        {
            break;
        }
        let permit = Arc::clone(&permits).acquire_owned().await?;
        let (shared, run) = (Arc::clone(&peers), *run);
        tasks.spawn(async move {
            let finished = make_run(&shared, run).await;
            drop(shared);
            drop(permit);
            finished.with_context(|| run.to_string())
        });
        while let Some(done) = tasks.try_join_next() {
            finished.push(report(done??, finished.len()));
        }
    }
    while let Some(done) = tasks.join_next().await {
        finished.push(report(done??, finished.len()));
    }
    finished.sort_by_key(|finished| finished.run.number);
    let left = wait_for_cleanup(&peers, &finished).await?;
    let mut facts = facts::collect(&peers, &finished).await?;
    facts.left = left;
    let found = check(&facts);
    let mut summary = Summary::new(options, &facts, &finished, found, began.elapsed());
    summary.started = peers.side.started().await;
    summary.responses = peers.side.responses();
    for finished in &finished {
        if summary.concerns(finished) {
            summary.evidence.push(facts::evidence(&peers, finished)?);
        }
    }
    if options.keep {
        facts::dump(&peers, peers.folder())?;
        if let Some(peers) = Arc::into_inner(peers) {
            print(&format!("kept in {}", peers.keep().display()));
        }
    }
    Ok(summary)
}

fn report_finished(
    finished: FinishedRun,
    peers: &Peers,
    all: usize,
    before: usize,
    print: &impl Fn(&str),
) -> FinishedRun {
    let statuses: Vec<String> = finished
        .jobs
        .iter()
        .map(|job| peers.platform.job(*job).status.to_string())
        .collect();
    let missed = if finished.fault_happened {
        ""
    } else {
        ", FAULT MISSED"
    };
    let number = before + 1;
    let seconds = peers.age().as_secs();
    print(&format!(
        "{seconds:>4} s [{number}/{all}] {}: {}{missed}",
        finished.run,
        statuses.join(", ")
    ));
    finished
}

/// Ends all faults, waits until the objects of the runs are removed, and returns the objects that are left.
async fn wait_for_cleanup(peers: &Peers, finished: &[FinishedRun]) -> Result<Vec<String>> {
    peers.side.clear_faults();
    peers.platform.clear_faults();
    peers.store_proxy.clear();
    peers.side.start_missing().await?;
    if matches!(peers.side, Side::Hub(_)) {
        // A store may take a lock after its release, if the request was repeated. The hub releases it once more.
        let organization = peers.platform.organization();
        let are_released = || async {
            let is_released = |run| matches!(facts::left_lock(peers, run, &organization), Ok(None));
            finished.iter().all(is_released)
        };
        holds(CLEANUP_TIMEOUT, "the release of all locks", are_released).await;
    }
    peers.side.until_empty(CLEANUP_TIMEOUT).await
}

/// Makes one run.
async fn make_run(peers: &Peers, run: Run) -> Result<FinishedRun> {
    let mut finished = FinishedRun {
        run,
        workspace: String::new(),
        jobs: Vec::new(),
        fault_happened: run.fault.is_none(),
        redis_lost_data: false,
        accepted_bad: Vec::new(),
    };
    if run.kind == Kind::BadData {
        finished.accepted_bad = peers.post_bad_data(run.number).await?;
        return Ok(finished);
    }
    peers.begin(run.number);
    finished.workspace = peers.platform.workspace(workspace(peers, run)?);
    if run.kind == Kind::Destroy {
        let made = peers.platform.start_job(NewJob::new(
            &finished.workspace,
            vec![Flow::new("terraformApply", 100)],
        ));
        finished.jobs.push(made);
        peers.until_over(made).await;
    }
    match run.fault.map(Fault::injection_point) {
        Some(InjectionPoint::Fetch) => peers.hold(run.number, Gate::Fetch)?,
        Some(InjectionPoint::Work | InjectionPoint::Report) => {
            peers.hold(run.number, Gate::Work)?;
        }
        _ => {}
    }
    let guard = match run.fault {
        Some(fault) => peers.side.before_dispatch(&peers.locks, fault).await,
        None => None,
    };
    let new = NewJob::new(&finished.workspace, template(peers, run));
    let job = peers.platform.start_job(new);
    finished.jobs.push(job);
    let target = Target {
        run,
        job,
        phase: match run.kind {
            Kind::Scripts => "script",
            Kind::Destroy => "gone",
            _ => "second",
        },
    };
    let (fault_happened, ()) = tokio::join!(
        async {
            match run.fault {
                Some(fault) => peers.inject(fault, target).await,
                None => Ok(true),
            }
        },
        approve(peers, run, job)
    );
    finished.fault_happened = fault_happened?;
    drop(guard);
    peers.until_over(job).await;
    finished.redis_lost_data = peers.end(run.number);
    Ok(finished)
}

/// Approves the plan, as a person does.
async fn approve(peers: &Peers, run: Run, job: u32) {
    if run.kind != Kind::Approved {
        return;
    }
    let status = || peers.platform.job(job).status;
    let waits = || async { status() == Status::WaitingApproval || status().is_terminal() };
    holds(CLEANUP_TIMEOUT, "an approval to give", waits).await;
    if status() == Status::WaitingApproval {
        peers.platform.approve(job).await;
    }
}

fn workspace(peers: &Peers, run: Run) -> Result<Workspace> {
    let folder = match run.kind {
        Kind::FailingPlan => "/wrong",
        Kind::BadFolder => "/nowhere",
        _ => "/good",
    };
    let mut workspace = Workspace {
        folder: Some(folder.to_owned()),
        ..Workspace::new(&peers.source(run.number)?)
    }
    .with(Variable::env("RUN", &run.number.to_string()));
    if run.fault == Some(Fault::AgentCutOff) {
        workspace.agent = peers.side.apart_url();
    }
    if run.kind == Kind::FailingApply {
        workspace = workspace.with(Variable::env("FAIL", "second"));
    }
    if run.kind == Kind::BadSetting {
        workspace = workspace.with(Variable::env("EPHEMERAL_CPU_REQUEST", "a lot"));
    }
    Ok(workspace)
}

fn template(peers: &Peers, run: Run) -> Vec<Flow> {
    let mut plan = Flow::new("terraformPlan", 100);
    plan.commands = json!([{
        "runtime": "BASH", "script": peers.work("plan"), "priority": 100,
        "before": true, "after": false, "verbose": false, "beforeInit": false,
    }]);
    let apply = Flow::new("terraformApply", 200);
    match run.kind {
        Kind::PlanApply => vec![plan, apply],
        Kind::Approved => vec![plan, Flow::new("approval", 150), apply],
        Kind::FailingPlan => vec![Flow::new("terraformPlan", 100), apply],
        Kind::Destroy => vec![Flow::new("terraformDestroy", 100)],
        Kind::Scripts => {
            vec![Flow::new("customScripts", 100).with_script(&peers.work("script"))]
        }
        _ => vec![apply],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(fault: Option<Fault>) -> FinishedRun {
        FinishedRun {
            run: Run {
                number: 18,
                kind: Kind::FailingApply,
                fault,
            },
            workspace: "a1b2".to_owned(),
            jobs: vec![7],
            fault_happened: true,
            redis_lost_data: false,
            accepted_bad: Vec::new(),
        }
    }

    #[test]
    fn an_apply_that_fails_owes_all_lines_unless_its_fault_ends_it() {
        assert!(finished(None).prints_all_lines_if_it_fails());
        assert!(!finished(Some(Fault::Evicted)).prints_all_lines_if_it_fails());
    }

    #[test]
    fn a_connection_to_the_store_is_that_of_one_run() {
        let run = finished(None);
        for (sent, is_its) in [
            (
                "PUT /bucket/tfstate/org/a1b2/terraform.tfstate HTTP/1.1",
                true,
            ),
            ("GET /bucket/tfoutput/org/7/step.tfoutput HTTP/1.1", true),
            (
                "GET /bucket?list-type=2 HTTP/1.1\r\nUser-Agent: x mayfly-run/18;",
                true,
            ),
            ("GET /bucket/tfoutput/org/77/step.tfoutput HTTP/1.1", false),
            (
                "GET /bucket?list-type=2 HTTP/1.1\r\nUser-Agent: x mayfly-run/180;",
                false,
            ),
            ("", false),
        ] {
            assert_eq!(run.has_sent(sent, "org"), is_its, "{sent}");
        }
    }
}
