//! The error of a step: its exit code, and its hint for users. All parts of the executor return it. A part has an error of
//! its own only if it decides by it, for example about a retry.
//!
//! This module knows no other part of the executor.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::io;
use std::panic::AssertUnwindSafe;
use std::path::Path;

use artifact_store::StoreError;
use futures_util::FutureExt as _;
use job_contract::chain::{chain, with_causes};
use job_contract::job::JobDataError;
use job_contract::{Exit, env};
use platform::PlatformError;
use run_log::LogError;
use runtime::setting::is_wrong_place;

/// The hint for a file that could not be written.
pub const DISK_HINT: &str =
    "check that the disk is not full and the folder belongs to the executor's user";

/// The hint for a reviewed plan that must not be applied.
pub const PLAN_AGAIN: &str = "plan again, review the new plan and apply it";

/// The error of a step: one sentence with all causes.
#[derive(Debug)]
pub struct StepError {
    exit: Exit,
    hint: Option<String>,
    text: String,
}

impl StepError {
    /// An error, and the exit code if the error ends a step.
    pub fn new(exit: Exit, text: impl Into<String>) -> Self {
        Self {
            exit,
            hint: None,
            text: text.into(),
        }
    }

    /// The run refers to something that is missing or invalid.
    pub fn user(text: impl Into<String>) -> Self {
        Self::new(Exit::BadJobData, text)
    }

    /// The executor's environment does not work; a retry may help.
    pub fn infrastructure(text: impl Into<String>) -> Self {
        Self::new(Exit::Infrastructure, text)
    }

    /// The executor has a defect.
    pub fn defect(text: impl Into<String>) -> Self {
        Self::new(Exit::Defect, text)
    }

    /// A stop order came before the step started anything.
    pub fn stopped() -> Self {
        Self::infrastructure("stopped before anything was started")
    }

    /// A stop order ended a part of the run. The result of the step says why.
    pub fn interrupted(part: &str) -> Self {
        Self::new(Exit::StepFailed, format!("{part} was interrupted"))
    }

    /// A phase panicked. The diagnostics have the details.
    pub fn panicked() -> Self {
        Self::defect("a phase of the run panicked")
    }

    /// The executor could not create, write or remove one of its own files or folders. `failure` names which.
    pub fn work_folder(failure: &str, path: &Path, source: &io::Error) -> Self {
        let error = Self::infrastructure(format!("{failure} `{}`", path.display())).because(source);
        if !is_wrong_place(source) {
            return error.with_hint(DISK_HINT);
        }
        let hint = format!(
            "set `{}` or `{}` to a folder that the executor's user can write in, and `{}` too if it is set",
            env::WORK_DIR,
            env::DATA_DIR,
            env::CHECKOUT_DIR
        );
        Self {
            exit: Exit::BadConfiguration,
            ..error.with_hint(hint)
        }
    }

    /// The executor could not read or write a file of the tool's working directory.
    pub fn working_dir(path: &Path, source: &io::Error) -> Self {
        let path = path.display();
        Self::infrastructure(format!(
            "could not write into the working directory `{path}`"
        ))
        .because(source)
        .with_hint(DISK_HINT)
    }

    /// Adds the cause, with its own causes, to the text.
    #[must_use]
    pub fn because(self, cause: &(dyn Error + 'static)) -> Self {
        Self {
            text: with_causes(self.text, Some(cause)),
            ..self
        }
    }

    /// Adds a hint for users.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Self {
            hint: Some(hint.into()),
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

impl Error for StepError {}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<JobDataError> for StepError {
    fn from(error: JobDataError) -> Self {
        Self::user(error.to_string())
    }
}

impl From<LogError> for StepError {
    fn from(error: LogError) -> Self {
        Self::infrastructure(chain(&error))
    }
}

impl From<PlatformError> for StepError {
    fn from(error: PlatformError) -> Self {
        Self {
            hint: error.hint(),
            ..Self::new(error.exit(), chain(&error))
        }
    }
}

impl From<StoreError> for StepError {
    fn from(error: StoreError) -> Self {
        let exit = match error {
            StoreError::LeftOut { .. } => Exit::BadConfiguration,
            _ => Exit::Infrastructure,
        };
        Self {
            hint: error.hint(),
            ..Self::new(exit, chain(&error))
        }
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
        let error = StepError::working_dir(Path::new("/w/x"), &full);
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
        let error = StepError::work_folder(failure, Path::new("/w"), &denied);
        let text = error.to_string();
        assert!(
            text.starts_with("could not create the folder `/w`: "),
            "{text}"
        );
        assert_eq!(error.exit(), Exit::BadConfiguration);
        assert!(error.hint().unwrap().contains(env::WORK_DIR));
    }
}
