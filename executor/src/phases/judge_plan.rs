//! Asks the operator's hooks about the plan that is about to be applied.
//!
//! Each applied plan has passed the hook `post-plan`: in the plan step, which notes that with the plan's digest, or here. An apply
//! without a reviewed plan makes one first, so that the hooks see what is applied.

use std::path::Path;

use job_contract::Exit;
use job_contract::final_statuses::Ending;
use job_contract::keys::PLAN_FILE;

use crate::child_env::ChildEnv;
use crate::error::StepError;
use crate::hooks::HookPoint;
use crate::operation::{Operation, OperationContext, OperationResult};
use crate::phases::plan_changes::run_plan;
use crate::phases::run_hook::{HookInput, end_leftovers, run_hook};
use crate::stored_plan::ReviewedPlan;

/// The plan to apply.
#[derive(Debug)]
pub(crate) enum JudgedPlan<'p> {
    /// The hooks do not need one: the tool applies without a plan.
    None,
    Reviewed(&'p ReviewedPlan),
    Own(Box<ReviewedPlan>),
}

impl JudgedPlan<'_> {
    pub(crate) const fn get(&self) -> Option<&ReviewedPlan> {
        match self {
            Self::None => None,
            Self::Reviewed(plan) => Some(plan),
            Self::Own(plan) => Some(plan),
        }
    }
}

/// Returns the plan to apply; `None` if a stop order ended the hooks.
pub(crate) async fn judge_plan<'p>(
    context: &OperationContext<'p, '_>,
    env: &ChildEnv,
    result: &mut OperationResult,
) -> Result<Option<JudgedPlan<'p>>, StepError> {
    let (run, prepared) = (context.run, context.prepared);
    let reviewed = prepared
        .plan
        .as_ref()
        .filter(|_| prepared.operation == Operation::Apply);
    let asks = run.hooks.has(HookPoint::PostPlan) || run.hooks.has(HookPoint::PreApply);
    let plan = match reviewed {
        Some(plan) => JudgedPlan::Reviewed(plan),
        None if !asks => return Ok(Some(JudgedPlan::None)),
        None => {
            if !run_hook(context, HookPoint::PrePlan, env, HookInput::default()).await? {
                return Ok(None);
            }
            let plan = plan_first(context, env, run.layout.private(), result).await?;
            JudgedPlan::Own(Box::new(plan))
        }
    };
    let is_judged = plan.get().and_then(ReviewedPlan::judged_by) == Some(run.hooks.digest());
    for point in [HookPoint::PostPlan, HookPoint::PreApply] {
        if point == HookPoint::PostPlan && is_judged {
            continue;
        }
        let input = HookInput {
            plan: plan.get(),
            outcome: None,
        };
        if !run_hook(context, point, env, input).await? {
            return Ok(None);
        }
    }
    if asks {
        // Scripts of the run could have left something that puts another plan into its place.
        end_leftovers().await?;
    }
    Ok(Some(plan))
}

/// Makes the plan of an apply or a destroy that has none.
async fn plan_first(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
    folder: &Path,
    result: &mut OperationResult,
) -> Result<ReviewedPlan, StepError> {
    let destroy = context.prepared.operation.destroys();
    let text = "The operator's hooks need the plan, so it is made first.";
    context.run.log.writer().line(text).await;
    let (ending, _) = run_plan(context, destroy, env, result).await?;
    if ending == Ending::Failure {
        let text = "the plan that the operator's hooks need could not be made: nothing was applied";
        return Err(StepError::new(Exit::StepFailed, text));
    }
    let file = context.prepared.working_dir.join(PLAN_FILE);
    ReviewedPlan::take(&file, folder).map_err(|source| StepError::working_dir(&file, &source))
}
