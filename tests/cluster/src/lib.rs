//! A Kubernetes cluster for tests: the control plane of Kubernetes, which runs apart and serves many tests, and for each
//! test nodes of its own, whose pods are local processes.
//!
//! In front of the API server each test has a listener, which records requests and lets them go wrong as the test asks.
//!
//! The nodes live on a runtime of their own, so that a test may block while they work, and take everything with them
//! when the cluster is dropped: no process of a pod outlives it.

mod clock;
mod cluster;
mod control_plane;
mod front;
mod kubelet;
pub mod node;
mod processes;
mod provision;
mod rights;
mod state;
mod target;

pub use cluster::{Builder, Cluster, StartError};
pub use control_plane::{ControlPlane, ControlPlaneError, Programs};
pub use front::faults::{Fault, Faults};
pub use front::recorder::{Recorded, Request};
pub use kubelet::nodes::{Node, Nodes};
pub use processes::EndedProgram;
pub use rights::{ADMIN, Rule};
pub use state::{Seen, State};
pub use target::{NoCluster, kubeconfig};

/// The identity of the nodes, and of what else the harness does in the cluster.
pub const CONTROLLERS: &str = "controllers";
