//! Everything that can end a run before a step could tell its own outcome.

use std::io;

use data_dir::DataError;
use job_contract::Exit;
use nix::sys::signal::Signal;
use platform::PlatformError;
use processes::executor::{self, ExecutorError};

use super::content::ContentError;
use super::job::InputError;
use crate::document::DocumentError;

/// Why a run could not continue.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error(transparent)]
    Content(#[from] ContentError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error("could not listen for signals")]
    Signals(#[source] io::Error),
    #[error("stopped by {} before anything was started", .0.as_str())]
    Stopped(Signal),
    #[error("packing the folder ended unexpectedly")]
    Packing,
    #[error("the executor ended without a report of the step's outcome")]
    NoOutcome,
}

impl RunError {
    /// The exit code, which says whose fault it is.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Content(error) => error.exit(),
            Self::Data(error) => error.exit(),
            Self::Document(error) => error.exit(),
            Self::Input(_) => InputError::EXIT,
            Self::Executor(error) => error.exit(),
            Self::Platform(_) | Self::Signals(_) => Exit::Infrastructure,
            Self::Stopped(signal) => executor::stop_exit(*signal),
            Self::Packing | Self::NoOutcome => Exit::Defect,
        }
    }

    /// What to do about it.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Content(error) => error.hint(),
            Self::Data(error) => error.hint(),
            Self::Input(error) => error.hint(),
            Self::Executor(error) => error.hint(),
            _ => None,
        }
    }
}
