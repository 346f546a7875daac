//! `api-launcher agent configure`: writes a configuration file.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, IsTerminal as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches, ValueHint};
use cluster::settings::KubernetesArgs;
use console::Term;
use http_service::diagnostics::refuse;
use job_contract::{Exit, env};
use runtime::setting::{SettingError, present};

use super::config::args::{OPTIONS, SettingsArgs};
use super::config::file::{self, FileValues};

/// The options of `agent configure`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ConfigureArgs {
    /// The file that is written
    #[arg(long, value_name = "FILE", default_value = file::NAME, value_hint = ValueHint::FilePath)]
    config: PathBuf,

    /// Write over a file that exists
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    given: GivenSettings,
}

/// The settings on the command line, as they were written.
#[derive(Clone, Debug, Default)]
struct GivenSettings(Vec<(&'static str, String)>);

impl FromArgMatches for GivenSettings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let text = |key: &&'static str| {
            let is_given = matches.value_source(key) == Some(ValueSource::CommandLine);
            let mut raw = matches.get_raw(key).filter(|_| is_given)?;
            let text = raw.next().and_then(OsStr::to_str)?;
            Some((*key, text.to_owned()))
        };
        Ok(Self(OPTIONS.iter().filter_map(text).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for GivenSettings {
    fn augment_args(command: Command) -> Command {
        // Settings of the environment are not written into the file.
        SettingsArgs::augment_args(command).mut_args(|arg| arg.env(None))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Writes the file, and returns the exit code.
pub(crate) fn run(args: &ConfigureArgs) -> u8 {
    let mut values = args.given.0.clone();
    let is_given = |values: &[(&str, String)], key| values.iter().any(|(known, _)| *known == key);
    let terminal = Term::stderr();
    let is_interactive = io::stdin().is_terminal() && terminal.is_term();
    if is_interactive && !is_given(&values, "service_url") {
        let answer = prompt(&terminal, "Address of the hub: ", Term::read_line);
        values.extend(answer.map(|text| ("service_url", text)));
    }
    let token = std::env::var(env::AGENT_TOKEN).ok();
    let mut token = present(token.as_deref()).map(str::to_owned);
    let has_token =
        token.is_some() || is_given(&values, "token_file") || is_given(&values, "oidc_token_file");
    if is_interactive && !has_token {
        token = prompt(&terminal, "Token of the pool: ", Term::read_secure_line);
    }
    values.extend(token.map(|token| ("token", token)));
    let content = render(&values);
    if let Err(errors) = check(&content) {
        return refuse(&errors);
    }
    match write(&args.config, &content, args.force) {
        Ok(()) => {
            let text = format!("wrote {}\n", args.config.display());
            let _ = io::stderr().write_all(text.as_bytes());
            Exit::Done.code()
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let text = "exists; --force writes over it".to_owned();
            refuse(&[SettingError::new(args.config.display().to_string(), text)])
        }
        Err(error) => {
            let text = format!("cannot be written: {error}");
            refuse(&[SettingError::new(args.config.display().to_string(), text)])
        }
    }
}

fn prompt(
    terminal: &Term,
    question: &str,
    read: impl FnOnce(&Term) -> io::Result<String>,
) -> Option<String> {
    terminal.write_str(question).ok()?;
    let answer = read(terminal).ok()?;
    present(Some(&answer)).map(str::to_owned)
}

/// Returns the content of the file. A JSON string is also a YAML string.
fn render(values: &[(&str, String)]) -> String {
    let mut content = String::from(
        "# Configuration of `api-launcher agent`. It may hold the token of the pool.\n",
    );
    for (key, text) in values {
        let text = serde_json::Value::from(text.as_str());
        let _ = writeln!(content, "{key}: {text}");
    }
    content
}

/// Checks whether an agent would accept the file.
fn check(content: &str) -> Result<(), Vec<SettingError>> {
    let values = FileValues::parse(PathBuf::from(file::NAME), content);
    let values = values.map_err(|error| vec![error])?;
    let kubernetes = KubernetesArgs::default();
    SettingsArgs::default()
        .resolve(Some(values), None, &kubernetes)
        .map(drop)
}

/// Writes the file. It appears with its whole content, and only its owner can read it.
fn write(path: &Path, content: &str, force: bool) -> io::Result<()> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let mut draft = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
    draft.write_all(content.as_bytes())?;
    draft
        .as_file()
        .set_permissions(fs::Permissions::from_mode(0o600))?;
    draft.as_file().sync_all()?;
    let persisted = if force {
        draft.persist(path)
    } else {
        draft.persist_noclobber(path)
    };
    persisted.map(drop).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configure(words: &str) -> ConfigureArgs {
        let command = ConfigureArgs::augment_args(Command::new("configure"));
        let words = ["configure"].into_iter().chain(words.split_whitespace());
        ConfigureArgs::from_arg_matches(&command.get_matches_from(words)).unwrap()
    }

    #[test]
    fn the_file_has_the_options_and_an_agent_accepts_it() {
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        fs::write(&token, "secret").unwrap();
        let path = folder.path().join("agent.yaml");
        let args = configure(&format!(
            "--config {} --service-url https://hub.example.test --token-file {} --single-run --slots 3",
            path.display(),
            token.display()
        ));
        assert_eq!(run(&args), 0);
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut values = file::find(Some(&path), &[]).unwrap().unwrap();
        assert_eq!(
            values.take("service_url").as_deref(),
            Some("https://hub.example.test")
        );
        assert_eq!(values.take("slots").as_deref(), Some("3"));
        assert_eq!(values.take("single_run").as_deref(), Some("true"));
        assert_eq!(values.take("on_stop"), None);
    }

    #[test]
    fn an_existing_file_is_only_replaced_with_force() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.yaml");
        write(&path, "first", false).unwrap();
        let error = write(&path, "second", false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        write(&path, "second", true).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
    }

    #[test]
    fn invalid_settings_are_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.yaml");
        let args = configure(&format!("--config {} --slots 0", path.display()));
        assert_eq!(run(&args), 64);
        assert!(!path.exists());
    }

    #[test]
    fn values_cannot_become_other_keys() {
        let content = render(&[("name", "a\"\ntoken: x".to_owned())]);
        let mut values = FileValues::parse(PathBuf::new(), &content).unwrap();
        assert_eq!(values.take("name").as_deref(), Some("a\"\ntoken: x"));
        assert_eq!(values.take("token"), None);
    }
}
