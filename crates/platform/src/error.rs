//! Errors of requests to a platform, with the next step.

use std::path::{Path, PathBuf};

use job_contract::{Exit, env};
use runtime::setting::is_wrong_place;

use crate::terrakube::TerrakubeError;

/// Why a request to the platform failed.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    #[error("could not {action} `{}`", path.display())]
    Record {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("`{}` is not a record of this program", path.display())]
    Corrupt {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error(transparent)]
    Terrakube(#[from] TerrakubeError),
}

impl PlatformError {
    /// Makes the error of an action with a record of the local platform.
    pub(crate) fn record(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Record {
            action,
            path,
            source,
        }
    }

    /// The exit code if the error prevents the start of a step.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Record { source, .. } if is_wrong_place(source) => Exit::BadConfiguration,
            Self::Record { .. } | Self::Corrupt { .. } => Exit::Infrastructure,
            Self::Terrakube(error) => error.exit(),
        }
    }

    /// The next step for the operator.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Record { source, .. } if is_wrong_place(source) => Some(format!(
                "set `{}` to a folder in which this user can write",
                env::DATA_DIR
            )),
            Self::Record { .. } | Self::Corrupt { .. } => None,
            Self::Terrakube(error) => error.hint(),
        }
    }
}
