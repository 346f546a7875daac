//! The local runner: executors as processes of this machine. `run` runs one job, and `dispatch_target` runs the dispatches of
//! `serve --target process`. `detached` starts executors that may outlive their launcher, for `dispatch_target` and the agent.

#[cfg(feature = "kubernetes")]
pub(crate) mod detached;
#[cfg(feature = "kubernetes")]
pub(crate) mod dispatch_target;
pub(crate) mod environment;
pub(crate) mod executor;
#[cfg(feature = "kubernetes")]
pub(crate) mod report_verifier;
pub mod run;
#[cfg(feature = "kubernetes")]
pub(crate) mod run_folder;
