//! The contract between the HTTP service, which receives dispatches, and the targets, which run them.

pub(crate) mod no_target;
pub(crate) mod response;
pub(crate) mod route;

use std::fmt::Debug;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::{Document, JobData, StepType};

use self::response::ResponseSent;
use crate::metrics::Load;

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

    /// Returns how many runs wait and run here. `None` means that another part keeps these metrics.
    fn load(&self) -> Option<Load> {
        None
    }

    /// Does what the target does beside accepting, until the launcher stops.
    fn work(&self) -> BoxFuture<'_, ()>;

    /// Waits for the tasks that follow responses. No dispatch is accepted any more.
    fn finish_background_tasks(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }

    /// Returns the name in the configuration.
    fn name(&self) -> &'static str;
}

/// How a dispatch was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acceptance {
    New,
    /// The same job and step came before.
    Duplicate,
}

/// Why a dispatch was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DispatchError {
    /// The platform may dispatch again.
    #[error("{0}")]
    Unavailable(String),
    /// The same dispatch would be rejected again.
    #[error("{0}")]
    Invalid(String),
}

/// Whether the target could accept a dispatch now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    /// The target accepts dispatches, but their runs fail for this reason, or are watched less closely. Or a hub has no space for
    /// new runs, and the others go on.
    Impaired(String),
    NotReady(String),
}

impl Readiness {
    /// The worse of two.
    pub(crate) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Ready, other) => other,
            (Self::Impaired(_), other @ Self::NotReady(_)) => other,
            (worse, _) => worse,
        }
    }
}

/// Returns whether a step has no work: an approval, or scripts without a script.
pub(crate) fn has_nothing_to_run(job: &JobData) -> bool {
    let idle = matches!(
        job.step_type(),
        Ok(StepType::Approval | StepType::CustomScripts)
    );
    idle && job.command_list.is_empty()
}
