//! The platform's side of the contract, for tests: records, scheduler, dispatch, sweep and HTTP interface as the
//! Terrakube API has them. It refuses what the API refuses. It notes what the API accepts although the contract forbids it.
//!
//! It shares no code with the programs under test, so that both cannot contain the same mistake. Recorded traffic of a stock
//! Terrakube proves it (`tests/enforces/recorded.rs`).

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::return_self_not_must_use,
    reason = "a harness fails a test by panicking, with all there is to know about it"
)]

mod agent_url;
mod context;
mod dispatch;
mod faults;
mod http;
pub mod java;
pub mod launcher;
mod ledger;
mod platform;
mod records;
mod release;
mod scheduler;
mod server;
mod streams;
mod sweep;
mod template;
mod token;

pub use dispatch::Native;
pub use faults::{Effect, Fault};
pub use ledger::{Actor, Ledger, Request, Rule, Transition, Violation};
pub use platform::{Builder, Outputs, Platform, StartError};
pub use records::{History, Job, NewJob, ORGANIZATION, Records, Status, Step, Variable, Workspace};
pub use release::Release;
pub use streams::LogEntry;
pub use template::Flow;
pub use token::Secret;
