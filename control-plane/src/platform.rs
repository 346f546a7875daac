//! The platform as the executor sees it, whichever one it is.

use std::fmt;
use std::path::PathBuf;

use job_contract::JobData;
use job_contract::settlement::Settlement;
use job_contract::status::JobStatus;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::local::LocalPlatform;

/// Which step a call speaks of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepRef {
    pub organization_id: String,
    pub workspace_id: String,
    pub job_id: String,
    pub step_id: String,
    /// Type of the step on the wire.
    pub step_type: String,
}

impl StepRef {
    /// The step a job document speaks of.
    pub fn of(job: &JobData) -> Self {
        Self {
            organization_id: job.organization_id.clone(),
            workspace_id: job.workspace_id.clone(),
            job_id: job.job_id.clone(),
            step_id: job.step_id.clone(),
            step_type: job.step_type.clone().unwrap_or_default(),
        }
    }
}

/// What the platform says about a step before it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Status of the job.
    pub status: JobStatus,
    /// How many steps the job's template has.
    pub template_steps: usize,
    /// Where the job's plan is stored.
    pub terraform_plan: Option<String>,
    /// Whether a plan step of this job has completed, so that an apply must use its plan.
    pub planned: bool,
}

/// Who holds a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// Name of the pod, or of the host where there is none.
    pub pod: String,
    /// UID of the pod, or another identity no second executor has.
    pub uid: String,
    /// When the claim was taken, RFC 3339.
    pub since: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` (uid {}) since {}", self.pod, self.uid, self.since)
    }
}

/// Answer to an attempt to claim a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The step is ours.
    Granted,
    /// Somebody holds it, or held it.
    Held(Holder),
}

/// What happens to the job's reference to its plan (contract 5.4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanReference {
    /// It stays as it is.
    Keep,
    /// A plan succeeded and is stored there.
    Set(String),
    /// A plan failed.
    Clear,
}

/// The final report of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Statuses of step and job.
    pub settlement: Settlement,
    /// Where the step's output lies.
    pub output: Option<String>,
    /// The plan reference.
    pub plan: PlanReference,
    /// Commit the step ran on; empty when the workspace could not be prepared.
    pub commit_id: String,
}

/// One published state (contract 6.4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// Where the state's JSON lies.
    pub output: String,
    /// Job that published it.
    pub job_reference: String,
    /// Serial of the raw state.
    pub serial: u64,
    /// MD5 of the raw state, lower-case hex.
    pub md5: String,
    /// Lineage of the raw state.
    pub lineage: String,
}

/// Why the platform could not be asked or told something.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// A record of the local platform could not be read or written.
    #[error("could not {action} `{}`", path.display())]
    Record {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// A record of the local platform is no document of ours.
    #[error("`{}` is not a record of this program", path.display())]
    Corrupt {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

/// A platform. Closed set: every executor speaks to exactly one.
#[derive(Clone, Debug)]
pub enum Platform {
    /// Files on this machine.
    Local(LocalPlatform),
}

impl Platform {
    /// What the platform says about the step.
    #[expect(
        clippy::unused_async,
        reason = "a platform behind a network answers later"
    )]
    pub async fn standing(&self, step: &StepRef) -> Result<Standing, PlatformError> {
        match self {
            Self::Local(local) => local.standing(step),
        }
    }

    /// Claims the step for `holder`, atomically: of all who ask, one is granted it, for ever.
    #[expect(
        clippy::unused_async,
        reason = "a platform behind a network answers later"
    )]
    pub async fn claim(&self, step: &StepRef, holder: &Holder) -> Result<Claim, PlatformError> {
        match self {
            Self::Local(local) => local.claim(step, holder),
        }
    }

    /// Reports that the step runs.
    #[expect(
        clippy::unused_async,
        reason = "a platform behind a network answers later"
    )]
    pub async fn report_running(
        &self,
        step: &StepRef,
        commit_id: &str,
        output: &str,
    ) -> Result<(), PlatformError> {
        match self {
            Self::Local(local) => local.report_running(step, commit_id, output),
        }
    }

    /// Reports how the step ended.
    #[expect(
        clippy::unused_async,
        reason = "a platform behind a network answers later"
    )]
    pub async fn report_outcome(
        &self,
        step: &StepRef,
        outcome: &Outcome,
    ) -> Result<(), PlatformError> {
        match self {
            Self::Local(local) => local.report_outcome(step, outcome),
        }
    }

    /// The job's context document; empty when there is none.
    #[expect(
        clippy::unused_async,
        reason = "a platform behind a network answers later"
    )]
    pub async fn context(&self, step: &StepRef) -> Result<Map<String, Value>, PlatformError> {
        match self {
            Self::Local(local) => local.context(&step.job_id),
        }
    }

    /// Merges `patch` into the job's context, object by object; what the patch does not name stays
    /// (contract 6.6).
    #[expect(
        clippy::unused_async,
        reason = "a platform behind a network answers later"
    )]
    pub async fn merge_context(
        &self,
        step: &StepRef,
        patch: &Map<String, Value>,
    ) -> Result<(), PlatformError> {
        match self {
            Self::Local(local) => local.merge_context(&step.job_id, patch),
        }
    }

    /// Records a published state.
    #[expect(
        clippy::unused_async,
        reason = "a platform behind a network answers later"
    )]
    pub async fn record_history(
        &self,
        step: &StepRef,
        history: &History,
    ) -> Result<(), PlatformError> {
        match self {
            Self::Local(local) => local.record_history(step, history),
        }
    }
}
