//! One step, top to bottom: prepare, run the phases, conclude. Each has a module of its own; this is the page
//! that shows how they follow one another, and that the tail happens whatever became of the rest.

use control_plane::platform::PlanReference;
use job_contract::progress::Phase;
use job_contract::report::ToolRecord;
use job_contract::settlement::{self, Ending};
use job_contract::status::StepStatus;
use job_contract::{Exit, JobData, StepType};

use crate::Ended;
use crate::conclusion::{self, Verdict};
use crate::config::Config;
use crate::fault::caught;
use crate::operation::{self, Operated, Prepared, scripts_in};
use crate::preparation::{self, Readiness};
use crate::run::{Run, StageError};
use crate::scripts::{self, Moment};
use crate::stop::Stop;
use crate::tool::ResolvedTool;
use crate::workspace::Workspace;

/// Runs the step and returns its report. The exit code of the process follows from it.
pub async fn run(config: &Config, job: JobData, stop: Stop) -> Ended {
    let identity = conclusion::identity(&job);
    let run = match Run::open(config, job.clone(), stop) {
        Ok(run) => run,
        Err(failure) => return conclusion::refuse(config, &job, identity, &failure).await,
    };
    let verdict = caught(Box::pin(execute(&run)))
        .await
        .unwrap_or_else(|_| Verdict::failed(&StageError::Panicked));
    conclusion::conclude(run, identity, verdict).await
}

/// The step itself. Every early return is a verdict, so that the tail of the run happens whatever it is.
async fn execute(run: &Run<'_>) -> Verdict {
    match Box::pin(preparation::prepare(run)).await {
        Ok(Readiness::Ready(prepared)) => Box::pin(operate(run, *prepared)).await,
        Ok(Readiness::Scripts(workspace, tool)) => {
            script_step(run, &workspace, tool.as_ref()).await
        }
        Ok(Readiness::NotOurs(verdict)) => *verdict,
        Err(failure) => {
            tell(run, &failure).await;
            before_claim(run, &failure)
        }
    }
}

/// Nothing has been changed yet. What only failed around the step, or was stopped, is for another executor to do:
/// a report would end the job and leave nothing to try again. Under a launcher that does not read exit codes only
/// a stopped executor is silent; its pod is replaced by any.
fn before_claim(run: &Run<'_>, failure: &StageError) -> Verdict {
    let verdict = Verdict::failed(failure);
    if verdict.exit != Exit::Infrastructure {
        return verdict;
    }
    match run.stop.given() {
        Some(order) => Verdict {
            error: Some(format!(
                "stopped by signal {} before anything was started",
                order.signal
            )),
            hint: None,
            reported: false,
            ..verdict
        },
        None => Verdict {
            reported: !run.config.run.outcome_exit_code,
            ..verdict
        },
    }
}

async fn operate(run: &Run<'_>, prepared: Prepared) -> Verdict {
    let operated = caught(Box::pin(operation::run(run, &prepared))).await;
    let operated = operated.unwrap_or_else(|_| Operated {
        ending: Ending::Failure,
        after_ok: true,
        changes: None,
        plan: None,
        error: Some(StageError::Panicked),
    });
    if let Some(failure) = &operated.error {
        tell(run, failure).await;
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
    let verdict = Verdict {
        // What fails after the claim is the step's own failure, unless we are at fault.
        exit: match &operated.error {
            Some(StageError::Panicked) => Exit::Defect,
            _ if failed => Exit::StepFailed,
            _ => Exit::Done,
        },
        ending: operated.ending,
        after_ok: operated.after_ok,
        changes: operated.changes,
        plan: match operated.plan {
            Some(reference) if !failed => PlanReference::Set(reference),
            _ if is_plan => PlanReference::Clear,
            _ => PlanReference::Keep,
        },
        commit_id: prepared.workspace.commit_id.clone(),
        tool: Some(ToolRecord {
            name: prepared.tool.tool,
            version: prepared.tool.version.to_string(),
        }),
        hint: operated.error.as_ref().and_then(StageError::hint),
        error: operated.error.as_ref().map(StageError::story),
        reported: true,
    };
    stopped_or(run, verdict)
}

/// `customScripts` and `approval`: every command in the clone root, by priority.
async fn script_step(run: &Run<'_>, workspace: &Workspace, tool: Option<&ResolvedTool>) -> Verdict {
    let mut env = run.env.clone();
    let commands = scripts::select(&run.job.command_list, Moment::Always);
    let scripts = scripts_in(run, &workspace.root, tool);
    let work = async {
        for (name, value) in &workspace.environment {
            env.set(name, value)?;
        }
        Ok::<_, StageError>(scripts.run(&commands, &mut env, "").await?)
    };
    let done = run
        .clock
        .time(Phase::Scripts, caught(work), |done| {
            matches!(done, Ok(Ok(true)))
        })
        .await;
    let failure = match done {
        Ok(Ok(ok)) => {
            let ending = if ok { Ending::Success } else { Ending::Failure };
            return stopped_or(
                run,
                Verdict {
                    exit: if ok { Exit::Done } else { Exit::StepFailed },
                    ending,
                    commit_id: workspace.commit_id.clone(),
                    error: None,
                    hint: None,
                    ..Verdict::failed(&StageError::Panicked)
                },
            );
        }
        Ok(Err(failure)) => failure,
        Err(_) => StageError::Panicked,
    };
    tell(run, &failure).await;
    let exit = if matches!(failure, StageError::Panicked) {
        Exit::Defect
    } else {
        Exit::StepFailed
    };
    Verdict {
        exit,
        commit_id: workspace.commit_id.clone(),
        ..Verdict::failed(&failure)
    }
}

/// A step that failed under a stop order failed because of it. One that was done anyway is done.
fn stopped_or(run: &Run<'_>, verdict: Verdict) -> Verdict {
    match run.stop.given() {
        Some(order) if verdict.exit == Exit::StepFailed => Verdict {
            exit: Exit::Signal(order.signal),
            error: Some(format!(
                "stopped by signal {} before it was done",
                order.signal
            )),
            hint: None,
            ..verdict
        },
        _ => verdict,
    }
}

/// Says in the run's log why it ends; the platform shows nothing else.
async fn tell(run: &Run<'_>, failure: &StageError) {
    let log = run.log.writer();
    if let StageError::Workspace(_) = failure {
        log.line("Failed to prepare work dir").await;
    }
    log.line(
        &run.palette()
            .failure(&format!("error: {}", failure.story())),
    )
    .await;
    if let Some(hint) = failure.hint() {
        log.line(&format!("hint: {hint}")).await;
    }
}
