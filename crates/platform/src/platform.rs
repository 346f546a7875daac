//! The platform as the executor sees it: Terrakube or the records of one machine.

use std::time::Duration;

use job_contract::StepType;
use job_contract::progress::Phase;
use job_contract::status::JobStatus;
use runtime::Deadline;
use serde_json::{Map, Value};

use crate::error::PlatformError;
use crate::local::LocalPlatform;
use crate::step::{
    Claim, History, Holder, Outcome, RunEnd, StartPermission, StartReport, StepRef, StepView,
};
use crate::terrakube::Terrakube;

/// A platform. Each executor uses exactly one.
#[derive(Clone, Debug)]
pub enum Platform {
    Local(LocalPlatform),
    Terrakube(Terrakube),
}

/// How often the local platform's record is checked for a cancellation.
const LOCAL_POLL: Duration = Duration::from_secs(2);

impl Platform {
    /// Whether the step may run. Waits until the platform has recorded the dispatch. The caller must not write to the
    /// run's log or send a report before.
    pub async fn start_permission(&self, step: &StepRef) -> Result<StartPermission, PlatformError> {
        match self {
            Self::Local(local) => {
                let view = local.step_view(step)?;
                let rejected = view.status == JobStatus::Rejected
                    && step.step_type != StepType::Approval.name();
                Ok(match view.outcome() {
                    _ if view.status.is_over() || rejected => {
                        StartPermission::JobEnded(view.status)
                    }
                    Some(outcome) => StartPermission::StepEnded(outcome),
                    None => StartPermission::Granted(view),
                })
            }
            Self::Terrakube(terrakube) => Ok(terrakube.start_permission(step).await?),
        }
    }

    /// What the platform says about the step now.
    pub async fn step_view(
        &self,
        step: &StepRef,
        deadline: &Deadline,
    ) -> Result<StepView, PlatformError> {
        match self {
            Self::Local(local) => local.step_view(step),
            Self::Terrakube(terrakube) => Ok(terrakube.step_view(step, deadline).await?),
        }
    }

    /// Returns when the job was cancelled, or failed, which has the same effect.
    pub async fn cancelled(&self, step: &StepRef) -> JobStatus {
        match self {
            Self::Local(local) => loop {
                tokio::time::sleep(LOCAL_POLL).await;
                // A record that cannot be read does not cancel the job.
                if let Ok(StepView {
                    status: status @ (JobStatus::Cancelled | JobStatus::Failed),
                    ..
                }) = local.step_view(step)
                {
                    return status;
                }
            },
            Self::Terrakube(terrakube) => terrakube.cancelled(step).await,
        }
    }

    /// Returns when the hub of the run has not answered for so long that another run may soon get the workspace, and for how
    /// long it has not. `stopping` is the time that stopping the run takes. Never returns without a hub.
    pub async fn cut_off(&self, stopping: Duration) -> Duration {
        match self {
            Self::Local(_) => std::future::pending().await,
            Self::Terrakube(terrakube) => terrakube.cut_off(stopping).await,
        }
    }

    /// Claims the step for `holder`, atomically: exactly one claimant gets the step, for ever.
    pub async fn claim(&self, step: &StepRef, holder: &Holder) -> Result<Claim, PlatformError> {
        match self {
            Self::Local(local) => local.claim(step, holder),
            Self::Terrakube(terrakube) => Ok(terrakube.claim(step, holder).await?),
        }
    }

    /// Whether the executor has a lease of a hub on the step. It then writes nothing before the claim.
    pub fn is_leased(&self) -> bool {
        match self {
            Self::Local(_) => false,
            Self::Terrakube(terrakube) => terrakube.config().lease.is_some(),
        }
    }

    /// Notes what the executor does. With a lease, the hub's page shows it.
    pub fn enter(&self, phase: Phase) {
        if let Self::Terrakube(terrakube) = self {
            terrakube.enter(phase.name());
        }
    }

    /// Reports the end of the run to the hub. Without a lease, or without a granted claim, it does nothing.
    pub async fn end(&self, end: &RunEnd, deadline: &Deadline) -> Result<(), PlatformError> {
        match self {
            Self::Local(_) => Ok(()),
            Self::Terrakube(terrakube) => Ok(terrakube.end(end, deadline).await?),
        }
    }

    /// The address in the platform's records for a step output that is `stored` there.
    pub fn step_output(&self, step: &StepRef, stored: String) -> String {
        match self {
            Self::Local(_) => stored,
            Self::Terrakube(terrakube) => terrakube.step_output(step),
        }
    }

    /// The address in the platform's records for the state `name` that is `stored` there.
    pub fn state_output(&self, step: &StepRef, name: &str, stored: String) -> String {
        match self {
            Self::Local(_) => stored,
            Self::Terrakube(terrakube) => terrakube.state_output(step, name),
        }
    }

    /// The address of the content of a CLI-driven run, if the job has one (contract 8.6).
    pub async fn override_source(&self, step: &StepRef) -> Result<Option<String>, PlatformError> {
        match self {
            Self::Local(_) => Ok(None),
            Self::Terrakube(terrakube) => Ok(terrakube.override_source(step).await?),
        }
    }

    /// Reports that the step runs.
    pub async fn report_running(
        &self,
        step: &StepRef,
        commit_id: &str,
        output: &str,
    ) -> Result<StartReport, PlatformError> {
        match self {
            Self::Local(local) => local.report_running(step, commit_id, output),
            Self::Terrakube(terrakube) => {
                Ok(terrakube.report_running(step, commit_id, output).await?)
            }
        }
    }

    /// Reports how the step ended.
    pub async fn report_outcome(
        &self,
        step: &StepRef,
        outcome: &Outcome,
        deadline: &Deadline,
    ) -> Result<(), PlatformError> {
        match self {
            Self::Local(local) => local.report_outcome(step, outcome),
            Self::Terrakube(terrakube) => {
                Ok(terrakube.report_outcome(step, outcome, deadline).await?)
            }
        }
    }

    /// The job context; empty if the job has none.
    pub async fn context(&self, step: &StepRef) -> Result<Map<String, Value>, PlatformError> {
        match self {
            Self::Local(local) => local.context(&step.job_id),
            Self::Terrakube(terrakube) => Ok(terrakube.context(step).await?),
        }
    }

    /// Merges `patch` into the job context, object by object. Keys that the patch does not name stay (contract 6.6).
    pub async fn merge_context(
        &self,
        step: &StepRef,
        patch: &Map<String, Value>,
    ) -> Result<(), PlatformError> {
        match self {
            Self::Local(local) => local.merge_context(&step.job_id, patch),
            Self::Terrakube(terrakube) => Ok(terrakube.merge_context(step, patch).await?),
        }
    }

    /// Records a published state.
    pub async fn record_history(
        &self,
        step: &StepRef,
        history: &History,
        deadline: &Deadline,
    ) -> Result<(), PlatformError> {
        match self {
            Self::Local(local) => local.record_history(step, history),
            Self::Terrakube(terrakube) => {
                Ok(terrakube.record_history(step, history, deadline).await?)
            }
        }
    }
}
