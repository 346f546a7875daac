//! The order of the phases of plan, apply and destroy (contract 4.3), between a prepared workspace and a step result.
//!
//! This module knows the phases by name only.

use job_contract::Exit;
use job_contract::final_statuses::{Ending, FinalStatuses, FollowingScripts};
use job_contract::progress::Phase;
use job_contract::report::ToolRecord;
use job_contract::status::StepStatus;
use platform::PlanReference;
use serde_json::json;
use tracing::warn;

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::error::{StepError, catch_panic};
use crate::hooks::HookPoint;
use crate::operation::{Operation, OperationContext, OperationResult, PreparedOperation};
use crate::phases::apply_changes::apply_changes;
use crate::phases::check_backend::{check_backend, refuse_detours};
use crate::phases::find_kept_state::find_kept_state_again;
use crate::phases::hand_over_files::{TreeBefore, leave_files, look_before, name_other_providers};
use crate::phases::init::{define_variables, init, write_backend};
use crate::phases::judge_plan::judge_plan;
use crate::phases::mask_inputs::mask_inputs;
use crate::phases::plan_changes::plan_changes;
use crate::phases::run_hook::{HookInput, run_hook};
use crate::phases::run_scripts::run_scripts;
use crate::step_result::StepResult;

/// Runs the operation of the step. Every failure, also a panic, becomes a result.
pub(crate) async fn run_operation(
    run: &RunContext<'_>,
    prepared: &PreparedOperation,
) -> StepResult {
    let phases = async { Ok(Box::pin(run_phases(run, prepared)).await) };
    let done = catch_panic(phases)
        .await
        .unwrap_or_else(|panicked| OperationResult::failed(Ending::Failure, panicked));
    if done.step_has_ended {
        return StepResult::already_ended(&run.step);
    }
    let cause = done
        .error
        .as_ref()
        .map(|error| (error.to_string(), error.hint()));
    let result = step_result(run, prepared, done)
        .or_stopped(&run.stop)
        .with_details(&run.log.redactor());
    if let (Some(_), Some((error, hint))) = (result.stopped, cause) {
        // It may have failed for another reason before the stop order.
        run.log_error(Some(&error), hint.as_deref()).await;
    }
    run.log_error(result.error.as_deref(), result.hint.as_deref())
        .await;
    result
}

/// Runs the phases. After a failure, later scripts still run, and changes are still published.
async fn run_phases(run: &RunContext<'_>, prepared: &PreparedOperation) -> OperationResult {
    let mut env = run.child_env().clone();
    for (name, value) in &prepared.workspace.environment {
        if let Err(error) = env.set(name, value) {
            return OperationResult::failed(Ending::NotReached, error);
        }
    }
    let tree_before = match prepared.operation {
        Operation::Plan { .. } => match look_before(run, &prepared.workspace).await {
            Ok(before) => before,
            Err(error) => return OperationResult::failed(Ending::NotReached, error),
        },
        Operation::Apply | Operation::Destroy => None,
    };
    let mut context = OperationContext::new(run, prepared);
    let mut result = match run_phases_before(&mut context, &mut env).await {
        Ok(true) => {
            log_banner(&context).await;
            match prepared.operation {
                Operation::Plan { destroy } => plan_changes(&context, destroy, &env).await,
                Operation::Apply | Operation::Destroy => {
                    Box::pin(apply_judged(&context, &env)).await
                }
            }
        }
        Ok(false) => OperationResult::new(Ending::NotReached),
        Err(error) => OperationResult::failed(Ending::NotReached, error),
    };
    let hook = run_hook_after(&context, &result, &env).await;
    run_phases_after(&context, &mut result, &mut env).await;
    if let Err(error) = hook {
        result.after_ok = false;
        result.error.get_or_insert(error);
    }
    conclude_plan(&context, tree_before, &mut result).await;
    result
}

/// Applies what the operator's hooks let pass.
async fn apply_judged(context: &OperationContext<'_, '_>, env: &ChildEnv) -> OperationResult {
    let mut before = OperationResult::new(Ending::NotReached);
    let judged = async {
        mask_inputs(context, env).await?;
        let plan = judge_plan(context, env, &mut before).await?;
        if plan.is_some() {
            let finding = find_kept_state_again(context.run);
            context.run.unless_stopped(Box::pin(finding)).await?;
        }
        Ok::<_, StepError>(plan)
    };
    match judged.await {
        Ok(Some(plan)) => apply_changes(context, plan.get(), env).await,
        Ok(None) => before,
        Err(error) => OperationResult {
            error: Some(error),
            ..before
        },
    }
}

/// Runs the operator's hook after an apply or a destroy, however it ended.
async fn run_hook_after(
    context: &OperationContext<'_, '_>,
    result: &OperationResult,
    env: &ChildEnv,
) -> Result<(), StepError> {
    let is_plan = matches!(context.prepared.operation, Operation::Plan { .. });
    if is_plan || result.ending == Ending::NotReached {
        return Ok(());
    }
    let outcome = json!({
        "succeeded": result.ending == Ending::Success,
        "changes": result.changes,
    });
    let input = HookInput {
        outcome: Some(outcome),
        ..HookInput::default()
    };
    // A stop order ends the step in any case.
    run_hook(context, HookPoint::PostApply, env, input)
        .await
        .map(drop)
}

/// Leaves the files of a plan step to its apply, also those of its last scripts.
async fn conclude_plan(
    context: &OperationContext<'_, '_>,
    tree_before: Option<TreeBefore>,
    result: &mut OperationResult,
) {
    let Some(record) = &mut result.plan else {
        return;
    };
    // After failed scripts, nothing applies the plan.
    if let Some(before) = tree_before.filter(|_| result.after_ok)
        && let Err(error) = leave_files(context, before, record).await
    {
        result.after_ok = false;
        result.error.get_or_insert(error);
    }
}

/// Runs everything before the operation; false if a stop order ended it.
async fn run_phases_before(
    context: &mut OperationContext<'_, '_>,
    env: &mut ChildEnv,
) -> Result<bool, StepError> {
    let none = HookInput::default;
    if !run_hook(context, HookPoint::PreInit, env, none()).await?
        || !run_scripts(context, Phase::BeforeInit, env, "").await?
    {
        return Ok(false);
    }
    refuse_detours(context, env).await?;
    let mut access = write_backend(context, env)?;
    access.provide(env)?;
    context.terraform.variables = define_variables(context).await?;
    init(context, env).await?;
    check_backend(context, env).await?;
    name_other_providers(context).await;
    let before = run_scripts(context, Phase::Before, env, "").await;
    access.provide(env)?;
    let is_plan = matches!(context.prepared.operation, Operation::Plan { .. });
    if !before? {
        return Ok(false);
    }
    if is_plan && !run_hook(context, HookPoint::PrePlan, env, none()).await? {
        return Ok(false);
    }
    check_backend(context, env).await?;
    Ok(true)
}

/// Runs the scripts that follow this end of the operation.
async fn run_phases_after(
    context: &OperationContext<'_, '_>,
    result: &mut OperationResult,
    env: &mut ChildEnv,
) {
    let run = context.run;
    let scripts = FollowingScripts::of(run.step_type, result.ending, run.job.ignore_error);
    let outputs = &result.terraform_output;
    if scripts.on_failure {
        match run_scripts(context, Phase::OnFailure, env, outputs).await {
            Ok(_) => {}
            Err(error) => warn!(%error, "the scripts on failure could not be run"),
        }
    }
    if scripts.after {
        match run_scripts(context, Phase::After, env, outputs).await {
            Ok(ok) => result.after_ok = ok,
            Err(error) => {
                result.after_ok = false;
                result.error.get_or_insert(error);
            }
        }
    }
}

async fn log_banner(context: &OperationContext<'_, '_>) {
    let (run, name) = (context.run, context.prepared.operation.banner_name());
    let banner = run.palette().operation(run.job.tool(), name);
    run.log.writer().line(banner.trim_end_matches('\n')).await;
}

fn step_result(
    run: &RunContext<'_>,
    prepared: &PreparedOperation,
    done: OperationResult,
) -> StepResult {
    // The template decides only about the job, not whether the step failed. So the number of its steps does not matter
    // here.
    let statuses = FinalStatuses::of(
        run.step_type,
        done.ending,
        done.after_ok,
        run.job.ignore_error,
        2,
    );
    let failed = statuses.step == StepStatus::Failed;
    let is_plan = matches!(prepared.operation, Operation::Plan { .. });
    StepResult {
        // A failure after the claim is the step's own failure, unless it is a defect of the executor.
        exit: match &done.error {
            Some(error) if error.exit() == Exit::Defect => Exit::Defect,
            _ if failed => Exit::StepFailed,
            _ => Exit::Done,
        },
        ending: done.ending,
        after_ok: done.after_ok,
        changes: done.changes,
        history: done.history,
        plan: match done.plan {
            // The plan of a step with failed after-scripts is recorded for people. Its job has failed, so no step can
            // apply it.
            Some(plan) if !failed || !done.after_ok => PlanReference::Set(plan.reference),
            _ if is_plan => PlanReference::Clear,
            _ => PlanReference::Keep,
        },
        commit_id: prepared.workspace.commit_id.clone(),
        tool: Some(ToolRecord {
            name: prepared.tool.tool,
            version: prepared.tool.version.to_string(),
        }),
        hint: done.error.as_ref().and_then(StepError::hint),
        error: done.error.as_ref().map(ToString::to_string),
        stopped: None,
        details: done.details,
        must_report: true,
    }
}
