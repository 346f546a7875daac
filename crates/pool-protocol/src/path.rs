//! Paths of the protocol, below the URL of the hub. Parameters are written as `{…}`, as in axum and OpenAPI.

use crate::id::{InstanceId, LeaseId, TaskId};

/// Returns the protocol versions of the hub. Needs no token.
pub const PROTOCOL: &str = "/api/v1/executor/protocol";
/// Exchanges a token of an OpenID provider for an access token of a pool (RFC 8693).
pub const TOKEN: &str = "/api/v1/executor/token";
/// Registers an instance.
pub const REGISTER: &str = "/api/v1/executor/instances/register";
/// Removes an instance.
pub const INSTANCE: &str = "/api/v1/executor/instances/{instance}";
/// Heartbeat of an instance. It renews the leases that it names.
pub const INSTANCE_HEARTBEAT: &str = "/api/v1/executor/instances/{instance}/heartbeat";
/// Waits for a task.
pub const REQUEST_TASK: &str = "/api/v1/executor/tasks/request";

/// A call of the agent or the executor that has a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseCall {
    /// The agent has started an executor.
    Started,
    /// The agent declines the task.
    Decline,
    /// The executor accepts the task: the claim.
    Accept,
    /// The executor is alive.
    Heartbeat,
    /// The step has succeeded.
    Complete,
    /// The step has failed.
    Fail,
    /// The step was stopped because it was cancelled.
    Cancelled,
}

// The last segment of the path.
crate::names!(LeaseCall {
    Started = "started",
    Decline = "decline",
    Accept = "accept",
    Heartbeat = "heartbeat",
    Complete = "complete",
    Fail = "fail",
    Cancelled = "cancelled",
});

/// A call for a lease.
pub const LEASE: &str = "/api/v1/executor/tasks/{task}/leases/{lease}/{call}";
/// The interface of the platform. Executors reach it through the hub with the token of a lease.
pub const RELAY: &str = "/api/v1/executor/tasks/{task}/leases/{lease}/platform/{*path}";

/// Returns what the store of the hub calls the artifacts of a step.
pub const ARTIFACTS: &str = "/api/v1/executor/tasks/{task}/leases/{lease}/artifacts";
/// One artifact of a step.
pub const ARTIFACT: &str = "/api/v1/executor/tasks/{task}/leases/{lease}/artifacts/{artifact}";
/// The state of the workspace, as the tool's own backend stores it.
pub const STATE: &str = "/api/v1/executor/tasks/{task}/leases/{lease}/state";
/// Locks the state.
pub const STATE_LOCK: &str = "/api/v1/executor/tasks/{task}/leases/{lease}/state/lock";
/// Unlocks the state.
pub const STATE_UNLOCK: &str = "/api/v1/executor/tasks/{task}/leases/{lease}/state/unlock";

/// Returns the path of a call for a lease.
pub fn lease(task: TaskId, lease: LeaseId, call: LeaseCall) -> String {
    format!("{}/{}", lease_base(task, lease), call.name())
}

/// Returns the prefix of the platform's paths for an executor that uses the relay.
pub fn relay(task: TaskId, lease: LeaseId) -> String {
    format!("{}/platform", lease_base(task, lease))
}

/// Returns the path of an instance.
pub fn instance(instance: InstanceId) -> String {
    format!("/api/v1/executor/instances/{instance}")
}

/// Returns the path for heartbeats of an instance.
pub fn instance_heartbeat(instance: InstanceId) -> String {
    format!("/api/v1/executor/instances/{instance}/heartbeat")
}

fn lease_base(task: TaskId, lease: LeaseId) -> String {
    format!("/api/v1/executor/tasks/{task}/leases/{lease}")
}
