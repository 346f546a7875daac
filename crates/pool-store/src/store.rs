//! The store.

use std::sync::Arc;

use pool_protocol::id::{InstanceId, PoolName, TaskId};
use pool_protocol::instance::{InstanceHeartbeat, Registration};
use pool_protocol::lease::{Acceptance, Decline, End, Holder};
use pool_protocol::task::TaskState;
use pool_protocol::token::JobGrant;

use crate::clock::Clock;
use crate::error::{Error, OpenError};
use crate::model::{
    Ending, Found, LeaseRequest, LeaseStatus, LeasedTask, Orders, RegisteredInstance, Submission,
    Submitted, Swept,
};
use crate::rules::Rules;
use crate::view::{EventView, InstanceView, Listed, Page, PoolView, TaskView};

/// The queue. Cheap to clone.
///
/// Each operation may be repeated after an error, or after its response was lost: it does nothing twice.
#[derive(Clone, Debug)]
pub struct Store(Arc<Rules>);

impl Store {
    /// Opens the store of a URL: `sqlite:/folder/file.db` or `postgres://…`.
    ///
    /// All tasks that waited for an instance wait to be confirmed again: the store may be a backup.
    pub async fn open(url: &str, rules: Rules) -> Result<Self, OpenError> {
        todo!("{url} {rules:?}")
    }

    /// The same with another clock. PostgreSQL adds its elapsed time to `now()`.
    pub async fn open_with(url: &str, rules: Rules, clock: impl Clock) -> Result<Self, OpenError> {
        todo!("{url} {rules:?} {:?}", clock.wall())
    }

    /// Closes it. Calls that still wait for a task end without one.
    pub async fn close(&self) {
        todo!()
    }

    // ---- the hub and the platform ----

    /// Stores a task. It waits to be confirmed. A refused one waits to be reported.
    pub async fn submit(&self, submission: Submission) -> Result<Submitted, Error> {
        todo!("{submission:?}")
    }

    /// Tasks of which the platform must be asked now: whether it still wants those that were not confirmed, and whether it
    /// has cancelled those that no executor has accepted. A task is given again after a while: soon if it was not
    /// confirmed, and after 5 s otherwise. The hub asks in a loop, at least 10 times a second while something waits to be
    /// confirmed.
    pub async fn to_check(&self, limit: u32) -> Result<Vec<TaskView>, Error> {
        todo!("{limit}")
    }

    /// Says what the platform has said of a task. Does nothing to a task that does not wait to be confirmed.
    pub async fn found(&self, task: TaskId, found: Found) -> Result<TaskState, Error> {
        todo!("{task} {found:?}")
    }

    /// The platform has cancelled the task. If it is not leased it is over at once; otherwise its instance and executor get
    /// a signal.
    pub async fn request_cancel(&self, task: TaskId) -> Result<TaskState, Error> {
        todo!("{task}")
    }

    /// Tasks that are over and whose outcome the hub must report to the platform. A task is given again, after longer and
    /// longer pauses, until [`Store::reported`]. The hub reads the step first: the platform may have the outcome.
    pub async fn to_report(&self, limit: u32) -> Result<Vec<TaskView>, Error> {
        todo!("{limit}")
    }

    /// The platform has the outcome of the task.
    pub async fn reported(&self, task: TaskId) -> Result<(), Error> {
        todo!("{task}")
    }

    /// Ends what has timed out, and forgets what is old. Call it every second, and at once if there is more to do. With
    /// PostgreSQL each hub calls it, and one of them does the work.
    pub async fn sweep(&self) -> Result<Swept, Error> {
        todo!()
    }

    // ---- agents ----

    /// Registers an instance. The same `system_id` of the same name gets the same instance again.
    pub async fn register(
        &self,
        pool: &PoolName,
        registration: &Registration,
    ) -> Result<RegisteredInstance, Error> {
        todo!("{pool} {registration:?}")
    }

    /// An instance lives. Its leases that it names are renewed.
    pub async fn heartbeat(
        &self,
        pool: &PoolName,
        instance: InstanceId,
        heartbeat: &InstanceHeartbeat,
    ) -> Result<Orders, Error> {
        todo!("{pool} {instance} {heartbeat:?}")
    }

    /// Removes an instance. Its leases stay: another instance of the agent may name them, or they expire.
    pub async fn remove(&self, pool: &PoolName, instance: InstanceId) -> Result<(), Error> {
        todo!("{pool} {instance}")
    }

    /// Gives a task to an instance: one that it was given before and does not know of, or a new one. Waits for a task if
    /// there is none, and returns `None` when the time is over. May be dropped at any time.
    pub async fn lease(&self, request: &LeaseRequest) -> Result<Option<LeasedTask>, Error> {
        todo!("{request:?}")
    }

    // ---- holders of leases ----

    /// An executor exists. `executor` names the Job or the process, for people.
    pub async fn started(&self, grant: JobGrant, executor: &str) -> Result<LeaseStatus, Error> {
        todo!("{grant:?} {executor}")
    }

    /// The agent hands the task back.
    pub async fn decline(&self, grant: JobGrant, decline: &Decline) -> Result<TaskState, Error> {
        todo!("{grant:?} {decline:?}")
    }

    /// An executor takes the task: the claim. It is granted to one holder, and to it again. Deletes the payload.
    pub async fn accept(&self, grant: JobGrant, holder: &Holder) -> Result<LeaseStatus, Error> {
        todo!("{grant:?} {holder:?}")
    }

    /// An executor that has accepted the task lives. If the store has forgotten that, because it was restored from a
    /// backup, it knows it again.
    pub async fn beat(&self, grant: JobGrant, beat: &Acceptance) -> Result<LeaseStatus, Error> {
        todo!("{grant:?} {beat:?}")
    }

    /// The task has ended. There is one result: the first one counts.
    pub async fn end(
        &self,
        grant: JobGrant,
        ending: Ending,
        end: &End,
    ) -> Result<TaskState, Error> {
        todo!("{grant:?} {ending:?} {end:?}")
    }

    // ---- people and metrics ----

    /// All pools that have tasks or instances.
    pub async fn pools(&self) -> Result<Vec<PoolView>, Error> {
        todo!()
    }

    /// Instances of a pool, or of all pools.
    pub async fn instances(
        &self,
        pool: Option<&PoolName>,
        page: Page<InstanceId>,
    ) -> Result<Vec<InstanceView>, Error> {
        todo!("{pool:?} {page:?}")
    }

    /// Tasks of a pool, or of all pools, oldest first.
    pub async fn tasks(
        &self,
        pool: Option<&PoolName>,
        listed: Listed,
        page: Page<TaskId>,
    ) -> Result<Vec<TaskView>, Error> {
        todo!("{pool:?} {listed:?} {page:?}")
    }

    /// One task.
    pub async fn task(&self, task: TaskId) -> Result<Option<TaskView>, Error> {
        todo!("{task}")
    }

    /// How many tasks of its pool wait in front of a task, if it waits.
    pub async fn position(&self, task: TaskId) -> Result<Option<u32>, Error> {
        todo!("{task}")
    }

    /// What happened to a task, oldest first; the first [`crate::PAGE`] events.
    pub async fn events(&self, task: TaskId) -> Result<Vec<EventView>, Error> {
        todo!("{task}")
    }
}
