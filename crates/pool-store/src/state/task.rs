//! A task and its states.

use pool_protocol::id::{AgentName, InstanceId, LeaseId, PoolName, TaskId};
use pool_protocol::lease::Holder;
use pool_protocol::task::TaskState;
use pool_protocol::token::JobGrant;

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

impl State {
    /// All values.
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

    /// Returns the name in the database and for people.
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

    /// Returns the state with this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }

    /// Returns the state in the protocol.
    #[must_use]
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
    #[must_use]
    pub const fn is_over(self) -> bool {
        self.protocol_state().is_terminal()
    }

    /// Returns whether an executor has accepted the task, and the task is not over.
    #[must_use]
    pub const fn is_accepted(self) -> bool {
        matches!(self, Self::Running | Self::Orphaned)
    }

    /// Returns whether an instance has a lease.
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

impl EndReason {
    /// All values.
    pub const ALL: [Self; 8] = [
        Self::Finished,
        Self::Revoked,
        Self::Lost,
        Self::Expired,
        Self::Poison,
        Self::Cancelled,
        Self::Superseded,
        Self::Refused,
    ];

    /// Returns the name in the database, for people and for metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Revoked => "revoked",
            Self::Lost => "lost",
            Self::Expired => "expired",
            Self::Poison => "poison",
            Self::Cancelled => "cancelled",
            Self::Superseded => "superseded",
            Self::Refused => "refused",
        }
    }

    /// Returns the reason with this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.name() == name)
    }
}

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

    /// Returns whether the task is over and its outcome must still be reported.
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
