//! Executors as processes of this machine, for `run` and for agents.
//!
//! - [`executor`]: the [`Program`](executor::Program) that is started, and what the end of a process means.
//! - [`environment`]: the variables of an executor. Nothing else of the caller gets through.
//! - [`run_folder`]: the files of one run that an executor and a later agent need to find each other.
//! - [`detached`]: an executor that may outlive who started it, and how another one finds it again.
//! - [`report_verifier`]: the final report of an executor, if it is not a forgery.
//!
//! This crate must not know where runs come from: neither the hub nor the command line.

pub mod detached;
pub mod environment;
pub mod executor;
pub mod report_verifier;
pub mod run_folder;
