//! The Kubernetes launcher: runs as Jobs of a cluster. `dispatch_target` runs the dispatches of `serve`, and `commands` and
//! `render` serve people.

pub mod commands;
pub mod config;
pub(crate) mod dispatch_target;
pub mod render;
