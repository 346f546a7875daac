//! The executor as a process of this machine, in a process group of its own.

pub(crate) mod tree;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use job_contract::Exit;
use nix::sys::signal::Signal;
use runtime::setting::is_wrong_place;
use tokio::process::{Child, Command};

/// Which program is the executor.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    path: PathBuf,
    arguments: Vec<&'static str>,
}

/// What an executor reads and writes.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) stdin: Stdio,
    pub(crate) stdout: Stdio,
    pub(crate) stderr: Stdio,
}

/// Why an executor could not be started or watched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecutorError {
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
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Start { source, .. } if is_wrong_place(source) => Exit::BadConfiguration,
            Self::NoSelf(_) | Self::Start { .. } | Self::Wait(_) => Exit::Infrastructure,
        }
    }

    /// What to do about it.
    pub(crate) const fn hint(&self) -> Option<&'static str> {
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
    pub(crate) fn choose(given: Option<&Path>) -> Result<Self, ExecutorError> {
        match given {
            Some(path) => Ok(Self {
                path: path.to_owned(),
                arguments: Vec::new(),
            }),
            None => Self::this("executor"),
        }
    }

    /// Returns this program with a subcommand.
    pub(crate) fn this(subcommand: &'static str) -> Result<Self, ExecutorError> {
        Ok(Self {
            path: std::env::current_exe().map_err(ExecutorError::NoSelf)?,
            arguments: vec![subcommand],
        })
    }

    /// Starts it with exactly this environment and these streams. In a process group of its own, it does not get the Ctrl-C
    /// of a terminal: the launcher decides how it stops.
    pub(crate) fn spawn(
        &self,
        environment: Vec<(OsString, OsString)>,
        streams: Streams,
    ) -> Result<Child, ExecutorError> {
        Command::new(&self.path)
            .args(&self.arguments)
            .env_clear()
            .envs(environment)
            .stdin(streams.stdin)
            .stdout(streams.stdout)
            .stderr(streams.stderr)
            .process_group(0)
            .spawn()
            .map_err(|source| ExecutorError::Start {
                path: self.path.clone(),
                source,
            })
    }
}

/// How an executor process ended, and which signal stopped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    /// The signal that stopped the run, if one did.
    pub(crate) stopped_by: Option<Signal>,
}

impl Ended {
    /// Whether it had no time to end what it had started.
    pub(crate) fn is_killed(self) -> bool {
        self.status.signal().is_some()
    }
}

/// Outcome of a step as an exit code, and what to say when the executor could not say it itself.
pub(crate) fn judge(ended: Ended) -> (Exit, Option<String>) {
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
pub(crate) fn stop_exit(signal: Signal) -> Exit {
    signal_exit(signal as i32)
}

fn signal_exit(signal: i32) -> Exit {
    Exit::Signal(u8::try_from(signal).unwrap_or(u8::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

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

    fn exited(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    fn killed(signal: i32) -> ExitStatus {
        ExitStatus::from_raw(signal)
    }
}
