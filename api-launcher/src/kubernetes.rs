//! The Kubernetes launcher: runs as Jobs of a cluster. `manifest` builds a Job, `cluster` submits and watches it, and
//! `verdict` says how it ended. `dispatch_target` runs the dispatches of `serve`, and `commands` serve people.

pub mod commands;
pub(crate) mod dispatch_target;
