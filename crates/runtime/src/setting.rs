//! Typed settings. A wrong value does not end the parsing: it is kept with its error, so that one start reports all errors.
//! Knows clap, but no single setting.
//!
//! A program declares `Option<Setting<T>>` options, `T` being a [`SettingValue`], and reads each with
//! [`ReadSetting::read`] or [`ReadSetting::require`].

mod nearest;
mod value;

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::marker::PhantomData;

use clap::builder::{TypedValueParser, ValueParserFactory};
use clap::parser::ValueSource;
use clap::{Arg, Args, Command, Error, Parser};
use nix::errno::Errno;

use crate::handover;
use crate::setting_text::meant;

pub use crate::setting_text::SettingError;
pub use nearest::nearest;
pub use value::{HttpUrl, Milliseconds, Seconds, SettingValue, choice, unexpected};

/// A setting: a value, a blank, or an invalid text. A blank counts as not set, because charts write empty values for unset
/// settings. `${NAME}` for the variable `NAME` counts as not set too: stock deployments have such placeholders (contract
/// 10.1).
#[derive(Clone, Debug)]
pub struct Setting<T> {
    /// Its variable, or the flag that set it. Empty if a program made it for itself.
    name: String,
    value: Result<Option<T>, String>,
}

impl<T: SettingValue> Setting<T> {
    fn parse(name: String, variable: &OsStr, text: &OsStr) -> Self {
        let Some(text) = text.to_str() else {
            let value = Err("is not UTF-8 text, as every setting must be".to_owned());
            return Self { name, value };
        };
        let value = meant(variable, text).map(T::parse).transpose();
        Self { name, value }
    }
}

impl<T: SettingValue> Setting<T> {
    /// A setting from another source than options and variables. Errors use this name.
    pub fn named(name: impl Into<String>, text: &str) -> Self {
        Self::parse(name.into(), OsStr::new(""), OsStr::new(text))
    }
}

/// A setting without a name, for programs that set it themselves.
impl<T: SettingValue> From<&str> for Setting<T> {
    fn from(text: &str) -> Self {
        Self::parse(String::new(), OsStr::new(""), text.as_ref())
    }
}

impl<T: SettingValue> From<String> for Setting<T> {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

/// Reads settings and collects their errors.
pub trait ReadSetting<T> {
    /// The value. `None` if the setting is not set or wrong.
    fn read(&self, errors: &mut Vec<SettingError>) -> Option<T>;

    /// The value of a setting that must be set. `variable` is its name in the error if it is missing.
    fn require(&self, variable: &'static str, errors: &mut Vec<SettingError>) -> Option<T>;

    /// The name for errors: the flag that set it, else the variable.
    fn name<'a>(&'a self, variable: &'a str) -> &'a str;

    /// The value. Does not report an error; another caller does.
    fn get(&self) -> Option<&T>;

    /// Whether the setting is set, also to a wrong value.
    fn is_set(&self) -> bool;
}

impl<T: Clone> ReadSetting<T> for Option<Setting<T>> {
    fn read(&self, errors: &mut Vec<SettingError>) -> Option<T> {
        let setting = self.as_ref()?;
        match &setting.value {
            Ok(value) => value.clone(),
            Err(text) => {
                errors.push(SettingError::new(&setting.name, text));
                None
            }
        }
    }

    fn require(&self, variable: &'static str, errors: &mut Vec<SettingError>) -> Option<T> {
        if !self.is_set() {
            errors.push(SettingError::new(variable, "is not set"));
        }
        self.read(errors)
    }

    fn name<'a>(&'a self, variable: &'a str) -> &'a str {
        let name = self.as_ref().map(|setting| setting.name.as_str());
        name.filter(|name| !name.is_empty()).unwrap_or(variable)
    }

    fn get(&self) -> Option<&T> {
        self.as_ref()?.value.as_ref().ok()?.as_ref()
    }

    fn is_set(&self) -> bool {
        self.as_ref()
            .is_some_and(|setting| !matches!(setting.value, Ok(None)))
    }
}

/// Parses any text into a [`Setting`].
#[derive(Debug)]
pub struct SettingParser<T>(PhantomData<fn() -> T>);

impl<T> Clone for SettingParser<T> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<T: SettingValue> ValueParserFactory for Setting<T> {
    type Parser = SettingParser<T>;

    fn value_parser() -> Self::Parser {
        SettingParser(PhantomData)
    }
}

impl<T: SettingValue> TypedValueParser for SettingParser<T> {
    type Value = Setting<T>;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        text: &OsStr,
    ) -> Result<Self::Value, Error> {
        self.parse_ref_(command, arg, text, ValueSource::CommandLine)
    }

    fn parse_ref_(
        &self,
        _: &Command,
        arg: Option<&Arg>,
        text: &OsStr,
        source: ValueSource,
    ) -> Result<Self::Value, Error> {
        let variable = arg.and_then(Arg::get_env).unwrap_or_default();
        let flag = arg.and_then(Arg::get_long);
        let name = match flag {
            Some(flag) if source == ValueSource::CommandLine || variable.is_empty() => {
                format!("--{flag}")
            }
            _ => variable.to_string_lossy().into_owned(),
        };
        Ok(Setting::parse(name, variable, text))
    }
}

/// The settings from these variables, without the environment. For tests.
///
/// # Panics
/// If there is no setting with one of these variables, or an option that is no [`Setting`] takes no such value.
pub fn from_variables<A: Args>(variables: &[(&str, &str)]) -> A {
    let mut command = A::augment_args(Command::new("settings")).mut_args(|arg| arg.env(None));
    let declared = A::augment_args(Command::new("settings"));
    for (variable, value) in variables {
        let mut args = declared.get_arguments();
        let is_it = |arg: &&Arg| arg.get_env().is_some_and(|name| name == *variable);
        let arg = args.find(is_it);
        let id = arg.map(|arg| arg.get_id().clone());
        let id = id.expect("a setting has this variable");
        // clap needs texts that live as long as the program.
        let (variable, value) = [*variable, *value]
            .map(|text| &*text.to_owned().leak())
            .into();
        command = command.mut_arg(id, |arg| arg.env(variable).default_value(value));
    }
    let matches = command.get_matches_from(["settings"]);
    A::from_arg_matches(&matches).expect("any text is taken")
}

/// The text of a setting, unless it is blank: charts write empty values for unset settings.
pub fn present(text: Option<&str>) -> Option<&str> {
    text.map(str::trim).filter(|text| !text.is_empty())
}

/// Whether the setting caused an error of its path: the path does not exist, is of another kind, or is not accessible for this
/// user. A retry does not help, as it may after an error of the disk.
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
    // These two error numbers have no `ErrorKind`.
    let number = error.raw_os_error().map(Errno::from_raw);
    kind || matches!(number, Some(Errno::ELOOP | Errno::ENOEXEC))
}

/// Parses a command line with the program's name, the secrets that were handed over, and the environment. A blank variable
/// counts as not set for the options that `meant` selects: options that are not [`Setting`]s, or for which a blank has a meaning.
pub fn parse_over_environment<P: Parser>(
    args: impl IntoIterator<Item = OsString>,
    meant: fn(&Arg) -> bool,
) -> Result<P, Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let command = over_environment(P::command(), meant);
    match command.try_get_matches_from(&args) {
        Ok(matches) => P::from_arg_matches(&matches),
        // Help names every variable, also blank ones.
        Err(help) if !help.use_stderr() => P::try_parse_from(args),
        Err(usage) => Err(usage),
    }
}

/// The command and its subcommands, with the secrets that were handed over, and without the blank variables of the selected
/// options.
fn over_environment(command: Command, meant: fn(&Arg) -> bool) -> Command {
    let blank = |argument: &Arg| {
        let value = argument.get_env().and_then(env::var_os);
        value.is_some_and(|value| value.to_str().is_some_and(|text| text.trim().is_empty()))
    };
    command
        .mut_args(|argument| {
            if let Some(secret) = argument.get_env().and_then(handover::received) {
                let in_environment = argument.get_env().and_then(env::var_os).is_some();
                let argument = argument.default_value(secret);
                // A blank variable would win over the default.
                if in_environment {
                    argument.env(None)
                } else {
                    argument
                }
            } else if meant(&argument) && blank(&argument) {
                argument.env(None)
            } else {
                argument
            }
        })
        .mut_subcommands(|below| over_environment(below, meant))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        settings: Settings,
    }

    #[derive(Debug, Args)]
    struct Settings {
        #[arg(long, env = "PORT")]
        port: Option<Setting<u16>>,
        #[arg(long)]
        name: Option<Setting<String>>,
    }

    fn port(text: &str) -> (Option<u16>, Vec<String>) {
        let mut errors = Vec::new();
        let settings: Settings = from_variables(&[("PORT", text)]);
        let port = settings.port.require("PORT", &mut errors);
        (port, errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_setting_is_read_and_blanks_and_placeholders_are_not_set() {
        assert_eq!(port(" 80 "), (Some(80), vec![]));
        for nothing in ["", " ", "${PORT}"] {
            assert_eq!(port(nothing), (None, vec!["`PORT` is not set".to_owned()]));
        }
        let wrong = "is `${HOST}`, expected a number from 0 to 65535";
        assert_eq!(port("${HOST}"), (None, vec![format!("`PORT` {wrong}")]));
    }

    #[test]
    fn an_error_names_where_the_value_came_from() {
        let not_text = OsStr::from_bytes(b"\xff").to_owned();
        let args = ["x", "--port", "many", "--name"].map(OsString::from);
        let parsed = Program::parse_from(args.into_iter().chain([not_text]));
        let mut errors = Vec::new();
        assert_eq!(parsed.settings.port.read(&mut errors), None);
        assert_eq!(parsed.settings.name.read(&mut errors), None);
        assert_eq!(errors[0].variable, "--port");
        assert_eq!(
            errors[1].to_string(),
            "`--name` is not UTF-8 text, as every setting must be"
        );
    }

    #[test]
    fn a_wrong_path_differs_from_a_failing_machine() {
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
