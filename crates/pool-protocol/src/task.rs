//! Tasks, and how an agent gets them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::id::{InstanceId, LeaseId, TaskId};

/// The states of a task.
///
/// ```text
/// AVAILABLE ── lease ──▶ LEASED ── accept ──▶ RUNNING ──▶ COMPLETED, FAILED, CANCELLED
///     ▲                    │                    └── no word ──▶ ORPHANED ──▶ the same
///     └── expiry, decline ─┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TaskState {
    /// It waits for an instance.
    Available,
    /// An instance has it. It may change nothing yet.
    Leased,
    /// An executor has accepted it. It is never given out again.
    Running,
    /// An executor had accepted it, and nothing was heard of it since. It may still run.
    Orphaned,
    Completed,
    Failed,
    Cancelled,
}

impl TaskState {
    /// Returns whether it never changes again.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

/// The body of a request for a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct TaskRequest {
    pub instance_id: InstanceId,
    /// How many tasks it could start now.
    pub available_capacity: u32,
    /// How long the hub may hold the request.
    pub wait_seconds: u32,
    /// All leases it knows of. A lease that it was given and does not name is given again.
    #[serde(default)]
    pub holding: Vec<LeaseId>,
}

/// A task and the lease on it. 204 without a body means that there was none.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LeasedTask {
    pub task_id: TaskId,
    pub lease_id: LeaseId,
    /// Grows with each lease of the task.
    pub fencing_token: u64,
    /// RFC 3339, by the clock of the hub.
    pub leased_at: String,
    /// RFC 3339, by the clock of the hub.
    pub expires_at: String,
    /// Counted from when the request was sent: clocks differ.
    #[serde(default)]
    pub expires_in_seconds: u32,
    /// 1 for the first lease.
    #[serde(default)]
    pub attempt: u32,
    /// For all calls about this lease.
    pub job_token: String,
    pub task: Task,
}

// The token and the payload are secrets.
impl std::fmt::Debug for LeasedTask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeasedTask")
            .field("task_id", &self.task_id)
            .field("lease_id", &self.lease_id)
            .field("fencing_token", &self.fencing_token)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

/// What is to be done.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Task {
    pub organization_id: String,
    pub workspace_id: String,
    pub job_id: String,
    pub step_id: String,
    /// The type of the step, as in the job document.
    #[serde(rename = "type")]
    pub kind: String,
    /// The job document. Absent if the pool has a key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payload: Option<Value>,
    /// The job document, sealed to a key of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed_payload: Option<SealedPayload>,
    /// The trace the run belongs to (W3C Trace Context).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

// The payload is a secret.
impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Task")
            .field("organization_id", &self.organization_id)
            .field("workspace_id", &self.workspace_id)
            .field("job_id", &self.job_id)
            .field("step_id", &self.step_id)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// A job document that only the holder of a pool's private key can read (HPKE, RFC 9180).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SealedPayload {
    /// Names the key: the first 8 hexadecimal digits of its public half's SHA-256.
    pub key_id: String,
    /// Base64.
    pub encapsulated_key: String,
    /// Base64.
    pub ciphertext: String,
}
