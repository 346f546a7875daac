//! Follows an executor: shows its output as it comes, asks it to stop at the first signal, and kills it at the second.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use processes::executor::{Ended, ExecutorError, Program, Streams, tree};
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::Child;
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

#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    group: u32,
    lines: mpsc::Receiver<Event>,
}

impl Running {
    /// Starts an executor with exactly this environment.
    pub(crate) fn start(
        program: &Program,
        environment: Vec<(OsString, OsString)>,
    ) -> Result<Self, ExecutorError> {
        let streams = Streams {
            stdin: Stdio::null(),
            stdout: Stdio::piped(),
            stderr: Stdio::piped(),
        };
        let mut child = program.spawn(environment, streams)?;
        let (send, lines) = mpsc::channel(READ_AHEAD);
        let stdout = child.stdout.take().expect("stdout is piped");
        let stderr = child.stderr.take().expect("stderr is piped");
        tokio::spawn(read_lines(stdout, send.clone(), |line| Event::Log { line }));
        tokio::spawn(read_lines(stderr, send, diagnostic));
        let group = child.id().expect("a child not waited for has an id");
        Ok(Self {
            child,
            group,
            lines,
        })
    }

    /// Its process group, which is also its process id.
    pub(crate) const fn group(&self) -> u32 {
        self.group
    }

    /// Shows what it says until it has ended, and passes the signals on. Before it is killed, those of `copies` are named that exist.
    pub(crate) async fn follow(
        mut self,
        view: &mut View,
        signals: &mut Signals,
        copies: &[PathBuf],
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
                        if stopped_by.is_some() {
                            name_copies(view, copies);
                        }
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

fn name_copies(view: &mut View, copies: &[PathBuf]) {
    for path in copies.iter().filter(|path| path.is_file()) {
        view.show(Event::warning(format!(
            "a state that the run could not store is kept in `{}`",
            path.display()
        )));
    }
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

/// Sends every line as an event until the stream or the receiver ends.
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
