//! Applies or destroys: runs the tool, and then saves the state, whatever the result. Apply and destroy change
//! infrastructure in the same way. Only the command lines of the tool differ.
//!
//! How a state is saved is the subject of `save_state`.

use std::time::SystemTime;

use job_contract::final_statuses::Ending;
use job_contract::keys::PLAN_FILE;
use job_contract::progress::Phase;
use platform::live::LivePhase;
use serde_json::{Map, Value, json};

use crate::child_env::ChildEnv;
use crate::error::{StepError, catch_panic};
use crate::operation::{Operation, OperationContext, OperationResult};
use crate::phases::live_view::LiveView;
use crate::phases::release_lock;
use crate::phases::rescue_state::errored_state_time;
use crate::phases::save_state::{ApplyEnd, PublishedState, SavedState, save_state};
use crate::phases::stored_state::read_before;
use crate::process::Completion;
use crate::stored_plan::ReviewedPlan;
use crate::terraform::raw_state::RawState;
use crate::terraform::structured::Structured;

/// The result of the tool.
struct Applied {
    done: Completion,
    structured: Structured,
    /// The plan for people, unless the user has just read it.
    rendered_plan: Option<Vec<u8>>,
}

/// Applies the changes, or destroys. An error is part of the result.
pub(crate) async fn apply_changes(
    context: &OperationContext<'_, '_>,
    plan: Option<&ReviewedPlan>,
    env: &ChildEnv,
) -> OperationResult {
    let mut result = OperationResult::new(Ending::Failure);
    if let Err(error) = apply_and_save(context, plan, env, &mut result).await {
        result.error = Some(error);
    }
    result
}

async fn apply_and_save(
    context: &OperationContext<'_, '_>,
    plan: Option<&ReviewedPlan>,
    env: &ChildEnv,
    result: &mut OperationResult,
) -> Result<(), StepError> {
    let before = read_before(context.run).await;
    let (run, prepared, started) = (context.run, context.prepared, SystemTime::now());
    let events = &context.terraform.events;
    let errored_before = errored_state_time(&prepared.working_dir);
    if let Some(plan) = plan {
        plan.copy_to(&prepared.working_dir.join(PLAN_FILE))?;
    }
    let live_view = LiveView::start(run, events.clone(), LivePhase::Apply);
    let running = run.timer.time(
        prepared.operation.phase(),
        catch_panic(Box::pin(run_tool(context, plan, env))),
        |applied| matches!(applied, Ok(applied) if applied.done.ended.is_success()),
    );
    // The end of the phase is announced after the tool has ended. A panic there must not leave the state unsaved.
    let applied = catch_panic(running).await;
    // The tool may have changed something. So the state is saved before any error is handled.
    let done = applied.as_ref().ok().map(|applied| applied.done);
    let end = ApplyEnd {
        success: done.is_some_and(|done| done.ended.is_success()),
        progress: events.progress(),
        tool_with_lock: release_lock::find_tool_with_lock(context, started, done),
        errored_before,
        printed_state: events.printed_state(),
        before,
    };
    let saving = Box::pin(async { Ok(save(context, env, &end, result).await) });
    let saved = catch_panic(saving)
        .await
        .unwrap_or_else(SavedState::unknown);
    result.details.tool_end = done
        .filter(|_| !end.success)
        .map(|done| format!("the tool ended with {}", done.ended));
    let applied = applied?;
    result.error = saved.missing.filter(|_| end.success);
    // The store has the state, also without a copy of it. With an outcome of `failed`, users would repeat the apply.
    if end.success && saved.is_confirmed {
        result.ending = Ending::Success;
    }
    let published = saved.published.as_ref();
    show_results(context, applied, published, live_view, result).await;
    Ok(())
}

/// Shows the changes in the run's log and in the job context.
async fn show_results(
    context: &OperationContext<'_, '_>,
    applied: Applied,
    published: Option<&PublishedState>,
    live_view: LiveView,
    result: &mut OperationResult,
) {
    let run = context.run;
    let success = applied.done.ended.is_success();
    context
        .log_unusual_end(applied.done, &mut result.details)
        .await;
    if success && let Some(plan) = applied.rendered_plan {
        run.log_output(&plan).await;
    }
    if result.error.is_some() && result.ending == Ending::Success {
        let text = "The state is stored. Only the copy of it that the platform shows could not be published.";
        run.log.writer().line(text).await;
    }
    let mut additions = Map::new();
    if let Some(raw) = published.and_then(|published| published.raw.as_ref()) {
        result.terraform_output = raw.outputs_json().to_string();
        if success {
            show_outputs(context, raw).await;
        }
        let outputs = json!({ &run.step.step_id: raw.outputs_for_context() });
        additions.insert("terraformOutputs".to_owned(), outputs);
    }
    let mut structured = applied.structured;
    if let Some(state) = published.and_then(|published| published.json.as_ref()) {
        structured.complete_from_state(state, success);
    }
    live_view.publish(run, &structured, additions).await;
    result.changes = structured.counts();
}

/// Saves the state, and adds the result. If the lock of another run blocked the tool, there is nothing to save, because
/// the state is that run's.
async fn save(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
    end: &ApplyEnd,
    result: &mut OperationResult,
) -> SavedState {
    let run = context.run;
    let details = &mut result.details;
    if !end.progress.has_begun() && release_lock::record_blocking_lock(context, details) {
        return SavedState::unchanged();
    }
    let save = Box::pin(save_state(run, &context.terraform, env, end));
    let mut saved = run
        .timer
        .time(Phase::State, save, |saved| saved.missing.is_none())
        .await;
    let (status, sentence, hint) = match saved.outcome.take() {
        Some(outcome) => (Some(outcome.status), Some(outcome.sentence), outcome.hint),
        None => (None, None, None),
    };
    details.state = status;
    details.lock = saved.lock.take();
    details.hint = hint;
    if !end.success {
        let progress = end.progress.sentence();
        details.sentence = Some(match sentence {
            Some(sentence) => format!("{progress}; {sentence}"),
            None => progress,
        });
        details.progress = Some(end.progress.report());
    }
    release_lock::add_unlock_hint(context, details);
    if let Some(published) = &saved.published {
        result.history.clone_from(&published.history);
    }
    saved
}

async fn run_tool(
    context: &OperationContext<'_, '_>,
    plan: Option<&ReviewedPlan>,
    env: &ChildEnv,
) -> Result<Applied, StepError> {
    let (run, terraform) = (context.run, &context.terraform);
    let log = run.log.writer();
    let is_destroy = context.prepared.operation == Operation::Destroy;
    let Some(plan) = plan else {
        let (done, structured) = if is_destroy {
            terraform.destroy(env, log).await?
        } else {
            terraform.apply_direct(env, log).await?
        };
        return Ok(Applied {
            done,
            structured,
            rendered_plan: None,
        });
    };
    let planned = planned_changes(context).await;
    // The plan is rendered in parallel with the apply, which is safe because rendering only reads the file. CLI-driven
    // runs do not need it: their users see plan and apply in one stream, and have just read the plan. So is a plan that this
    // step has made. A panic of the renderer must not end the tool.
    let rendered_plan = catch_panic(async {
        if run.job.show_header && plan.is_reviewed() {
            terraform.show_plan(env).await
        } else {
            Ok(None)
        }
    });
    let (applied, rendered_plan) =
        tokio::join!(terraform.apply_plan(env, log, planned), rendered_plan);
    let (done, structured) = applied?;
    Ok(Applied {
        done,
        structured,
        rendered_plan: rendered_plan.unwrap_or_default(),
    })
}

/// The changes of the job's only plan, all still to be made.
async fn planned_changes(context: &OperationContext<'_, '_>) -> Structured {
    let job_context = context.run.job_context().await;
    match job_context
        .get("planStructuredOutput")
        .and_then(Value::as_object)
    {
        Some(plans) if plans.len() == 1 => plans
            .values()
            .next()
            .map(Structured::seeded)
            .unwrap_or_default(),
        _ => Structured::default(),
    }
}

async fn show_outputs(context: &OperationContext<'_, '_>, state: &RawState) {
    if context.prepared.operation == Operation::Apply && !state.outputs.is_empty() {
        let text = format!("\nOutputs:\n\n{}", state.outputs_text().join("\n"));
        context.run.log.writer().line(&text).await;
    }
}
