//! What happens to a task.

/// Why a task is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndReason {
    /// Its executor, or the agent in its place, said how it ended.
    Told,
    /// Nothing was heard of the executor that had accepted it.
    Lost,
    /// No executor accepted it in time.
    Expired,
    /// Too many leases came to nothing.
    Poison,
    /// It was cancelled before an executor accepted it.
    Cancelled,
    /// The platform did not want it any more. Nothing is to be reported. It can be submitted again.
    Superseded,
    /// It may not run, or no agent can open its payload.
    Refused,
}
