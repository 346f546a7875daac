//! The local runner: executors as processes of this machine. `run` runs one job, and `dispatch_target` runs the dispatches of
//! `serve --target process`.

#[cfg(feature = "kubernetes")]
pub(crate) mod dispatch_target;
pub(crate) mod environment;
pub(crate) mod executor;
pub mod run;
