//! Why no tool was found, the kind of the error, and a hint.

use std::{io, path::PathBuf};

use job_contract::Exit;
use job_contract::job::Tool;
use reqwest::StatusCode;
use runtime::setting::is_wrong_place;
use semver::Version;

use crate::error::{ErrorKind, StepError};

use super::{
    range::{EXAMPLES, RangeError},
    verify::SignatureError,
};

/// Why [`resolve`](super::resolve) found no tool to run.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    #[error(transparent)]
    Range(#[from] RangeError),
    #[error("no {tool} release satisfies `{range}`")]
    NoMatch {
        tool: Tool,
        range: String,
        /// The greatest stable release in the index.
        newest: Option<Version>,
        index: String,
    },
    #[error("{tool} {version} is not published for {platform}")]
    NoBuild {
        tool: Tool,
        version: Version,
        platform: String,
    },
    #[error("could not read the {tool} release index")]
    Index { tool: Tool, source: FetchError },
    #[error("the {tool} release index at `{url}` is not in the format expected")]
    IndexFormat {
        tool: Tool,
        url: String,
        source: serde_json::Error,
    },
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("no checksums are published at `{url}`")]
    ChecksumsMissing { url: String },
    #[error("the checksums at `{url}` do not list `{archive}`")]
    ChecksumUnlisted { url: String, archive: String },
    #[error("`{url}` has SHA-256 {actual}, but its release lists {expected}")]
    ChecksumMismatch {
        url: String,
        expected: String,
        actual: String,
    },
    #[error("no signature is published for `{url}`")]
    SignatureMissing { url: String },
    #[error("the signature at `{url}` was not accepted")]
    Signature { url: String, source: SignatureError },
    #[error("could not load the signing keys in `{path}`")]
    ExtraKeys {
        path: PathBuf,
        source: SignatureError,
    },
    #[error("could not unpack `{url}`")]
    Archive { url: String, source: ArchiveError },
    #[error("the tool cache is full, writing `{path}`")]
    CacheFull { path: PathBuf, source: io::Error },
    #[error("the tool cache is not writable at `{path}`")]
    CacheNotWritable { path: PathBuf, source: io::Error },
    #[error("could not lock `{path}`")]
    CacheLock { path: PathBuf, source: io::Error },
    #[error("could not use the tool cache at `{path}`")]
    Cache { path: PathBuf, source: io::Error },
    #[error("no TLS provider was installed before resolving a tool")]
    NoTlsProvider,
    #[error("the task to {task} ended unexpectedly")]
    Task {
        task: &'static str,
        source: tokio::task::JoinError,
    },
}

impl From<ToolError> for StepError {
    fn from(error: ToolError) -> Self {
        let exit = if error.is_wrong_setting() {
            Exit::BadConfiguration
        } else {
            error.kind().exit()
        };
        let hint = error.hint();
        Self::new(exit, error).with_hint(hint)
    }
}

/// Why a file could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("could not reach `{url}`")]
    Unreachable { url: String, source: reqwest::Error },
    #[error("`{url}` answered {status}")]
    Status { url: String, status: StatusCode },
    #[error("the download of `{url}` was interrupted")]
    Interrupted { url: String, source: reqwest::Error },
    #[error("`{url}` is larger than {limit_mib} MiB")]
    TooLarge { url: String, limit_mib: u64 },
    #[error("could not set up HTTP")]
    Client(#[source] reqwest::Error),
}

impl FetchError {
    /// Whether the release server was unusable, and did not refuse the request.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { source, .. } => !source.is_redirect() && !source.is_builder(),
            Self::Interrupted { .. } => true,
            Self::Status { status, .. } => {
                status.is_server_error()
                    || matches!(
                        *status,
                        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS
                    )
            }
            Self::TooLarge { .. } | Self::Client(_) => false,
        }
    }

    pub(crate) fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Unreachable { .. } | Self::Interrupted { .. } => {
                "put this version on PATH (in the executor's image) or into the tool cache, name a \
                 release index or mirror that can be reached, or correct the proxy settings"
                    .into()
            }
            Self::Status { status, .. } if *status == StatusCode::NOT_FOUND => {
                "check the address of the index or mirror".into()
            }
            Self::Status { status, .. }
                if matches!(*status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) =>
            {
                "the server requires credentials, or refuses those in the address".into()
            }
            Self::Status { status, .. } if *status == StatusCode::TOO_MANY_REQUESTS => {
                "the server limits requests; use a mirror or an index that caches".into()
            }
            Self::Status { .. } => "the server reports an error; try again later".into(),
            Self::TooLarge { .. } => "no release is that large; check the address".into(),
            Self::Client(_) => return None,
        })
    }
}

/// Why an archive with the right checksum contains no usable binary.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error("not a readable zip archive")]
    Unreadable(#[source] zip::result::ZipError),
    #[error("it has no file `{0}`")]
    NoBinary(&'static str),
    #[error("its binary is larger than {limit_mib} MiB")]
    TooLarge { limit_mib: u64 },
    #[error("its binary cannot be read")]
    Corrupt(#[source] io::Error),
}

impl ToolError {
    /// The kind of the error, which decides about retries.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Range(_) | Self::NoMatch { .. } | Self::NoBuild { .. } => ErrorKind::User,
            Self::NoTlsProvider | Self::Task { .. } | Self::Fetch(FetchError::Client(_)) => {
                ErrorKind::Defect
            }
            _ => ErrorKind::Infrastructure,
        }
    }

    /// Whether the cause is a wrong or missing setting. Another executor would have the same error.
    pub fn is_wrong_setting(&self) -> bool {
        match self {
            // The retries are over. So the cause is a missing route to the releases, or the missing version in the
            // image.
            Self::Index { source, .. } => source.is_transient(),
            Self::Fetch(source @ FetchError::Unreachable { .. }) => source.is_transient(),
            Self::CacheNotWritable { .. } | Self::ExtraKeys { .. } => true,
            Self::Cache { source, .. } | Self::CacheLock { source, .. } => is_wrong_place(source),
            _ => false,
        }
    }

    /// The hint for users, if there is one.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Range(_) => format!("valid ranges look like {EXAMPLES}"),
            Self::NoMatch { newest, index, .. } => match newest {
                Some(newest) => format!("the newest release offered by `{index}` is {newest}"),
                None => format!("`{index}` offers no stable release at all; check its address"),
            },
            Self::NoBuild { .. } => {
                "choose another version, or run on a platform it is published for".into()
            }
            Self::Index { source, .. } | Self::Fetch(source) => return source.hint(),
            Self::IndexFormat { .. } => {
                "check its address; a proxy or a login page may have answered instead".into()
            }
            Self::ChecksumsMissing { .. } => {
                "a mirror must have each release's SHA256SUMS in the folder of its archives".into()
            }
            Self::ChecksumUnlisted { .. } | Self::ChecksumMismatch { .. } => {
                "the mirror or a proxy serves a changed or incomplete file; nothing was installed"
                    .into()
            }
            Self::SignatureMissing { .. } => {
                "mirror the signature files too, or do not require signatures".into()
            }
            Self::Signature { source, .. } => source.hint(),
            Self::ExtraKeys { .. } => "the file must hold OpenPGP public keys".into(),
            Self::Archive { .. } => {
                "the file has the published checksum, so the release itself is broken; choose another version"
                    .into()
            }
            Self::CacheFull { .. } => {
                "free space on its volume, or set another cache directory".into()
            }
            Self::CacheNotWritable { .. } => {
                "make it writable, or put the wanted version there beforehand".into()
            }
            Self::CacheLock { .. } => {
                "the file system must support file locks; set a cache directory on another one"
                    .into()
            }
            Self::Cache { .. } => "check the directory and its file system".into(),
            Self::NoTlsProvider | Self::Task { .. } => return None,
        })
    }

    /// Classifies an I/O error in the cache by its remedy.
    pub(crate) fn cache(path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::CacheFull { path, source }
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                Self::CacheNotWritable { path, source }
            }
            _ => Self::Cache { path, source },
        }
    }
}
