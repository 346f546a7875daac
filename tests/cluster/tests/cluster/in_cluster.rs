//! Tests with a cluster: `cargo xtask test cluster` finds them by the name of this module.

mod front;
mod pods;

use test_cluster::{Cluster, kubeconfig};
use test_peers::skips::needed;

/// A cluster, or nothing where none is given and the test has to return.
async fn cluster() -> Option<Cluster> {
    let kubeconfig = needed(kubeconfig())?;
    Some(Cluster::builder().start(&kubeconfig).await.unwrap())
}
