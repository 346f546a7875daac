//! A process under test: its output is collected as it comes, everything that waits has a deadline, and nothing
//! outlives its test.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::must_use_candidate,
    reason = "a harness fails a test by panicking, with all there is to know about it"
)]

use std::fmt;
use std::io::{Read, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::evidence;
use crate::wait::{self, DEADLINE};

/// More than [`evidence`] shows of a process that has ended.
const KEPT: usize = 128 * 1024;

/// Which of its two streams a process wrote to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// A process that has been started and not yet waited for. Stopped when dropped.
#[derive(Debug)]
pub struct Running {
    pid: Pid,
    started: Instant,
    exited: Receiver<ExitStatus>,
    stdout: Collector,
    stderr: Collector,
    stdin: Option<ChildStdin>,
    drop_signal: Signal,
    over: bool,
}

/// A process that has ended, and what it wrote.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    pub elapsed: Duration,
}

impl Running {
    /// Starts the command without standard input.
    pub fn start(command: &mut Command) -> Self {
        Self::start_with(command, Stdio::null())
    }

    /// Starts the command with a standard input that [`Running::write`] writes to.
    pub fn start_interactive(command: &mut Command) -> Self {
        Self::start_with(command, Stdio::piped())
    }

    fn start_with(command: &mut Command, stdin: Stdio) -> Self {
        let started = Instant::now();
        let mut child = command
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("could not start {command:?}: {error}"));
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        let stdout = Collector::of(child.stdout.take().unwrap());
        let stderr = Collector::of(child.stderr.take().unwrap());
        let program = command.get_program().to_string_lossy();
        for (stream, collector) in [("stdout", &stdout), ("stderr", &stderr)] {
            let shared = Arc::clone(&collector.shared);
            evidence::keep(format!("{program} ({pid}), {stream}"), move || shared.end());
        }
        let stdin = child.stdin.take();
        let (sender, exited) = channel();
        thread::spawn(move || {
            if let Ok(status) = child.wait() {
                let _ = sender.send(status);
            }
        });
        Self {
            pid,
            started,
            exited,
            stdout,
            stderr,
            stdin,
            drop_signal: Signal::SIGKILL,
            over: false,
        }
    }

    /// Stops it with SIGTERM instead of SIGKILL when dropped, so that it can stop what it has started.
    #[must_use]
    pub const fn terminated_when_dropped(mut self) -> Self {
        self.drop_signal = Signal::SIGTERM;
        self
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits until the stream holds this text.
    pub fn wait_for(&self, stream: Stream, needle: &str) {
        assert!(
            self.shows(stream, needle),
            "{stream:?} never showed {needle:?}\n{}",
            self.so_far()
        );
    }

    /// Waits until the stream holds this text; says whether it does, or has ended without.
    pub fn shows(&self, stream: Stream, needle: &str) -> bool {
        self.collector(stream).wait_for(needle)
    }

    /// Waits for a whole line with this text, and returns it.
    pub fn line_with(&self, stream: Stream, needle: &str) -> String {
        self.find_line(stream, needle, |line| {
            line.contains(needle).then(|| line.to_owned())
        })
    }

    /// Waits for the first whole line in which `look` finds something, and returns that.
    pub fn find_line<T>(&self, stream: Stream, what: &str, look: impl Fn(&str) -> Option<T>) -> T {
        let found = self.collector(stream).find_line(look);
        found.unwrap_or_else(|| panic!("{stream:?} never showed {what:?}\n{}", self.so_far()))
    }

    /// What the stream holds so far.
    pub fn text(&self, stream: Stream) -> String {
        self.collector(stream).text()
    }

    fn collector(&self, stream: Stream) -> &Collector {
        match stream {
            Stream::Stdout => &self.stdout,
            Stream::Stderr => &self.stderr,
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid, signal).unwrap();
    }

    /// Writes to the standard input of a process started with [`Running::start_interactive`].
    pub fn write(&mut self, text: &str) {
        let stdin = self.stdin.as_mut().expect("started interactively");
        stdin.write_all(text.as_bytes()).unwrap();
        stdin.flush().unwrap();
    }

    /// Ends the standard input.
    pub fn close_input(&mut self) {
        self.stdin = None;
    }

    /// Waits for the end of the process and of its output.
    pub fn wait(mut self) -> Finished {
        let status = match self.exited.recv_timeout(DEADLINE) {
            Ok(status) => status,
            Err(RecvTimeoutError::Timeout) => {
                panic!("still running after {DEADLINE:?}\n{}", self.so_far())
            }
            Err(RecvTimeoutError::Disconnected) => panic!("could not be waited for"),
        };
        self.over = true;
        Finished {
            status,
            elapsed: self.started.elapsed(),
            stdout: self.stdout.finish(),
            stderr: self.stderr.finish(),
        }
    }

    /// Kills it as a crash would.
    pub fn kill(self) -> Finished {
        self.signal(Signal::SIGKILL);
        self.wait()
    }

    fn so_far(&self) -> String {
        format!(
            "--- stdout\n{}\n--- stderr\n{}",
            self.stdout.text(),
            self.stderr.text()
        )
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.over && self.exited.try_recv().is_err() {
            let _ = kill(self.pid, self.drop_signal);
            if self.exited.recv_timeout(DEADLINE).is_err() {
                let _ = kill(self.pid, Signal::SIGKILL);
            }
        }
    }
}

impl Finished {
    /// The exit code; a process that died of a signal has none.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| {
            panic!("died of signal {:?}\n{self}", self.status.signal());
        })
    }

    /// Standard output as events. Fails unless every line is one.
    pub fn events(&self) -> Vec<Value> {
        let event = |line| {
            serde_json::from_str(line)
                .unwrap_or_else(|error| panic!("{line:?} is no event: {error}\n{self}"))
        };
        self.stdout.lines().map(event).collect()
    }
}

/// The command that starts a program on a terminal of its own. What is typed goes through [`Running::write`], where `\x03`
/// is Ctrl-C.
pub fn on_terminal<'a>(program: &'a str, args: impl IntoIterator<Item = &'a str>) -> Command {
    let words = std::iter::once(program).chain(args);
    let line: Vec<_> = words.map(|word| format!("'{word}'")).collect();
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--flush", "--command"]);
    command.args([&line.join(" "), "/dev/null"]);
    command
}

/// Whether a process has ended. A zombie has: its parent may reap it later.
pub fn has_ended(pid: impl fmt::Display) -> bool {
    !std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        let state = stat.rsplit(')').next().unwrap_or("");
        !state.trim().starts_with(['Z', 'X'])
    })
}

/// Whether a process ends before [`DEADLINE`].
pub fn ends(pid: impl fmt::Display) -> bool {
    let has_ended = || has_ended(&pid);
    wait::within_blocking(DEADLINE, "the end of a process", has_ended).is_ok()
}

/// Everything there is to know, for the message of a failed assertion.
impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} after {:?}\n--- stdout\n{}\n--- stderr\n{}",
            self.status, self.elapsed, self.stdout, self.stderr
        )
    }
}

#[derive(Debug)]
struct Collector {
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<Collected>,
    changed: Condvar,
}

impl Shared {
    /// The end of what is collected, unless it is in use.
    fn end(&self) -> Option<String> {
        let state = evidence::lock(&self.state)?;
        let kept = state.bytes.len().saturating_sub(KEPT);
        Some(String::from_utf8_lossy(&state.bytes[kept..]).into_owned())
    }
}

#[derive(Debug, Default)]
struct Collected {
    bytes: Vec<u8>,
    ended: bool,
}

impl Collector {
    fn of(mut source: impl Read + Send + 'static) -> Self {
        let shared = Arc::new(Shared::default());
        let writer = Arc::clone(&shared);
        let reader = thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            loop {
                let count = source.read(&mut buffer).unwrap_or(0);
                let mut state = writer.state.lock().unwrap();
                state.bytes.extend_from_slice(&buffer[..count]);
                state.ended = count == 0;
                writer.changed.notify_all();
                if count == 0 {
                    return;
                }
            }
        });
        Self {
            shared,
            reader: Some(reader),
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.shared.state.lock().unwrap().bytes).into_owned()
    }

    fn wait_for(&self, needle: &str) -> bool {
        let needle = needle.as_bytes();
        self.find(|bytes| {
            let mut parts = bytes.windows(needle.len());
            parts.any(|part| part == needle).then_some(())
        })
        .is_some()
    }

    fn find_line<T>(&self, look: impl Fn(&str) -> Option<T>) -> Option<T> {
        self.find(|bytes| {
            let text = String::from_utf8_lossy(bytes);
            let whole = text
                .split_inclusive('\n')
                .filter(|line| line.ends_with('\n'));
            whole.map(str::trim_end).find_map(&look)
        })
    }

    /// What `look` finds in the output, once it is there.
    fn find<T>(&self, look: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
        let state = self.shared.state.lock().unwrap();
        let missing = |state: &mut Collected| !state.ended && look(&state.bytes).is_none();
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, DEADLINE, missing)
            .unwrap();
        look(&state.bytes)
    }

    fn finish(&mut self) -> String {
        let state = self.shared.state.lock().unwrap();
        let (state, timeout) = self
            .shared
            .changed
            .wait_timeout_while(state, DEADLINE, |state| !state.ended)
            .unwrap();
        assert!(
            !timeout.timed_out(),
            "the process has ended and something still holds its output open:\n{}",
            String::from_utf8_lossy(&state.bytes)
        );
        drop(state);
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        let text = self.text();
        // What is kept of a process that has ended.
        let bytes = &mut self.shared.state.lock().unwrap().bytes;
        bytes.drain(..bytes.len().saturating_sub(KEPT));
        bytes.shrink_to_fit();
        text
    }
}

/// Copies a program that is to be started. A child of its own writes it: a file that this process has open for writing is also
/// open in each child that another test starts at that moment, and cannot be executed until that child runs its program.
pub fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status().unwrap();
    assert!(copied.success(), "`{}` is not copied", from.display());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_status_are_collected() {
        let finished =
            Running::start(Command::new("bash").args(["-c", "echo out; echo err >&2; exit 3"]))
                .wait();
        assert_eq!(finished.code(), 3);
        assert_eq!(
            (finished.stdout.as_str(), finished.stderr.as_str()),
            ("out\n", "err\n")
        );
    }

    #[test]
    fn a_line_is_waited_for_and_a_signal_delivered() {
        let script = "trap 'kill $!; exit 7' TERM; sleep 60 & echo ready; wait";
        let running = Running::start(Command::new("bash").args(["-c", script]));
        running.wait_for(Stream::Stdout, "ready");
        running.signal(Signal::SIGTERM);
        assert_eq!(running.wait().code(), 7);
    }
}
