//! What can happen to a task.

use pool_protocol::id::{AgentName, InstanceId, LeaseId};
use pool_protocol::lease::{Acceptance, Decline, End, Holder};
use pool_protocol::token::JobGrant;

use crate::model::{Ending, Found};

/// Something that happens to a task.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The platform says what it knows of it.
    Found(Found),
    /// The platform has cancelled it.
    Cancel,
    /// The platform has its outcome.
    Reported,
    /// An instance gets it.
    Lease {
        lease: LeaseId,
        instance: InstanceId,
        agent: &'a AgentName,
    },
    /// An instance names it among the leases it has, or is given it again.
    Named { instance: InstanceId },
    /// An executor exists.
    Started { grant: JobGrant, executor: &'a str },
    /// The agent hands it back.
    Decline {
        grant: JobGrant,
        decline: &'a Decline,
    },
    /// An executor takes it.
    Accept { grant: JobGrant, holder: &'a Holder },
    /// An executor that has taken it lives.
    Beat {
        grant: JobGrant,
        beat: &'a Acceptance,
    },
    /// It has ended.
    End {
        grant: JobGrant,
        ending: Ending,
        end: &'a End,
    },
    /// Time has passed.
    TimeOut,
}
