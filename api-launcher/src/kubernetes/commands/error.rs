//! Why a command failed, and what to do about it.

use std::io;

use cluster::{ClusterError, ConnectError};
use job_contract::{Exit, chain};
use manifest::ManifestError;
use manifest::ManifestErrors;

use crate::document::DocumentError;

const REACH: &str = "is the API server reachable? Set KUBECONFIG or pass --kubeconfig and --context; in a pod, the service \
    account must have its token mounted";

#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(
        "no run `{word}` in the namespace `{namespace}`: looked for a job id, `job/step`, and the name of a Job"
    )]
    NotFound { word: String, namespace: String },
    #[error("`{word}` may mean any of {}: {}", candidates.len(), candidates.join(", "))]
    Ambiguous {
        word: String,
        /// Names of Jobs.
        candidates: Vec<String>,
    },
    #[error("the configuration cannot be used")]
    Configuration(Vec<ManifestError>),
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("the job document cannot be launched")]
    Manifest(ManifestErrors),
    #[error("could not write the answer as JSON")]
    Json(#[source] serde_json::Error),
    #[error("could not write to standard output")]
    Output(#[source] io::Error),
    #[error("could not start")]
    Runtime(#[source] io::Error),
}

impl CommandError {
    pub(super) fn exit(&self) -> Exit {
        match self {
            Self::Connect(error) => error.exit(),
            Self::Runtime(_) | Self::Output(_) => Exit::Infrastructure,
            Self::Cluster(ClusterError::Credential { source, .. }) => source.exit(),
            Self::Cluster(error) if error.is_transient() => Exit::Infrastructure,
            Self::Cluster(_)
            | Self::NotFound { .. }
            | Self::Ambiguous { .. }
            | Self::Configuration(_) => Exit::BadConfiguration,
            Self::Document(error) => error.exit(),
            Self::Manifest(errors) => errors.exit(),
            Self::Json(_) => Exit::Defect,
        }
    }

    /// Returns the whole message, one line for each fact.
    pub(super) fn lines(&self) -> Vec<String> {
        match self {
            Self::Configuration(errors) => errors.iter().map(ToString::to_string).collect(),
            Self::Manifest(errors) => errors.errors().iter().map(ToString::to_string).collect(),
            _ => vec![chain(self)],
        }
    }

    pub(super) fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Connect(ConnectError::Kubeconfig(_)) => {
                Some("`kubectl config get-contexts` shows what the kubeconfig has")
            }
            Self::Connect(ConnectError::KubeconfigText { .. }) => Some(
                "`kubectl config view` shows it with its secrets left out, once it can be read",
            ),
            Self::Connect(ConnectError::Credential(source))
            | Self::Cluster(ClusterError::Credential { source, .. }) => Some(source.hint()),
            Self::Connect(_) | Self::Cluster(ClusterError::NoAnswer { .. }) => Some(REACH),
            Self::Cluster(ClusterError::Refused {
                code: 401 | 403, ..
            }) => Some("`api-launcher check` lists every right the launcher needs"),
            Self::NotFound { .. } => {
                Some("`api-launcher list` shows the runs; --namespace looks elsewhere")
            }
            Self::Ambiguous { .. } => Some("name one of these Jobs, or `job/step`"),
            _ => None,
        }
    }
}
