//! Refuses a step that cannot run as it asks, before anything of it is fetched.
//!
//! Reads job data and settings. Knows nothing of the platform and of the workspace.

use job_contract::{Exit, StepType, env};
use tracing::warn;

use crate::child_env;
use crate::context::RunContext;
use crate::error::StepError;
use crate::scripts;

/// Refuses a step that cannot be run as it asks.
pub(crate) async fn check_step(run: &RunContext<'_>) -> Result<(), StepError> {
    scripts::check(&run.job, &run.env.path())?;
    for name in child_env::without_effect(&run.job) {
        let text = format!(
            "`{}` names `{name}`, a setting of the executor, where it has no effect: what stands there reaches the tool \
             and scripts alone.",
            env::EPHEMERAL_ENV
        );
        run.log.writer().line(&text).await;
    }
    refuse_policies(run).await
}

/// Policies are not evaluated here. A plan that comes with some would pass over a mandatory one, so that it is not made,
/// unless the operator says so. A workspace's own variables are not the operator's word.
async fn refuse_policies(run: &RunContext<'_>) -> Result<(), StepError> {
    let what = match run.step_type {
        StepType::Plan | StepType::PlanDestroy if run.job.has_policies() => {
            "the plan comes with policies (`policyList`)"
        }
        StepType::PolicyEvaluation => "the step is to evaluate policies (`policyEvaluation`)",
        _ => return Ok(()),
    };
    let mut own = child_env::extra_variables(&run.job);
    let by_workspace = own.any(|(name, _)| name == env::IGNORE_POLICIES);
    if !run.config.run.ignore_policies || by_workspace {
        return Err(policies_not_evaluated(what));
    }
    let text = format!(
        "WARNING: {what}, and NONE IS EVALUATED: the operator has set {}",
        env::IGNORE_POLICIES
    );
    warn!("{text}");
    run.log_failure(&text).await;
    Ok(())
}

fn policies_not_evaluated(what: &str) -> StepError {
    let hint = format!(
        "run the workspace with an executor that evaluates policies, or have the operator set `{}=true` on this one, \
         which passes over all of them",
        env::IGNORE_POLICIES
    );
    let error = format!("{what}, and this executor does not evaluate policies: nothing was run");
    // The document is valid. The setting it refers to forbids the step.
    StepError::new(Exit::StepFailed, error).with_hint(hint)
}
