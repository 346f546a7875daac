//! The Kubernetes launcher: runs as Jobs of a cluster. `manifest` builds a Job, `cluster` submits and watches it, and
//! `verdict` says how it ended. `dispatch_target` runs the dispatches of `serve`, and `commands` and `render` serve people.

pub mod cluster;
pub mod commands;
pub mod config;
pub(crate) mod dispatch_target;
pub mod manifest;
pub mod render;
pub mod verdict;
