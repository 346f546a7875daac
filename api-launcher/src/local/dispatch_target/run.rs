//! One accepted run, from its start to its reported end. If a former launcher was interrupted, the step still runs once, or
//! its loss is reported.

use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use job_contract::report::FinalReport;
use job_contract::status::{JobStatus, StepStatus};
use job_contract::{Document, Exit, chain};
use platform::StepRef;
use runtime::tree_removal;
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{error, info, warn};

use super::journal::RunOutcome;
use super::queue::RunKey;
use super::settings::RunsOnStop;
use super::{Inner, RunSlot, blocking, now};
use crate::dispatch::has_nothing_to_run;
use crate::local::detached::{DetachedExecutor, StartError, kill_after};
use crate::local::environment::Platform;
use crate::local::executor::{self, tree};
use crate::local::run_folder::RunFolder;
use crate::reporter::{ReportError, StepState};

/// How often the platform is asked whether the job was cancelled.
const CANCEL_POLL: Duration = Duration::from_secs(2);
/// How long a run waits after an error of the launcher, such as a full disk.
const RETRY: Duration = Duration::from_secs(30);
/// How long a run waits after each refusal of the platform in a row. A load balancer may refuse a few requests wrongly. The
/// next refusal drops the run.
const REFUSAL_PAUSES: [Duration; 3] = [
    Duration::from_secs(2),
    Duration::from_secs(10),
    Duration::from_secs(30),
];
/// How long a step waits after its executor failed before it claimed the step, and how often the executor is started again:
/// as often as a pod.
const PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];

/// The line in the log of a step whose success the launcher reports.
const DONE: &str =
    "The step was done. Its executor could not report it to the platform, so the launcher did.";

/// How following an executor ended.
enum FollowEnd {
    Ended(Option<ExitStatus>),
    /// The launcher stops and leaves the executor running.
    Left,
}

/// How far an earlier attempt brought the run.
enum RunProgress {
    /// The step has an outcome, or the job is over.
    Over(StepState),
    /// An executor of a former launcher runs.
    Running(DetachedExecutor),
    /// An executor had claimed the step and is gone.
    Lost,
    Fresh,
}

/// Runs a step to its end and removes it from the queue. After an error the run is queued again, unless the platform refused
/// it too often in a row.
pub(super) async fn run_to_end(slot: RunSlot, key: RunKey) {
    let inner = Arc::clone(&slot.inner);
    let failure = match attempt(&inner, &key).await {
        Ok(Some(Over { state, end })) => {
            inner.metrics.finished(state.step == StepStatus::Completed);
            let is_done = state.step == StepStatus::Completed;
            let (exit, reason) = end.unzip();
            let outcome = RunOutcome {
                status: Some(state.step),
                exit_code: exit.map(Exit::code),
                reason: reason.filter(|_| !is_done),
            };
            inner.journal.ended(&key, outcome).await;
            finish(&inner, &key).await;
            drop(slot);
            info!(run = %key, job_status = %state.job, step_status = ?state.step, "a run has ended");
            return;
        }
        Ok(None) => {
            info!(run = %key, "a run goes on without this launcher");
            return;
        }
        Err(failure) => failure,
    };
    let Some(pause) = retry_pause(&inner, &key, &failure) else {
        error!(run = %key, error = chain(&failure), "the platform refuses every request about a run: the run is dropped");
        inner.metrics.finished(false);
        let outcome = RunOutcome {
            reason: Some(chain(&failure)),
            ..RunOutcome::default()
        };
        inner.journal.ended(&key, outcome).await;
        finish(&inner, &key).await;
        return;
    };
    drop(slot);
    inner.journal.failed(&key, &chain(&failure));
    inner.stop_late_heartbeat(&key);
    error!(run = %key, error = chain(&failure), "a run could not be continued; it is tried again");
    tokio::select! {
        () = inner.shutdown.graceful.cancelled() => {}
        () = tokio::time::sleep(pause) => {
            inner.index().admit(now(), key);
            inner.wake.notify_one();
        }
    }
}

/// Returns how long a run waits before its next attempt, or `None` if there is no next attempt.
fn retry_pause(inner: &Inner, key: &RunKey, failure: &RunError) -> Option<Duration> {
    let mut refusals = inner.refusals();
    if !failure.is_refusal() {
        refusals.remove(key);
        return Some(RETRY);
    }
    let count = refusals.entry(key.clone()).or_default();
    let pause = REFUSAL_PAUSES.get(*count).copied();
    *count += 1;
    pause
}

async fn finish(inner: &Inner, key: &RunKey) {
    inner.beats().remove(key);
    inner.refusals().remove(key);
    let (queue, name) = (inner.queue.clone(), key.clone());
    if let Err(failure) = blocking(move || queue.finish(&name, now())).await {
        error!(run = %key, error = chain(&failure), "a finished run could not be removed from the queue");
    }
}

/// Why a run could not be carried to its end.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error("the accepted document cannot be read")]
    Entry(#[source] std::io::Error),
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error("could not wait for the executor")]
    Wait(#[source] std::io::Error),
}

impl RunError {
    /// Whether the platform refused a request about the run, for example because it has removed the job.
    fn is_refusal(&self) -> bool {
        matches!(self, Self::Report(error) if error.is_final())
    }
}

/// A run that has ended.
struct Over {
    state: StepState,
    /// How its executor ended, with what to tell people.
    end: Option<(Exit, String)>,
}

impl From<StepState> for Over {
    fn from(state: StepState) -> Self {
        Self { state, end: None }
    }
}

async fn attempt(inner: &Inner, key: &RunKey) -> Result<Option<Over>, RunError> {
    let job = inner.queue.load(key).map_err(RunError::Entry)?;
    let folder = RunFolder::new(inner.queue.run_folder(key));
    let step = StepRef::of(&job);
    inner.reporter.mark_queued(&job)?;
    if inner.reporter.completes_empty_steps() && has_nothing_to_run(&job) {
        inner.reporter.complete_empty_step(&job).await?;
        return Ok(Some(inner.reporter.step_state(&step).await?.into()));
    }
    let mut pauses = PAUSES.into_iter();
    loop {
        let mut running = match start_or_find(inner, key, &folder, &job).await? {
            StartOutcome::Executor(executor) => executor,
            StartOutcome::Over(state) => return Ok(Some(state.into())),
        };
        inner.journal.started(key, &folder, running.id());
        let FollowEnd::Ended(status) = follow(inner, key, &step, &mut running).await? else {
            return Ok(None);
        };
        tree::kill_leftovers(&folder.work()).await;
        inner.mark_ended(key);
        let report = inner.verifier.read_report(&folder, status);
        let report = report.as_ref();
        let end = end_of(report, status);
        if matches!(end, Some((Exit::Infrastructure, _))) {
            // The next start of the launcher runs the step.
            if inner.shutdown.graceful.is_cancelled() {
                return Ok(None);
            }
            if !inner.reporter.is_claimed(&step).await?
                && let Some(pause) = pauses.next()
            {
                inner.mark_restarted(key);
                inner.journal.failed(key, &failure_reason(report, end));
                warn!(run = %key, "infrastructure failed before the step was taken: it is started again");
                tokio::select! {
                    () = inner.shutdown.graceful.cancelled() => return Ok(None),
                    () = tokio::time::sleep(pause) => continue,
                }
            }
        }
        let exit = end.as_ref().map_or(Exit::Defect, |(exit, _)| *exit);
        let told = Some((exit, failure_reason(report, end.clone())));
        let state = report_end(inner, &folder, &step, report, end).await?;
        return Ok(Some(Over { state, end: told }));
    }
}

/// What starting a run came to.
enum StartOutcome {
    Executor(DetachedExecutor),
    /// There is nothing to run. The step has this state.
    Over(StepState),
}

/// Returns the executor of a run, and starts one unless it runs already or must not run again.
async fn start_or_find(
    inner: &Inner,
    key: &RunKey,
    folder: &RunFolder,
    job: &Document,
) -> Result<StartOutcome, RunError> {
    let step = StepRef::of(job);
    let progress = find_progress(inner, folder, &step).await?;
    let report = || inner.verifier.read_report(folder, None);
    match progress {
        RunProgress::Over(state) if state.has_outcome() => {
            finish_report(inner, folder, &step, report().as_ref()).await?;
        }
        RunProgress::Over(_) => inner.reporter.mark_not_executed(&step)?,
        RunProgress::Lost
            if matches!(end_of(report().as_ref(), None), Some((Exit::Claimed, _))) =>
        {
            leave_to_holder(&step);
        }
        RunProgress::Lost => {
            let reason = "The executor of this step was lost while no launcher watched it, after it had \
                          taken the step. It is not run again: what it was changing may exist without being \
                          in the state. Plan again before anything else.";
            report_for_executor(inner, folder, &step, report().as_ref(), reason).await?;
        }
        RunProgress::Running(executor) => {
            info!(run = %key, "found the executor of a former launcher at work");
            return Ok(StartOutcome::Executor(executor));
        }
        RunProgress::Fresh => match start_executor(inner, key, folder, job) {
            Ok(executor) => return Ok(StartOutcome::Executor(executor)),
            Err(failure) => {
                inner.metrics.start_failed();
                error!(run = %key, error = chain(&failure), "an executor could not be started");
                let reason = format!("The executor could not be started: {}.", chain(&failure));
                inner
                    .reporter
                    .report_failure_with_log(&step, &reason, &folder.log())
                    .await?;
            }
        },
    }
    Ok(StartOutcome::Over(inner.reporter.step_state(&step).await?))
}

/// How an executor ended, and why if its report does not say it.
type End = (Exit, Option<String>);

fn end_of(report: Option<&FinalReport>, status: Option<ExitStatus>) -> Option<End> {
    let Some(status) = status else {
        return Some((Exit::from_code(report?.outcome.into())?, None));
    };
    Some(executor::judge(executor::Ended {
        status,
        stopped_by: None,
    }))
}

async fn find_progress(
    inner: &Inner,
    folder: &RunFolder,
    step: &StepRef,
) -> Result<RunProgress, ReportError> {
    if let Some(executor) = DetachedExecutor::find(folder) {
        return Ok(RunProgress::Running(executor));
    }
    tree::kill_leftovers(&folder.work()).await;
    let state = inner.reporter.step_state(step).await?;
    if state.has_outcome() || matches!(state.job, JobStatus::Cancelled | JobStatus::Failed) {
        return Ok(RunProgress::Over(state));
    }
    Ok(if inner.reporter.is_claimed(step).await? {
        RunProgress::Lost
    } else {
        RunProgress::Fresh
    })
}

/// Starts an executor. First removes what an interrupted start left.
fn start_executor(
    inner: &Inner,
    key: &RunKey,
    folder: &RunFolder,
    job: &Document,
) -> Result<DetachedExecutor, StartError> {
    tree_removal::remove(&inner.queue.run_folder(key)).map_err(StartError::Folder)?;
    let executor = DetachedExecutor::start(
        folder,
        &inner.program,
        &inner.data,
        if inner.reporter.executors_use_api() {
            Platform::Terrakube
        } else {
            Platform::Machine
        },
        inner.verifier.secret_of(folder),
        job,
    )?;
    info!(
        run = %key,
        step_type = job.step_type,
        organization_id = job.organization_id,
        workspace_id = job.workspace_id,
        "started an executor"
    );
    Ok(executor)
}

/// Waits for the end of the executor. Stops it if the job is cancelled or the launcher stops.
async fn follow(
    inner: &Inner,
    key: &RunKey,
    step: &StepRef,
    executor: &mut DetachedExecutor,
) -> Result<FollowEnd, RunError> {
    let mut poll = tokio::time::interval(CANCEL_POLL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut stop_requested: Option<Instant> = None;
    loop {
        let kill_at = stop_requested.map_or_else(Instant::now, |at| at + kill_after());
        tokio::select! {
            biased;
            ended = executor.ended() => {
                return ended.map(FollowEnd::Ended).map_err(RunError::Wait);
            }
            () = inner.shutdown.immediate.cancelled() => return Ok(FollowEnd::Left),
            () = inner.shutdown.graceful.cancelled(), if stop_requested.is_none() => {
                if inner.on_stop == RunsOnStop::Leave {
                    return Ok(FollowEnd::Left);
                }
                warn!(run = %key, "the launcher stops: asked the executor to stop too");
                executor.terminate();
                stop_requested = Some(Instant::now());
            }
            () = tokio::time::sleep_until(kill_at), if stop_requested.is_some() => {
                warn!(run = %key, "the executor did not stop: killed it");
                executor.kill();
                stop_requested = Some(Instant::now());
            }
            // Executors that use the platform's API notice a cancellation themselves.
            _ = poll.tick(), if stop_requested.is_none() && !inner.reporter.executors_use_api() => {
                let state = inner.reporter.step_state(step).await;
                if state.is_ok_and(|state| state.job == JobStatus::Cancelled) {
                    info!(run = %key, "the job was cancelled: asked the executor to stop");
                    executor.terminate();
                    stop_requested = Some(Instant::now());
                }
            }
        }
    }
}

/// Reports the end of a step, unless its executor did.
async fn report_end(
    inner: &Inner,
    folder: &RunFolder,
    step: &StepRef,
    report: Option<&FinalReport>,
    end: Option<End>,
) -> Result<StepState, RunError> {
    let state = inner.reporter.step_state(step).await?;
    if state.has_outcome() {
        finish_report(inner, folder, step, report).await?;
        return Ok(inner.reporter.step_state(step).await?);
    }
    // The platform repeats a dispatch that it did not record. This run is then tried again.
    if inner.reporter.awaits_dispatch(&state) {
        return Err(ReportError::NotDispatched(state.job).into());
    }
    match end {
        // Another executor has claimed the step and reports its outcome.
        Some((Exit::Claimed, _)) => {
            leave_to_holder(step);
            return Ok(state);
        }
        Some((Exit::Done, _)) if state.job.is_over() => inner.reporter.mark_not_executed(step)?,
        end => {
            report_for_executor(inner, folder, step, report, &failure_reason(report, end)).await?;
        }
    }
    Ok(inner.reporter.step_state(step).await?)
}

/// Gives the job the outcome of its step, if it lacks it.
async fn finish_report(
    inner: &Inner,
    folder: &RunFolder,
    step: &StepRef,
    report: Option<&FinalReport>,
) -> Result<(), ReportError> {
    if let Some(report) = report.filter(|report| report.is_unreported_success())
        && inner
            .reporter
            .is_half_reported_success(step, report)
            .await?
    {
        return inner
            .reporter
            .report_success_with_log(step, report, DONE, &folder.log())
            .await;
    }
    inner.reporter.finish_report(step).await
}

fn leave_to_holder(step: &StepRef) {
    warn!(
        job_id = step.job_id,
        step_id = step.step_id,
        "another executor holds the step"
    );
}

/// Fails the step, unless its executor left a report of its success.
async fn report_for_executor(
    inner: &Inner,
    folder: &RunFolder,
    step: &StepRef,
    report: Option<&FinalReport>,
    reason: &str,
) -> Result<(), ReportError> {
    let Some(report) = report.filter(|report| report.is_unreported_success()) else {
        return inner
            .reporter
            .report_failure_with_log(step, reason, &folder.log())
            .await;
    };
    if inner.reporter.step_state(step).await?.job.is_over() {
        return inner.reporter.mark_not_executed(step);
    }
    inner
        .reporter
        .report_success_with_log(step, report, DONE, &folder.log())
        .await
}

fn failure_reason(report: Option<&FinalReport>, end: Option<End>) -> String {
    let said = report.and_then(|report| report.error.clone());
    let (exit, complaint) = end.unwrap_or((Exit::Defect, None));
    let cause = said.or(complaint).unwrap_or_else(|| match exit {
        Exit::Done => "the executor ended without a report of the step's outcome".to_owned(),
        Exit::Defect => "the executor was lost".to_owned(),
        exit => exit.to_string(),
    });
    format!("The step has failed: {cause}.")
}
