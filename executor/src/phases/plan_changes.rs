//! Plans: runs the tool, stores its plan and shows it.
//!
//! How a plan is stored is the subject of `stored_plan`.

use std::pin::pin;
use std::time::{Duration, SystemTime};

use artifact_store::Digest;
use futures_util::future::{Either, maybe_done, select};
use job_contract::chain;
use job_contract::final_statuses::Ending;
use job_contract::keys::PLAN_FILE;
use job_contract::progress::Phase;
use job_contract::report::ChangeCounts;
use platform::live::LivePhase;
use runtime::Deadline;
use serde_json::{Map, Value, json};
use tracing::warn;

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::error::{StepError, catch_panic};
use crate::hooks::HookPoint;
use crate::operation::{OperationContext, OperationResult};
use crate::phases::live_view::LiveView;
use crate::phases::release_lock;
use crate::phases::run_hook::{HookInput, run_hook};
use crate::process::{Completion, Ended};
use crate::stored_plan::{self, NewPlan, PlanRecord, ReviewedPlan};
use crate::terraform::structured::Structured;

/// Timeout for answers of the platform that the plan does not depend on.
const VIEW_TIMEOUT: Duration = Duration::from_secs(10);

/// A plan as the tool renders it.
#[derive(Default)]
struct RenderedPlan {
    text: Option<Vec<u8>>,
    json: Option<Value>,
}

/// Plans the changes. An error is part of the result.
pub(crate) async fn plan_changes(
    context: &OperationContext<'_, '_>,
    destroy: bool,
    env: &ChildEnv,
) -> OperationResult {
    let mut result = OperationResult::new(Ending::Failure);
    if let Err(error) = plan_and_store(context, destroy, env, &mut result).await {
        result.error = Some(error);
    }
    result
}

async fn plan_and_store(
    context: &OperationContext<'_, '_>,
    destroy: bool,
    env: &ChildEnv,
    result: &mut OperationResult,
) -> Result<(), StepError> {
    let run = context.run;
    let events = context.terraform.events.clone();
    let live_view = LiveView::start(run, events, LivePhase::Plan);
    let (noted, planned) = tokio::join!(
        catch_panic(note_start(run)),
        run_plan(context, destroy, env, result)
    );
    noted?;
    let (ending, mut structured) = planned?;
    let mut stored = None;
    if ending != Ending::Failure {
        if step_has_ended(run).await {
            result.step_has_ended = true;
            return Ok(());
        }
        stored = Some(if context.terraform.structured_output {
            store_and_show(context, env, &mut structured).await?
        } else {
            // The log has the tool's own rendering already.
            let store = Box::pin(store_plan(context));
            run.phase(Phase::Store, store).await?
        });
    }
    let counted = structured.counts();
    let changes = counted
        .or_else(|| context.terraform.events.progress().planned_counts())
        .unwrap_or_else(|| structured.counted());
    if let Some(record) = &mut stored
        && let Err(refused) = judge(context, env, record, &changes).await
    {
        // The plan is shown, and nothing can apply it.
        run.stored(stored_plan::note(&run.store, &run.job, None))
            .await?;
        live_view.publish(run, &structured, Map::new()).await;
        return Err(refused);
    }
    let mut additions = stored
        .as_ref()
        .map(|record| record.patch(&run.job.step_id))
        .unwrap_or_default();
    if context.terraform.structured_output {
        let marker = json!("<div data-terrakube-structured-plan=\"true\"></div>");
        additions.insert(
            "terrakubeUI".to_owned(),
            json!({ &run.step.step_id: marker }),
        );
    }
    live_view.publish(run, &structured, additions).await;
    result.ending = ending;
    result.changes = (ending != Ending::Failure).then_some(changes);
    result.plan = stored;
    Ok(())
}

/// Asks the operator's hook about the stored plan, and notes that it was asked.
async fn judge(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
    record: &mut PlanRecord,
    changes: &ChangeCounts,
) -> Result<(), StepError> {
    let run = context.run;
    if !run.hooks.has(HookPoint::PostPlan) {
        return Ok(());
    }
    let file = context.prepared.working_dir.join(PLAN_FILE);
    let plan = ReviewedPlan::of_record(&file, record.clone());
    let input = HookInput {
        plan: Some(&plan),
        outcome: Some(json!({ "changes": changes })),
    };
    if !run_hook(context, HookPoint::PostPlan, env, input).await? {
        return Err(StepError::interrupted("the operator's hook after the plan"));
    }
    record.judged_by = Some(run.hooks.digest().to_owned());
    let noted = stored_plan::note(&run.store, &run.job, Some(record.clone()));
    run.stored(noted).await
}

/// Notes that the job is planned. If the plan fails, the note prevents an apply of this job without a plan.
async fn note_start(run: &RunContext<'_>) -> Result<(), StepError> {
    if run.connections.is_local() {
        run.stored(stored_plan::note(&run.store, &run.job, None))
            .await?;
    }
    Ok(())
}

/// Runs the tool, and releases the lock on the state if the tool left it.
pub(crate) async fn run_plan(
    context: &OperationContext<'_, '_>,
    destroy: bool,
    env: &ChildEnv,
    result: &mut OperationResult,
) -> Result<(Ending, Structured), StepError> {
    let (run, terraform, started) = (context.run, &context.terraform, SystemTime::now());
    let planned = terraform.plan(env, destroy, run.log.writer());
    let planned = run
        .timer
        .time(
            Phase::Plan,
            planned,
            |done| matches!(done, Ok((done, _)) if plan_ending(*done) != Ending::Failure),
        )
        .await;
    let done = planned.as_ref().ok().map(|(done, _)| *done);
    let details = &mut result.details;
    if !release_lock::record_blocking_lock(context, details)
        && let Some(tool) = release_lock::find_tool_with_lock(context, started, done)
    {
        details.lock = release_lock::release_leftover_lock(run, terraform, env, &tool).await;
        release_lock::add_unlock_hint(context, details);
    }
    let (done, structured) = planned?;
    context.log_unusual_end(done, details).await;
    let ending = plan_ending(done);
    if ending == Ending::Failure {
        details.tool_end = Some(format!("the tool ended with {}", done.ended));
    }
    Ok((ending, structured))
}

/// Exit codes of `plan -detailed-exitcode`; every other end is a failure (W-18).
fn plan_ending(done: Completion) -> Ending {
    match done.ended {
        Ended::Code(0) => Ending::Success,
        Ended::Code(2) => Ending::Changes,
        Ended::Code(_) | Ended::Signal(_) => Ending::Failure,
    }
}

/// Whether another executor has reported the step. A plan may be repeated while the other executor still makes its own.
/// Once the other has reported, its plan is under review, and must not be replaced.
async fn step_has_ended(run: &RunContext<'_>) -> bool {
    let deadline = Deadline::after(VIEW_TIMEOUT);
    let view = run.connections.platform.step_view(&run.step, &deadline);
    match view.await {
        Ok(view) => view.step_has_ended() && !view.status.is_over(),
        Err(error) => {
            warn!(
                error = chain(&error),
                "the platform did not report whether the step has already ended"
            );
            false
        }
    }
}

/// Rendering only reads the plan, so it runs in parallel with the upload.
async fn store_and_show(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
    structured: &mut Structured,
) -> Result<PlanRecord, StepError> {
    let run = context.run;
    let mut rendered = pin!(maybe_done(render_plan(context, env)));
    let store = async {
        let store = Box::pin(store_plan(context));
        match select(store, &mut rendered).await {
            Either::Left((stored, _)) => stored,
            Either::Right(((), store)) => store.await,
        }
    };
    let stored = run.phase(Phase::Store, store).await?;
    let show = async {
        rendered.as_mut().await;
        let rendered = rendered.as_mut().take_output();
        let RenderedPlan { text, json } = rendered.transpose()?.unwrap_or_default();
        if let Some(text) = text {
            run.log_output(&text).await;
        }
        if let Some(plan) = json {
            structured.complete_from_plan(&plan);
        }
        Ok::<_, StepError>(())
    };
    run.phase(Phase::Show, show).await?;
    Ok(stored)
}

/// Stores the plan before any later script can change it, so that the stored plan is the one that the tool made.
async fn store_plan(context: &OperationContext<'_, '_>) -> Result<PlanRecord, StepError> {
    let (run, prepared) = (context.run, context.prepared);
    let file = prepared.working_dir.join(PLAN_FILE);
    let digest = Digest::of(&file).map_err(|source| StepError::working_dir(&file, &source))?;
    let plan = NewPlan {
        file: &file,
        digest,
        tool: &prepared.tool,
        commit_id: &prepared.workspace.head,
        backend: context.run.backend.kind(),
    };
    run.stored(stored_plan::store(&run.store, &run.job, plan))
        .await
}

/// Both renderings run at the same time: each is a process of the tool that only reads the plan.
async fn render_plan(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
) -> Result<RenderedPlan, StepError> {
    let (text, json) = tokio::join!(
        context.terraform.show_plan(env),
        context.terraform.show_plan_json(env)
    );
    let text = text?;
    let json = match json?.map(|text| serde_json::from_slice(&text)) {
        Some(Ok(plan)) => Some(plan),
        Some(Err(error)) => {
            warn!(%error, "the tool's JSON rendering of the plan is not usable");
            None
        }
        None => {
            warn!("the tool could not render the plan as JSON");
            None
        }
    };
    Ok(RenderedPlan { text, json })
}
