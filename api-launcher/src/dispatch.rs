//! The contract between the HTTP service, which receives dispatches, and the targets, which run them.

pub(crate) mod no_target;
pub(crate) mod route;

use std::fmt::Debug;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http_service::Readiness;
use job_contract::{Document, JobData, StepType};
use reporter::dispatch::{Acceptance, DispatchError, ResponseSent};

/// Runs the steps of accepted dispatches.
pub(crate) trait DispatchTarget: Debug + Send + Sync {
    /// Accepts a valid job document. The run is stored durably when the future ends, even if the caller has hung up.
    /// The target reports nothing to the platform before `response_sent`.
    fn accept(
        &self,
        job: Document,
        response_sent: ResponseSent,
    ) -> BoxFuture<'_, Result<Acceptance, DispatchError>>;

    /// Returns whether the target could accept a dispatch now.
    fn readiness(&self) -> BoxFuture<'_, Readiness>;

    /// Does what the target does beside accepting, until the launcher stops.
    fn work(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }

    /// Waits for the tasks that follow responses. No dispatch is accepted any more.
    fn finish_background_tasks(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }

    /// Returns the name in the configuration.
    fn name(&self) -> &'static str;
}

/// Returns whether a step has no work: an approval, or scripts without a script.
pub(crate) fn has_nothing_to_run(job: &JobData) -> bool {
    let idle = matches!(
        job.step_type(),
        Ok(StepType::Approval | StepType::CustomScripts)
    );
    idle && job.command_list.is_empty()
}
