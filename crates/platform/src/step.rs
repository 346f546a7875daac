//! What a platform is asked and told about a step: whether it may run, who has claimed it, and how it ended.

use std::fmt;

use job_contract::JobData;
use job_contract::final_statuses::FinalStatuses;
use job_contract::status::{JobStatus, StepStatus};
use serde::{Deserialize, Serialize};

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

/// Whether a step may run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartPermission {
    /// It may.
    Granted(StepView),
    /// Its job is over, with that status.
    Over(JobStatus),
    /// The step has an outcome, though its job continues: a dispatch that came late.
    Settled(StepStatus),
    /// The platform never recorded the dispatch, and will probably repeat it: this one is not to touch the job.
    NotDispatched(JobStatus),
}

/// Answer to the report that a step runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// The platform knows.
    Told,
    /// The job, which has that status, or the step itself ended meanwhile: the step is not to run.
    Over(JobStatus),
}

/// What the platform says about a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepView {
    /// Status of the job.
    pub status: JobStatus,
    /// Status of the step, as far as the platform knows it.
    pub step: Option<StepStatus>,
    /// How many steps the job's template has.
    pub template_steps: usize,
    /// Where the job's plan is stored.
    pub terraform_plan: Option<String>,
    /// Whether a plan step of this job has completed, so that an apply must use its plan.
    pub planned: bool,
    /// The step has an outcome and its job still runs, with no other running step and without the outcome of this
    /// one: the report was interrupted between the two.
    pub half_reported: bool,
}

impl StepView {
    /// How the step ended. Scripts of a rejected job come for a step that is over, and run all the same.
    pub fn outcome(&self) -> Option<StepStatus> {
        let outcome = self.step?;
        (self.step_has_ended() && self.status != JobStatus::Rejected).then_some(outcome)
    }

    /// Whether the step has an outcome, from any reporter.
    pub const fn step_has_ended(&self) -> bool {
        !matches!(
            self.step,
            None | Some(StepStatus::Pending | StepStatus::Running)
        )
    }
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

impl Holder {
    /// A holder of which nothing else is known.
    pub fn unknown() -> Self {
        Self {
            pod: "unknown".to_owned(),
            uid: "unknown".to_owned(),
            since: "an unknown time".to_owned(),
        }
    }
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
    /// An executor holds it, or held it.
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
    pub statuses: FinalStatuses,
    /// Where the step's output is.
    pub output: Option<String>,
    /// Why it ended so, in a sentence for a platform that has no output to show.
    pub note: Option<String>,
    /// The plan reference.
    pub plan: PlanReference,
    /// Commit the step ran on, empty when the workspace could not be prepared; `None` leaves what is on record.
    pub commit_id: Option<String>,
}

/// One published state (contract 6.4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// Where the state's JSON is.
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
