//! Where executors run.

use std::fmt::Debug;

use futures_util::future::BoxFuture;
use job_contract::Document;
use pool_protocol::lease::{DeclineReason, End};
use pool_protocol::path::LeaseCall;
use secrecy::SecretString;
use std::sync::Arc;
use tokio::sync::mpsc;

use super::lease::{Held, LeaseRef, Stop};

/// What an executor needs to run a task.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) lease: LeaseRef,
    pub(crate) job: Document,
    /// The address of the lease.
    pub(crate) url: String,
    pub(crate) token: SecretString,
}

/// Why an executor was not started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StartFailure {
    /// Another try may succeed.
    Again(DeclineReason, String),
    /// No try can succeed: the kind of the verdict, and why.
    Never(&'static str, String),
}

/// An executor that an earlier agent has started.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) lease: LeaseRef,
    /// Which step it is, for the log.
    pub(crate) run: String,
    pub(crate) executor: Box<dyn Executor>,
}

/// How an executor ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RunEnd {
    /// It had not accepted the task. Another try may succeed.
    Again(DeclineReason, String),
    /// Another executor has the task.
    Elsewhere,
    /// The task is over.
    Over(LeaseCall, End),
}

/// Starts executors.
pub(crate) trait Target: Debug + Send + Sync {
    /// Returns the name in the configuration.
    fn name(&self) -> &'static str;

    /// Returns what distinguishes two installations of one agent.
    fn installation(&self) -> &str;

    /// Looks for the executors that earlier agents have started. What they have only begun to start is not among them: the
    /// hub gives its lease again.
    fn find(&self) -> BoxFuture<'_, Result<Vec<Found>, String>>;

    /// Starts an executor. One that runs for this lease already is taken over.
    fn start<'a>(
        &'a self,
        order: &'a Order,
    ) -> BoxFuture<'a, Result<Box<dyn Executor>, StartFailure>>;

    /// Does what the target does beside that, until it is dropped. Executors of leases that the agent does not know of go
    /// to `found`.
    fn work(&self, found: mpsc::UnboundedSender<Found>) -> BoxFuture<'_, ()>;
}

/// An executor that runs, or that has ended.
pub(crate) trait Executor: Debug + Send + Sync {
    /// Returns the name by which people find it.
    fn name(&self) -> String;

    /// Waits for its end. Meanwhile it notes why it waits. The future may be dropped and made again.
    fn ended<'a>(&'a mut self, held: &'a Held) -> BoxFuture<'a, RunEnd>;

    /// Stops it. Its end follows.
    fn stop(&mut self, stop: Stop) -> BoxFuture<'_, Result<(), String>>;

    /// The hub knows its end: removes what is left of it.
    fn forget(self: Box<Self>) -> BoxFuture<'static, ()>;
}

/// The end of a task that the agent reports because its executor cannot.
pub(crate) fn over(call: LeaseCall, exit_code: Option<i32>, verdict: &str, text: String) -> RunEnd {
    RunEnd::Over(
        call,
        End {
            exit_code,
            final_log_sequence: None,
            diagnostic: text,
            verdict: Some(verdict.to_owned()),
            reported: false,
        },
    )
}

/// A target that is shared.
pub(crate) type SharedTarget = Arc<dyn Target>;
