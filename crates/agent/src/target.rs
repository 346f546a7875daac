//! The interface to the places where executors run.

use std::fmt::Debug;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use job_contract::Document;
use pool_protocol::lease::{DeclineReason, End, LeaseRef};
use pool_protocol::path::LeaseCall;
use secrecy::SecretString;
use tokio::sync::mpsc;
use verdict::VerdictKind;

use super::lease::{AgentLease, Stop};

/// The request to start an executor for a task.
#[derive(Debug)]
pub(crate) struct StartRequest {
    pub(crate) lease: LeaseRef,
    pub(crate) job: Document,
    /// The URL of the lease.
    pub(crate) url: String,
    pub(crate) token: SecretString,
}

/// Why an executor was not started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StartFailure {
    /// A retry may succeed, so the agent declines the task.
    Decline(DeclineReason, String),
    /// A retry cannot succeed, so the agent fails the task. The kind of the verdict, and the reason.
    Fail(VerdictKind, String),
}

/// An executor that an earlier agent has started.
#[derive(Debug)]
pub(crate) struct FoundExecutor {
    pub(crate) lease: LeaseRef,
    /// The job and step, for the log.
    pub(crate) run: String,
    /// The URL of the lease that the executor uses, if the target knows it.
    pub(crate) url: Option<String>,
    pub(crate) executor: Box<dyn Executor>,
}

/// How an executor ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RunEnd {
    /// The executor had not accepted the task. A retry may succeed, so the agent declines the task.
    Decline(DeclineReason, String),
    /// The agent does not know whether the executor had accepted the task. The hub does: the agent declines the task, or
    /// fails it with this end if it was accepted.
    Lost(DeclineReason, End),
    /// Another executor has the task.
    Elsewhere,
    /// The task is over.
    Over(LeaseCall, End),
}

/// Starts executors.
pub(crate) trait Target: Debug + Send + Sync {
    /// Returns the name in the configuration.
    fn name(&self) -> &'static str;

    /// Returns an id that differs between two installations of one agent.
    fn installation(&self) -> &str;

    /// Finds the executors of earlier agents. Interrupted starts are not included, because the hub returns their leases
    /// again.
    fn find(&self) -> BoxFuture<'_, Result<Vec<FoundExecutor>, String>>;

    /// Starts an executor. If an executor of this lease already runs, takes it over.
    fn start<'a>(
        &'a self,
        order: &'a StartRequest,
    ) -> BoxFuture<'a, Result<Box<dyn Executor>, StartFailure>>;

    /// Runs the background work of the target until it is dropped. Sends executors of leases that the agent does not
    /// have to `found`.
    fn work(&self, found: mpsc::UnboundedSender<FoundExecutor>) -> BoxFuture<'_, ()>;
}

/// An executor that runs or has ended.
pub(crate) trait Executor: Debug + Send + Sync {
    /// Returns the name of the executor, for people.
    fn name(&self) -> String;

    /// Waits for the end of the executor, and sets in `lease` why it waits. The future may be dropped and created
    /// again.
    fn ended<'a>(&'a mut self, lease: &'a AgentLease) -> BoxFuture<'a, RunEnd>;

    /// Stops the executor. Its end follows.
    fn stop(&mut self, stop: Stop) -> BoxFuture<'_, Result<(), String>>;

    /// Removes what remains of the executor. The hub has its end.
    fn forget(self: Box<Self>) -> BoxFuture<'static, ()>;
}

/// Returns the end of a task that the agent reports because its executor cannot.
pub(crate) fn over(
    call: LeaseCall,
    exit_code: Option<i32>,
    verdict: VerdictKind,
    text: String,
) -> RunEnd {
    RunEnd::Over(call, unreported(exit_code, verdict, text))
}

/// Returns the end of a task that no executor has reported.
pub(crate) fn unreported(exit_code: Option<i32>, verdict: VerdictKind, text: String) -> End {
    End {
        exit_code,
        final_log_sequence: None,
        diagnostic: text,
        verdict: Some(verdict.name().to_owned()),
        reported: false,
        report: None,
    }
}

/// A shared target.
pub(crate) type SharedTarget = Arc<dyn Target>;
