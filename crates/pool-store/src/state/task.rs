//! A task and its states.

use pool_protocol::id::{AgentName, InstanceId, LeaseId, PoolName, TaskId};
use pool_protocol::lease::{Holder, LeaseRef};
use pool_protocol::names;
use pool_protocol::task::TaskState;

use crate::clock::{Millis, millis};
use crate::rules::Rules;

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The platform has not confirmed yet that the step still waits.
    Submitted,
    /// The task waits for an instance.
    Available,
    /// An instance has a lease.
    Leased,
    /// An executor exists.
    Started,
    /// An executor has accepted the task.
    Running,
    /// That executor has sent no heartbeat for a while.
    Orphaned,
    Completed,
    Failed,
    Cancelled,
}

// In the database and for people.
names!(State {
    Submitted = "submitted",
    Available = "available",
    Leased = "leased",
    Started = "started",
    Running = "running",
    Orphaned = "orphaned",
    Completed = "completed",
    Failed = "failed",
    Cancelled = "cancelled",
});

impl State {
    /// Returns the state in the protocol.
    pub const fn protocol_state(self) -> TaskState {
        match self {
            Self::Submitted | Self::Available => TaskState::Available,
            Self::Leased | Self::Started => TaskState::Leased,
            Self::Running => TaskState::Running,
            Self::Orphaned => TaskState::Orphaned,
            Self::Completed => TaskState::Completed,
            Self::Failed => TaskState::Failed,
            Self::Cancelled => TaskState::Cancelled,
        }
    }

    /// Returns whether the task is over. Then its state never changes again.
    pub const fn is_over(self) -> bool {
        self.protocol_state().is_terminal()
    }

    /// Returns whether an executor has accepted the task, and the task is not over.
    pub const fn is_accepted(self) -> bool {
        matches!(self, Self::Running | Self::Orphaned)
    }

    /// Returns whether an instance has a lease.
    pub const fn is_active(self) -> bool {
        matches!(self, Self::Leased | Self::Started) || self.is_accepted()
    }
}

/// Why a task is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndReason {
    /// Its executor, or the agent in its place, has reported the end.
    Finished,
    /// The credential of its agent was revoked after an executor had accepted it.
    Revoked,
    /// The executor that had accepted it stopped sending heartbeats.
    Lost,
    /// No executor accepted it in time.
    Expired,
    /// Too many leases failed.
    Poison,
    /// It was cancelled before an executor accepted it.
    Cancelled,
    /// The platform no longer wanted it. It is not reported. The step can be submitted again.
    Superseded,
    /// It may not run, or an agent refused it.
    Refused,
}

// In the database and for people.
names!(EndReason {
    Finished = "finished",
    Revoked = "revoked",
    Lost = "lost",
    Expired = "expired",
    Poison = "poison",
    Cancelled = "cancelled",
    Superseded = "superseded",
    Refused = "refused",
});

/// How a task ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskEnd {
    pub reason: EndReason,
    /// The explanation for people.
    pub diagnostic: String,
    pub exit_code: Option<i32>,
    pub verdict: Option<String>,
    pub final_log_sequence: Option<u64>,
    /// The final report of an executor that could not report to the platform, as JSON.
    pub report: Option<String>,
    pub at: Millis,
    /// Whether the platform has the outcome or needs none.
    pub reported: bool,
}

impl TaskEnd {
    /// Returns the end of a task of whose executor nothing is known. The platform does not have it yet.
    pub const fn new(reason: EndReason, diagnostic: String, at: Millis) -> Self {
        Self {
            reason,
            diagnostic,
            exit_code: None,
            verdict: None,
            final_log_sequence: None,
            report: None,
            at,
            reported: false,
        }
    }
}

/// A task without its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    pub id: TaskId,
    pub pool: PoolName,
    pub organization: String,
    pub workspace: String,
    pub job: String,
    pub step: String,
    pub kind: String,
    pub traceparent: Option<String>,

    pub state: State,
    /// Increases with each lease, and when the platform says that the step runs without one.
    pub fencing_token: u64,
    /// The current lease, or the last one. `None` also if the platform says that the step runs without one.
    pub lease: Option<LeaseId>,
    /// The instance that has the task, or had it last.
    pub instance: Option<InstanceId>,
    pub agent: Option<AgentName>,
    /// The id of the credential with which the lease was made or renewed last: a digest of a pool token, or of a trust in
    /// a provider. `None` if a restored store does not know the lease.
    pub credential: Option<String>,
    /// Failed leases that count.
    pub attempts: u32,
    /// The reasons of the failed leases that count, then the reason of the last one that does not.
    pub reasons: Vec<String>,
    pub submitted_at: Millis,
    /// The task is not leased before this time.
    pub not_before: Millis,
    pub leased_at: Millis,
    /// The time of the last request of its instance or executor.
    pub heard_at: Millis,
    /// The Job or process of the executor, for people.
    pub executor: Option<String>,
    /// The executor that accepted it. `None` if the platform reported that the step runs.
    pub holder: Option<Holder>,
    /// The phase of the executor, or why it does not start yet, for people.
    pub phase: Option<String>,
    pub cancel_requested: bool,
    pub end: Option<TaskEnd>,
}

impl Task {
    /// Returns the time at which the state times out. If the task is over, returns the time at which it is deleted,
    /// unless it must still be reported.
    pub fn deadline(&self, rules: &Rules) -> Millis {
        let (from, limit) = match self.state {
            State::Submitted | State::Available => (self.submitted_at, rules.queue_timeout),
            State::Leased => {
                // An instance that never gets the task, or never starts its executor, must not keep it from others.
                let latest = self.leased_at.saturating_add(millis(rules.unaccepted));
                return latest.min(self.heard_at.saturating_add(millis(rules.lease)));
            }
            State::Started => (self.heard_at, rules.unaccepted),
            State::Running => (self.heard_at, rules.orphaned_after),
            State::Orphaned => (self.heard_at, rules.lost_after),
            State::Completed | State::Failed | State::Cancelled => (
                self.end.as_ref().map_or(self.heard_at, |end| end.at),
                rules.remembered_for,
            ),
        };
        from.saturating_add(millis(limit))
    }

    /// Returns whether the task is over and its outcome must still be reported.
    pub fn is_unreported(&self) -> bool {
        self.end.as_ref().is_some_and(|end| !end.reported)
    }

    /// The current lease, or the last one.
    pub fn grant(&self) -> Option<LeaseRef> {
        Some(LeaseRef {
            task: self.id,
            lease: self.lease?,
            fencing_token: self.fencing_token,
        })
    }
}
