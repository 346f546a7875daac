//! One step from top to bottom: prepare, run the operation or the scripts, conclude. This page shows the order of the
//! phases. The last phase runs whatever the others returned.

use std::time::Duration;

use job_contract::report::StopReason;
use job_contract::{Exit, JobData, StepType, chain};
use platform::{Platform, RunEnd, RunResult, StepRef};
use run_log::LogWriter;
use runtime::reaper;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use crate::config::{Config, Folders};
use crate::connections::Connections;
use crate::context::RunContext;
use crate::error::{StepError, catch_panic};
use crate::final_report::FinishedRun;
use crate::job::JobError;
use crate::last_deadline::LastDeadline;
use crate::limit_watch::{self, LimitWatch};
use crate::phases::ask_permission::{StartDecision, ask_permission};
use crate::phases::claim_step::claim_to_report;
use crate::phases::conclude::conclude;
use crate::phases::report_rejection::{end_unreported, reject_run};
use crate::phases::run_scripts::run_script_step;
use crate::pipeline::prepare::{PreparedStep, prepare};
use crate::pipeline::run_operation::run_operation;
use crate::step_result::StepResult;
use crate::stop::{Budget, Cause, Stop};

mod prepare;
mod run_operation;

/// Runs the step and returns its report. The report determines the exit code of the process.
pub(crate) async fn run(
    config: &Config,
    job: JobData,
    stop: Stop,
    deadline: &LastDeadline,
) -> FinishedRun {
    let (folders, connections) = match open_connections(config, &job) {
        Ok(opened) => opened,
        Err(failure) => return reject_unconnected(config, &job, &failure, &stop).await,
    };
    // The heartbeat lasts from the start until the platform has the outcome.
    let heartbeat = job
        .validate()
        .ok()
        .and_then(|()| connections.heartbeat(&job.job_id));
    let grace = config
        .run
        .grace_period(job.step_type().unwrap_or(StepType::Approval));
    let run = run_connected(config, folders, &connections, job, stop.clone());
    let finished = Box::pin(run).await;
    deadline.set_exit_code(finished.exit_code(config));
    end_task(config, &connections, &finished, &stop, grace).await;
    match heartbeat {
        Some(heartbeat) if finished.reported => heartbeat.stop().await,
        // Another executor that runs the step, now or later, sends heartbeats for the same job.
        Some(heartbeat) => heartbeat.leave(),
        None => {}
    }
    finished
}

/// Reports job data that cannot be run, if they identify the step.
pub(crate) async fn reject(config: &Config, failure: JobError, stop: &Stop) -> FinishedRun {
    let (job, error) = (&failure.identity, &failure.error);
    if failure.is_foreign {
        return end_unreported(job, error);
    }
    match open_connections(config, job) {
        Ok((_, connections)) => reject_and_end(config, &connections, job, error, stop).await,
        // The error in the document is reported, because it occurs in every environment.
        Err(_) => reject_unconnected(config, job, error, stop).await,
    }
}

/// Reports through the API alone. That works if only Redis or a folder is configured wrongly.
async fn reject_unconnected(
    config: &Config,
    job: &JobData,
    failure: &StepError,
    stop: &Stop,
) -> FinishedRun {
    match Connections::to_api(config, job) {
        Some(connections) => reject_and_end(config, &connections, job, failure, stop).await,
        None => end_unreported(job, failure),
    }
}

async fn reject_and_end(
    config: &Config,
    connections: &Connections,
    job: &JobData,
    failure: &StepError,
    stop: &Stop,
) -> FinishedRun {
    let finished = reject_run(config, connections, job, failure, stop).await;
    let grace = config.run.grace_period(StepType::Approval);
    end_task(config, connections, &finished, stop, grace).await;
    finished
}

/// Reports the end of the run to the hub. If that fails, the agent reports it.
async fn end_task(
    config: &Config,
    connections: &Connections,
    finished: &FinishedRun,
    stop: &Stop,
    grace: Duration,
) {
    let report = &finished.report;
    let end = RunEnd {
        result: match report.stopped {
            Some(StopReason::Cancelled) => RunResult::Cancelled,
            _ if report.outcome == Exit::Done.code() => RunResult::Completed,
            _ => RunResult::Failed,
        },
        exit_code: finished.exit_code(config),
        diagnostic: report.error.clone().unwrap_or_default(),
        reported: finished.reported,
        report: report.for_hub(),
    };
    let deadline = connections.deadline(stop, Budget::of(grace).end);
    if let Err(error) = connections.platform.end(&end, &deadline).await {
        warn!(
            error = chain(&error),
            "the end of the run could not be reported to the hub"
        );
    }
}

fn open_connections(config: &Config, job: &JobData) -> Result<(Folders, Connections), StepError> {
    config.check_records()?;
    let folders = config.folders(std::env::var_os("HOME"))?;
    let connections = Connections::open(config, &folders, job)?;
    Ok((folders, connections))
}

async fn run_connected(
    config: &Config,
    folders: Folders,
    connections: &Connections,
    job: JobData,
    stop: Stop,
) -> FinishedRun {
    let opened = RunContext::open(
        config,
        folders,
        connections.clone(),
        job.clone(),
        stop.clone(),
    );
    let run = match opened {
        Ok(run) => run,
        Err(failure) => return reject_run(config, connections, &job, &failure, &stop).await,
    };
    let running = async { Ok(Box::pin(execute_and_conclude(run)).await) };
    let finished = catch_panic(running).await;
    // The launcher or the hub reports it.
    finished.unwrap_or_else(|panicked| end_unreported(&job, &panicked))
}

/// Runs the step, and ends everything that it has started.
async fn execute_and_conclude(run: RunContext<'_>) -> FinishedRun {
    let limit_watch = tokio::spawn(limit_watch::watch(LimitWatch::of(&run)));
    let result = catch_panic(async { Ok(Box::pin(execute(&run)).await) })
        .await
        .unwrap_or_else(|panicked| StepResult::failed(&panicked));
    // Concluding needs no limits. It writes no log lines, its memory does not grow, and each of its waits has a
    // timeout. The timeouts are far below the time between the executor's deadline and its Job's. If the Job's deadline
    // comes nevertheless, its signal shortens the waits.
    limit_watch.abort();
    // What scripts left in the background ends with the run, before the platform hears of the end and starts the next step.
    let left = tokio::task::spawn_blocking(reaper::kill_descendants).await;
    if let Ok(processes) = left
        && processes > 0
    {
        warn!(
            processes,
            "processes that the run has started could not be killed"
        );
    }
    if let Some(references) = &run.references {
        let giving_back = async {
            references.finish().await;
            Ok(())
        };
        // The state is stored, and the outcome is still to be reported.
        let _ = catch_panic(giving_back).await;
    }
    Box::pin(conclude(run, result)).await
}

/// Runs the step. Every early return is a result, so that the run is always concluded.
async fn execute(run: &RunContext<'_>) -> StepResult {
    let view = match ask_permission(run).await {
        Ok(StartDecision::Start(view)) => view,
        Ok(StartDecision::DoNotStart(result)) => return *result,
        Err(failure) => return fail_before_claim(run, &failure).await,
    };
    let _watch = AbortOnDropHandle::new(tokio::spawn(stop_when_cancelled(
        run.connections.platform.clone(),
        run.step.clone(),
        run.stop.clone(),
        run.log.writer(),
    )));
    let _lease_watch = AbortOnDropHandle::new(tokio::spawn(stop_when_cut_off(
        run.connections.platform.clone(),
        run.budget.tool,
        run.stop.clone(),
        run.log.writer(),
    )));
    match Box::pin(prepare(run, &view)).await {
        Ok(PreparedStep::Operation(prepared)) => Box::pin(run_operation(run, &prepared)).await,
        Ok(PreparedStep::Scripts(workspace, tool)) => {
            run_script_step(run, &workspace, tool.as_ref()).await
        }
        Ok(PreparedStep::NotRun(result)) => *result,
        Err(failure) => {
            run.log_error(Some(&failure.to_string()), failure.hint().as_deref())
                .await;
            fail_before_claim(run, &failure).await
        }
    }
}

/// Gives the stop order once the platform's job is over. An executor gets no other notice (contract 11.4).
async fn stop_when_cancelled(platform: Platform, running: StepRef, stop: Stop, log: LogWriter) {
    let status = platform.cancelled(&running).await;
    let cause = Cause::Cancelled;
    warn!(%status, "the job is over: interrupting tool and scripts, then storing results");
    stop.order(cause);
    log.line(&format!("mayfly: {cause}")).await;
}

/// Gives the stop order if the hub of the run does not answer, before the hub can have given the run up. Otherwise the tool would
/// still work while another run has the workspace. `stopping` is the time that the tool gets.
async fn stop_when_cut_off(platform: Platform, stopping: Duration, stop: Stop, log: LogWriter) {
    let cause = Cause::CutOff(platform.cut_off(stopping).await);
    if stop.given().is_some() {
        return;
    }
    warn!("{cause}: interrupting tool and scripts, then storing results");
    stop.order(cause);
    log.line(&format!("mayfly: {cause}")).await;
}

/// Reports a step that failed before its claim. The executor must get the claim for that, because another executor may
/// be running the step.
async fn fail_before_claim(run: &RunContext<'_>, failure: &StepError) -> StepResult {
    let result = result_before_claim(run, failure);
    if !result.must_report {
        return result;
    }
    match claim_to_report(&run.connections.platform, run.config, &run.job).await {
        Ok(None) => {
            if let Err(error) = run.open_live_log(true) {
                warn!(%error, "the run's log cannot be followed");
            }
            result
        }
        Ok(Some(not_run)) => not_run,
        Err(error) => {
            warn!(
                error = chain(&error),
                "the step cannot be claimed, so its failure is not reported"
            );
            StepResult {
                must_report: false,
                ..result
            }
        }
    }
}

/// The result of a step that failed before its claim, so that nothing has been changed. A failure of the environment,
/// or a stop by a signal, leaves the step to another executor: a report would end the job and prevent a retry. Some
/// launchers do not read exit codes. Under these, only a stopped executor stays silent, because every launcher replaces
/// its pod.
fn result_before_claim(run: &RunContext<'_>, failure: &StepError) -> StepResult {
    let result = StepResult {
        commit_id: run.commit_id.get().cloned().unwrap_or_default(),
        ..StepResult::failed(failure)
    };
    if result.exit != Exit::Infrastructure {
        return result;
    }
    match run.stop.given().map(|order| order.cause) {
        Some(Cause::Signal(signal)) => StepResult {
            error: Some(format!(
                "stopped by signal {signal} before anything was started"
            )),
            hint: None,
            must_report: false,
            ..result
        },
        // The platform itself has ended the step.
        Some(cause @ Cause::Cancelled) => StepResult::not_run(Exit::Done, cause.to_string()),
        Some(cause) => StepResult {
            exit: cause.exit(),
            error: Some(cause.to_string()),
            hint: cause.hint().map(str::to_owned),
            stopped: Some(cause.reason()),
            ..result
        },
        None => StepResult {
            must_report: !run.config.run.outcome_exit_code,
            ..result
        },
    }
}
