//! The record of requests, changes of status, and violations of the contract.

use std::fmt;
use std::time::Instant;

use serde_json::Value;

use crate::records::Status;

/// The author of a change of status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Actor {
    /// A program with an internal token.
    Client,
    Scheduler,
    Sweep,
    User,
}

/// A change of status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    pub at: Instant,
    pub job: u32,
    /// Number of the step; none when it is the job's own status.
    pub step: Option<u32>,
    pub from: Status,
    pub to: Status,
    pub by: Actor,
}

/// A request and its answer.
#[derive(Debug, Clone)]
pub struct Request {
    pub at: Instant,
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Zero when there was no answer.
    pub status: u16,
    /// Whether the platform did what was asked, whatever the answer was.
    pub done: bool,
    /// The body, if it was JSON.
    pub body: Value,
    /// Issuer of a valid token.
    pub issuer: Option<String>,
    /// The job in its path.
    pub job: Option<u32>,
    /// Whether a dispatch of that job was open when the request arrived.
    pub during_dispatch: bool,
}

/// A rule of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// Nothing is changed while the dispatch of that job is open.
    DuringDispatch,
    /// Statuses and lines come after the job is in `queue`.
    BeforeQueue,
    /// A job with a final status is not changed.
    TerminalJob,
    /// A step with a final status is not changed.
    TerminalStep,
    /// The step is reported before the job.
    JobBeforeStep,
    /// `pending` without changes wedges the job.
    PendingWithoutChanges,
    /// Only attributes that exist.
    UnknownAttribute,
    /// Only attributes that a report may change.
    ForeignAttribute,
    /// Only values that fit the column.
    TooWide,
    /// Only documents of the interface.
    BadDocument,
    /// Only its media type.
    MediaType,
    /// Only valid tokens.
    Token,
    /// Tokens live for minutes.
    TokenLifetime,
    /// Only requests that the token permits.
    Forbidden,
    /// Keys and values in Redis are serialised strings.
    PlainRedis,
    /// Log entries have their four fields.
    LogEntry,
    /// No line comes after the final status of its step.
    LogAfterEnd,
    /// The output is stored at the reported address before the report.
    Output,
    /// The context is merged.
    ContextLost,
    /// The platform's status of the context is not sent back. A context with structured output is stored.
    ContextStatus,
    /// Sensitive values stay out of the context.
    SensitiveValue,
    /// The structured stream expires.
    StreamWithoutExpiry,
    /// The heartbeat is removed at the end.
    HeartbeatLeft,
}

/// A broken rule, with details.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub rule: Rule,
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.detail)
    }
}

/// Requests and violations so far.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    pub requests: Vec<Request>,
    pub violations: Vec<Violation>,
}

impl Ledger {
    pub(crate) fn violated(&mut self, rule: Rule, detail: impl Into<String>) {
        self.violations.push(Violation {
            rule,
            detail: detail.into(),
        });
    }

    /// The broken rules, each once.
    pub fn broken(&self) -> Vec<Rule> {
        let mut rules: Vec<_> = self.violations.iter().map(|found| found.rule).collect();
        rules.sort_unstable();
        rules.dedup();
        rules
    }

    /// The accepted changes of jobs and steps: last part of the path, and the attributes.
    pub fn changes(&self) -> Vec<(String, Value)> {
        let changes = self.of("PATCH", "/job/").into_iter();
        let done = changes.filter(|request| request.done);
        done.map(|request| {
            let place = request.path.rsplit('/').next().unwrap_or_default();
            (place.to_owned(), request.body["data"]["attributes"].clone())
        })
        .collect()
    }

    /// The requests of a method whose path contains this, in order.
    pub fn of(&self, method: &str, path: &str) -> Vec<&Request> {
        self.requests
            .iter()
            .filter(|request| request.method == method && request.path.contains(path))
            .collect()
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.requests.first().map(|request| request.at);
        for request in &self.requests {
            let at = first.map_or_else(Default::default, |first| request.at - first);
            let body = match request.body["data"]["attributes"].as_object() {
                Some(attributes) => serde_json::to_string(attributes).unwrap_or_default(),
                None => String::new(),
            };
            writeln!(
                f,
                "{:>8.3} {} {} {} {body}",
                at.as_secs_f64(),
                request.status,
                request.method,
                request.path,
            )?;
        }
        for violation in &self.violations {
            writeln!(f, "violation: {violation}")?;
        }
        Ok(())
    }
}
