//! Asks the platform whether the step may start, and opens the live log.
//!
//! This module knows nothing of the step's work.

use job_contract::Exit;
use job_contract::status::JobStatus;
use platform::{StartPermission, StepView};
use tracing::warn;

use crate::context::RunContext;
use crate::error::StepError;
use crate::step_result::StepResult;

/// The decision that follows from the platform's answer.
pub(crate) enum StartDecision {
    Start(StepView),
    DoNotStart(Box<StepResult>),
}

/// Waits for the platform's answer. Before that, the live log must stay empty (contract 2.5).
pub(crate) async fn ask_permission(run: &RunContext<'_>) -> Result<StartDecision, StepError> {
    let permission = async { Ok(run.connections.platform.start_permission(&run.step).await?) };
    let view = match run.unless_stopped(permission).await? {
        StartPermission::Granted(view) => view,
        StartPermission::JobEnded(status) => {
            return Ok(do_not_start(job_is_over(run, &status).await));
        }
        StartPermission::StepEnded(_) => {
            return Ok(do_not_start(StepResult::already_ended(&run.step)));
        }
        StartPermission::NotDispatched(status) => {
            return Ok(do_not_start(not_dispatched(run, &status)));
        }
    };
    run.open_live_log(false)?;
    Ok(StartDecision::Start(run.view.get_or_init(|| view).clone()))
}

fn do_not_start(result: StepResult) -> StartDecision {
    StartDecision::DoNotStart(Box::new(result))
}

/// Ends without a run, because the platform repeats the dispatch. Mayfly's launcher then starts this dispatch again.
/// Any other launcher starts another executor.
fn not_dispatched(run: &RunContext<'_>, status: &JobStatus) -> StepResult {
    let text = format!(
        "the platform has not recorded the dispatch, and the job is {status}: the step is not run"
    );
    warn!("{text}");
    let exit = if run.config.run.outcome_exit_code {
        Exit::Infrastructure
    } else {
        Exit::Done
    };
    StepResult::not_run(exit, text)
}

/// Ends without a run: the job has ended meanwhile, or it continues and the step already has an outcome.
pub(crate) async fn job_is_over(run: &RunContext<'_>, status: &JobStatus) -> StepResult {
    if status.is_over() || *status == JobStatus::Rejected {
        let text = format!("the job is already {status}: the step is not run");
        warn!("{text}");
        run.log.writer().line(&text).await;
        return StepResult::not_run(Exit::Done, text);
    }
    StepResult::already_ended(&run.step)
}
