//! Starts every git process of the executor. So one place decides which environment, protocols and credentials git
//! gets. This module knows nothing of job data.
//!
//! git gets credentials from a helper that asks the executor. The helper is bound to the scheme, host and port of the source, so
//! submodules and redirects to other hosts never get them. Credentials are in no argument and in no file, apart from keys of
//! SSH. These are removed when the `Git` value is dropped.

mod broker;
mod failure;
mod guard;
mod login;
mod module_objects;
mod modules;
mod operator_logins;
mod process;
mod program;
mod run_settings;
mod session;
mod ssh_call;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Weak;

use git_address::Address;
use runtime::tree_removal;
use secrecy::{ExposeSecret as _, SecretString};
use tokio::process::Command;

use self::broker::Answers;

pub(super) use self::failure::GitFailure;
use self::failure::{mask, meaningful_line};
pub(crate) use self::login::Login;
pub(crate) use self::module_objects::ModuleStore;
pub(crate) use self::modules::{ModuleAccess, OpenModuleAccess};
use self::operator_logins::OperatorLogins;
use self::process::Finished;
use self::session::Session;
use super::WorkspaceConfig;
use super::credentials::Credential;
use super::layout::write_private_file;
use super::source::{Source, Transport, Userinfo};
use super::ssh::{key_file_content, ssh_command};
use crate::error::StepError;

/// Seconds without a byte after which an HTTP transfer ends. Servers that are busy packing send keep-alives more often.
const STALLED_AFTER_SECONDS: u32 = 120;

/// A command of git that failed.
struct Failed {
    failure: GitFailure,
    error: StepError,
}

/// Git with the settings for one source.
pub(super) struct Git<'a> {
    config: &'a WorkspaceConfig,
    source: &'a Source,
    ssh_command: String,
    secrets: Vec<SecretString>,
    operators: Option<OperatorLogins>,
    /// Git's only configuration file, the key, and who answers git's questions. Dropping it removes them.
    session: Session,
}

impl<'a> Git<'a> {
    /// Writes git's files for `source` into a new folder below `private`.
    pub(super) async fn open(
        config: &'a WorkspaceConfig,
        private: &Path,
        source: &'a Source,
        credential: &Credential,
    ) -> Result<Self, StepError> {
        let mut secrets = credential.secrets();
        secrets.extend(source.userinfo.iter().flat_map(Userinfo::secrets));
        let login = login(source, credential);
        let operators = config
            .logins
            .as_ref()
            .map(|logins| OperatorLogins::new(logins, login.as_ref(), |_| false));
        let answers = Answers {
            allowed: config.allowed.clone(),
            login,
            operators: operators.clone(),
            objects: Weak::new(),
        };
        let session = Session::open(private, answers, bare_command(config))
            .await
            .map_err(|error| could_not_run(&error))?;
        let key = write_files(&session, source, credential, operators.as_ref())
            .map_err(|error| no_session(&error))?;
        let ssh_command = ssh_command(key.as_deref(), config.known_hosts.as_deref());
        Ok(Self {
            config,
            source,
            ssh_command: match session.guard() {
                Some(guard) => guard.ssh_command(&ssh_command),
                None => ssh_command,
            },
            secrets,
            operators,
            session,
        })
    }

    /// Clones one reference without its history, and checks nothing out. A branch wins over a tag of the same name.
    /// Without a name, it clones the server's HEAD.
    pub(super) async fn clone(&self, reference: &str, target: &Path) -> Result<(), StepError> {
        if self.clone_if_there(reference, target).await? {
            return Ok(());
        }
        let repository = self.source;
        let text = format!("`{repository}` has no branch or tag `{reference}`");
        Err(GitFailure::NoReference.error(text))
    }

    /// Clones as [`Git::clone`] does. Returns whether the reference exists.
    pub(super) async fn clone_if_there(
        &self,
        reference: &str,
        target: &Path,
    ) -> Result<bool, StepError> {
        let mut args = arguments(&[
            "clone",
            "--quiet",
            "--no-checkout",
            "--depth=1",
            "--single-branch",
            "--template=",
        ]);
        if !reference.is_empty() {
            args.push(format!("--branch={reference}").into());
        }
        args.extend(arguments(&["--", &self.source.address]));
        args.push(target.into());
        match self.attempt("clone", None, &args).await? {
            Err(failed) if failed.failure == GitFailure::NoReference => Ok(false),
            done => done.map(|_| true).map_err(|failed| failed.error),
        }
    }

    /// Checks out the reference that [`Git::clone`] fetched.
    pub(super) async fn check_out_head(&self, repository: &Path) -> Result<(), StepError> {
        self.check_out(repository, "HEAD", false).await
    }

    /// The commit that is checked out, or that [`Git::clone`] fetched.
    pub(super) async fn head(&self, repository: &Path) -> Result<String, StepError> {
        let args = arguments(&["rev-parse", "HEAD"]);
        let finished = self
            .run("read the commit of", Some(repository), &args)
            .await?;
        Ok(finished.stdout.trim().to_owned())
    }

    /// Checks out `commit`. If the server permits it, only this commit is fetched, otherwise the reference's whole
    /// history. Returns whether the commit was found.
    pub(super) async fn check_out_commit(
        &self,
        repository: &Path,
        commit: &str,
    ) -> Result<bool, StepError> {
        if !is_plain_revision(commit) {
            return Ok(false);
        }
        if !self.has_commit(repository, commit).await? {
            let fetched = self.fetch_alone(repository, commit).await?;
            if !fetched && !self.deepen_until(repository, commit).await? {
                return Ok(false);
            }
            if fetched && !self.has_commit(repository, commit).await? {
                // It is a name. The clone has no reference for it except `FETCH_HEAD`.
                self.check_out(repository, "FETCH_HEAD", true).await?;
                return Ok(true);
            }
        }
        self.check_out(repository, commit, true).await?;
        Ok(true)
    }

    /// Fetches the submodules, without history if the server permits that.
    pub(super) async fn update_submodules(&self, repository: &Path) -> Result<(), StepError> {
        const ACTION: &str = "fetch the submodules of";
        let update = ["submodule", "--quiet", "update", "--init", "--recursive"];
        let mut shallow = arguments(&update);
        shallow.push("--depth=1".into());
        match self.attempt(ACTION, Some(repository), &shallow).await? {
            Err(failed) if failed.failure == GitFailure::NoReference => {
                let forget = arguments(&["submodule", "--quiet", "deinit", "--all", "--force"]);
                self.run(ACTION, Some(repository), &forget).await?;
                tree_removal::remove(&repository.join(".git/modules"))
                    .map_err(|error| no_session(&error))?;
                self.run(ACTION, Some(repository), &arguments(&update))
                    .await
                    .map(drop)
            }
            done => done.map(drop).map_err(|failed| failed.error),
        }
    }

    async fn check_out(
        &self,
        repository: &Path,
        revision: &str,
        detach: bool,
    ) -> Result<(), StepError> {
        let mut args = arguments(&["checkout", "--quiet", "--force"]);
        if detach {
            args.push("--detach".into());
        }
        args.extend(arguments(&[revision, "--"]));
        self.run("check out", Some(repository), &args)
            .await
            .map(drop)
    }

    async fn has_commit(&self, repository: &Path, commit: &str) -> Result<bool, StepError> {
        let commit = format!("{commit}^{{commit}}");
        let args = arguments(&[
            "rev-parse",
            "--quiet",
            "--verify",
            "--end-of-options",
            &commit,
        ]);
        Ok(self.execute(Some(repository), &args).await?.success)
    }

    /// Fetches exactly this commit or name. Returns whether the server permitted it.
    async fn fetch_alone(&self, repository: &Path, commit: &str) -> Result<bool, StepError> {
        let args = arguments(&["fetch", "--quiet", "--depth=1", "origin", commit]);
        self.try_fetch(repository, &args).await
    }

    async fn deepen_until(&self, repository: &Path, commit: &str) -> Result<bool, StepError> {
        let args = arguments(&["fetch", "--quiet", "--unshallow", "origin"]);
        // A repository with a single commit is complete already, which git reports as an error.
        self.try_fetch(repository, &args).await?;
        self.has_commit(repository, commit).await
    }

    async fn try_fetch(&self, repository: &Path, args: &[OsString]) -> Result<bool, StepError> {
        let Err(Failed { failure, error }) =
            self.attempt("fetch from", Some(repository), args).await?
        else {
            return Ok(true);
        };
        // Any other failure would occur with the next request too.
        if !matches!(failure, GitFailure::NoReference | GitFailure::Other) {
            return Err(error);
        }
        tracing::debug!(%error, "the server does not permit fetching this");
        Ok(false)
    }

    async fn run(
        &self,
        action: &str,
        repository: Option<&Path>,
        args: &[OsString],
    ) -> Result<Finished, StepError> {
        let done = self.attempt(action, repository, args).await?;
        done.map_err(|failed| failed.error)
    }

    /// Runs a command that may fail. The outer error means that git could not be run.
    async fn attempt(
        &self,
        action: &str,
        repository: Option<&Path>,
        args: &[OsString],
    ) -> Result<Result<Finished, Failed>, StepError> {
        let finished = self.execute(repository, args).await?;
        if finished.success {
            return Ok(Ok(finished));
        }
        let operators = self.operators.as_ref();
        let of_operator = operators.map(OperatorLogins::secrets).unwrap_or_default();
        let secrets: Vec<&str> = self
            .secrets
            .iter()
            .chain(&of_operator)
            .map(SecretString::expose_secret)
            .collect();
        let mut problems = operators
            .map(OperatorLogins::take_problems)
            .unwrap_or_default();
        problems.push(meaningful_line(&finished.stderr, &secrets));
        tracing::debug!(stderr = %mask(&finished.stderr, &secrets), "git failed");
        let failure = GitFailure::classify(&finished.stderr);
        let text = format!(
            "could not {action} `{}`: {}: {}",
            self.source,
            failure.summary(),
            problems.join("; ")
        );
        let error = failure.error(text);
        Ok(Err(Failed { failure, error }))
    }

    async fn execute(
        &self,
        repository: Option<&Path>,
        args: &[OsString],
    ) -> Result<Finished, StepError> {
        let command = self.command(repository, args);
        tracing::debug!(?args, "git");
        process::run(command)
            .await
            .map_err(|error| could_not_run(&error))
    }

    /// Builds every git command.
    fn command(&self, repository: Option<&Path>, args: &[OsString]) -> Command {
        let mut command = bare_command(self.config);
        if let Some(repository) = repository {
            command.arg("-C").arg(repository);
        }
        command.args(args).current_dir(self.session.path());
        if let Some(bundle) = self.ca_bundle() {
            command.env("GIT_SSL_CAINFO", bundle);
        }
        if let Some(guard) = self.session.guard() {
            command
                .env("GIT_EXEC_PATH", &guard.programs)
                // It fetches from where the repository says.
                .env("GIT_LFS_SKIP_SMUDGE", "1");
        }
        // The guard sees no transport of files. The source itself has been judged.
        let is_judged = self.config.allowed.is_some();
        let of_submodules = args.first().is_some_and(|first| first == "submodule");
        let protocols = if is_judged && of_submodules {
            NO_FILES
        } else {
            allowed_protocols(&self.source.transport)
        };
        command
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", self.session.path().join(CONFIG_FILE))
            .env("GIT_TERMINAL_PROMPT", "0")
            .env("GIT_ADVICE", "0")
            .env("GIT_ALLOW_PROTOCOL", protocols)
            .env("GIT_SSH_VARIANT", "ssh")
            .env("GIT_SSH_COMMAND", &self.ssh_command);
        command
    }

    /// Git's HTTP library reads a variable of its own. A CA bundle for all programs applies to git too.
    fn ca_bundle(&self) -> Option<&OsStr> {
        let value = |name: &str| {
            let found = self.config.environment.iter().find(|(key, _)| key == name);
            found.map(|(_, value)| value.as_os_str())
        };
        value("GIT_SSL_CAINFO").or_else(|| value("SSL_CERT_FILE"))
    }
}

/// git with the environment that every command has.
fn bare_command(config: &WorkspaceConfig) -> Command {
    let mut command = Command::new("git");
    command
        .env_clear()
        .envs(config.environment.iter().map(|(name, value)| (name, value)))
        .env("PATH", &config.path)
        .env("HOME", &config.home)
        .env("LC_ALL", "C");
    command
}

/// The login of the source's own server: the credential, else what its address holds.
pub(super) fn login(source: &Source, credential: &Credential) -> Option<Login> {
    let Transport::Http { origin } = &source.transport else {
        return None;
    };
    let (username, password) = match (credential, &source.userinfo) {
        (Credential::Basic { username, password }, _) => (username, password),
        (Credential::Anonymous, Some(info)) if !info.is_empty() => (&info.username, &info.password),
        _ => return None,
    };
    Some(Login {
        base: Address::parse(origin).ok()?,
        username: username.clone(),
        password: password.clone(),
    })
}

fn could_not_run(error: &io::Error) -> StepError {
    if error.kind() == io::ErrorKind::NotFound {
        StepError::infrastructure("`git` is not installed or not on PATH")
            .with_hint("install git where the executor runs")
    } else {
        StepError::infrastructure("could not run `git`").because(error)
    }
}

/// The private files of the session could not be written.
fn no_session(error: &io::Error) -> StepError {
    StepError::infrastructure("could not prepare the credentials for `git`").because(error)
}

const CONFIG_FILE: &str = "config";
const KEY_FILE: &str = "key";

/// Writes git's configuration, and the key of SSH.
fn write_files(
    session: &Session,
    source: &Source,
    credential: &Credential,
    operators: Option<&OperatorLogins>,
) -> io::Result<Option<PathBuf>> {
    let mut key = None;
    if let Credential::SshKey(text) = credential {
        let file = session.path().join(KEY_FILE);
        write_private_file(&file, key_file_content(text).expose_secret().as_bytes())?;
        key = Some(file);
    }
    let helper = session.credential_helper();
    let mut config = render_config(
        &source.transport,
        helper.as_deref(),
        session.guard().is_some(),
    );
    if let (Some(operators), Some(helper)) = (operators, &helper) {
        for (name, value) in operators.settings(helper) {
            config.push_str(&config_line(&name, &value));
        }
        let headers = operators.headers().unwrap_or_default();
        config.push_str(headers.expose_secret());
    }
    let config = SecretString::from(config);
    let file = session.path().join(CONFIG_FILE);
    write_private_file(&file, config.expose_secret().as_bytes())?;
    Ok(key)
}

/// Git's whole configuration apart from the repository's own.
fn render_config(transport: &Transport, helper: Option<&str>, is_judged: bool) -> String {
    let mut config = format!(
        "[core]\n\thooksPath = /dev/null\n\tfsmonitor = false\n\
         [gc]\n\tauto = 0\n\
         [maintenance]\n\tauto = false\n\
         [advice]\n\tdetachedHead = false\n\
         [init]\n\tdefaultBranch = main\n\
         [http]\n\tlowSpeedLimit = 1\n\tlowSpeedTime = {STALLED_AFTER_SECONDS}\n"
    );
    if *transport == Transport::File {
        // The repository may belong to another user. That is safe, because git only reads its objects.
        config.push_str("[safe]\n\tdirectory = *\n");
    }
    if is_judged {
        config.push_str("[http]\n\tfollowRedirects = false\n");
    }
    if let (Some(helper), Transport::Http { origin }) = (helper, transport) {
        config.push_str(&config_line(&format!("credential.{origin}.helper"), helper));
    }
    config
}

/// A setting with an address in its name, in the form of a file.
fn config_line(name: &str, value: &str) -> String {
    let (section, rest) = name.split_once('.').unwrap_or_default();
    let (address, key) = rest.rsplit_once('.').unwrap_or_default();
    format!(
        "[{section} \"{}\"]\n\t{key} = \"{}\"\n",
        config_quote(address),
        config_quote(value)
    )
}

/// Escapes the inside of a quoted value or section name of a git configuration file.
fn config_quote(text: &str) -> String {
    text.replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

/// The protocols of connections, which the guard sees.
const NO_FILES: &str = "http:https:ssh";

/// The protocols that git may use. A remote repository must not read files of this machine. So submodules may use
/// `file` only if the source itself is a file.
fn allowed_protocols(transport: &Transport) -> &'static str {
    match transport {
        Transport::File => "file:http:https:ssh",
        Transport::Http { .. } | Transport::Ssh => NO_FILES,
    }
}

/// Whether git can only interpret a text as a commit or a name, not as an option or a refspec.
fn is_plain_revision(text: &str) -> bool {
    !text.starts_with(['-', '+', '/'])
        && !text.contains("..")
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_./+#@".contains(&b) || !b.is_ascii())
}

fn arguments(texts: &[&str]) -> Vec<OsString> {
    texts.iter().map(OsString::from).collect()
}

/// Whether the checked-out tree declares submodules.
pub(super) fn has_submodules(repository: &Path) -> bool {
    fs::symlink_metadata(repository.join(".gitmodules")).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("0123456789abcdef0123456789abcdef01234567", true)]
    #[case("feature/a-b", true)]
    #[case("v1.2.3", true)]
    #[case("--upload-pack=x", false)]
    #[case("+a", false)]
    #[case("a:b", false)]
    #[case("a..b", false)]
    #[case("a b", false)]
    #[case("HEAD^{tree}", false)]
    fn revisions_are_names_and_nothing_else(#[case] text: &str, #[case] plain: bool) {
        assert_eq!(is_plain_revision(text), plain);
    }

    #[test]
    fn the_credential_helper_is_bound_to_one_origin() {
        let transport = Transport::Http {
            origin: "https://h:8443".to_owned(),
        };
        let config = render_config(&transport, Some("!f() { \"a\\b\"; }; f"), false);
        assert!(config.contains("[credential \"https://h:8443\"]"));
        assert!(
            config.contains(r#"helper = "!f() { \"a\\b\"; }; f""#),
            "{config}"
        );
        assert!(!config.contains("[safe]") && !config.contains("followRedirects"));
        let judged = render_config(&transport, None, true);
        assert!(!judged.contains("[credential"));
        assert!(judged.contains("followRedirects = false"));
    }

    #[test]
    fn only_file_sources_may_have_file_submodules() {
        assert!(allowed_protocols(&Transport::File).contains("file"));
        assert!(!allowed_protocols(&Transport::Ssh).contains("file"));
    }
}
