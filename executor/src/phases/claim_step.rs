//! Claims the step, and reports that it runs. Before the claim, the executor changes nothing.
//!
//! This module knows nothing of the step's work, except whether it can change something.

use std::time::SystemTime;

use job_contract::progress::Phase;
use job_contract::{Exit, JobData, chain};
use platform::{Claim, Holder, Platform, PlatformError, StartReport, StepRef};
use tracing::{info, warn};
use uuid::Uuid;

use crate::config::Config;
use crate::context::{RunContext, output_key};
use crate::error::StepError;
use crate::phases::ask_permission::job_is_over;
use crate::running_report::RunningReport;
use crate::step_result::StepResult;
use crate::workspace::Workspace;

/// Whether this executor runs the step.
pub(crate) enum StartDecision {
    Start,
    /// It must not run the step. The run ends with this result.
    DoNotStart(Box<StepResult>),
}

/// Takes the claim on the step and reports that it runs.
pub(crate) async fn claim_step(
    run: &RunContext<'_>,
    workspace: &Workspace,
) -> Result<StartDecision, StepError> {
    if run.stop.given().is_some() {
        return Err(StepError::stopped());
    }
    // A store that cannot be used is found before the claim.
    let output = async { Ok(run.store.reference(&output_key(&run.job)).await?) };
    let output = run.unless_stopped(output).await?;
    let platform = &run.connections.platform;
    let claim = async { Ok(platform.claim(&run.step, &holder(run.config)).await?) };
    let claim = if platform.is_leased() {
        // The hub knows whether it granted a claim whose response nobody waits for, and the agent asks it.
        Box::pin(run.phase(Phase::Claim, run.unless_stopped(claim))).await?
    } else {
        Box::pin(run.phase(Phase::Claim, claim)).await?
    };
    match claim {
        Claim::Taken(holder) if changes_something(&run.job) => {
            let result = taken_by(&run.step, &holder);
            if let Some(text) = &result.error {
                run.log_failure(text).await;
            }
            return Ok(StartDecision::DoNotStart(Box::new(result)));
        }
        Claim::Taken(holder) => {
            // Its outcome may be under review already, and the reviewed artifacts must stay unchanged.
            let deadline = run.deadline();
            let view = run
                .connections
                .platform
                .step_view(&run.step, &deadline)
                .await?;
            if view.step_has_ended() && !view.status.is_over() {
                let result = StepResult::already_ended(&run.step);
                return Ok(StartDecision::DoNotStart(Box::new(result)));
            }
            info!(%holder, "the step was started before; repeating it changes nothing");
        }
        Claim::Refused(why) => {
            let result = refused(&run.step, &why);
            if let Some(text) = &result.error {
                run.log_failure(text).await;
            }
            return Ok(StartDecision::DoNotStart(Box::new(result)));
        }
        Claim::Granted => run.open_live_log(true)?,
    }
    if run.config.run.disable_acknowledge {
        return Ok(StartDecision::Start);
    }
    Ok(report_running(run, workspace, output).await)
}

/// Reports that the step runs. The step must not start if its job is over.
async fn report_running(
    run: &RunContext<'_>,
    workspace: &Workspace,
    stored: String,
) -> StartDecision {
    let output = run.connections.platform.step_output(&run.step, stored);
    let running = RunningReport {
        platform: run.connections.platform.clone(),
        step: run.step.clone(),
        commit_id: workspace.commit_id.clone(),
        output,
    };
    match running.send().await {
        Ok(StartReport::Accepted) => {}
        Ok(StartReport::Ended(status)) => {
            return StartDecision::DoNotStart(Box::new(job_is_over(run, &status).await));
        }
        // The step is claimed. If this process gave up now, no other executor could run the step.
        Err(error) => {
            warn!(
                error = chain(&error),
                "the step could not be reported as running, trying again in parallel"
            );
            run.start_report_retry.get_or_init(|| running.repeat());
        }
    }
    StartDecision::Start
}

/// Whether the step must not run twice. A step of an unknown type may change something.
fn changes_something(job: &JobData) -> bool {
    match job.step_type() {
        Ok(step_type) if step_type.uses_tool() => step_type.changes_infrastructure(),
        Ok(_) => !job.command_list.is_empty(),
        Err(_) => true,
    }
}

/// Claims a step that failed before its start, so that this executor may report the failure. Returns `Some` if another
/// executor holds the claim: that one may be running the step, and reports it.
pub(crate) async fn claim_to_report(
    platform: &Platform,
    config: &Config,
    job: &JobData,
) -> Result<Option<StepResult>, PlatformError> {
    let step = StepRef::of(job);
    // What may be run twice may be reported by each, unless a hub gives the step to one alone.
    if !changes_something(job) && !platform.is_leased() {
        return Ok(None);
    }
    Ok(match platform.claim(&step, &holder(config)).await? {
        Claim::Granted => None,
        Claim::Taken(holder) => Some(taken_by(&step, &holder)),
        Claim::Refused(why) => Some(refused(&step, &why)),
    })
}

fn refused(step: &StepRef, why: &str) -> StepResult {
    let text = format!("step {} is not this executor's to run: {why}", step.step_id);
    warn!("{text}");
    StepResult::not_run(Exit::Claimed, text)
}

fn taken_by(step: &StepRef, holder: &Holder) -> StepResult {
    let text = format!(
        "step {} was already taken by pod {holder}: it is not run again",
        step.step_id
    );
    warn!("{text}");
    StepResult::not_run(Exit::Claimed, text)
}

fn holder(config: &Config) -> Holder {
    let host = || {
        nix::unistd::gethostname()
            .ok()
            .and_then(|name| name.into_string().ok())
    };
    Holder {
        pod: config
            .run
            .pod_name
            .clone()
            .or_else(host)
            .unwrap_or_else(|| "unknown".to_owned()),
        uid: config
            .run
            .pod_uid
            .clone()
            .unwrap_or_else(|| Uuid::new_v4().to_string()),
        since: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
    }
}
