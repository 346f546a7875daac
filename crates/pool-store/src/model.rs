//! What the operations of a store take and give.

use std::fmt;
use std::time::Duration;

use pool_protocol::id::{InstanceId, LeaseId, PoolName, TaskId};
use pool_protocol::instance::Signal;
use pool_protocol::task::TaskState;
use pool_protocol::token::JobGrant;

use crate::view::TaskView;

/// A run step that the platform has ordered.
#[derive(Clone, Debug)]
pub struct Submission {
    /// New. A duplicate keeps the one it was first submitted with.
    pub task: TaskId,
    pub pool: PoolName,
    pub organization: String,
    pub workspace: String,
    pub job: String,
    /// Unique: a second submission of the same job and step is a duplicate.
    pub step: String,
    /// The type of the step, as in the job document.
    pub kind: String,
    /// W3C Trace Context.
    pub traceparent: Option<String>,
    /// The pool's executors accept nothing: an executor that exists has accepted the task.
    pub stock: bool,
    pub content: Content,
}

/// What is submitted.
#[derive(Clone, Debug)]
pub enum Content {
    /// The job document.
    Payload(Payload),
    /// The task may not run, for this reason. It is over from the first moment, and must be reported.
    Refused(String),
}

/// A job document, as the caller has encoded or sealed it. Opaque here.
#[derive(Clone, PartialEq, Eq)]
pub struct Payload {
    /// Which key it is sealed to, if it is.
    pub key_id: Option<String>,
    pub data: Vec<u8>,
}

// The data may be secret.
impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Payload")
            .field("key_id", &self.key_id)
            .field("length", &self.data.len())
            .finish()
    }
}

/// What became of a submission. Either way it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    New(TaskId),
    Duplicate(TaskId),
}

impl Submitted {
    /// The task.
    #[must_use]
    pub const fn task(self) -> TaskId {
        match self {
            Self::New(task) | Self::Duplicate(task) => task,
        }
    }
}

/// What the platform says of a task that was not confirmed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The step waits to be run.
    Waiting,
    /// The step is over, or was never committed.
    Over,
    /// The step runs: an executor, of which the store knows nothing, has accepted it.
    Running,
}

/// An instance asks for a task.
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    /// The pool of the instance's token.
    pub pool: PoolName,
    pub instance: InstanceId,
    /// All leases it knows of. A lease that it has and does not name is given again.
    pub holding: Vec<LeaseId>,
    /// How long to wait for a task.
    pub wait: Duration,
}

/// A task and the lease on it.
#[derive(Clone, Debug)]
pub struct LeasedTask {
    pub grant: JobGrant,
    /// How long the lease is valid without a heartbeat of the instance.
    pub expires_in: Duration,
    /// 1 for the first lease.
    pub attempt: u32,
    /// Whether the instance was given this lease before.
    pub redelivered: bool,
    pub organization: String,
    pub workspace: String,
    pub job: String,
    pub step: String,
    pub kind: String,
    pub traceparent: Option<String>,
    pub payload: Payload,
}

/// A lease as the store sees it after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseStatus {
    pub grant: JobGrant,
    pub state: TaskState,
    /// How long it holds without another word.
    pub expires_in: Duration,
    pub cancel_requested: bool,
}

/// How a task ended, as its holder says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Completed,
    Failed,
    Cancelled,
}

/// What an instance learns when it registers or sends a heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    pub signals: Vec<Signal>,
    /// Leases that are not the instance's any more.
    pub stale: Vec<LeaseId>,
}

/// A registered instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisteredInstance {
    pub instance: InstanceId,
    pub stale: Vec<LeaseId>,
}

/// What a sweep did.
#[derive(Clone, Debug, Default)]
pub struct Swept {
    /// Tasks whose state has changed. Those that are over must be reported: see [`crate::Store::to_report`].
    pub changed: Vec<TaskView>,
    /// Whether there is more to do now: not all fits into one sweep.
    pub more: bool,
    /// Whether nothing had been swept for a while, so that all time limits were set anew.
    pub resumed: bool,
}
