//! Tasks, and the requests of agents for them.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::id::{InstanceId, LeaseId, TaskId};

/// The states of a task.
///
/// ```text
/// AVAILABLE ── lease ──▶ LEASED ── accept ──▶ RUNNING ──▶ COMPLETED, FAILED, CANCELLED
///     ▲                    │                    └── silence ──▶ ORPHANED ──▶ the same
///     └── expiry, decline ─┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TaskState {
    /// The task waits for an instance.
    Available,
    /// An instance has a lease. It may change nothing yet.
    Leased,
    /// An executor has accepted the task. The task is never leased again.
    Running,
    /// The executor that accepted the task has sent no heartbeat for a while. It may still run.
    Orphaned,
    Completed,
    Failed,
    Cancelled,
}

impl TaskState {
    /// Returns whether the task is over. Then its state never changes again.
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
    /// How many tasks the instance could start now.
    pub available_capacity: u32,
    /// How long the hub may wait for a task.
    pub wait_seconds: u32,
    /// All leases that the instance knows. If it has another lease, the hub returns that lease again.
    #[serde(default)]
    pub holding: Vec<LeaseId>,
}

/// A task and the lease on it. Without a task, the status is 204 and there is no body.
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LeasedTask {
    pub task_id: TaskId,
    pub lease_id: LeaseId,
    /// Increases with each lease of the task.
    pub fencing_token: u64,
    /// Time of the hub's clock (RFC 3339).
    pub leased_at: String,
    /// Time of the hub's clock (RFC 3339).
    pub expires_at: String,
    /// The time from the request to the expiry. It does not depend on clocks, which may differ.
    #[serde(default)]
    pub expires_in_seconds: u32,
    /// 1 for the first lease.
    #[serde(default)]
    pub attempt: u32,
    /// The token for all calls for this lease.
    pub job_token: String,
    pub task: Task,
}

// The output contains neither token nor payload, because they are secrets.
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

/// The content of a task.
#[derive(Clone, Serialize, Deserialize)]
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
    /// The job document, as the platform sent it.
    #[cfg_attr(test, schemars(with = "serde_json::Value"))]
    pub payload: Box<RawValue>,
    /// The trace of the run (W3C Trace Context).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

// The output contains no payload, because it is a secret.
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
