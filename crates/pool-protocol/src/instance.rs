//! What an agent says of itself: registration and heartbeat.

use serde::{Deserialize, Serialize};

use crate::id::{AgentName, InstanceId, LeaseId, PoolName, TaskId};

/// The body of a registration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Registration {
    /// Stays the same when the process registers again.
    pub system_id: String,
    pub name: AgentName,
    pub executor_version: String,
    pub protocol_min_version: u32,
    pub protocol_max_version: u32,
    /// The operating system, as `linux`.
    pub platform: String,
    /// As `amd64`.
    pub architecture: String,
    /// How many tasks it runs at once.
    pub capacity: u32,
    #[serde(default)]
    pub tags: Vec<String>,
    /// Where it runs tasks: two installations of one name differ in it. The UID of a cluster, or a machine's id.
    #[serde(default)]
    pub installation: String,
    /// How it runs tasks.
    #[serde(default)]
    pub target: String,
    /// Leases of earlier processes whose executors it has found.
    #[serde(default)]
    pub leases: Vec<HeldLease>,
}

/// A lease, as its holder names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct HeldLease {
    pub task_id: TaskId,
    pub lease_id: LeaseId,
    pub fencing_token: u64,
    #[serde(default)]
    pub phase: Phase,
    /// Why it waits, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// How far an agent has come with a task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Phase {
    /// No executor yet.
    #[default]
    Preparing,
    /// The executor exists and has not accepted the task.
    Started,
    /// The executor has accepted the task.
    Running,
    /// A phase that a later version of the protocol has.
    #[serde(other)]
    Other,
}

/// The response to a registration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Registered {
    pub instance_id: InstanceId,
    pub pool_id: PoolName,
    pub system_id: String,
    pub selected_protocol_version: u32,
    pub status: InstanceStatus,
    pub heartbeat_interval_seconds: u32,
    pub lease_duration_seconds: u32,
    /// How long a request for a task may wait.
    #[serde(default = "default_wait")]
    pub max_wait_seconds: u32,
    /// Leases that are not the instance's any more: what runs for them must be removed.
    #[serde(default)]
    pub stale: Vec<LeaseId>,
}

const fn default_wait() -> u32 {
    50
}

/// Whether an instance gets tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum InstanceStatus {
    /// Known, and gets no tasks yet.
    Standby,
    Active,
    /// A status that a later version of the protocol has.
    #[serde(other)]
    Other,
}

/// The body of an instance's heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct InstanceHeartbeat {
    pub state: InstanceState,
    pub available_capacity: u32,
    #[serde(default)]
    pub leases: Vec<HeldLease>,
}

/// What an instance does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum InstanceState {
    Online,
    /// It takes no tasks, and follows those it has.
    Draining,
    /// A state that a later version of the protocol has.
    #[serde(other)]
    Other,
}

/// The response to an instance's heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct InstanceOrders {
    #[serde(default)]
    pub action: Action,
    #[serde(default)]
    pub signals: Vec<Signal>,
    /// Leases that are not the instance's any more: what runs for them must be removed.
    #[serde(default)]
    pub stale: Vec<LeaseId>,
}

/// What an instance is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Action {
    #[default]
    None,
    /// Take no tasks for now.
    Pause,
    /// Take no tasks, and end with the last one.
    Drain,
    /// End now.
    Disconnect,
    /// An action that a later version of the protocol has.
    #[serde(other)]
    Other,
}

/// What is to happen to a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Signal {
    pub task_id: TaskId,
    pub lease_id: LeaseId,
    pub signal: SignalKind,
}

/// How a task is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum SignalKind {
    /// Stop it in its own time: the state is saved.
    Cancel,
    /// Stop it now.
    Force,
    /// A signal that a later version of the protocol has.
    #[serde(other)]
    Other,
}
