//! The platform as the executor sees it, whichever one it is.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use job_contract::settlement::Settlement;
use job_contract::status::{JobStatus, StepStatus};
use job_contract::{Exit, JobData, StepType, env};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::local::LocalPlatform;
use crate::patience::Patience;
use crate::setting::is_wrong_place;
use crate::terrakube::{Terrakube, TerrakubeError};

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
pub enum Admission {
    /// It may.
    Granted(Standing),
    /// Its job is over, with that status.
    Over(JobStatus),
    /// The step has an outcome, though its job goes on: a dispatch that came late.
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
pub struct Standing {
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
    /// The step has an outcome and its job still runs, with no other step at work and no word of this one: whoever
    /// reported was interrupted between the two.
    pub half_told: bool,
}

impl Standing {
    /// How the step ended. Scripts of a rejected job come for a step that is over, and run all the same.
    pub fn outcome(&self) -> Option<StepStatus> {
        let outcome = self.step?;
        (self.step_has_ended() && self.status != JobStatus::Rejected).then_some(outcome)
    }

    /// Whether the step has an outcome, whoever reported it.
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
    /// Somebody of whom nothing else is known.
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
    /// Terrakube's API did not do what it was asked to.
    #[error(transparent)]
    Terrakube(#[from] TerrakubeError),
}

impl PlatformError {
    /// The exit code when this keeps a step from being started.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Record { source, .. } if is_wrong_place(source) => Exit::BadConfiguration,
            Self::Record { .. } | Self::Corrupt { .. } => Exit::Infrastructure,
            Self::Terrakube(error) => error.exit(),
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Record { source, .. } if is_wrong_place(source) => Some(format!(
                "`{}` names a folder this user can write in",
                env::DATA_DIR
            )),
            Self::Record { .. } | Self::Corrupt { .. } => None,
            Self::Terrakube(error) => error.hint(),
        }
    }
}

/// A platform. Closed set: every executor speaks to exactly one.
#[derive(Clone, Debug)]
pub enum Platform {
    /// Files on this machine.
    Local(LocalPlatform),
    /// Terrakube's API.
    Terrakube(Terrakube),
}

/// How often the local platform's record is looked at for a cancellation.
const LOCAL_POLL: Duration = Duration::from_secs(2);

impl Platform {
    /// Whether the step may run, once the platform knows that it was dispatched. Nothing may be written to the run's
    /// log or reported before.
    pub async fn admission(&self, step: &StepRef) -> Result<Admission, PlatformError> {
        match self {
            Self::Local(local) => {
                let standing = local.standing(step)?;
                let rejected = standing.status == JobStatus::Rejected
                    && step.step_type != StepType::Approval.name();
                Ok(match standing.outcome() {
                    _ if standing.status.is_over() || rejected => Admission::Over(standing.status),
                    Some(outcome) => Admission::Settled(outcome),
                    None => Admission::Granted(standing),
                })
            }
            Self::Terrakube(terrakube) => Ok(terrakube.admission(step).await?),
        }
    }

    /// What the platform says about the step now.
    pub async fn standing(
        &self,
        step: &StepRef,
        patience: &Patience,
    ) -> Result<Standing, PlatformError> {
        match self {
            Self::Local(local) => local.standing(step),
            Self::Terrakube(terrakube) => Ok(terrakube.standing(step, patience).await?),
        }
    }

    /// Returns once somebody cancelled the job, or failed it, which is as good.
    pub async fn cancelled(&self, step: &StepRef) -> JobStatus {
        match self {
            Self::Local(local) => loop {
                tokio::time::sleep(LOCAL_POLL).await;
                // A record that cannot be read has cancelled nothing.
                if let Ok(Standing {
                    status: status @ (JobStatus::Cancelled | JobStatus::Failed),
                    ..
                }) = local.standing(step)
                {
                    return status;
                }
            },
            Self::Terrakube(terrakube) => terrakube.cancelled(step).await,
        }
    }

    /// Claims the step for `holder`, atomically: of all who ask, one is granted it, for ever.
    pub async fn claim(&self, step: &StepRef, holder: &Holder) -> Result<Claim, PlatformError> {
        match self {
            Self::Local(local) => local.claim(step, holder),
            Self::Terrakube(terrakube) => Ok(terrakube.claim(step, holder).await?),
        }
    }

    /// How the platform's records name the output of a step that is `stored` there.
    pub fn step_output(&self, step: &StepRef, stored: String) -> String {
        match self {
            Self::Local(_) => stored,
            Self::Terrakube(terrakube) => terrakube.step_output(step),
        }
    }

    /// How the platform's records name the state of that name that is `stored` there.
    pub fn state_output(&self, step: &StepRef, name: &str, stored: String) -> String {
        match self {
            Self::Local(_) => stored,
            Self::Terrakube(terrakube) => terrakube.state_output(step, name),
        }
    }

    /// Where the content of a CLI-driven run is, if the job says so (contract 8.6).
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
    ) -> Result<Start, PlatformError> {
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
        patience: &Patience,
    ) -> Result<(), PlatformError> {
        match self {
            Self::Local(local) => local.report_outcome(step, outcome),
            Self::Terrakube(terrakube) => {
                Ok(terrakube.report_outcome(step, outcome, patience).await?)
            }
        }
    }

    /// The job's context document; empty when there is none.
    pub async fn context(&self, step: &StepRef) -> Result<Map<String, Value>, PlatformError> {
        match self {
            Self::Local(local) => local.context(&step.job_id),
            Self::Terrakube(terrakube) => Ok(terrakube.context(step).await?),
        }
    }

    /// Merges `patch` into the job's context, object by object; what the patch does not name stays
    /// (contract 6.6).
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
        patience: &Patience,
    ) -> Result<(), PlatformError> {
        match self {
            Self::Local(local) => local.record_history(step, history),
            Self::Terrakube(terrakube) => {
                Ok(terrakube.record_history(step, history, patience).await?)
            }
        }
    }
}
