//! The ways a run can end.

use std::fmt;

use job_contract::Exit;
use serde::{Deserialize, Serialize};

/// Makes the kinds from a table: the kind, its name in JSON and in tables, and the exit with which the executor would have ended,
/// if it could.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident, $name:literal, $outcome:expr;)*) => {
        /// Every way a run can end.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum VerdictKind {
            $($(#[$doc])* #[serde(rename = $name)] $kind,)*
        }

        impl VerdictKind {
            pub const ALL: [Self; 24] = [$(Self::$kind),*];

            /// The name in JSON and in tables.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }

            /// The exit with which the executor would have ended, if it could.
            pub const fn outcome(self) -> Exit {
                match self {
                    $(Self::$kind => $outcome,)*
                }
            }
        }
    };
}

kinds! {
    Completed, "completed", Exit::Done;
    StepFailed, "step_failed", Exit::StepFailed;
    NeverScheduled, "never_scheduled", Exit::Infrastructure;
    ImageNotPulled, "image_not_pulled", Exit::Infrastructure;
    ConfigMissing, "config_missing", Exit::BadConfiguration;
    QuotaExceeded, "quota_exceeded", Exit::Infrastructure;
    AdmissionRefused, "admission_refused", Exit::BadConfiguration;
    OomKilled, "oom_killed", Exit::Signal(9);
    Evicted, "evicted", Exit::Signal(9);
    Preempted, "preempted", Exit::Signal(15);
    NodeLost, "node_lost", Exit::Signal(9);
    DeadlineExceeded, "deadline_exceeded", Exit::Signal(15);
    Deleted, "deleted", Exit::Signal(15);
    Lost, "lost", Exit::Signal(9);
    BadJobData, "bad_job_data", Exit::BadJobData;
    Claimed, "claimed", Exit::Claimed;
    Infrastructure, "infrastructure", Exit::Infrastructure;
    Defect, "defect", Exit::Defect;
    Signalled, "signalled", Exit::Signal(15);
    /// The job was cancelled.
    Cancelled, "cancelled", Exit::Signal(15);
    /// The executor stopped the tool before the kernel would have killed it for its memory.
    MemoryStop, "memory_stop", Exit::StepFailed;
    /// The executor stopped the tool because the tool had no output for too long.
    Silence, "silence", Exit::StepFailed;
    /// A lock of another run or person was on the state.
    StateLocked, "state_locked", Exit::StepFailed;
    /// The agent of a pool had to stop at once and ended the executor.
    AgentForced, "agent_forced", Exit::Signal(9);
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
