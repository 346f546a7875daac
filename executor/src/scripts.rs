//! The scripts of a step: which run when, in what order, in what environment (contract 4.4).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use job_contract::progress::Phase;
use job_contract::{Command, JobData, Runtime};
use platform::terrakube::{TokenSource, token};
use run_log::RunLog;
use runtime::{no_proxy, regular_file};
use secrecy::{ExposeSecret as _, SecretString};
use tracing::warn;

use crate::banner::Palette;
use crate::child_env::ChildEnv;
use crate::error::StepError;
use crate::process::{self, Ended, Interrupt, Invocation, Limit, ToLog};
use crate::stop::{Budget, Stop};
use crate::tool::{Origin, ResolvedTool};
use crate::workspace::write_private_file;

mod groovy;

/// The file in which scripts export variables for everything that runs later.
const TEMP_ENV: &str = ".terrakube_temp_env";
/// The variable with the token for the platform.
const PLATFORM_TOKEN: &str = "terrakubeToken";
/// Larger than any environment can be.
const MAX_TEMP_ENV_BYTES: u64 = 4 << 20;
/// The folder for tools that scripts install for later scripts.
const TOOLS: &str = ".terrakube/tools";
/// The clone of the extension repository.
const TOOLS_REPOSITORY: &str = ".terrakube/toolsRepository";
/// How deep folders are searched for scripts that belong on `PATH`.
const MAX_PATH_DEPTH: usize = 16;

/// Whether a command runs in a phase. Script steps and failure lists run all their commands.
const fn runs_in(command: &Command, phase: Phase) -> bool {
    match phase {
        Phase::BeforeInit => command.before_init,
        Phase::Before => command.before && !command.before_init,
        Phase::After => command.after,
        Phase::OnFailure | Phase::Scripts => true,
        _ => false,
    }
}

/// The commands of a phase in their order: by priority, and in document order if priorities are equal.
pub fn select(commands: &[Command], phase: Phase) -> Vec<&Command> {
    let mut selected: Vec<&Command> = commands
        .iter()
        .filter(|command| runs_in(command, phase))
        .collect();
    selected.sort_by_key(|command| command.priority);
    selected
}

/// Refuses a step with a script that can never run, before the step does any work.
pub fn check(job: &JobData, path: &std::ffi::OsStr) -> Result<(), StepError> {
    for command in job.command_list.iter().chain(&job.on_failure_list) {
        if runtime_of(command)? == Runtime::Groovy {
            groovy::find(path, command)?;
        }
    }
    Ok(())
}

fn runtime_of(command: &Command) -> Result<Runtime, StepError> {
    command.runtime().ok_or_else(|| {
        StepError::user(format!(
            "a script with priority {} has runtime `{}`, expected `BASH` or `GROOVY`",
            command.priority,
            command.runtime.as_deref().unwrap_or("null")
        ))
    })
}

/// A file of a script could not be written or read.
fn not_prepared(dir: &Path, source: &io::Error) -> StepError {
    let dir = dir.display();
    StepError::infrastructure(format!("could not prepare a script in `{dir}`")).because(source)
}

/// Runs scripts in one folder.
#[derive(Debug)]
pub struct Scripts<'r> {
    pub job: &'r JobData,
    /// The working directory, or the clone root for script steps.
    pub dir: &'r Path,
    /// Folder for generated files that must not be in the work tree.
    pub private: &'r Path,
    pub tool: Option<&'r ResolvedTool>,
    pub api: PlatformApi<'r>,
    pub log: &'r RunLog,
    pub palette: Palette,
    pub stop: &'r Stop,
    pub budget: Budget,
}

/// How scripts reach the platform's API.
#[derive(Debug)]
pub struct PlatformApi<'r> {
    /// Its address, if there is one.
    pub url: Option<String>,
    pub token: ApiToken<'r>,
}

/// The token that scripts send.
#[derive(Debug)]
pub enum ApiToken<'r> {
    None,
    /// A new one for each script.
    Minted(&'r TokenSource),
    /// The same for all, at an address of the run itself.
    OfRun(&'r SecretString),
}

/// How scripts ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScriptsEnd {
    Done,
    /// A stop order came before the next one.
    Stopped,
    /// A script failed. Its output is in the log.
    Failed(Ended),
}

impl Scripts<'_> {
    /// Runs commands one after the other, and stops at the first that fails. Exported variables go into `env`, and so reach
    /// everything that runs later.
    pub async fn run(
        &self,
        commands: &[&Command],
        env: &mut ChildEnv,
        terraform_output: &str,
    ) -> Result<ScriptsEnd, StepError> {
        for command in commands {
            if self.stop.given().is_some() {
                return Ok(ScriptsEnd::Stopped);
            }
            let done = self.run_one(command, env, terraform_output).await;
            let exported = self.load_exported(env);
            let ended = done?;
            if !ended.is_success() {
                return Ok(ScriptsEnd::Failed(ended));
            }
            exported?;
        }
        Ok(ScriptsEnd::Done)
    }

    async fn run_one(
        &self,
        command: &Command,
        env: &ChildEnv,
        terraform_output: &str,
    ) -> Result<Ended, StepError> {
        let log = self.log.writer();
        let runtime = runtime_of(command)?;
        if command.verbose {
            let name = command.runtime.as_deref().unwrap_or_default();
            log.line(
                self.palette
                    .script_begins(command, name)
                    .trim_end_matches('\n'),
            )
            .await;
        }
        let token = match self.api.token {
            ApiToken::None => None,
            ApiToken::Minted(tokens) => tokens.mint(token::SCRIPT),
            ApiToken::OfRun(token) => Some(token.clone()),
        };
        let token = token.as_ref().map_or("", |token| token.expose_secret());
        self.log
            .add_secrets([token].iter().filter(|token| !token.is_empty()));
        let variables = self.variables(env, terraform_output, token);
        let file = self.write_script(command, runtime)?;
        let invocation = match runtime {
            Runtime::Bash => self.invocation("bash".into(), vec![file.clone().into()], &variables),
            Runtime::Groovy => groovy::invocation(self, command, &file, &variables)?,
        };
        let limit = Limit {
            stop: self.stop.clone(),
            interrupt: Some(Interrupt::Group),
            grace: self.budget.tool,
        };
        let mut output = ToLog(self.log.writer());
        let done = process::run(&invocation, &limit, &mut output).await;
        output.0.close().await;
        if let Err(error) = fs::remove_file(&file) {
            warn!(%error, "could not remove a script that has run");
        }
        let ended = done?.ended;
        if !ended.is_success() {
            let code = match ended {
                Ended::Code(code) => code.to_string(),
                Ended::Signal(signal) => (128 + signal).to_string(),
            };
            log.line(&self.palette.failure(&format!("Script Exit Code ==>{code}")))
                .await;
        }
        if command.verbose {
            log.line(self.palette.script_ends().trim_end_matches('\n'))
                .await;
        }
        Ok(ended)
    }

    fn write_script(&self, command: &Command, runtime: Runtime) -> Result<PathBuf, StepError> {
        let name = match runtime {
            Runtime::Bash => "userScript.sh",
            Runtime::Groovy => "userScript.groovy",
        };
        let fail = |source| not_prepared(self.dir, &source);
        fs::create_dir_all(self.dir.join(TOOLS)).map_err(fail)?;
        let file = self.dir.join(name);
        write_private_file(&file, command.script.as_bytes()).map_err(fail)?;
        Ok(file)
    }

    fn invocation(
        &self,
        program: PathBuf,
        args: Vec<OsString>,
        variables: &BTreeMap<String, OsString>,
    ) -> Invocation {
        Invocation {
            program,
            args,
            dir: self.dir.to_owned(),
            env: process::environment(variables),
            input: None,
            prints_document: false,
        }
    }

    /// The environment of a script. Later entries override earlier ones, as in contract 4.4.
    fn variables(
        &self,
        env: &ChildEnv,
        terraform_output: &str,
        token: &str,
    ) -> BTreeMap<String, OsString> {
        let job = self.job;
        let text = |text: Option<&str>| text.unwrap_or_default().to_owned();
        let path = |relative: &str| self.dir.join(relative).display().to_string();
        let own = [
            ("bashToolsDirectory", path(TOOLS)),
            ("terrakubeToolsRepository", path(TOOLS_REPOSITORY)),
            ("terrakubeEnv", path(TEMP_ENV)),
            ("workingDirectory", self.dir.display().to_string()),
            ("organizationId", job.organization_id.clone()),
            ("workspaceId", job.workspace_id.clone()),
            ("jobId", job.job_id.clone()),
            ("stepId", job.step_id.clone()),
            ("terraformVersion", job.terraform_version.clone()),
            ("source", text(job.source.as_deref())),
            ("branch", job.branch.clone()),
            ("vcsType", text(job.vcs_type.as_deref())),
            ("accessToken", text(job.access_token.as_deref())),
            ("terraformOutput", terraform_output.to_owned()),
            ("terrakubeApi", text(self.api.url.as_deref())),
            (PLATFORM_TOKEN, token.to_owned()),
        ];
        let mut variables: BTreeMap<String, OsString> = own
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.into()))
            .collect();
        variables.extend(
            env.iter()
                .filter_map(|(name, value)| Some((name.to_str()?.to_owned(), value.to_owned()))),
        );
        variables.extend(
            job.variables
                .iter()
                .map(|(name, value)| (name.clone(), value.value.clone().into())),
        );
        variables.insert("PATH".to_owned(), self.path(env));
        if matches!(self.api.token, ApiToken::OfRun(_)) {
            // Programs send requests to this machine through a proxy too, unless they are told not to.
            let direct = no_proxy::with("127.0.0.1", |name| variables.get(name).cloned());
            variables.extend(no_proxy::NAMES.map(|name| (name.to_owned(), direct.clone())));
        }
        variables.retain(|name, value| {
            let fits = name.len() + value.len() + 2 <= job_contract::env::MAX_ENV_STRING_BYTES
                && !name.is_empty()
                && !name.contains(['=', '\0'])
                && !value.as_encoded_bytes().contains(&0);
            if !fits {
                warn!(
                    name,
                    "a variable that cannot be part of an environment is not passed to the script"
                );
            }
            fits
        });
        variables
    }

    /// The executor's `PATH`, with the step's own tool at the front and the scripts' folders at the end.
    fn path(&self, env: &ChildEnv) -> OsString {
        let mut folders: Vec<PathBuf> = Vec::new();
        if let Some(tool) = self.tool.filter(|tool| tool.origin != Origin::Path) {
            folders.extend(tool.path.parent().map(Path::to_owned));
        }
        folders.extend(std::env::split_paths(&env.path()));
        let mut extra = Vec::new();
        collect_folders(&self.dir.join(TOOLS), MAX_PATH_DEPTH, &mut extra);
        collect_script_folders(self.dir, MAX_PATH_DEPTH, &mut extra);
        folders.extend(
            extra
                .into_iter()
                .filter(|folder| !folder.as_os_str().as_encoded_bytes().contains(&b':')),
        );
        std::env::join_paths(folders).unwrap_or_else(|_| env.path())
    }

    fn load_exported(&self, env: &mut ChildEnv) -> Result<(), StepError> {
        let path = self.dir.join(TEMP_ENV);
        let text = match regular_file::read_text(&path, MAX_TEMP_ENV_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(source) => {
                let path = path.display();
                let text = format!("could not read the variables a script exported in `{path}`");
                return Err(StepError::user(text).because(&source));
            }
        };
        for (number, line) in (1..)
            .zip(text.lines())
            .filter(|(_, line)| !line.trim().is_empty())
        {
            let set = line.split_once('=').map(|(name, value)| {
                self.log
                    .add_secrets(run_log::secrets_in(name.trim(), value));
                env.set(name.trim(), value)
            });
            match set {
                Some(Ok(())) => {}
                Some(Err(error)) => warn!(line = number, %error, "an exported variable is skipped"),
                None => warn!(
                    line = number,
                    "a line without `=` among exported variables is skipped"
                ),
            }
        }
        Ok(())
    }
}

/// The folder for the clone of the extension repository.
pub fn tools_repository(dir: &Path) -> PathBuf {
    dir.join(TOOLS_REPOSITORY)
}

/// `folder` and all folders below it.
fn collect_folders(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if depth == 0 || !folder.is_dir() {
        return;
    }
    found.push(folder.to_owned());
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect_folders(&entry.path(), depth - 1, found);
        }
    }
}

/// Folders that hold `*.sh` files. It also makes the files executable.
fn collect_script_folders(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if depth == 0 {
        return;
    }
    let mut holds_scripts = false;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        if kind.is_dir() && !matches!(entry.file_name().to_str(), Some(".git" | ".terraform")) {
            collect_script_folders(&path, depth - 1, found);
        } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "sh") {
            holds_scripts = true;
            if let Ok(metadata) = entry.metadata() {
                let mut permissions = metadata.permissions();
                permissions.set_mode(permissions.mode() | 0o100);
                if let Err(error) = fs::set_permissions(&path, permissions) {
                    warn!(%error, path = %path.display(), "could not make a script executable");
                }
            }
        }
    }
    if holds_scripts && !found.iter().any(|other| other == folder) {
        found.push(folder.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(script: &str, priority: i64) -> Command {
        Command {
            runtime: Some("BASH".into()),
            script: script.into(),
            priority,
            ..Command::default()
        }
    }

    #[test]
    fn commands_run_by_priority_and_then_in_document_order() {
        let commands = [
            command("c", 20),
            command("a", 10),
            command("d", 20),
            command("b", 10),
        ];
        let order: Vec<_> = select(&commands, Phase::Scripts)
            .iter()
            .map(|c| c.script.as_str())
            .collect();
        assert_eq!(order, ["a", "b", "c", "d"]);
    }

    #[test]
    fn before_init_wins_over_before() {
        let both = Command {
            before: true,
            before_init: true,
            ..command("x", 1)
        };
        let commands = [both];
        assert_eq!(select(&commands, Phase::BeforeInit).len(), 1);
        assert!(select(&commands, Phase::Before).is_empty());
    }

    #[test]
    fn scripts_that_can_never_run_are_refused_first() {
        let job = |runtime: Option<&str>| JobData {
            command_list: vec![Command {
                runtime: runtime.map(str::to_owned),
                priority: 3,
                ..Command::default()
            }],
            ..JobData::default()
        };
        let path = std::ffi::OsStr::new("/nonexistent");
        assert!(check(&job(Some("BASH")), path).is_ok());
        for (runtime, problem) in [
            (Some("GROOVY"), "with priority 3 needs Groovy"),
            (Some("bash"), "has runtime `bash`"),
            (None, "has runtime `null`"),
        ] {
            let error = check(&job(runtime), path).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn script_folders_are_found_and_their_scripts_made_executable() {
        let folder = tempfile::tempdir().unwrap();
        let nested = folder.path().join("a/b");
        fs::create_dir_all(&nested).unwrap();
        fs::create_dir_all(folder.path().join(".git/hooks")).unwrap();
        fs::write(nested.join("x.sh"), "").unwrap();
        fs::write(folder.path().join(".git/hooks/y.sh"), "").unwrap();
        let mut found = Vec::new();
        collect_script_folders(folder.path(), 8, &mut found);
        assert_eq!(found, std::slice::from_ref(&nested));
        let mode = nested.join("x.sh").metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o100, 0o100);
    }
}
