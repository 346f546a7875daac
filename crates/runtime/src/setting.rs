//! What can be wrong with a setting. Settings are read to the end before anything is reported, so that one start
//! tells all there is to mend.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::io;

use clap::{Arg, Command, Error, Parser};
use nix::errno::Errno;

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

/// Whether what went wrong with a path is the setting's fault: it names what is not there, what is of another kind, or what
/// this user may not use. Trying again does not help, as it may after an error of the disk.
pub fn is_wrong_place(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    let kind = matches!(
        error.kind(),
        Kind::NotFound
            | Kind::NotADirectory
            | Kind::IsADirectory
            | Kind::AlreadyExists
            | Kind::PermissionDenied
            | Kind::ReadOnlyFilesystem
            | Kind::InvalidFilename
    );
    // These two have no kind.
    let number = error.raw_os_error().map(Errno::from_raw);
    kind || matches!(number, Some(Errno::ELOOP | Errno::ENOEXEC))
}

/// Reads a command line, the program's name included, over the environment. Of the options that are `meant`, a variable
/// that is blank counts as not set: like [`present`], for what is no text, or means something when it is blank.
pub fn parse_over_environment<P: Parser>(
    args: impl IntoIterator<Item = OsString>,
    meant: fn(&Arg) -> bool,
) -> Result<P, Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let command = without_blank_variables(P::command(), meant);
    match command.try_get_matches_from(&args) {
        Ok(matches) => P::from_arg_matches(&matches),
        // Help names every variable, the blank ones too.
        Err(help) if !help.use_stderr() => P::try_parse_from(args),
        Err(usage) => Err(usage),
    }
}

/// The command, and those it has, without the variables that are blank, of the options that are meant.
fn without_blank_variables(command: Command, meant: fn(&Arg) -> bool) -> Command {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_cannot_serve_is_told_from_a_machine_that_is_in_trouble() {
        use Errno::{
            EACCES, EEXIST, EINTR, EIO, EISDIR, ELOOP, EMFILE, ENAMETOOLONG, ENOENT, ENOEXEC,
            ENOSPC, ENOTDIR, EPERM, EROFS, ESTALE,
        };
        for number in [
            EACCES,
            EEXIST,
            EISDIR,
            ELOOP,
            ENAMETOOLONG,
            ENOENT,
            ENOEXEC,
            ENOTDIR,
            EPERM,
            EROFS,
        ] {
            assert!(is_wrong_place(&number.into()), "{number}");
        }
        for number in [EINTR, EIO, EMFILE, ENOSPC, ESTALE] {
            assert!(!is_wrong_place(&number.into()), "{number}");
        }
    }
}
