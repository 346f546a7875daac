//! Parameters and results of the operations of a store.

use std::fmt;
use std::time::Duration;

use pool_protocol::id::{InstanceId, LeaseId, PoolName, TaskId};
use pool_protocol::instance::Signal;
use pool_protocol::lease::LeaseRef;
use pool_protocol::task::TaskState;

use crate::state::Task;
use crate::view::TaskView;

/// A run step that the platform has ordered.
#[derive(Clone, Debug)]
pub struct Submission {
    /// A new id. A duplicate keeps the id of the first submission.
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
    pub content: Content,
}

/// The content of a submission.
#[derive(Clone, Debug)]
pub enum Content {
    Payload(Payload),
    /// The task may not run, for this reason. It is over at once, and must be reported.
    Refused(String),
}

/// A job document. The store does not read it.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Payload(pub Vec<u8>);

// The document has secrets.
impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Payload({} bytes)", self.0.len())
    }
}

/// The result of a submission. The task is stored in both cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    New(TaskId),
    Duplicate(TaskId),
}

impl Submitted {
    /// Returns the id of the task.
    pub const fn task(self) -> TaskId {
        match self {
            Self::New(task) | Self::Duplicate(task) => task,
        }
    }
}

/// The state of an unconfirmed task on the platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlatformState {
    /// The step waits for its run.
    Waiting,
    /// The step is over, or the platform never stored it.
    Over,
    /// The step runs. An executor that the store does not know has accepted it.
    Running,
}

/// A request of an instance for a task.
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    /// The pool of the instance's token.
    pub pool: PoolName,
    /// See [`Task::credential`](crate::state::Task::credential).
    pub credential: String,
    pub instance: InstanceId,
    /// All leases that the instance knows. If it has another lease, the store returns that lease again.
    pub holding: Vec<LeaseId>,
    /// How long to wait for a task.
    pub wait: Duration,
}

/// A task and the lease on it.
#[derive(Clone, Debug)]
pub struct LeasedTask {
    pub grant: LeaseRef,
    /// How long the lease is valid without a heartbeat of the instance.
    pub expires_in: Duration,
    /// 1 for the first lease.
    pub attempt: u32,
    /// Whether the instance was given this lease before.
    pub redelivered: bool,
    pub task: Task,
    pub payload: Payload,
}

/// A lease as the store sees it after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseStatus {
    pub grant: LeaseRef,
    pub state: TaskState,
    /// How long the lease is valid without a heartbeat.
    pub expires_in: Duration,
    pub cancel_requested: bool,
}

/// How a task ended, as its agent or executor reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Completed,
    Failed,
    Cancelled,
}

/// What a heartbeat of an instance returns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    pub signals: Vec<Signal>,
    /// Leases that the instance no longer has.
    pub stale: Vec<LeaseId>,
}

/// A registered instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisteredInstance {
    pub instance: InstanceId,
    pub stale: Vec<LeaseId>,
}

/// The result of a sweep.
#[derive(Clone, Debug, Default)]
pub struct Swept {
    /// Tasks whose state has changed. Those that are over must be reported, see [`crate::Store::to_report`].
    pub changed: Vec<TaskView>,
    /// Whether one sweep was not enough. Then sweep again at once.
    pub more: bool,
    /// Whether there was no sweep for a while. Then all time limits start again.
    pub resumed: bool,
}
