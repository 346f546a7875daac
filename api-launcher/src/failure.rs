//! Why a command failed, whose fault it is, and what to do about it.

use std::error::Error;
use std::io;
use std::path::Path;

use data_dir::DataError;
use job_contract::Exit;
use platform::PlatformError;
use processes::executor::ExecutorError;
use runtime::setting::SettingError;

/// Why a command failed. Causes follow as sources.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    /// One line for each fact.
    text: String,
    source: Option<Box<dyn Error + Send + Sync>>,
    /// What to do about it.
    pub(crate) hint: Option<&'static str>,
}

impl Failure {
    pub(crate) fn new(exit: Exit, text: impl Into<String>) -> Self {
        Self {
            exit,
            text: text.into(),
            source: None,
            hint: None,
        }
    }

    /// An error that speaks for itself.
    pub(crate) fn of(exit: Exit, error: impl Error + Send + Sync + 'static) -> Self {
        Self::new(exit, error.to_string()).because(error)
    }

    /// The path could not be read.
    pub(crate) fn unreadable(path: &Path) -> impl Fn(io::Error) -> Self + use<> {
        let text = format!("could not read `{}`", path.display());
        move |error| Self::new(Exit::BadJobData, &text).because(error)
    }

    pub(crate) fn because(mut self, cause: impl Error + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(cause));
        self
    }

    pub(crate) fn with_hint(mut self, hint: impl Into<Option<&'static str>>) -> Self {
        self.hint = hint.into();
        self
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        let hint = error.hint();
        Self::of(error.exit(), error).with_hint(hint)
    }
}

impl From<ExecutorError> for Failure {
    fn from(error: ExecutorError) -> Self {
        let hint = error.hint();
        Self::of(error.exit(), error).with_hint(hint)
    }
}

impl From<PlatformError> for Failure {
    fn from(error: PlatformError) -> Self {
        Self::of(Exit::Infrastructure, error)
    }
}

impl From<Vec<SettingError>> for Failure {
    fn from(errors: Vec<SettingError>) -> Self {
        let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
        Self::new(Exit::BadConfiguration, lines.join("\n"))
    }
}
