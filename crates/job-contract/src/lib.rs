//! What `api-launcher` and `executor` agree on, and nothing else: the job document and its encodings,
//! environment names, statuses and outcomes, exit codes, object keys, and the records the two programs
//! exchange; and how both tell an error. No clock, no randomness, no I/O: every function here is a pure translation.
//!
//! The wire is Terrakube's; sections named in the documentation of items ("contract 4.6") are those of
//! `docs/job-contract.md`.

pub mod chain;
pub mod document;
pub mod encoding;
pub mod env;
pub mod exit;
pub mod final_statuses;
pub mod job;
pub mod keys;
pub mod pairs;
pub mod progress;
pub mod records;
pub mod report;
pub mod secret;
pub mod status;

pub use chain::chain;
pub use document::Document;
pub use exit::Exit;
pub use job::{Command, JobData, Runtime, StepType, Tool};
pub use records::Records;
