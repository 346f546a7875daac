//! The executor as a process: started in a group of its own, its two streams read as they come, asked to stop
//! by the first signal and killed by the second.

pub(crate) mod tree;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use job_contract::Exit;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use runtime::setting::is_wrong_place;
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::event::{Event, Level};
use super::signals::Signals;
use super::view::View;

/// Longer lines are shown in pieces; nothing a tool prints for people comes near.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Lines read ahead of the view. A slow terminal slows the executor's pipe, not this process's memory.
const READ_AHEAD: usize = 1024;
/// Lines shown in one go.
const BATCH: usize = 256;
/// How long the streams may stay open after the executor has ended: something it started still holds them.
const DRAIN: Duration = Duration::from_secs(2);

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
    #[error("this program cannot find itself to start the built-in executor")]
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
    /// The one asked for, else the one built into this program.
    pub(crate) fn choose(asked: Option<&Path>) -> Result<Self, ExecutorError> {
        match asked {
            Some(path) => Ok(Self {
                path: path.to_owned(),
                arguments: Vec::new(),
            }),
            None => Ok(Self {
                path: std::env::current_exe().map_err(ExecutorError::NoSelf)?,
                arguments: vec!["executor"],
            }),
        }
    }

    /// Starts it with exactly this environment and these streams, in a process group of its own.
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

    /// Starts it with exactly this environment. Its own process group keeps the terminal's Ctrl-C away from
    /// it: whether and how it is stopped is decided here.
    pub(crate) fn start(
        &self,
        environment: Vec<(OsString, OsString)>,
    ) -> Result<Running, ExecutorError> {
        let streams = Streams {
            stdin: Stdio::null(),
            stdout: Stdio::piped(),
            stderr: Stdio::piped(),
        };
        let mut child = self.spawn(environment, streams)?;
        let (send, lines) = mpsc::channel(READ_AHEAD);
        let stdout = child.stdout.take().expect("stdout is piped");
        let stderr = child.stderr.take().expect("stderr is piped");
        tokio::spawn(read_lines(stdout, send.clone(), |line| Event::Log { line }));
        tokio::spawn(read_lines(stderr, send, diagnostic));
        let group = child.id().expect("a child not waited for has an id");
        Ok(Running {
            child,
            group,
            lines,
        })
    }
}

/// A started executor.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    group: u32,
    lines: mpsc::Receiver<Event>,
}

/// How an executor process ended, and whether it was asked to.
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

impl Running {
    /// Its process group, which is also its process id.
    pub(crate) const fn group(&self) -> u32 {
        self.group
    }

    /// Shows what it says until it has ended, and passes the signals on.
    pub(crate) async fn follow(
        mut self,
        view: &mut View,
        signals: &mut Signals,
    ) -> Result<Ended, ExecutorError> {
        let mut stopped_by = None;
        let mut status = None;
        let mut open = true;
        let mut batch = Vec::with_capacity(BATCH);
        let mut deadline = Instant::now();
        while open || status.is_none() {
            tokio::select! {
                // Signals are heard even while lines pour in, and lines are shown before the end they precede.
                biased;
                signal = signals.next() => {
                    if status.is_none() {
                        self.stop(view, signal, stopped_by.is_some());
                    }
                    stopped_by.get_or_insert(signal);
                }
                () = tokio::time::sleep_until(deadline), if status.is_some() => open = false,
                count = self.lines.recv_many(&mut batch, BATCH), if open => {
                    open = count > 0;
                    view.show_all(std::mem::take(&mut batch));
                }
                ended = self.child.wait(), if status.is_none() => {
                    status = Some(ended.map_err(ExecutorError::Wait)?);
                    deadline = Instant::now() + DRAIN;
                }
            }
        }
        Ok(Ended {
            status: status.expect("the loop ends with a status"),
            stopped_by,
        })
    }

    fn stop(&self, view: &mut View, signal: Signal, again: bool) {
        let pid = Pid::from_raw(self.group.cast_signed());
        let (sent, message) = if again {
            (
                tree::kill(pid),
                "killed: what was being changed may exist without being in the state; \
                 plan again before anything else, and unlock the state if the tool asks for it",
            )
        } else if signal == Signal::SIGINT {
            (
                kill(pid, Signal::SIGTERM),
                "stopping: asked the executor to finish gracefully and store the state; \
                 press Ctrl-C again to kill it",
            )
        } else {
            (
                kill(pid, Signal::SIGTERM),
                "stopping: asked the executor to finish gracefully and store the state; \
                 another signal kills it",
            )
        };
        // It may have ended by itself in between, which `wait` tells.
        if sent.is_ok() {
            view.show(Event::warning(message));
        }
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
                "the executor ended with exit code {code}, which means nothing"
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

fn diagnostic(line: String) -> Event {
    use job_contract::progress::{Diagnostic, Progress};
    let Some(diagnostic) = Diagnostic::parse(&line) else {
        return Event::Diagnostic {
            level: Level::Output,
            message: line,
        };
    };
    match (diagnostic.event, diagnostic.phase) {
        (Some(Progress::PhaseStarted), Some(phase)) => Event::PhaseStarted { phase },
        (Some(Progress::PhaseFinished), Some(phase)) => Event::PhaseFinished {
            phase,
            duration_ms: diagnostic.duration_ms.unwrap_or(0),
            ok: diagnostic.ok.unwrap_or(true),
        },
        _ => Event::Diagnostic {
            level: Level::parse(&diagnostic.level),
            message: diagnostic.message,
        },
    }
}

/// Sends every line as an event until the stream ends or nobody listens any more.
async fn read_lines(
    stream: impl AsyncRead + Unpin,
    send: mpsc::Sender<Event>,
    event: fn(String) -> Event,
) {
    let mut reader = BufReader::with_capacity(64 * 1024, stream);
    while let Ok(Some(line)) = next_line(&mut reader).await {
        if send.send(event(line)).await.is_err() {
            return;
        }
    }
}

/// The next line without its end, in pieces of at most [`MAX_LINE_BYTES`].
async fn next_line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    loop {
        let buffer = reader.fill_buf().await?;
        if buffer.is_empty() {
            return Ok((!line.is_empty()).then(|| text(&line)));
        }
        let room = MAX_LINE_BYTES - line.len();
        let end = buffer.iter().take(room).position(|byte| *byte == b'\n');
        let taken = end.unwrap_or(buffer.len().min(room));
        line.extend_from_slice(&buffer[..taken]);
        reader.consume(taken + usize::from(end.is_some()));
        if end.is_some() || line.len() == MAX_LINE_BYTES {
            return Ok(Some(text(&line)));
        }
    }
}

fn text(line: &[u8]) -> String {
    String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use job_contract::progress::Phase;
    use rstest::rstest;

    #[rstest]
    #[case(exited(0), None, 0)]
    #[case(exited(1), None, 1)]
    #[case(exited(65), None, 65)]
    #[case(exited(75), None, 75)]
    #[case(exited(76), None, 76)]
    #[case(exited(143), None, 143)]
    // A panic of the executor, and a code nobody defined.
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

    #[tokio::test]
    async fn lines_are_split_at_their_ends_and_at_the_limit() {
        let long = "x".repeat(MAX_LINE_BYTES + 5);
        let input = format!("a\r\n\n{long}\nlast");
        let mut reader = BufReader::with_capacity(1000, input.as_bytes());
        let mut lines = Vec::new();
        while let Some(line) = next_line(&mut reader).await.unwrap() {
            lines.push(line.len());
        }
        assert_eq!(lines, [1, 0, MAX_LINE_BYTES, 5, 4]);
    }

    #[test]
    fn stderr_becomes_progress_diagnostics_or_plain_lines() {
        let finished = r#"{"level":"INFO","message":"","event":"phase_finished","phase":"init","duration_ms":5,"ok":false}"#;
        assert_eq!(
            diagnostic(finished.into()),
            Event::PhaseFinished {
                phase: Phase::Init,
                duration_ms: 5,
                ok: false
            }
        );
        assert_eq!(
            diagnostic(r#"{"level":"WARN","message":"careful"}"#.into()),
            Event::warning("careful")
        );
        assert_eq!(
            diagnostic("thread 'main' panicked".into()),
            Event::Diagnostic {
                level: Level::Output,
                message: "thread 'main' panicked".into()
            }
        );
    }
}
