//! Why a step did not do what it should: which exit code follows, and what people can do about it.
//!
//! Knows no other part of the executor. Each part has errors of its own and says beside them how they become a
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

/// What to do where a file could not be written.
pub const DISK_HINT: &str =
    "check that the disk is not full and the folder belongs to the executor's user";

/// What an error says about its cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The run asks for something that does not exist or cannot be.
    User,
    /// Something around the executor does not work; trying again may help.
    Infrastructure,
    /// The executor is wrong.
    Defect,
}

impl ErrorKind {
    /// The exit code of a step that failed this way before it was claimed.
    pub const fn exit(self) -> Exit {
        match self {
            Self::User => Exit::BadJobData,
            Self::Infrastructure => Exit::Infrastructure,
            Self::Defect => Exit::Defect,
        }
    }
}

/// Why a step did not do what it should. Displayed with all its causes, in one sentence.
#[derive(Debug)]
pub struct StepError {
    exit: Exit,
    hint: Option<String>,
    source: Box<dyn Error + Send + Sync>,
}

impl StepError {
    /// An error, and the exit code if it ends a step.
    pub fn new(exit: Exit, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            exit,
            hint: None,
            source: source.into(),
        }
    }

    /// Something around the executor does not work.
    pub fn infrastructure(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Exit::Infrastructure, source)
    }

    /// A stop order came before anything was started.
    pub fn stopped() -> Self {
        Self::infrastructure("stopped before anything was started")
    }

    /// A phase broke off. What happened is among the diagnostics.
    pub fn panicked() -> Self {
        Self::new(Exit::Defect, "a phase of the run panicked")
    }

    /// A folder or file of the executor's own could not be created, written or removed: `failure` says which.
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

    /// A file of the tool's working directory could not be read or written.
    pub fn working_dir(path: &Path, source: io::Error) -> Self {
        let error = FileError {
            failure: "could not write into the working directory",
            path: path.display().to_string(),
            source,
        };
        Self::infrastructure(error).with_hint(DISK_HINT.to_owned())
    }

    /// The same error with something that can be done about it.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<Option<String>>) -> Self {
        Self {
            hint: hint.into(),
            ..self
        }
    }

    /// The exit code if this ends a step.
    pub const fn exit(&self) -> Exit {
        self.exit
    }

    /// What to do about it.
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

/// Turns a panic into an error, so that what must happen afterwards still does.
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
    fn a_place_that_cannot_serve_is_a_setting() {
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
