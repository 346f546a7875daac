//! Which cluster tests run in, as the environment says.

use std::env;
use std::path::PathBuf;

/// Names the kubeconfig of the cluster of a run of tests.
const CLUSTER: &str = "MAYFLY_TEST_CLUSTER";

/// The environment names no cluster.
#[derive(Debug, thiserror::Error)]
#[error(
    "no cluster: `cargo xtask test cluster` and `cargo xtask chaos` start one, or set `{CLUSTER}` to a kubeconfig"
)]
pub struct NoCluster;

/// The kubeconfig of the cluster in which tests run.
pub fn kubeconfig() -> Result<PathBuf, NoCluster> {
    let file = env::var_os(CLUSTER).filter(|value| !value.is_empty());
    file.map(PathBuf::from).ok_or(NoCluster)
}
