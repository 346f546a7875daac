//! The contract between `api-launcher` and `executor`: the job document and its encodings, environment names, statuses and
//! outcomes, exit codes, object keys, reports, and the format of errors. All functions are pure: no clock, no randomness, no
//! I/O.
//!
//! The wire format is Terrakube's. "contract 4.6" in the documentation of items is section 4.6 of `docs/job-contract.md`.

pub mod annotations;
pub mod aws;
pub mod build;
pub mod chain;
pub mod document;
pub mod encoding;
pub mod env;
pub mod exit;
pub mod final_statuses;
pub mod google;
pub mod identity;
pub mod java_options;
pub mod job;
pub mod jwt;
pub mod kept_state;
pub mod keys;
pub mod labels;
pub mod pairs;
pub mod progress;
pub mod provider_cache;
pub mod records;
pub mod report;
pub mod secret;
pub mod status;
#[cfg(feature = "full")]
mod zstd_frame;
#[cfg(not(feature = "full"))]
#[path = "no_zstd_frame.rs"]
mod zstd_frame;

pub use chain::chain;
pub use document::Document;
pub use exit::Exit;
pub use job::{Command, JobData, Runtime, StepType, Tool};
pub use records::Records;
