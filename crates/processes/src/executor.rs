//! The executor as a process of this machine, in a process group of its own. Other processes of this user, such as the code of
//! another run, cannot look into it, and secrets are not in its environment.

pub mod tree;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

use job_contract::{Exit, env};
use nix::sys::signal::Signal;
use runtime::handover::Handover;
use runtime::hardening::Hardened;
use runtime::reaper;
use runtime::setting::is_wrong_place;
use runtime::unreadable_program::UnreadableProgram;
use tokio::process::{Child, Command};
use tracing::warn;

/// The argument that makes a program the executor that is built into it.
pub const SUBCOMMAND: &str = "executor";

/// Which program is the executor.
#[derive(Clone, Debug)]
pub struct Program {
    /// What people call it.
    path: PathBuf,
    /// What is executed.
    file: PathBuf,
    arguments: Vec<&'static str>,
    /// The copy that `file` is, if it is one.
    _copy: Option<Arc<UnreadableProgram>>,
}

/// This program, also after its file was replaced by another version.
const THIS: &str = "/proc/self/exe";

/// What an executor reads and writes.
#[derive(Debug)]
pub struct Streams {
    pub stdin: Stdio,
    pub stdout: Stdio,
    pub stderr: Stdio,
}

/// Why an executor could not be started or watched.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    #[error("could not find the path of this program, which contains the executor")]
    NoSelf(#[source] io::Error),
    #[error("could not start the executor `{}`", path.display())]
    Start {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("could not wait for the executor")]
    Wait(#[source] io::Error),
}

impl ExecutorError {
    /// Whose fault it is.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Start { source, .. } if is_wrong_place(source) => Exit::BadConfiguration,
            Self::NoSelf(_) | Self::Start { .. } | Self::Wait(_) => Exit::Infrastructure,
        }
    }

    /// What to do about it.
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Start { .. } => {
                Some("name a program that can be started with --executor or MAYFLY_EXECUTOR")
            }
            Self::NoSelf(_) | Self::Wait(_) => None,
        }
    }
}

impl Program {
    /// Returns the program that is given, or else the executor that is built into this one.
    pub fn choose(given: Option<&Path>) -> Result<Self, ExecutorError> {
        if let Some(path) = given {
            let file = which::which(path).unwrap_or_else(|_| path.to_owned());
            return Ok(Self::new(path.to_owned(), file, Vec::new()));
        }
        let path = std::env::current_exe().map_err(ExecutorError::NoSelf)?;
        Ok(Self::new(path, THIS.into(), vec![SUBCOMMAND]))
    }

    fn new(path: PathBuf, file: PathBuf, arguments: Vec<&'static str>) -> Self {
        let copy = UnreadableProgram::copy(&file).unwrap_or_else(|error| {
            let path = path.display();
            warn!(%error, %path, "could not copy the program: runs can look into each other's executors at their start");
            None
        });
        let copy = copy.map(Arc::new);
        Self {
            path,
            file: copy.as_ref().map_or(file, |copy| copy.path()),
            arguments,
            _copy: copy,
        }
    }

    /// Starts it with exactly these variables and these streams. The secrets among the variables are not in its environment:
    /// it gets them as a [`Handover`]. In a process group of its own, it does not get the Ctrl-C of a terminal: the launcher
    /// decides how it stops.
    pub fn spawn(
        &self,
        variables: Vec<(OsString, OsString)>,
        streams: Streams,
    ) -> Result<Child, ExecutorError> {
        let is_secret = |name: &OsString| name.to_str().is_some_and(env::is_secret);
        let (secrets, environment): (Vec<_>, Vec<_>) =
            variables.into_iter().partition(|(name, _)| is_secret(name));
        let mut command = Command::new(&self.file);
        command
            .arg0(&self.path)
            .args(&self.arguments)
            .env_clear()
            .envs(environment)
            .stdin(streams.stdin)
            .stdout(streams.stdout)
            .stderr(streams.stderr)
            .process_group(0);
        Handover::of(&secrets)
            .and_then(|secrets| reaper::spawn_with(&mut command, Some(secrets)))
            .map_err(|source| ExecutorError::Start {
                path: self.path.clone(),
                source,
            })
    }
}

/// Prepares a launcher or an agent that starts executors on this machine. Warns if the code of a run could read the secrets of
/// this process when it starts again.
pub fn prepare_for_processes(hardened: &Hardened) {
    reaper::adopt_orphans();
    if hardened.was_exposed() {
        warn!(
            "runs can read the secrets of this process: use a user other than root, and install the program as root with mode \
             0711"
        );
    }
}

/// How an executor process ended, and which signal stopped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub status: ExitStatus,
    /// The signal that stopped the run, if one did.
    pub stopped_by: Option<Signal>,
}

/// Outcome of a step as an exit code, and what to say when the executor could not say it itself.
pub fn judge(ended: Ended) -> (Exit, Option<String>) {
    if let Some(signal) = ended.status.signal() {
        let name = Signal::try_from(signal).map_or_else(
            |_| format!("signal {signal}"),
            |signal| signal.as_str().to_owned(),
        );
        let exit = ended
            .stopped_by
            .map_or_else(|| signal_exit(signal), stop_exit);
        return (exit, Some(format!("the executor was ended by {name}")));
    }
    let code = ended.status.code().unwrap_or(-1);
    match (Exit::from_code(code), ended.stopped_by) {
        (Some(Exit::Done), _) => (Exit::Done, None),
        (_, Some(signal)) => (stop_exit(signal), None),
        (Some(exit), None) => (exit, None),
        (None, None) => (
            Exit::Defect,
            Some(format!(
                "the executor ended with exit code {code}, which has no meaning"
            )),
        ),
    }
}

/// The exit code for a run a signal has stopped.
pub fn stop_exit(signal: Signal) -> Exit {
    signal_exit(signal as i32)
}

fn signal_exit(signal: i32) -> Exit {
    Exit::Signal(u8::try_from(signal).unwrap_or(u8::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    #[rstest]
    #[case(exited(0), None, 0)]
    #[case(exited(1), None, 1)]
    #[case(exited(65), None, 65)]
    #[case(exited(75), None, 75)]
    #[case(exited(76), None, 76)]
    #[case(exited(143), None, 143)]
    // A panic of the executor, and an undefined code.
    #[case(exited(101), None, 2)]
    #[case(exited(3), None, 2)]
    // Killed from outside, as by the kernel when memory is short.
    #[case(killed(9), None, 137)]
    // Stopped by us: the signal we got decides, unless the step was done all the same.
    #[case(exited(143), Some(Signal::SIGINT), 130)]
    #[case(exited(1), Some(Signal::SIGTERM), 143)]
    #[case(exited(0), Some(Signal::SIGINT), 0)]
    #[case(killed(9), Some(Signal::SIGINT), 130)]
    #[case(killed(15), Some(Signal::SIGHUP), 129)]
    fn ends_become_exit_codes(
        #[case] status: ExitStatus,
        #[case] stopped_by: Option<Signal>,
        #[case] expected: u8,
    ) {
        assert_eq!(judge(Ended { status, stopped_by }).0.code(), expected);
    }

    #[tokio::test]
    async fn secrets_are_handed_over_and_are_not_in_the_environment() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        let script = "#!/bin/bash\nenv\necho -- \"$@\"\n\
                      file=/dev/fd/$MAYFLY_SECRETS_DESCRIPTOR; chmod 400 $file; tr '\\0' '\\n' < $file\n";
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        let secrets = env::SECRETS.map(str::to_owned).into_iter();
        let secrets = secrets.chain([0, 1].map(env::job_data_part));
        let known = ["PATH", env::LEASE_URL].map(str::to_owned);
        let variables: Vec<(OsString, OsString)> = secrets
            .chain(known)
            .map(|name| {
                let value = match name.as_str() {
                    "PATH" => "/usr/bin:/bin".to_owned(),
                    _ => format!("value of {name}"),
                };
                (name.into(), value.into())
            })
            .collect();
        let streams = Streams {
            stdin: Stdio::null(),
            stdout: Stdio::piped(),
            stderr: Stdio::null(),
        };
        let program = Program::choose(Some(&path)).unwrap();
        let child = program.spawn(variables, streams).unwrap();
        let output = child.wait_with_output().await.unwrap().stdout;
        let output = String::from_utf8(output).unwrap();
        let (environment, secrets) = output.split_once("--\n").unwrap();
        assert!(environment.contains("MAYFLY_LEASE_URL=value of MAYFLY_LEASE_URL\n"));
        for name in env::SECRETS.into_iter().chain(["EphemeralJobData_1"]) {
            assert!(!environment.contains(name), "{environment}");
            let line = format!("{name}=value of {name}\n");
            assert!(secrets.contains(&line), "{secrets}");
        }
    }

    fn exited(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    fn killed(signal: i32) -> ExitStatus {
        ExitStatus::from_raw(signal)
    }
}
