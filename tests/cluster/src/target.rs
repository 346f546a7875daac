//! Which API server a cluster has, as the environment says.

use std::env;
use std::path::PathBuf;

/// What serves the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A server in this process.
    InProcess,
    /// A cluster that runs already, with the controllers and the scheduler of Kubernetes, to which this file leads.
    Real(PathBuf),
}

/// Names the kubeconfig of the cluster `cargo xtask test cluster` has made sure of.
const CLUSTER: &str = "MAYFLY_TEST_CLUSTER";

fn real() -> Option<Target> {
    let file = env::var_os(CLUSTER).filter(|value| !value.is_empty())?;
    Some(Target::Real(PathBuf::from(file)))
}

impl Target {
    /// The one in this process, and the real one where one is named.
    pub fn all() -> Vec<Self> {
        [Some(Self::InProcess), real()]
            .into_iter()
            .flatten()
            .collect()
    }

    /// The real one where one is named.
    pub(crate) fn preferred() -> Self {
        real().unwrap_or(Self::InProcess)
    }
}
