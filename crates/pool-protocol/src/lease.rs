//! What the holder of a lease says of its task, and what the hub answers.

use serde::{Deserialize, Serialize};

use crate::id::{LeaseId, TaskId};
use crate::task::TaskState;

/// The body of `started`: an executor exists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Started {
    /// What people look for: namespace and name of a Job, or a process.
    #[serde(default)]
    pub executor: String,
}

/// The body of `decline`: the agent hands the task back, and nothing of it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Decline {
    pub reason: DeclineReason,
    /// For people. Never a secret.
    #[serde(default)]
    pub diagnostic: String,
    /// When another try may succeed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay_seconds: Option<u32>,
}

/// Why a task is handed back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum DeclineReason {
    /// The agent stops. No attempt is counted.
    Draining,
    /// There is no room for now. No attempt is counted.
    Quota,
    /// The task and its payload do not belong together, or the agent may not run it.
    Refused,
    /// The agent has no key for the payload.
    Sealed,
    /// Infrastructure failed.
    Failed,
    /// A reason that a later version of the protocol has.
    #[serde(other)]
    Other,
}

impl DeclineReason {
    /// Returns whether it counts as an attempt.
    #[must_use]
    pub const fn counts(self) -> bool {
        !matches!(self, Self::Draining | Self::Quota)
    }
}

/// Who accepts a task, or says that it lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// The UID of the pod, or what else is never used twice.
    pub uid: String,
    /// For people.
    #[serde(default)]
    pub name: String,
}

/// The body of `accept` and of `heartbeat`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Acceptance {
    pub holder: Holder,
    /// What the executor does now, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
}

/// A lease as the hub sees it now. The response to `started`, `accept` and `heartbeat`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    pub task_id: TaskId,
    pub lease_id: LeaseId,
    pub fencing_token: u64,
    pub state: TaskState,
    /// RFC 3339, by the clock of the hub.
    pub expires_at: String,
    /// Counted from when the request was sent: clocks differ.
    #[serde(default)]
    pub expires_in_seconds: u32,
    /// Replaces the one that was used.
    pub job_token: String,
    pub cancel_requested: bool,
}

// The token is a secret.
impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("task_id", &self.task_id)
            .field("lease_id", &self.lease_id)
            .field("fencing_token", &self.fencing_token)
            .field("state", &self.state)
            .field("cancel_requested", &self.cancel_requested)
            .finish_non_exhaustive()
    }
}

/// The body of `complete`, `fail` and `cancelled`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct End {
    /// The exit code of the executor, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// How many lines of the log there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub final_log_sequence: Option<u64>,
    /// What to tell people. Never a secret.
    #[serde(default)]
    pub diagnostic: String,
    /// The kind of the verdict, if the agent says this because the executor cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<String>,
    /// Whether the platform has the outcome already.
    #[serde(default)]
    pub reported: bool,
}

/// The response to `complete`, `fail` and `cancelled`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Ended {
    pub task_id: TaskId,
    pub state: TaskState,
}
