//! The local runner: executors as processes of this machine. `run` runs one job, and `target` runs the dispatches of
//! `serve --target process`.

pub(crate) mod environment;
pub(crate) mod executor;
pub mod run;
#[cfg(feature = "kubernetes")]
pub(crate) mod target;
