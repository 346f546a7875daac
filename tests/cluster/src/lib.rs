//! A Kubernetes cluster for tests: an API server in this process, the controllers that act on its objects, and a pod
//! runner that starts what pods name as local processes.
//!
//! The cluster lives on a runtime of its own, so that a test may block while it works, and takes everything with it
//! when it is dropped: no process of a pod outlives it.

mod api_server;
mod cluster;
mod controllers;
mod kubelet;
mod real_server;

pub use api_server::authorizer::{ADMIN, Rule};
pub use api_server::faults::{Fault, Faults};
pub use api_server::recorder::{Recorded, Request};
pub use cluster::{Builder, Cluster, StartError, State};
pub use kubelet::nodes::{Node, Nodes, Taint};
pub use real_server::{RealServer, RealServerError};

/// The identity of the cluster's own controllers and pod runner.
pub const CONTROLLERS: &str = "controllers";
