//! Whose fault a failure is, and how a chain of causes is told in one sentence.

use std::error::Error;

use job_contract::Exit;

/// Whose fault a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The run asks for something that does not exist or cannot be.
    User,
    /// Something around us does not work; trying again may help.
    Infrastructure,
    /// We are wrong.
    Defect,
}

impl Fault {
    /// The exit code of a step that failed this way before it was claimed.
    pub const fn exit(self) -> Exit {
        match self {
            Self::User => Exit::BadJobData,
            Self::Infrastructure => Exit::Infrastructure,
            Self::Defect => Exit::Defect,
        }
    }
}

/// An error and its causes, outermost first, each once.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
    }
    text
}
