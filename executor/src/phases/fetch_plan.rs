//! Fetches the plan that an apply must use.
//!
//! This phase collects the facts about the job's plan. `stored_plan` decides which plan may be used.

use job_contract::StepType;
use platform::StepView;
use serde_json::Map;

use crate::context::RunContext;
use crate::error::StepError;
use crate::stored_plan::{PlanFetcher, ReviewedPlan};

/// The plan of the job; `None` if the step is no apply, or if the job has no plan.
pub(crate) async fn fetch_plan(
    run: &RunContext<'_>,
    view: &StepView,
) -> Result<Option<ReviewedPlan>, StepError> {
    if run.step_type != StepType::Apply {
        return Ok(None);
    }
    // Without a plan there is nothing to compare.
    let context = if view.terraform_plan.is_some() {
        run.job_context().await
    } else {
        Map::new()
    };
    let fetcher = PlanFetcher {
        job: &run.job,
        view,
        context: &context,
        store: &run.store,
        backend: run.backend.kind(),
        private: run.layout.private(),
        platform_keeps_records: !run.connections.is_local(),
        mixed_fleet: run.config.run.mixed_fleet,
    };
    fetcher.fetch().await
}
