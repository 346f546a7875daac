//! The ways a run can end.

use std::fmt;

use job_contract::Exit;
use serde::{Deserialize, Serialize};

/// Every way a run can end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerdictKind {
    Completed,
    StepFailed,
    NeverScheduled,
    ImageNotPulled,
    ConfigMissing,
    QuotaExceeded,
    AdmissionRefused,
    OomKilled,
    Evicted,
    Preempted,
    NodeLost,
    DeadlineExceeded,
    Deleted,
    Lost,
    BadJobData,
    Claimed,
    Infrastructure,
    Defect,
    Signalled,
    /// The job was cancelled.
    Cancelled,
    /// The executor stopped the tool before the kernel would have killed it for its memory.
    MemoryStop,
    /// The executor stopped the tool because the tool had no output for too long.
    Silence,
    /// A lock of another run or person was on the state.
    StateLocked,
    /// The agent of a pool had to stop at once and ended the executor.
    AgentForced,
}

impl VerdictKind {
    /// Every kind there is.
    pub const ALL: [Self; 24] = [
        Self::Completed,
        Self::StepFailed,
        Self::NeverScheduled,
        Self::ImageNotPulled,
        Self::ConfigMissing,
        Self::QuotaExceeded,
        Self::AdmissionRefused,
        Self::OomKilled,
        Self::Evicted,
        Self::Preempted,
        Self::NodeLost,
        Self::DeadlineExceeded,
        Self::Deleted,
        Self::Lost,
        Self::BadJobData,
        Self::Claimed,
        Self::Infrastructure,
        Self::Defect,
        Self::Signalled,
        Self::Cancelled,
        Self::MemoryStop,
        Self::Silence,
        Self::StateLocked,
        Self::AgentForced,
    ];

    /// The name in JSON and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::StepFailed => "step_failed",
            Self::NeverScheduled => "never_scheduled",
            Self::ImageNotPulled => "image_not_pulled",
            Self::ConfigMissing => "config_missing",
            Self::QuotaExceeded => "quota_exceeded",
            Self::AdmissionRefused => "admission_refused",
            Self::OomKilled => "oom_killed",
            Self::Evicted => "evicted",
            Self::Preempted => "preempted",
            Self::NodeLost => "node_lost",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Deleted => "deleted",
            Self::Lost => "lost",
            Self::BadJobData => "bad_job_data",
            Self::Claimed => "claimed",
            Self::Infrastructure => "infrastructure",
            Self::Defect => "defect",
            Self::Signalled => "signalled",
            Self::Cancelled => "cancelled",
            Self::MemoryStop => "memory_stop",
            Self::Silence => "silence",
            Self::StateLocked => "state_locked",
            Self::AgentForced => "agent_forced",
        }
    }

    /// The exit with which the executor would have ended, if it could.
    pub const fn outcome(self) -> Exit {
        match self {
            Self::Completed => Exit::Done,
            Self::StepFailed | Self::MemoryStop | Self::Silence | Self::StateLocked => {
                Exit::StepFailed
            }
            Self::NeverScheduled
            | Self::ImageNotPulled
            | Self::QuotaExceeded
            | Self::Infrastructure => Exit::Infrastructure,
            Self::ConfigMissing | Self::AdmissionRefused => Exit::BadConfiguration,
            Self::BadJobData => Exit::BadJobData,
            Self::Claimed => Exit::Claimed,
            Self::Defect => Exit::Defect,
            Self::Preempted
            | Self::DeadlineExceeded
            | Self::Deleted
            | Self::Signalled
            | Self::Cancelled => Exit::Signal(15),
            Self::OomKilled | Self::Evicted | Self::NodeLost | Self::Lost | Self::AgentForced => {
                Exit::Signal(9)
            }
        }
    }
}

/// What an executor's own exit code says, in a pod and on a machine alike.
impl From<Exit> for VerdictKind {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Done => Self::Completed,
            Exit::StepFailed => Self::StepFailed,
            Exit::Defect => Self::Defect,
            Exit::BadConfiguration => Self::ConfigMissing,
            Exit::BadJobData => Self::BadJobData,
            Exit::Infrastructure => Self::Infrastructure,
            Exit::Claimed => Self::Claimed,
            Exit::Signal(_) => Self::Signalled,
        }
    }
}

impl fmt::Display for VerdictKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
