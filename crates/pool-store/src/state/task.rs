//! A task, with all that the state machine knows of it.

use pool_protocol::id::{AgentName, InstanceId, LeaseId, PoolName, TaskId};
use pool_protocol::lease::Holder;
use pool_protocol::task::TaskState;
use pool_protocol::token::JobGrant;

use crate::clock::{Millis, millis};
use crate::rules::Rules;

/// Where a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// It waits until the platform confirms that it wants it.
    Submitted,
    /// It waits for an instance.
    Available,
    /// An instance has it.
    Leased,
    /// An executor exists.
    Started,
    /// An executor has accepted it.
    Running,
    /// Nothing was heard of that executor for a while.
    Orphaned,
    Completed,
    Failed,
    Cancelled,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Submitted,
        Self::Available,
        Self::Leased,
        Self::Started,
        Self::Running,
        Self::Orphaned,
        Self::Completed,
        Self::Failed,
        Self::Cancelled,
    ];

    /// The name of it, in the database and for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Submitted => "submitted",
            Self::Available => "available",
            Self::Leased => "leased",
            Self::Started => "started",
            Self::Running => "running",
            Self::Orphaned => "orphaned",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// The state of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }

    /// What the wire calls it.
    #[must_use]
    pub const fn on_the_wire(self) -> TaskState {
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

    /// Returns whether it never changes again.
    #[must_use]
    pub const fn is_over(self) -> bool {
        self.on_the_wire().is_terminal()
    }

    /// Returns whether an executor has accepted it, and it is not over.
    #[must_use]
    pub const fn is_accepted(self) -> bool {
        matches!(self, Self::Running | Self::Orphaned)
    }

    /// Returns whether an instance has it.
    #[must_use]
    pub const fn is_active(self) -> bool {
        matches!(self, Self::Leased | Self::Started) || self.is_accepted()
    }
}

/// Why a task is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndReason {
    /// Its executor, or the agent in its place, has reported the end.
    Finished,
    /// The executor that had accepted it sent no heartbeat any more.
    Lost,
    /// No executor accepted it in time.
    Expired,
    /// Too many leases failed.
    Poison,
    /// It was cancelled before an executor accepted it.
    Cancelled,
    /// The platform did not want it any more. Nothing is to be reported. It can be submitted again.
    Superseded,
    /// It may not run, or no agent can open its payload.
    Refused,
}

impl EndReason {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Finished,
        Self::Lost,
        Self::Expired,
        Self::Poison,
        Self::Cancelled,
        Self::Superseded,
        Self::Refused,
    ];

    /// The name of it, in the database, for people and for metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Lost => "lost",
            Self::Expired => "expired",
            Self::Poison => "poison",
            Self::Cancelled => "cancelled",
            Self::Superseded => "superseded",
            Self::Refused => "refused",
        }
    }

    /// The reason of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.name() == name)
    }
}

/// How a task ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskEnd {
    pub reason: EndReason,
    /// What to tell people.
    pub diagnostic: String,
    pub exit_code: Option<i32>,
    pub verdict: Option<String>,
    pub final_log_sequence: Option<u64>,
    pub at: Millis,
    /// Whether the platform has the outcome, or needs none.
    pub reported: bool,
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
    /// An executor that exists has accepted it.
    pub stock: bool,

    pub state: State,
    /// Grows with each lease.
    pub fencing_token: u64,
    /// The current lease, or the last one.
    pub lease: Option<LeaseId>,
    /// Who has it, or had it last.
    pub instance: Option<InstanceId>,
    pub agent: Option<AgentName>,
    /// Failed leases that count.
    pub attempts: u32,
    /// Why: one text for each of them, and one for the last that did not count.
    pub reasons: Vec<String>,
    /// An agent that has no key for the payload.
    pub sealed_for: Option<AgentName>,
    pub submitted_at: Millis,
    /// It is not leased before.
    pub not_before: Millis,
    pub leased_at: Millis,
    /// When its instance or executor was heard last.
    pub heard_at: Millis,
    /// The Job or process, for people.
    pub executor: Option<String>,
    /// Who accepted it. `None` if the platform said that it runs, or the executor accepts nothing.
    pub holder: Option<Holder>,
    pub phase: Option<String>,
    pub cancel_requested: bool,
    pub end: Option<TaskEnd>,
}

impl Task {
    /// When its state ends by itself. For one that is over: when it is forgotten, unless it must still be reported.
    #[must_use]
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

    /// Returns whether it is over and the platform must still learn how.
    #[must_use]
    pub fn is_unreported(&self) -> bool {
        self.end.as_ref().is_some_and(|end| !end.reported)
    }

    /// The current lease, or the last one.
    #[must_use]
    pub fn grant(&self) -> Option<JobGrant> {
        Some(JobGrant {
            task: self.id,
            lease: self.lease?,
            fencing_token: self.fencing_token,
        })
    }
}
