//! The types of requests to a platform about a step: start permission, claim, statuses and outcome.

use std::fmt;

use job_contract::JobData;
use job_contract::final_statuses::FinalStatuses;
use job_contract::status::{JobStatus, StepStatus};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The ids of a step.
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
    /// The step of a job document.
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
    Granted(StepView),
    JobEnded(JobStatus),
    /// The step has an outcome, but its job continues: the dispatch came late.
    StepEnded(StepStatus),
    /// The platform has not recorded the dispatch, and will probably repeat it. This executor must not change the job.
    NotDispatched(JobStatus),
}

/// The answer to the report that a step runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartReport {
    Accepted,
    /// The step or its job has ended meanwhile, so the step must not run. Has the status of the job.
    Ended(JobStatus),
}

/// What the platform's records say about a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepView {
    pub status: JobStatus,
    /// Status of the step, if the platform knows it.
    pub step: Option<StepStatus>,
    pub template_steps: usize,
    pub terraform_plan: Option<String>,
    /// Whether a plan step of this job has completed. If so, an apply must use its plan.
    pub planned: bool,
    /// Whether a report was interrupted: the step has an outcome, but the running job lacks it and has no other running
    /// step.
    pub half_reported: bool,
}

impl StepView {
    /// The status with which the step ended. `None` for a rejected job: its scripts run for a step that has ended.
    pub fn outcome(&self) -> Option<StepStatus> {
        let outcome = self.step?;
        (self.step_has_ended() && self.status != JobStatus::Rejected).then_some(outcome)
    }

    /// Whether the step has an outcome from any reporter.
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
    /// Name of the pod; without a pod, name of the host.
    pub pod: String,
    /// UID of the pod, or another id that is unique to the executor.
    pub uid: String,
    /// When the holder took the claim, RFC 3339.
    pub since: String,
}

impl Holder {
    /// A holder without known details.
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

/// The answer to an attempt to claim a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    Granted,
    /// Another executor has the claim, or had it.
    Taken(Holder),
    /// It is not ours, for this reason, and not to be run whatever it does.
    Refused(String),
}

/// How a run ended, for the hub that has given it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunEnd {
    pub result: RunResult,
    pub exit_code: u8,
    /// What to tell people. Never a secret.
    pub diagnostic: String,
    pub reported: bool,
    /// What the hub needs to report the step, if the executor did not.
    pub report: Option<Map<String, Value>>,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunResult {
    Completed,
    Failed,
    Cancelled,
}

/// What happens to the job's reference to its plan (contract 5.4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanReference {
    Keep,
    /// A plan succeeded and is stored at this address.
    Set(String),
    /// A plan failed.
    Clear,
}

/// The final report of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub statuses: FinalStatuses,
    /// Address of the step's output.
    pub output: Option<String>,
    /// One sentence with the cause, for a platform that has no output to show.
    pub note: Option<String>,
    pub plan: PlanReference,
    /// Commit of the step; empty if the workspace could not be prepared. `None` keeps the recorded one.
    pub commit_id: Option<String>,
}

/// One published state (contract 6.4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// Address of the state's JSON.
    pub output: String,
    pub job_reference: String,
    pub serial: u64,
    /// MD5 of the raw state, lower-case hex.
    pub md5: String,
    pub lineage: String,
}
