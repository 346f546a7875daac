//! The order of the phases before the claim, which may be repeated freely, and of the claim.
//!
//! This module knows the phases by name only.

use job_contract::progress::Phase;
use platform::StepView;

use crate::context::RunContext;
use crate::error::StepError;
use crate::operation::{Operation, PreparedOperation};
use crate::phases::assume_role::assume_role;
use crate::phases::check_step::check_step;
use crate::phases::claim_step::{StartDecision, claim_step};
use crate::phases::fetch_plan::fetch_plan;
use crate::phases::find_kept_state::find_kept_state;
use crate::phases::give_identity::give_identity;
use crate::phases::hand_over_files::take_files;
use crate::phases::prepare_workspace::{prepare_workspace, wait_for_turn, working_dir};
use crate::phases::resolve_references::resolve_references;
use crate::phases::resolve_tool::{resolve_optional_tool, resolve_tool};
use crate::step_result::StepResult;
use crate::stored_plan::ReviewedPlan;
use crate::tool::ResolvedTool;
use crate::workspace::Workspace;

/// The prepared work of a step.
pub(crate) enum PreparedStep {
    Operation(Box<PreparedOperation>),
    Scripts(Box<Workspace>, Option<ResolvedTool>),
    /// This executor must not run the step.
    NotRun(Box<StepResult>),
}

/// Prepares the step, and claims it.
pub(crate) async fn prepare(
    run: &RunContext<'_>,
    view: &StepView,
) -> Result<PreparedStep, StepError> {
    check_step(run).await?;
    let preparing = run.unless_stopped(Box::pin(async {
        wait_for_turn(run).await?;
        find_kept_state(run).await?;
        let plan = fetch_plan(run, view).await?;
        let workspace = prepare_workspace(run, plan.as_ref()).await?;
        Ok::<_, StepError>((workspace, plan))
    }));
    let (mut workspace, plan) = run.phase(Phase::Workspace, preparing).await?;
    give_identity(run, &mut workspace).await?;
    let mut step = if let Some(operation) = Operation::of(run.step_type) {
        let prepared = prepare_operation(run, operation, workspace, plan).await?;
        PreparedStep::Operation(Box::new(prepared))
    } else {
        let tool = if run.job.command_list.is_empty() {
            None
        } else {
            resolve_optional_tool(run).await
        };
        PreparedStep::Scripts(Box::new(workspace), tool)
    };
    let planned = match &step {
        PreparedStep::Operation(prepared) if prepared.plan.is_some() => {
            Some(prepared.working_dir.clone())
        }
        _ => None,
    };
    let workspace: &Workspace = match &mut step {
        PreparedStep::Operation(prepared) => {
            let prepared = &mut **prepared;
            assume_role(run, &mut prepared.workspace, Some(&prepared.tool.version)).await?;
            &prepared.workspace
        }
        PreparedStep::Scripts(workspace, _) => {
            assume_role(run, workspace, None).await?;
            workspace
        }
        PreparedStep::NotRun(_) => return Ok(step),
    };
    resolve_references(run, planned.as_deref()).await?;
    Ok(match claim_step(run, workspace).await? {
        StartDecision::DoNotStart(result) => PreparedStep::NotRun(result),
        StartDecision::Start => step,
    })
}

async fn prepare_operation(
    run: &RunContext<'_>,
    operation: Operation,
    workspace: Workspace,
    plan: Option<ReviewedPlan>,
) -> Result<PreparedOperation, StepError> {
    let working_dir = working_dir(run, &workspace).await?;
    if let Some(plan) = &plan {
        let taking = run.unless_stopped(Box::pin(take_files(run, &workspace, plan)));
        taking.await?;
    }
    // A plan must be applied by the version that made it.
    let pinned = plan
        .as_ref()
        .and_then(|plan| plan.record.as_ref())
        .map(|record| record.version.as_str());
    let range = pinned.unwrap_or(&run.job.terraform_version);
    let resolving = run.unless_stopped(Box::pin(resolve_tool(run, range)));
    let tool = run.phase(Phase::Tool, resolving).await?;
    Ok(PreparedOperation {
        operation,
        workspace,
        working_dir,
        tool,
        plan,
    })
}
