//! A Kubernetes cluster for tests: an API server, the controllers that act on its objects, and a pod runner that starts
//! what pods name as local processes.
//!
//! The API server is a real one where the environment names it ([`Target`]), else one in this process that is held to
//! the same behaviour. In front of either stands the same listener, which records requests and lets them go wrong on
//! order.
//!
//! The cluster lives on a runtime of its own, so that a test may block while it works, and takes everything with it
//! when it is dropped: no process of a pod outlives it.

mod api_server;
mod cluster;
mod control_plane;
mod controllers;
mod front;
mod kubelet;
mod real;
mod target;

pub use api_server::authorizer::{ADMIN, Rule};
pub use cluster::{Builder, Cluster, StartError, State};
pub use control_plane::{ControlPlane, ControlPlaneError, Programs};
pub use front::faults::{Fault, Faults};
pub use front::recorder::{Recorded, Request};
pub use kubelet::nodes::{Node, Nodes, Taint};
pub use target::Target;

/// The identity of the cluster's own controllers and pod runner.
pub const CONTROLLERS: &str = "controllers";
