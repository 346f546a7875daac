//! Registration and heartbeats of the instances of agents.

use serde::{Deserialize, Serialize};

use crate::id::{AgentName, InstanceId, LeaseId, PoolName, TaskId};

/// The body of a registration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Registration {
    /// An id of the process. It stays the same when the process registers again.
    pub system_id: String,
    pub name: AgentName,
    pub executor_version: String,
    pub protocol_min_version: u32,
    pub protocol_max_version: u32,
    /// The operating system, for example `linux`.
    // Elsewhere, the platform is the system that orders runs.
    #[serde(rename = "platform")]
    pub operating_system: String,
    /// The architecture, for example `amd64`.
    pub architecture: String,
    /// How many tasks it runs at once.
    pub capacity: u32,
    #[serde(default)]
    pub tags: Vec<String>,
    /// The id of the cluster or machine. Two installations with one name differ in it.
    #[serde(default)]
    pub installation: String,
    /// The target of the agent: how it runs tasks.
    #[serde(default)]
    pub target: String,
    /// Leases of earlier processes of the agent whose executors were found.
    #[serde(default)]
    pub leases: Vec<InstanceLease>,
}

/// A lease that an instance has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct InstanceLease {
    pub task_id: TaskId,
    pub lease_id: LeaseId,
    pub fencing_token: u64,
    #[serde(default)]
    pub phase: Phase,
    /// Why the task waits, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The progress of a task at its agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Phase {
    /// The executor does not exist yet.
    #[default]
    Preparing,
    /// The executor exists and has not accepted the task.
    Started,
    /// The executor has accepted the task.
    Running,
    /// A phase of a later version of the protocol.
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
    /// The longest wait of a request for a task.
    #[serde(default = "default_wait")]
    pub max_wait_seconds: u32,
    /// Leases that the instance no longer has. Their executors must be removed.
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
    /// The instance is registered, and gets no tasks yet.
    Standby,
    Active,
    /// A status of a later version of the protocol.
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
    pub leases: Vec<InstanceLease>,
}

/// The state of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum InstanceState {
    Online,
    /// It takes no new tasks, and follows its current ones.
    Draining,
    /// A state of a later version of the protocol.
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
    /// Leases that the instance no longer has. Their executors must be removed.
    #[serde(default)]
    pub stale: Vec<LeaseId>,
}

/// What an instance must do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Action {
    #[default]
    None,
    /// Take no new tasks for now.
    Pause,
    /// Take no new tasks, and end after the last current one.
    Drain,
    /// End now.
    Disconnect,
    /// An action of a later version of the protocol.
    #[serde(other)]
    Other,
}

/// An order to stop a task.
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
    /// Stop the task gracefully: the executor saves the state.
    Cancel,
    /// Stop the task at once.
    Force,
    /// A signal of a later version of the protocol.
    #[serde(other)]
    Other,
}
