//! git during `init`, which fetches modules: the same rule for addresses as for the source, the credential of the source for
//! repositories on the same server, the operator's logins, and the objects that runs share. This module does not know the tool.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use git_address::AllowList;
use git_logins::Logins;
use secrecy::ExposeSecret as _;
use tokio::process::Command;
use tracing::warn;

use super::broker::Answers;
use super::login::Login;
use super::module_objects::{ModuleObjects, ModuleStore, Shared};
use super::operator_logins::OperatorLogins;
use super::run_settings::RunSettings;
use super::session::Session;
use super::{NO_FILES, no_session};
use crate::child_env::ChildEnv;
use crate::error::StepError;
use crate::workspace::write_private_file;

const HEADERS_FILE: &str = "headers";

/// What git may do during `init`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModuleAccess {
    pub(crate) allowed: Option<Arc<AllowList>>,
    /// The credential of the source, for its server.
    pub(crate) login: Option<Login>,
    /// Whether this credential is the executor's own identity.
    pub(crate) is_own_identity: bool,
    pub(crate) operators: Option<Arc<Logins>>,
    /// A command line of ssh that reads no settings of the run.
    pub(crate) ssh_command: String,
    /// Where runs share what they have cloned.
    pub(crate) store: Option<ModuleStore>,
}

/// Access of one `init`. Dropping it takes the access back.
#[derive(Debug)]
pub(crate) struct OpenModuleAccess {
    _session: Session,
    operators: Option<OperatorLogins>,
    /// Which servers get no login, and why.
    pub(crate) withheld: Vec<String>,
    /// The command line of ssh, if it is guarded.
    pub(crate) ssh_command: Option<String>,
    objects: Option<Arc<ModuleObjects>>,
}

impl ModuleAccess {
    /// Opens the access, and adds to the environment of `init` how git uses it. `None` if there is nothing to add.
    pub(crate) async fn open(
        &self,
        private: &Path,
        path: &OsStr,
        folder: &Path,
        env: &mut ChildEnv,
    ) -> Result<Option<OpenModuleAccess>, StepError> {
        let objects = self.store.as_ref().and_then(|store| {
            ModuleObjects::new(store.clone(), private, path)
                .inspect_err(|error| warn!(%error, "modules are fetched without the store"))
                .ok()
        });
        let objects = objects.map(Arc::new);
        let is_plain = self.allowed.is_none() && self.login.is_none() && self.operators.is_none();
        if is_plain && objects.is_none() {
            return Ok(None);
        }
        let run = if self.operators.is_some() || self.is_own_identity {
            let reading = RunSettings::read(env, path, folder);
            reading.await.map_err(|error| no_session(&error))?
        } else {
            RunSettings::default()
        };
        let withheld = self.withheld(&run);
        let is_withheld = |server: &str| withheld.iter().any(|(known, _)| known == server);
        let login = self.login.clone().filter(|login| {
            !self.is_own_identity
                || !login
                    .base
                    .origin()
                    .is_some_and(|server| is_withheld(&server))
        });
        let operators = self
            .operators
            .as_ref()
            .map(|logins| OperatorLogins::new(logins, self.login.as_ref(), is_withheld));
        let answers = Answers {
            allowed: self.allowed.clone(),
            login: login.clone(),
            operators: operators.clone(),
            objects: objects.as_ref().map(Arc::downgrade).unwrap_or_default(),
        };
        let mut git = Command::new("git");
        git.env_clear().env("PATH", path).env("LC_ALL", "C");
        let session = Session::open(private, answers, git)
            .await
            .map_err(|error| no_session(&error))?;
        let mut settings = Vec::new();
        if let Some(helper) = session.credential_helper() {
            if let Some(origin) = login.and_then(|login| login.base.origin()) {
                settings.push((format!("credential.{origin}.helper"), helper.clone()));
            }
            if let Some(operators) = &operators {
                settings.extend(operators.settings(&helper));
            }
        }
        if let Some(headers) = operators.as_ref().and_then(OperatorLogins::headers) {
            let file = session.path().join(HEADERS_FILE);
            write_private_file(&file, headers.expose_secret().as_bytes())
                .map_err(|error| no_session(&error))?;
            settings.push(("include.path".to_owned(), file.display().to_string()));
        }
        let mut ssh_command = None;
        if let Some(guard) = session.guard() {
            settings.push(("http.followRedirects".to_owned(), "false".to_owned()));
            env.set("GIT_EXEC_PATH", &guard.programs.to_string_lossy())?;
            env.set("GIT_ALLOW_PROTOCOL", NO_FILES)?;
            env.set("GIT_SSH_VARIANT", "ssh")?;
            // It fetches from where the repository says.
            env.set("GIT_LFS_SKIP_SMUDGE", "1")?;
            ssh_command = Some(guard.ssh_command(&self.ssh_command));
        }
        if let (Some(objects), Some(socket)) = (&objects, session.socket()) {
            let program = objects.write_program(socket);
            env.put_first_in_path(&program.map_err(|error| no_session(&error))?);
        }
        add_settings(env, &settings)?;
        Ok(Some(OpenModuleAccess {
            _session: session,
            operators,
            withheld: withheld
                .into_iter()
                .map(|(server, setting)| {
                    format!(
                        "The operator's login for {server} is not used for modules: the run sets `{setting}`, with which it \
                         could get to others."
                    )
                })
                .collect(),
            ssh_command,
            objects,
        }))
    }

    /// The servers that get no login of the operator, each with a setting of the run that could lead it elsewhere.
    fn withheld(&self, run: &RunSettings) -> Vec<(String, String)> {
        let own = self.login.as_ref().filter(|_| self.is_own_identity);
        let mut servers = self
            .operators
            .as_ref()
            .map(|logins| logins.origins())
            .unwrap_or_default();
        servers.extend(own.and_then(|login| login.base.origin()));
        servers
            .into_iter()
            .filter_map(|server| {
                let setting = run.against(&server)?.to_owned();
                Some((server, setting))
            })
            .collect()
    }
}

impl OpenModuleAccess {
    /// Keeps what was cloned for later runs.
    pub(crate) async fn keep_objects(&self) -> Shared {
        match &self.objects {
            Some(objects) => objects.keep().await,
            None => Shared::default(),
        }
    }

    /// Why the operator's logins gave no tokens.
    pub(crate) fn take_problems(&self) -> Vec<String> {
        let operators = self.operators.as_ref();
        operators
            .map(OperatorLogins::take_problems)
            .unwrap_or_default()
    }
}

/// Adds settings of git behind those that the run has set in its variables, so that these win.
fn add_settings(env: &mut ChildEnv, settings: &[(String, String)]) -> Result<(), StepError> {
    const COUNT: &str = "GIT_CONFIG_COUNT";
    let present = env.get(COUNT).and_then(OsStr::to_str);
    let present: usize = present.and_then(|text| text.parse().ok()).unwrap_or(0);
    for (number, (name, value)) in (present..).zip(settings) {
        env.set(&format!("GIT_CONFIG_KEY_{number}"), name)?;
        env.set(&format!("GIT_CONFIG_VALUE_{number}"), value)?;
    }
    env.set(COUNT, &(present + settings.len()).to_string())
}
