//! What can be wrong with a setting. Settings are read to the end before anything is reported, so that one start
//! tells all there is to mend.

use std::env;
use std::fmt;

use clap::{Arg, Command};

/// What is wrong with one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingProblem {
    /// Its variable.
    pub variable: &'static str,
    /// What is wrong, as the end of a sentence that begins with the variable. Never quotes a secret.
    pub text: String,
}

impl SettingProblem {
    /// A problem of that variable.
    pub fn new(variable: &'static str, text: impl Into<String>) -> Self {
        Self {
            variable,
            text: text.into(),
        }
    }
}

impl fmt::Display for SettingProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.variable, self.text)
    }
}

/// The text of a setting, unless it is blank: a chart writes empty values for what is not set.
pub fn present(text: Option<&str>) -> Option<&str> {
    text.map(str::trim).filter(|text| !text.is_empty())
}

/// The command, and those it has, without the variables that are blank, of the options that are meant: like
/// [`present`], for what is no text, or means something when it is blank.
pub fn without_blank_variables(command: Command, meant: fn(&Arg) -> bool) -> Command {
    let blank = |argument: &Arg| {
        let value = argument.get_env().and_then(env::var_os);
        value.is_some_and(|value| value.to_str().is_some_and(|text| text.trim().is_empty()))
    };
    command
        .mut_args(|argument| {
            if meant(&argument) && blank(&argument) {
                argument.env(None)
            } else {
                argument
            }
        })
        .mut_subcommands(|below| without_blank_variables(below, meant))
}
