//! The error of a step: its exit code, and its hint for users.
//!
//! This module knows no other part of the executor. Each part has its own errors, and converts them into a
//! [`StepError`].

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::io;
use std::panic::AssertUnwindSafe;
use std::path::Path;

use artifact_store::StoreError;
use futures_util::FutureExt as _;
use job_contract::job::JobDataError;
use job_contract::{Exit, chain, env};
use platform::PlatformError;
use run_log::LogError;
use runtime::setting::is_wrong_place;

/// The hint for a file that could not be written.
pub const DISK_HINT: &str =
    "check that the disk is not full and the folder belongs to the executor's user";

/// The cause of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The run refers to something that is missing or invalid.
    User,
    /// The executor's environment does not work; a retry may help.
    Infrastructure,
    /// The executor has a defect.
    Defect,
}

impl ErrorKind {
    /// The exit code of a step that failed for this cause before its claim.
    pub const fn exit(self) -> Exit {
        match self {
            Self::User => Exit::BadJobData,
            Self::Infrastructure => Exit::Infrastructure,
            Self::Defect => Exit::Defect,
        }
    }
}

/// The error of a step. It is displayed with all its causes, in one sentence.
#[derive(Debug)]
pub struct StepError {
    exit: Exit,
    hint: Option<String>,
    source: Box<dyn Error + Send + Sync>,
}

impl StepError {
    /// An error, and the exit code if the error ends a step.
    pub fn new(exit: Exit, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            exit,
            hint: None,
            source: source.into(),
        }
    }

    /// The executor's environment does not work.
    pub fn infrastructure(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Exit::Infrastructure, source)
    }

    /// A stop order came before the step started anything.
    pub fn stopped() -> Self {
        Self::infrastructure("stopped before anything was started")
    }

    /// A phase panicked. The diagnostics have the details.
    pub fn panicked() -> Self {
        Self::new(Exit::Defect, "a phase of the run panicked")
    }

    /// The executor could not create, write or remove one of its own files or folders. `failure` names which.
    pub fn work_folder(failure: &'static str, path: &Path, source: io::Error) -> Self {
        let is_wrong_place = is_wrong_place(&source);
        let error = FileError {
            failure,
            path: path.display().to_string(),
            source,
        };
        if is_wrong_place {
            let hint = format!(
                "set `{}` or `{}` to a folder that the executor's user can write in, and `{}` too if it is set",
                env::WORK_DIR,
                env::DATA_DIR,
                env::CHECKOUT_DIR
            );
            Self::new(Exit::BadConfiguration, error).with_hint(hint)
        } else {
            Self::infrastructure(error).with_hint(DISK_HINT.to_owned())
        }
    }

    /// The executor could not read or write a file of the tool's working directory.
    pub fn working_dir(path: &Path, source: io::Error) -> Self {
        let error = FileError {
            failure: "could not write into the working directory",
            path: path.display().to_string(),
            source,
        };
        Self::infrastructure(error).with_hint(DISK_HINT.to_owned())
    }

    /// Adds a hint to the error.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<Option<String>>) -> Self {
        Self {
            hint: hint.into(),
            ..self
        }
    }

    /// The exit code if this error ends a step.
    pub const fn exit(&self) -> Exit {
        self.exit
    }

    /// The hint for users.
    pub fn hint(&self) -> Option<String> {
        self.hint.clone()
    }
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&chain(&*self.source))
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{failure} `{path}`")]
struct FileError {
    failure: &'static str,
    path: String,
    #[source]
    source: io::Error,
}

impl From<JobDataError> for StepError {
    fn from(error: JobDataError) -> Self {
        Self::new(ErrorKind::User.exit(), error)
    }
}

impl From<LogError> for StepError {
    fn from(error: LogError) -> Self {
        Self::infrastructure(error)
    }
}

impl From<PlatformError> for StepError {
    fn from(error: PlatformError) -> Self {
        let hint = error.hint();
        Self::new(error.exit(), error).with_hint(hint)
    }
}

impl From<StoreError> for StepError {
    fn from(error: StoreError) -> Self {
        let hint = error.hint();
        Self::infrastructure(error).with_hint(hint)
    }
}

/// Turns a panic into an error, so that the rest of the run still happens.
pub async fn catch_panic<T>(
    work: impl Future<Output = Result<T, StepError>>,
) -> Result<T, StepError> {
    let done = AssertUnwindSafe(work).catch_unwind().await;
    done.unwrap_or_else(|_| Err(StepError::panicked()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_error() {
        let panicked = catch_panic(async { panic!("on purpose") }).await;
        let error = panicked.map(|(): ()| ()).unwrap_err();
        assert_eq!(error.exit(), Exit::Defect);
        assert_eq!(catch_panic(async { Ok(7) }).await.unwrap(), 7);
    }

    #[test]
    fn an_error_is_shown_with_its_causes() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let error = StepError::working_dir(Path::new("/w/x"), full);
        assert_eq!(
            error.to_string(),
            "could not write into the working directory `/w/x`: no storage space"
        );
        assert_eq!(error.exit(), Exit::Infrastructure);
        assert_eq!(error.hint().as_deref(), Some(DISK_HINT));
    }

    #[test]
    fn an_unusable_folder_is_a_wrong_setting() {
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let failure = "could not create the folder";
        let error = StepError::work_folder(failure, Path::new("/w"), denied);
        let text = error.to_string();
        assert!(
            text.starts_with("could not create the folder `/w`: "),
            "{text}"
        );
        assert_eq!(error.exit(), Exit::BadConfiguration);
        assert!(error.hint().unwrap().contains(env::WORK_DIR));
    }
}
