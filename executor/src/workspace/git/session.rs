//! What git needs during one piece of work: the broker of its credentials and connections, and the guard that asks the broker.
//! Dropping the session ends and removes both.

use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tokio::process::Command;

use super::broker::{Answers, Broker};
use super::guard::Guard;
use super::process;
use crate::workspace::ssh::shell_quote;

/// An open session. The broker ends before its folder is removed.
#[derive(Debug)]
pub(super) struct Session {
    broker: Option<Broker>,
    guard: Option<Guard>,
    has_logins: bool,
    folder: TempDir,
}

impl Session {
    /// Opens a session in a new folder below `private`. `git` is a command of git without arguments.
    pub(super) async fn open(private: &Path, answers: Answers, git: Command) -> io::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("git-")
            .tempdir_in(private)?;
        let has_rule = answers.allowed.is_some();
        let operators = answers.operators.as_ref();
        let has_logins =
            answers.login.is_some() || operators.is_some_and(|operators| !operators.is_empty());
        let broker = if has_rule || has_logins || answers.objects.strong_count() > 0 {
            Some(Broker::open(folder.path(), answers)?)
        } else {
            None
        };
        let guard = match &broker {
            Some(broker) if has_rule => {
                let real = programs_of(git).await?;
                Some(Guard::write(folder.path(), &real, broker.socket())?)
            }
            _ => None,
        };
        Ok(Self {
            broker,
            guard,
            has_logins,
            folder,
        })
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Where questions are answered, if there are any.
    pub(super) fn socket(&self) -> Option<&Path> {
        self.broker.as_ref().map(Broker::socket)
    }

    /// The guard, if there is a rule for addresses.
    pub(super) const fn guard(&self) -> Option<&Guard> {
        self.guard.as_ref()
    }

    /// The value of `credential.helper`, if there are logins.
    pub(super) fn credential_helper(&self) -> Option<String> {
        let broker = self.broker.as_ref().filter(|_| self.has_logins)?;
        let socket = shell_quote(&broker.socket().to_string_lossy());
        // Only `get`: for others, the client would start a server of its own.
        Some(format!(
            "!f() {{ test \"$1\" = get && git credential-cache --socket {socket} get; }}; f"
        ))
    }
}

/// The folder of git's own programs.
async fn programs_of(mut git: Command) -> io::Result<PathBuf> {
    git.arg("--exec-path");
    let finished = process::run(git).await?;
    let path = finished.stdout.trim_end_matches('\n').to_owned();
    if finished.success && path.starts_with('/') {
        Ok(std::ffi::OsString::from_vec(path.into_bytes()).into())
    } else {
        Err(io::Error::other(
            "git does not say where its programs are (`git --exec-path`)",
        ))
    }
}
