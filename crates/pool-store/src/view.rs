//! Views of tasks, instances and pools for the status page and for metrics. No view contains a payload.

use std::time::{Duration, SystemTime};

use pool_protocol::id::{AgentName, InstanceId, LeaseId, PoolName, TaskId};
use pool_protocol::task::TaskState;

use crate::state::TaskEnd;

/// The largest number of entries of a list.
pub const PAGE: u32 = 500;

/// A part of a list.
#[derive(Clone, Copy, Debug)]
pub struct Page<Id> {
    /// The list starts after this entry. `None`: at the first.
    pub after: Option<Id>,
    /// At most [`PAGE`].
    pub limit: u32,
}

impl<Id> Page<Id> {
    /// The first page.
    pub const fn first() -> Self {
        Self {
            after: None,
            limit: PAGE,
        }
    }
}

/// A pool that has tasks or instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolView {
    pub pool: PoolName,
    /// Instances that are online, also those that are draining or degraded.
    pub online: u32,
    pub offline: u32,
    /// How many tasks the online instances run at once.
    pub capacity: u32,
    /// How many more they could start, according to their last heartbeats.
    pub free: u32,
    /// Tasks that the platform has not confirmed yet.
    pub unconfirmed: u32,
    /// Tasks that wait for an instance.
    pub available: u32,
    pub leased: u32,
    pub running: u32,
    pub orphaned: u32,
    /// Tasks that are over and whose outcome the platform does not have yet.
    pub unreported: u32,
    /// How long the oldest task has waited.
    pub oldest: Option<Duration>,
}

/// Whether an instance takes tasks and can start them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    Online,
    /// It takes no tasks, and follows those it has.
    Draining,
    /// It is online, and its last leases failed.
    Degraded,
    Offline,
}

/// An instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceView {
    pub instance: InstanceId,
    pub pool: PoolName,
    pub agent: AgentName,
    pub version: String,
    pub operating_system: String,
    pub architecture: String,
    pub target: String,
    pub tags: Vec<String>,
    pub condition: Condition,
    pub capacity: u32,
    /// How many more tasks it could start, according to its last heartbeat.
    pub free: u32,
    /// How many tasks it has.
    pub tasks: u32,
    /// How many of its leases failed since the last successful one.
    pub failures: u32,
    pub last_seen: Duration,
}

/// Why a task waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The platform has not confirmed yet that the task is wanted.
    Unconfirmed,
    /// The pause after a failed lease is not over.
    Pause(Duration),
    /// Another task of its workspace is active.
    Workspace(TaskId),
    /// No instance of the pool is online.
    NoInstance,
    /// No instance has free capacity.
    NoCapacity,
    /// An instance has capacity and will take it soon.
    Turn,
}

/// A task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskView {
    pub task: TaskId,
    pub pool: PoolName,
    pub organization: String,
    pub workspace: String,
    pub job: String,
    pub step: String,
    pub kind: String,
    pub traceparent: Option<String>,
    pub state: TaskState,
    /// Why it waits. `None`: it does not wait.
    pub wait: Option<Wait>,
    /// The time since it was submitted.
    pub age: Duration,
    /// Failed leases that count.
    pub attempts: u32,
    /// The reasons of the failed leases.
    pub reasons: Vec<String>,
    /// The current lease, or the last one.
    pub lease: Option<LeaseId>,
    pub fencing_token: u64,
    pub instance: Option<InstanceId>,
    pub agent: Option<AgentName>,
    /// See [`Task::credential`](crate::state::Task::credential).
    pub credential: Option<String>,
    /// The Job or process that was started.
    pub executor: Option<String>,
    /// The executor that accepted it: its name, for people.
    pub holder: Option<String>,
    /// The phase of the executor, or why it does not start yet.
    pub phase: Option<String>,
    /// The time since the last heartbeat, if the task is leased or accepted.
    pub silent: Option<Duration>,
    pub cancel_requested: bool,
    pub end: Option<TaskEnd>,
    /// The time since its end.
    pub ended: Option<Duration>,
}

/// Selects the tasks of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TaskFilter {
    /// Tasks that are not over.
    #[default]
    Open,
    /// Tasks that are over, the last submitted first.
    Latest,
    /// All tasks.
    All,
}

/// An entry in the history of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventView {
    /// Wall time of the hub or of PostgreSQL.
    pub at: SystemTime,
    /// The previous state. `None` for the first entry.
    pub from: Option<&'static str>,
    pub to: &'static str,
    /// The platform, the hub, an agent or an executor.
    pub actor: String,
    pub note: String,
}
