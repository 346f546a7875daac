//! The Kubernetes launcher: runs as Jobs of a cluster. `target` runs the dispatches of `serve`, and `commands` and
//! `render` serve people.

pub mod commands;
pub mod config;
pub mod render;
pub(crate) mod target;
