//! Paths of the wire, below the URL of the hub. `{…}` are parameters, as axum and OpenAPI write them.

use crate::id::{InstanceId, LeaseId, TaskId};

/// Tells the versions the hub speaks. Needs no token.
pub const PROTOCOL: &str = "/api/v1/executor/protocol";
/// Exchanges a token of an OpenID provider for an access token of a pool (RFC 8693).
pub const TOKEN: &str = "/api/v1/executor/token";
/// Registers an instance.
pub const REGISTER: &str = "/api/v1/executor/instances/register";
/// Removes an instance.
pub const INSTANCE: &str = "/api/v1/executor/instances/{instance}";
/// Says that an instance lives, and renews its leases that are not accepted yet.
pub const INSTANCE_HEARTBEAT: &str = "/api/v1/executor/instances/{instance}/heartbeat";
/// Waits for a task.
pub const REQUEST_TASK: &str = "/api/v1/executor/tasks/request";

/// What a lease's holder says of its task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseCall {
    /// The agent has started an executor.
    Started,
    /// The agent hands the task back.
    Decline,
    /// The executor takes the task: the claim.
    Accept,
    /// The executor lives.
    Heartbeat,
    /// Lines of the run log.
    Logs,
    /// The step has ended well.
    Complete,
    /// The step has failed.
    Fail,
    /// The step has stopped because it was cancelled.
    Cancelled,
}

impl LeaseCall {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Started,
        Self::Decline,
        Self::Accept,
        Self::Heartbeat,
        Self::Logs,
        Self::Complete,
        Self::Fail,
        Self::Cancelled,
    ];

    /// The last part of its path.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Decline => "decline",
            Self::Accept => "accept",
            Self::Heartbeat => "heartbeat",
            Self::Logs => "logs",
            Self::Complete => "complete",
            Self::Fail => "fail",
            Self::Cancelled => "cancelled",
        }
    }

    /// The call of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|call| call.name() == name)
    }
}

/// A call about a lease.
pub const LEASE: &str = "/api/v1/executor/tasks/{task}/leases/{lease}/{call}";
/// The platform's own interface, reached through the hub with the token of a lease.
pub const RELAY: &str = "/api/v1/executor/tasks/{task}/leases/{lease}/platform/{*path}";

/// The path of a call about a lease.
#[must_use]
pub fn lease(task: TaskId, lease: LeaseId, call: LeaseCall) -> String {
    format!("{}/{}", lease_base(task, lease), call.name())
}

/// What stands before the paths of the platform when an executor uses the relay.
#[must_use]
pub fn relay(task: TaskId, lease: LeaseId) -> String {
    format!("{}/platform", lease_base(task, lease))
}

/// The path of an instance.
#[must_use]
pub fn instance(instance: InstanceId) -> String {
    format!("/api/v1/executor/instances/{instance}")
}

/// The path of an instance's heartbeats.
#[must_use]
pub fn instance_heartbeat(instance: InstanceId) -> String {
    format!("/api/v1/executor/instances/{instance}/heartbeat")
}

fn lease_base(task: TaskId, lease: LeaseId) -> String {
    format!("/api/v1/executor/tasks/{task}/leases/{lease}")
}
