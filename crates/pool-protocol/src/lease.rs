//! Calls of the agent and the executor that have a lease, and their responses.

use serde::{Deserialize, Serialize};

use crate::id::{LeaseId, TaskId};
use crate::task::TaskState;

/// Identifies a lease. Every executor carries it, so that a later agent finds the lease of the executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeaseRef {
    pub task: TaskId,
    pub lease: LeaseId,
    pub fencing_token: u64,
}

/// The body of `started`: an executor exists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Started {
    /// Where people find the executor: namespace and name of a Job, or a process.
    #[serde(default)]
    pub executor: String,
}

/// The body of `decline`: the agent returns the task, and nothing of the task runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Decline {
    pub reason: DeclineReason,
    /// An explanation for people. It never contains a secret.
    #[serde(default)]
    pub diagnostic: String,
    /// The pause before the next lease, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay_seconds: Option<u32>,
}

/// Why an agent declines a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum DeclineReason {
    /// The agent stops. This counts no attempt.
    Draining,
    /// The agent has no capacity for now. This counts no attempt.
    Quota,
    /// The payload belongs to another task, or the agent may not run the task.
    Refused,
    /// Infrastructure failed.
    Failed,
    /// A reason of a later version of the protocol.
    #[serde(other)]
    Other,
}

impl DeclineReason {
    /// Returns whether the decline counts as an attempt.
    pub const fn counts(self) -> bool {
        !matches!(self, Self::Draining | Self::Quota)
    }
}

/// The executor that accepts a task or sends a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// The UID of the pod, or another value that is never used twice.
    pub uid: String,
    /// The name for people.
    #[serde(default)]
    pub name: String,
}

/// The body of `accept` and of `heartbeat`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Acceptance {
    pub holder: Holder,
    /// The phase of the executor, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
}

/// The current state of a lease. The response to `started`, `accept` and `heartbeat`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    pub task_id: TaskId,
    pub lease_id: LeaseId,
    pub fencing_token: u64,
    pub state: TaskState,
    /// Time of the hub's clock (RFC 3339).
    pub expires_at: String,
    /// The time from the request to the expiry. It does not depend on clocks, which may differ.
    #[serde(default)]
    pub expires_in_seconds: u32,
    /// The time without a heartbeat after which the run is given up.
    #[serde(default)]
    pub lost_in_seconds: u32,
    /// The new token. It replaces the token of the request.
    pub job_token: String,
    pub cancel_requested: bool,
}

// The output contains no token, because tokens are secrets.
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
    /// The exit code of the executor, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The number of lines of the run log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub final_log_sequence: Option<u64>,
    /// An explanation for people. It never contains a secret.
    #[serde(default)]
    pub diagnostic: String,
    /// The kind of the verdict, if the agent reports the end because the executor cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<String>,
    /// Whether the platform already has the outcome.
    #[serde(default)]
    pub reported: bool,
    /// The final report of an executor that could not report to the platform: its termination message, or the part of
    /// it with `unreportedStep`. A hub needs it for a plan, because it contains the address of the stored plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<serde_json::Map<String, serde_json::Value>>,
}

/// The response to `complete`, `fail` and `cancelled`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Ended {
    pub task_id: TaskId,
    pub state: TaskState,
}
