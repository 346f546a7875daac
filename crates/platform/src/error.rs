//! Why a platform could not be asked or told something, and what to do about it.

use std::path::PathBuf;

use job_contract::{Exit, env};
use runtime::setting::is_wrong_place;

use crate::terrakube::TerrakubeError;

/// Why the platform could not be asked or told something.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// A record of the local platform could not be read or written.
    #[error("could not {action} `{}`", path.display())]
    Record {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// A record of the local platform is no document of ours.
    #[error("`{}` is not a record of this program", path.display())]
    Corrupt {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// Terrakube's API did not do what it was asked to.
    #[error(transparent)]
    Terrakube(#[from] TerrakubeError),
}

impl PlatformError {
    /// The exit code when this keeps a step from being started.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Record { source, .. } if is_wrong_place(source) => Exit::BadConfiguration,
            Self::Record { .. } | Self::Corrupt { .. } => Exit::Infrastructure,
            Self::Terrakube(error) => error.exit(),
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Record { source, .. } if is_wrong_place(source) => Some(format!(
                "`{}` names a folder this user can write in",
                env::DATA_DIR
            )),
            Self::Record { .. } | Self::Corrupt { .. } => None,
            Self::Terrakube(error) => error.hint(),
        }
    }
}
