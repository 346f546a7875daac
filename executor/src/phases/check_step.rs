//! Refuses a step that cannot run as configured, before anything is fetched.
//!
//! It reads job data and settings. It knows nothing of the platform and of the workspace.

use job_contract::{Exit, StepType, env};
use tracing::warn;

use crate::child_env;
use crate::context::RunContext;
use crate::error::StepError;
use crate::scripts;

/// Refuses a step that cannot run as configured.
pub(crate) async fn check_step(run: &RunContext<'_>) -> Result<(), StepError> {
    scripts::check(&run.job, &run.child_env().path())?;
    for name in child_env::ineffective_variables(&run.job) {
        let text = format!(
            "`{}` names `{name}`, a setting of the executor, where it has no effect. Only the tool and scripts get its \
             value.",
            env::EPHEMERAL_ENV
        );
        run.log.writer().line(&text).await;
    }
    if let Some(references) = &run.references {
        references.check(&run.job)?;
    }
    refuse_policies(run).await
}

/// Mayfly does not evaluate policies. A plan that comes with policies would skip a mandatory one. So the step fails,
/// unless the operator permits such plans. A workspace's own variables cannot give this permission.
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
         which skips all policies",
        env::IGNORE_POLICIES
    );
    let error = format!("{what}, and this executor does not evaluate policies: nothing was run");
    // The document is valid. Its setting forbids the step.
    StepError::new(Exit::StepFailed, error).with_hint(hint)
}
