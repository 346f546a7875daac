//! The events of a task.

use pool_protocol::id::{AgentName, InstanceId, LeaseId};
use pool_protocol::lease::{Acceptance, Decline, End, Holder, LeaseRef};

use crate::model::{Ending, PlatformState};

/// An event of a task.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The platform has reported the state of the step.
    PlatformState(PlatformState),
    /// The platform has cancelled the step.
    Cancel,
    /// The platform has the outcome.
    Reported,
    /// An instance gets a lease.
    Lease {
        lease: LeaseId,
        instance: InstanceId,
        agent: &'a AgentName,
        /// See [`Task::credential`](super::Task::credential).
        credential: &'a str,
    },
    /// An instance has named the lease in a heartbeat, or got it again.
    Renewed {
        instance: InstanceId,
        credential: &'a str,
        /// Why the executor does not start yet, for people.
        reason: Option<&'a str>,
    },
    /// An executor exists.
    Started { grant: LeaseRef, executor: &'a str },
    /// The agent declines the task.
    Decline {
        grant: LeaseRef,
        decline: &'a Decline,
    },
    /// An executor accepts the task.
    Accept { grant: LeaseRef, holder: &'a Holder },
    /// The executor that has accepted the task sends a heartbeat.
    Heartbeat {
        grant: LeaseRef,
        heartbeat: &'a Acceptance,
    },
    /// The task has ended.
    End {
        grant: LeaseRef,
        ending: Ending,
        end: &'a End,
    },
    /// The credential with which the lease was made or renewed last is no longer valid.
    Revoked { credential: &'a str },
    /// The document cannot be read, so the task cannot be leased.
    Unreadable { reason: &'a str },
    /// Time has passed.
    TimeOut,
}
