//! What the commands say about errors of the cluster, and what to do about them.

use cluster::{ClusterError, ConnectError};
use job_contract::Exit;
use manifest::ManifestErrors;

use crate::failure::Failure;

const REACH: &str = "is the API server reachable? Set KUBECONFIG or pass --kubeconfig and --context; in a pod, the service \
    account must have its token mounted";

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        let hint = match &error {
            ConnectError::Kubeconfig(_) => {
                "`kubectl config get-contexts` shows what the kubeconfig has"
            }
            ConnectError::KubeconfigText { .. } => {
                "`kubectl config view` shows it with its secrets left out, once it can be read"
            }
            ConnectError::Credential(source) => source.hint(),
            _ => REACH,
        };
        Self::of(error.exit(), error).with_hint(hint)
    }
}

impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        let exit = match &error {
            ClusterError::Credential { source, .. } => source.exit(),
            error if error.is_transient() => Exit::Infrastructure,
            _ => Exit::BadConfiguration,
        };
        let hint = match &error {
            ClusterError::Credential { source, .. } => Some(source.hint()),
            ClusterError::NoAnswer { .. } => Some(REACH),
            ClusterError::Refused {
                code: 401 | 403, ..
            } => Some("`api-launcher check` lists every right the launcher needs"),
            _ => None,
        };
        Self::of(exit, error).with_hint(hint)
    }
}

impl From<ManifestErrors> for Failure {
    fn from(errors: ManifestErrors) -> Self {
        let exit = errors.exit();
        let mut failure = Self::from(errors.errors);
        failure.exit = exit;
        failure
    }
}
