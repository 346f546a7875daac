//! One step, top to bottom: prepare, run the phases, conclude. Each has a module of its own; this is the page
//! that shows how they follow one another, and that the tail happens whatever became of the rest.

use job_contract::progress::Phase;
use job_contract::report::{LockStanding, ToolRecord};
use job_contract::settlement::{self, Ending};
use job_contract::status::StepStatus;
use job_contract::{Exit, JobData, StepType, chain};
use platform::PlanReference;
use platform::{Platform, StepRef};
use run_log::LogWriter;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use crate::Ended;
use crate::config::Config;
use crate::connections::Connections;
use crate::context::RunContext;
use crate::error::{StepError, catch_panic};
use crate::job::JobError;
use crate::last_deadline::LastDeadline;
use crate::limit_watch::{self, LimitWatch};
use crate::operation::{self, Operated, Prepared, joined, scripts_in};
use crate::phases::conclude::{self, StepResult};
use crate::preparation::{self, Readiness};
use crate::scripts::{self, Moment};
use crate::stop::{Cause, Stop};
use crate::tool::ResolvedTool;
use crate::workspace::Workspace;

/// Runs the step and returns its report. The exit code of the process follows from it.
pub async fn run(config: &Config, job: JobData, stop: Stop, deadline: &LastDeadline) -> Ended {
    let connections = match open_connections(config) {
        Ok(connections) => connections,
        Err(failure) => return refuse_unconnected(config, &job, &failure, &stop).await,
    };
    // From the first moment, and until the platform has been told how it ended.
    let heartbeat = job
        .validate()
        .ok()
        .and_then(|()| connections.heartbeat(&job.job_id));
    let ended = run_connected(config, &connections, job, stop).await;
    deadline.settle(ended.code(config));
    match heartbeat {
        Some(heartbeat) if ended.reported => heartbeat.stop().await,
        // Whoever runs the step now, or next, beats for the same job.
        Some(heartbeat) => heartbeat.leave(),
        None => {}
    }
    ended
}

/// Reports job data that cannot be run, if it says whose it is.
pub(crate) async fn refuse(config: &Config, failure: JobError, stop: &Stop) -> Ended {
    let whose = match &failure {
        JobError::Undecodable {
            whose: Some(whose), ..
        } => whose.as_ref().clone(),
        _ => JobData::default(),
    };
    let failure = StepError::from(failure);
    match open_connections(config) {
        Ok(connections) => conclude::refuse(config, &connections, &whose, &failure, stop).await,
        // What is wrong with the document is found in every environment.
        Err(_) => refuse_unconnected(config, &whose, &failure, stop).await,
    }
}

/// Where only Redis, or a folder, is set wrongly, the platform can still be told.
async fn refuse_unconnected(
    config: &Config,
    job: &JobData,
    failure: &StepError,
    stop: &Stop,
) -> Ended {
    match Connections::to_api(config) {
        Some(connections) => conclude::refuse(config, &connections, job, failure, stop).await,
        None => conclude::unreported(job, failure),
    }
}

fn open_connections(config: &Config) -> Result<Connections, StepError> {
    config.check_records()?;
    let folders = config.folders(std::env::var_os("HOME"))?;
    Connections::open(config, &folders)
}

async fn run_connected(
    config: &Config,
    connections: &Connections,
    job: JobData,
    stop: Stop,
) -> Ended {
    let run = match RunContext::open(config, connections.clone(), job.clone(), stop.clone()) {
        Ok(run) => run,
        Err(failure) => return conclude::refuse(config, connections, &job, &failure, &stop).await,
    };
    let limit_watch = tokio::spawn(limit_watch::watch(LimitWatch::of(&run)));
    let result = catch_panic(async { Ok(Box::pin(execute(&run)).await) })
        .await
        .unwrap_or_else(|panicked| StepResult::failed(&panicked));
    // The tail needs no guard. Nothing is heard of it, nothing in it grows, and each of its waits has a limit of its own
    // that is far below what lies between the executor's deadline and its Job's. Should that come all the same, its
    // signal hurries whatever is left.
    limit_watch.abort();
    conclude::conclude(run, result).await
}

/// The step itself. Every early return is a result, so that the tail of the run happens whatever it is.
async fn execute(run: &RunContext<'_>) -> StepResult {
    let view = match preparation::admit(run).await {
        Ok(Ok(view)) => view,
        Ok(Err(result)) => return result,
        Err(failure) => return before_claim(run, &failure).await,
    };
    let _watch = AbortOnDropHandle::new(tokio::spawn(stop_when_cancelled(
        run.connections.platform.clone(),
        run.step.clone(),
        run.stop.clone(),
        run.log.writer(),
    )));
    match Box::pin(preparation::prepare(run, &view)).await {
        Ok(Readiness::Ready(prepared)) => Box::pin(operate(run, *prepared)).await,
        Ok(Readiness::Scripts(workspace, tool)) => {
            script_step(run, &workspace, tool.as_ref()).await
        }
        Ok(Readiness::NotOurs(result)) => *result,
        Err(failure) => {
            tell(run, &failure).await;
            before_claim(run, &failure).await
        }
    }
}

/// Gives the stop order once the platform's job is over: nothing else tells an executor (contract 11.4).
async fn stop_when_cancelled(platform: Platform, running: StepRef, stop: Stop, log: LogWriter) {
    let status = platform.cancelled(&running).await;
    let cause = Cause::Cancelled;
    warn!(%status, "the job is over: interrupting what runs, then storing what there is");
    stop.order(cause);
    log.line(&format!("mayfly: {cause}")).await;
}

/// A step that fails before it was claimed is reported only by whoever is granted the claim now: another executor may be
/// in the middle of it.
async fn before_claim(run: &RunContext<'_>, failure: &StepError) -> StepResult {
    let result = judged(run, failure);
    if !result.reported {
        return result;
    }
    match preparation::claim_to_report(&run.connections.platform, run.config, &run.job).await {
        Ok(None) => result,
        Ok(Some(not_ours)) => not_ours,
        Err(error) => {
            warn!(
                error = chain(&error),
                "the step cannot be claimed, so its failure is not reported"
            );
            StepResult {
                reported: false,
                ..result
            }
        }
    }
}

/// Nothing has been changed yet. What only failed around the step, or was stopped by a signal, is for another executor
/// to do: a report would end the job and leave nothing to try again. Under a launcher that does not read exit codes
/// only a stopped executor is silent; its pod is replaced by any.
fn judged(run: &RunContext<'_>, failure: &StepError) -> StepResult {
    let result = StepResult::failed(failure);
    if result.exit != Exit::Infrastructure {
        return result;
    }
    match run.stop.given().map(|order| order.cause) {
        Some(Cause::Signal(signal)) => StepResult {
            error: Some(format!(
                "stopped by signal {signal} before anything was started"
            )),
            hint: None,
            reported: false,
            ..result
        },
        // The platform has ended the step itself.
        Some(cause @ Cause::Cancelled) => StepResult::not_ours(Exit::Done, cause.to_string()),
        Some(cause) => StepResult {
            exit: cause.exit(),
            error: Some(cause.to_string()),
            hint: cause.hint().map(str::to_owned),
            stopped: Some(cause.reason()),
            ..result
        },
        None => StepResult {
            reported: !run.config.run.outcome_exit_code,
            ..result
        },
    }
}

async fn operate(run: &RunContext<'_>, prepared: Prepared) -> StepResult {
    let operated = catch_panic(async { Ok(Box::pin(operation::run(run, &prepared)).await) }).await;
    let operated = operated.unwrap_or_else(|panicked| Operated {
        error: Some(panicked),
        ..Operated::ended(Ending::Failure)
    });
    if operated.step_has_ended {
        return preparation::step_has_ended(run);
    }
    // Whether the step failed does not depend on the template, only what becomes of the job does.
    let settlement = settlement::settle(
        run.step_type,
        operated.ending,
        operated.after_ok,
        run.job.ignore_error,
        2,
    );
    let failed = settlement.step == StepStatus::Failed;
    let is_plan = matches!(run.step_type, StepType::Plan | StepType::PlanDestroy);
    let result = StepResult {
        // What fails after the claim is the step's own failure, unless we are at fault.
        exit: match &operated.error {
            Some(error) if error.exit() == Exit::Defect => Exit::Defect,
            _ if failed => Exit::StepFailed,
            _ => Exit::Done,
        },
        ending: operated.ending,
        after_ok: operated.after_ok,
        changes: operated.changes,
        history: operated.history,
        plan: match operated.plan {
            // A plan whose after-scripts failed is recorded for people. Its job has failed, so no step can apply it.
            Some(reference) if !failed || !operated.after_ok => PlanReference::Set(reference),
            _ if is_plan => PlanReference::Clear,
            _ => PlanReference::Keep,
        },
        commit_id: prepared.workspace.commit_id.clone(),
        tool: Some(ToolRecord {
            name: prepared.tool.tool,
            version: prepared.tool.version.to_string(),
        }),
        hint: operated.error.as_ref().and_then(StepError::hint),
        error: operated.error.as_ref().map(ToString::to_string),
        stopped: None,
        account: operated.account,
        reported: true,
    };
    let result = with_account(run, stopped_or(run, result));
    if let (Some(_), Some(failure)) = (result.stopped, &operated.error) {
        // It may have failed for a reason of its own before it was stopped.
        tell(run, failure).await;
    }
    say(run, result.error.as_deref(), result.hint.as_deref()).await;
    result
}

/// How an operation that failed ended, how far it came, and what became of the state, in one sentence.
fn with_account(run: &RunContext<'_>, mut result: StepResult) -> StepResult {
    let account = &result.account;
    if result.exit == Exit::Done {
        return result;
    }
    let met = matches!(&account.lock, Some(lock) if lock.standing == LockStanding::InTheWay);
    // How a tool ended that met a lock says nothing that the lock does not.
    let end = account
        .end
        .clone()
        .filter(|_| !met || account.progress.is_some());
    let error = joined(
        [result.error.clone().or(end), account.sentence.clone()],
        ": ",
    );
    let hint = joined([account.hint.clone(), result.hint.clone()], "; ");
    // An address may hold a key that is a secret somewhere else.
    let redactor = run.log.redactor();
    if let Some(progress) = &mut result.account.progress {
        for address in progress.failed.iter_mut().chain(&mut progress.unfinished) {
            *address = redactor.redact(address).into_owned();
        }
    }
    StepResult {
        error: error.map(|error| redactor.redact(&error).into_owned()),
        hint,
        ..result
    }
}

/// `customScripts` and `approval`: every command in the clone root, by priority.
async fn script_step(
    run: &RunContext<'_>,
    workspace: &Workspace,
    tool: Option<&ResolvedTool>,
) -> StepResult {
    let mut env = run.env.clone();
    let commands = scripts::select(&run.job.command_list, Moment::Always);
    let scripts = scripts_in(run, &workspace.root, tool);
    let work = async {
        for (name, value) in &workspace.environment {
            env.set(name, value)?;
        }
        Ok::<_, StepError>(scripts.run(&commands, &mut env, "").await?)
    };
    let done = run
        .timer
        .time(Phase::Scripts, catch_panic(work), |done| {
            matches!(done, Ok(true))
        })
        .await;
    let failure = match done {
        Ok(ok) => {
            let (exit, ending) = if ok {
                (Exit::Done, Ending::Success)
            } else {
                (Exit::StepFailed, Ending::Failure)
            };
            return stopped_or(
                run,
                StepResult {
                    commit_id: workspace.commit_id.clone(),
                    ..StepResult::new(exit, ending)
                },
            );
        }
        Err(failure) => failure,
    };
    tell(run, &failure).await;
    let exit = if failure.exit() == Exit::Defect {
        Exit::Defect
    } else {
        Exit::StepFailed
    };
    StepResult {
        exit,
        commit_id: workspace.commit_id.clone(),
        ..StepResult::failed(&failure)
    }
}

/// A step that failed under a stop order failed because of it. One that was done anyway is done.
fn stopped_or(run: &RunContext<'_>, result: StepResult) -> StepResult {
    match run.stop.given() {
        Some(order) if result.exit == Exit::StepFailed => StepResult {
            exit: order.cause.exit(),
            error: Some(order.cause.to_string()),
            hint: order.cause.hint().map(str::to_owned),
            stopped: Some(order.cause.reason()),
            ..result
        },
        _ => result,
    }
}

/// Says in the run's log why it ends; the platform shows nothing else.
async fn tell(run: &RunContext<'_>, failure: &StepError) {
    say(run, Some(&failure.to_string()), failure.hint().as_deref()).await;
}

async fn say(run: &RunContext<'_>, error: Option<&str>, hint: Option<&str>) {
    let log = run.log.writer();
    if let Some(error) = error {
        let text = run.palette().failure(&format!("error: {error}"));
        log.line(&text).await;
    }
    if let Some(hint) = hint {
        log.line(&format!("hint: {hint}")).await;
    }
}
