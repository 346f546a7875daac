//! git during `init`, which fetches modules: the same rule for addresses as for the source, and the credential of the source
//! for repositories on the same server. This module does not know the tool.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use git_address::AllowList;
use tokio::process::Command;

use super::broker::{Answers, Login};
use super::session::Session;
use super::{NO_FILES, no_session};
use crate::child_env::ChildEnv;
use crate::error::StepError;

/// What git may do during `init`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModuleAccess {
    pub(crate) allowed: Option<Arc<AllowList>>,
    /// The credential of the source, for its server.
    pub(crate) login: Option<Login>,
    /// A command line of ssh that reads no settings of the run.
    pub(crate) ssh_command: String,
}

/// Access of one `init`. Dropping it takes the access back.
#[derive(Debug)]
pub(crate) struct OpenModuleAccess {
    _session: Session,
    /// The command line of ssh, if it is guarded.
    pub(crate) ssh_command: Option<String>,
}

impl ModuleAccess {
    /// Opens the access, and adds to the environment of `init` how git uses it. `None` if there is nothing to add.
    pub(crate) async fn open(
        &self,
        private: &Path,
        path: &OsStr,
        env: &mut ChildEnv,
    ) -> Result<Option<OpenModuleAccess>, StepError> {
        if self.allowed.is_none() && self.login.is_none() {
            return Ok(None);
        }
        let answers = Answers {
            allowed: self.allowed.clone(),
            logins: self.login.iter().cloned().collect(),
        };
        let mut git = Command::new("git");
        git.env_clear().env("PATH", path).env("LC_ALL", "C");
        let session = Session::open(private, answers, git)
            .await
            .map_err(|error| no_session(&error))?;
        let mut settings = Vec::new();
        if let (Some(helper), Some(login)) = (session.credential_helper(), &self.login)
            && let Some(origin) = login.base.origin()
        {
            settings.push((format!("credential.{origin}.helper"), helper));
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
        add_settings(env, &settings)?;
        Ok(Some(OpenModuleAccess {
            _session: session,
            ssh_command,
        }))
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
