//! Which API server a cluster has, as the environment says.

use std::env;
use std::path::PathBuf;

/// What serves the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A server in this process.
    InProcess,
    /// `etcd` and `kube-apiserver` of this folder, started for one cluster.
    Assets(PathBuf),
    /// A whole cluster that runs already, which `KUBECONFIG` names. Its own controllers and kubelets act on objects.
    Shared,
}

/// Names the folder with `etcd` and `kube-apiserver`.
const ASSETS: &str = "KUBEBUILDER_ASSETS";
/// Names a cluster.
const KUBECONFIG: &str = "KUBECONFIG";

fn named(variable: &str) -> Option<PathBuf> {
    env::var_os(variable)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

impl Target {
    /// The one in this process, and every real one that is named.
    pub fn all() -> Vec<Self> {
        let assets = named(ASSETS).map(Self::Assets);
        let shared = named(KUBECONFIG).map(|_| Self::Shared);
        [Some(Self::InProcess), assets, shared]
            .into_iter()
            .flatten()
            .collect()
    }

    /// The most real one that is named. One where others act on objects too only if that may be.
    pub(crate) fn preferred(may_be_shared: bool) -> Self {
        if let Some(folder) = named(ASSETS) {
            return Self::Assets(folder);
        }
        if may_be_shared && named(KUBECONFIG).is_some() {
            Self::Shared
        } else {
            Self::InProcess
        }
    }
}
