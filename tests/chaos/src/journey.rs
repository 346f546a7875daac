//! A journey: the runs of a schedule, some at a time, each with what happens to it, and then the balance.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use serde_json::json;
use test_cluster::State;
use test_platform::{Flow, NewJob, Records, Status, Variable, Workspace};

use crate::books::{Ending, balance};
use crate::facts;
use crate::schedule::{Kind, Moment, Run, Strike, schedule};
use crate::strikes::Target;
use crate::tally::Tally;
use crate::world::{Gate, SETTINGS, Weather, World};

/// How long the dust may take to settle: leases pass on, verdicts are told, histories are cut.
const SETTLE: Duration = Duration::from_secs(150);

/// What a journey is like.
#[derive(Clone, Debug)]
pub struct Options {
    /// Decides everything that is left to chance.
    pub seed: u64,
    /// How many.
    pub runs: u32,
    /// How many at a time.
    pub at_once: usize,
    /// Only this one of them.
    pub only: Option<u32>,
    /// Launcher and executor, by the name it is started with.
    pub program: PathBuf,
    /// Leave the journals, logs and programs of the journey where they are.
    pub keep: bool,
}

impl Options {
    /// A journey with this program for launcher and executor.
    pub fn new(seed: u64, runs: u32, program: &Path) -> Self {
        Self {
            seed,
            runs,
            at_once: 8,
            only: None,
            program: program.to_owned(),
            keep: false,
        }
    }

    /// What will be run.
    pub fn schedule(&self) -> Vec<Run> {
        let mut runs = schedule(self.seed, self.runs);
        runs.retain(|run| self.only.is_none_or(|only| run.number == only));
        runs
    }
}

/// What became of a run, as its driver saw it.
#[derive(Clone, Debug)]
pub(crate) struct Driven {
    pub(crate) run: Run,
    pub(crate) workspace: String,
    /// The platform's jobs, in order; the last is the one that was struck.
    pub(crate) jobs: Vec<u32>,
    pub(crate) struck: bool,
    pub(crate) weather: Weather,
    pub(crate) let_in: Vec<String>,
}

impl Driven {
    /// The outcomes a job of the run may have.
    pub(crate) fn permitted(&self, job: u32) -> BTreeSet<Ending> {
        let is_last = self.jobs.last() == Some(&job);
        let own = match self.run.kind {
            Kind::FailingPlan | Kind::FailingApply | Kind::BadSetting | Kind::BadFolder => {
                Ending::Failed
            }
            _ => Ending::Completed,
        };
        let mut permitted: BTreeSet<Ending> = match self.run.strike.filter(|_| is_last) {
            Some(Strike::Cancel) => [Ending::Cancelled].into(),
            Some(strike) if strike.ends() => [Ending::Failed].into(),
            _ => [own].into(),
        };
        // The tool gives up when its own patience ends, and says so.
        if self.weather.store_was_away {
            permitted.insert(Ending::Failed);
        }
        permitted
    }

    /// Whether nobody has what the job's containers wrote: the live log was in a Redis that forgot it, and the container
    /// went with its node or with its pod.
    pub(crate) fn log_is_gone(&self, job: u32) -> bool {
        let goes = matches!(self.run.strike, Some(Strike::NodeLost | Strike::Deleted));
        self.jobs.last() == Some(&job) && goes && self.weather.redis_forgot
    }

    /// Whether the run failed for want of the store before it came to where it was to be struck.
    pub(crate) fn fell_before(&self, records: &Records) -> bool {
        let last = self.jobs.last().map(|job| records.job(*job).status);
        self.weather.store_was_away && last == Some(Status::Failed)
    }

    /// Whether a failed step of the run has printed everything it prints: the failure is its own, and comes last. Without
    /// the store the tool gives up before that, as early as in `init`.
    pub(crate) fn prints_all_although_it_fails(&self) -> bool {
        let is_ended = self.run.strike.is_some_and(Strike::ends);
        self.run.kind == Kind::FailingApply && !is_ended && !self.weather.store_was_away
    }

    /// Whether the job's tool was ended at once.
    pub(crate) fn tool_was_killed(&self, job: u32) -> bool {
        self.jobs.last() == Some(&job) && self.run.strike.is_some_and(Strike::kills_the_tool)
    }
}

/// Makes a journey in the cluster of a kubeconfig; `tell` hears of every run that is over.
///
/// # Errors
/// Fails when the journey cannot be made; what does not add up is in the tally.
pub async fn travel(options: &Options, kubeconfig: &Path, tell: impl Fn(&str)) -> Result<Tally> {
    let began = Instant::now();
    let runs = options.schedule();
    let world = Arc::new(World::start(&options.program, kubeconfig).await?);
    let places = Arc::new(Semaphore::new(options.at_once));
    let mut tasks = JoinSet::new();
    let mut driven = Vec::new();
    for run in &runs {
        let place = Arc::clone(&places).acquire_owned().await?;
        let (peers, run) = (Arc::clone(&world), *run);
        tasks.spawn(async move {
            let driven = drive(&peers, run).await;
            drop(peers);
            drop(place);
            driven.with_context(|| run.to_string())
        });
        while let Some(done) = tasks.try_join_next() {
            driven.push(over(done??, &world, runs.len(), driven.len(), &tell));
        }
    }
    while let Some(done) = tasks.join_next().await {
        driven.push(over(done??, &world, runs.len(), driven.len(), &tell));
    }
    driven.sort_by_key(|driven| driven.run.number);
    let left = settle(&world).await?;
    let mut facts = facts::collect(&world, &driven).await?;
    facts.left = left;
    let found = balance(&facts);
    let started = world.launchers.lock().await.started();
    let mut tally = Tally::new(options, &facts, &driven, found, started, began.elapsed());
    for driven in &driven {
        if tally.concerns(driven) {
            tally.evidence.push(facts::evidence(&world, driven)?);
        }
    }
    if options.keep {
        facts::dump(&world, world.folder())?;
        if let Some(world) = Arc::into_inner(world) {
            tell(&format!("kept in {}", world.keep().display()));
        }
    }
    Ok(tally)
}

fn over(driven: Driven, world: &World, all: usize, before: usize, tell: &impl Fn(&str)) -> Driven {
    let statuses: Vec<String> = driven
        .jobs
        .iter()
        .map(|job| world.platform.job(*job).status.to_string())
        .collect();
    let missed = if driven.struck { "" } else { ", NOT STRUCK" };
    let number = before + 1;
    let seconds = world.age().as_secs();
    tell(&format!(
        "{seconds:>4} s [{number}/{all}] {}: {}{missed}",
        driven.run,
        statuses.join(", ")
    ));
    driven
}

/// Everything is well again; waits until nothing of the runs is left, and returns what is.
async fn settle(world: &World) -> Result<Vec<String>> {
    world.cluster.faults().clear();
    world.platform.clear_faults();
    world.way_to_store.clear();
    world.start_launchers().await?;
    let nothing = |state: &State| left(state).is_empty().then_some(());
    let settled = world.cluster.wait_for(&world.runs, SETTLE, nothing).await;
    Ok(settled.err().map(|state| left(&state)).unwrap_or_default())
}

fn left(state: &State) -> Vec<String> {
    let name = |name: &Option<String>| name.clone().unwrap_or_default();
    let jobs = state
        .jobs
        .iter()
        .map(|job| format!("Job {}", name(&job.metadata.name)));
    let pods = state
        .pods
        .iter()
        .map(|pod| format!("pod {}", name(&pod.metadata.name)));
    let secrets = state
        .secrets
        .iter()
        .map(|secret| name(&secret.metadata.name))
        .filter(|name| name != SETTINGS)
        .map(|name| format!("Secret {name}"));
    jobs.chain(pods).chain(secrets).collect()
}

/// One run, from its workspace to its end.
async fn drive(world: &World, run: Run) -> Result<Driven> {
    let mut driven = Driven {
        run,
        workspace: String::new(),
        jobs: Vec::new(),
        struck: run.strike.is_none(),
        weather: Weather::default(),
        let_in: Vec::new(),
    };
    if run.kind == Kind::BadData {
        driven.let_in = world.post_nonsense(run.number).await?;
        return Ok(driven);
    }
    world.begin(run.number);
    driven.workspace = world.platform.workspace(workspace(world, run)?);
    if run.kind == Kind::Destroy {
        let made = world.platform.start_job(NewJob::new(
            &driven.workspace,
            vec![Flow::new("terraformApply", 100)],
        ));
        driven.jobs.push(made);
        world.until_over(made).await;
    }
    match run.strike.map(Strike::moment) {
        Some(Moment::Fetch) => world.hold(run.number, Gate::Fetch)?,
        Some(Moment::Work | Moment::Report) => world.hold(run.number, Gate::Work)?,
        _ => {}
    }
    let turn = match run.strike {
        Some(strike) => world.before_dispatch(strike).await,
        None => None,
    };
    let new = NewJob::new(&driven.workspace, template(world, run));
    let job = world.platform.start_job(new);
    driven.jobs.push(job);
    let target = Target {
        run,
        job,
        phase: match run.kind {
            Kind::Scripts => "script",
            Kind::Destroy => "gone",
            _ => "second",
        },
    };
    let (struck, ()) = tokio::join!(
        async {
            match run.strike {
                Some(strike) => world.strike(strike, target).await,
                None => Ok(true),
            }
        },
        approve(world, run, job)
    );
    driven.struck = struck?;
    drop(turn);
    world.until_over(job).await;
    driven.weather = world.end(run.number);
    Ok(driven)
}

/// A person looks at the plan and approves.
async fn approve(world: &World, run: Run, job: u32) {
    if run.kind != Kind::Approved {
        return;
    }
    let status = || world.platform.job(job).status;
    let waits = || status() == Status::WaitingApproval || status().is_terminal();
    crate::world::until(SETTLE, waits).await;
    if status() == Status::WaitingApproval {
        world.platform.approve(job).await;
    }
}

fn workspace(world: &World, run: Run) -> Result<Workspace> {
    let folder = match run.kind {
        Kind::FailingPlan => "/wrong",
        Kind::BadFolder => "/nowhere",
        _ => "/good",
    };
    let mut workspace = Workspace {
        folder: Some(folder.to_owned()),
        ..Workspace::new(&world.source(run.number)?)
    }
    .with(Variable::env("RUN", &run.number.to_string()));
    if run.kind == Kind::FailingApply {
        workspace = workspace.with(Variable::env("FAIL", "second"));
    }
    if run.kind == Kind::BadSetting {
        workspace = workspace.with(Variable::env("EPHEMERAL_CPU_REQUEST", "a lot"));
    }
    Ok(workspace)
}

fn template(world: &World, run: Run) -> Vec<Flow> {
    let mut plan = Flow::new("terraformPlan", 100);
    plan.commands = json!([{
        "runtime": "BASH", "script": world.work("plan"), "priority": 100,
        "before": true, "after": false, "verbose": false, "beforeInit": false,
    }]);
    let apply = Flow::new("terraformApply", 200);
    match run.kind {
        Kind::PlanApply => vec![plan, apply],
        Kind::Approved => vec![plan, Flow::new("approval", 150), apply],
        Kind::FailingPlan => vec![Flow::new("terraformPlan", 100), apply],
        Kind::Destroy => vec![Flow::new("terraformDestroy", 100)],
        Kind::Scripts => {
            vec![Flow::new("customScripts", 100).with_script(&world.work("script"))]
        }
        _ => vec![apply],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing_apply(strike: Option<Strike>, store_was_away: bool) -> Driven {
        Driven {
            run: Run {
                number: 18,
                kind: Kind::FailingApply,
                strike,
            },
            workspace: String::new(),
            jobs: vec![1],
            struck: true,
            weather: Weather {
                store_was_away,
                ..Weather::default()
            },
            let_in: Vec::new(),
        }
    }

    #[test]
    fn an_apply_that_fails_owes_all_lines_unless_something_else_failed_it_before() {
        assert!(failing_apply(None, false).prints_all_although_it_fails());
        let without_store = failing_apply(None, true);
        assert_eq!(without_store.permitted(1), [Ending::Failed].into());
        assert!(!without_store.prints_all_although_it_fails());
        assert!(!failing_apply(Some(Strike::Evicted), false).prints_all_although_it_fails());
    }
}
