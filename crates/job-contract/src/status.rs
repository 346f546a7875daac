//! Statuses of jobs and steps, in the platform's words (contract 2.8).

use std::fmt;

use serde::{Deserialize, Serialize};

/// Status of a job. Unknown statuses of other releases are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum JobStatus {
    Pending,
    WaitingApproval,
    Approved,
    Queue,
    Running,
    Completed,
    NoChanges,
    Failed,
    Cancelled,
    Rejected,
    #[serde(untagged)]
    Other(String),
}

impl JobStatus {
    /// Whether the job has ended, so that nothing may run or be reported. `rejected` is not such a status: an `onReject`
    /// dispatch runs with it (contract 2.5).
    pub const fn is_over(&self) -> bool {
        matches!(
            self,
            Self::Completed | Self::NoChanges | Self::Failed | Self::Cancelled
        )
    }
}

impl fmt::Display for JobStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Status of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StepStatus {
    Pending,
    Running,
    Completed,
    Failed,
    Cancelled,
    NotExecuted,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_have_the_platforms_names() {
        for (status, word) in [
            (JobStatus::WaitingApproval, "waitingApproval"),
            (JobStatus::NoChanges, "noChanges"),
            (JobStatus::Queue, "queue"),
            (JobStatus::Other("postponed".into()), "postponed"),
        ] {
            assert_eq!(serde_json::to_value(&status).unwrap(), word);
            assert_eq!(
                serde_json::from_value::<JobStatus>(word.into()).unwrap(),
                status
            );
            assert_eq!(status.to_string(), word);
        }
        assert_eq!(
            serde_json::to_value(StepStatus::NotExecuted).unwrap(),
            "notExecuted"
        );
    }
}
