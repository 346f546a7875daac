//! Runs a complete command line: spawn, stream, interrupt, kill. This module knows nothing of Terraform or of scripts.
//!
//! stdout and stderr share one pipe, so that their lines keep the order of writing. If stdout is a document, stderr is
//! dropped. The child leads a process group of its own. A stop order interrupts the child first, and kills the whole
//! group after the grace period. Background processes of the child are killed with the group. A panic of the consumer of its
//! output does not end the child.

use std::ffi::OsString;
use std::fs::File;
use std::future::{Future, pending};
use std::io::{self, Seek as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use run_log::LogWriter;
use runtime::{memory_file, reaper};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

use crate::error::StepError;
use crate::stop::{Order, Stop};

/// How long a child's background processes may keep its output open after the child has ended.
const LEFTOVER_GRACE: Duration = Duration::from_secs(2);
const CHUNK_BYTES: usize = 64 * 1024;

/// A command line and its folder.
#[derive(Clone)]
pub struct Invocation {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    pub dir: PathBuf,
    /// The whole environment. The child inherits no other variable.
    pub env: Vec<(OsString, OsString)>,
    /// The child's input; without one, its input is empty.
    pub input: Option<Bytes>,
    /// Whether stdout is a document. Then stderr is dropped.
    pub prints_document: bool,
}

/// Arguments and environment are the user's, and may be secret.
impl std::fmt::Debug for Invocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Invocation")
            .field("program", &self.program)
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// The receiver of the interrupt at a stop order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// Only the process: a tool stops its providers itself, and the signal would kill them.
    Process,
    /// The whole group, like Ctrl-C in a terminal. Otherwise a shell waits for its foreground child.
    Group,
}

/// The effect of a stop order on a child.
#[derive(Clone, Debug)]
pub struct Limit {
    pub stop: Stop,
    /// Who is interrupted; `None` for a child that saves results, which is not interrupted.
    pub interrupt: Option<Interrupt>,
    /// How long after the order the child's process group is killed.
    pub grace: Duration,
}

impl Limit {
    /// Waits for the order that concerns the child.
    async fn order(&self) -> Order {
        match self.interrupt {
            Some(_) => self.stop.ordered().await,
            None => self.stop.hurried().await,
        }
    }
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Code(i32),
    Signal(i32),
}

impl Ended {
    /// Whether it ended with exit code 0.
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Code(0))
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => match Signal::try_from(*signal) {
                Ok(name) => write!(f, "signal {name}"),
                Err(_) => write!(f, "signal {signal}"),
            },
        }
    }
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Self {
        // A process that ended was either signalled or has a code.
        status
            .signal()
            .map_or_else(|| Self::Code(status.code().unwrap_or(-1)), Self::Signal)
    }
}

/// A child that has ended and whose output has been read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub ended: Ended,
    /// Whether this module interrupted or killed it.
    pub stopped: bool,
}

/// Receives a child's output as the child writes it.
pub trait Consumer: Send {
    /// Takes the next bytes. The child's output is not read until this returns.
    fn consume(&mut self, chunk: &[u8]) -> impl Future<Output = ()> + Send;
}

/// Collects output in memory up to a limit. It drops further output, and sets `truncated`.
#[derive(Debug, Default)]
pub struct Capture {
    pub bytes: Vec<u8>,
    pub limit: usize,
    pub truncated: bool,
}

impl Capture {
    /// Collects up to `limit` bytes.
    pub const fn up_to(limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            limit,
            truncated: false,
        }
    }
}

impl Consumer for Capture {
    async fn consume(&mut self, chunk: &[u8]) {
        let free = self.limit.saturating_sub(self.bytes.len());
        self.truncated |= chunk.len() > free;
        self.bytes
            .extend_from_slice(&chunk[..chunk.len().min(free)]);
    }
}

/// Writes output to the run's log unchanged.
#[derive(Debug)]
pub struct ToLog(pub LogWriter);

impl Consumer for ToLog {
    async fn consume(&mut self, chunk: &[u8]) {
        self.0.write(chunk).await;
    }
}

/// Runs a command to its end. If the consumer panics, the error comes after the end.
pub async fn run(
    invocation: &Invocation,
    limit: &Limit,
    consumer: &mut impl Consumer,
) -> Result<Completion, StepError> {
    let lost = |source| failed(invocation, "observe the process", &source);
    let (child, mut output) = spawn(invocation)?;
    debug!(program = %invocation.program.display(), pid = child.group.as_raw(), "started");
    let mut supervision = Supervision {
        child,
        kill_at: None,
        stopped: false,
        stop_handled: false,
        consumer_panicked: false,
    };
    let watching = supervision.watch(limit, &mut output, consumer);
    let completion = watching.await.map_err(lost)?;
    if supervision.consumer_panicked {
        return Err(StepError::panicked());
    }
    Ok(completion)
}

fn spawn(invocation: &Invocation) -> Result<(Group, pipe::Receiver), StepError> {
    let fail = |source: io::Error| match source.raw_os_error().map(Errno::from_raw) {
        Some(Errno::E2BIG) => StepError::user(format!(
            "could not start `{}`: its arguments and environment are larger than the system accepts",
            invocation.program.display()
        )),
        _ => failed(invocation, "start", &source),
    };
    let (reader, writer) = io::pipe().map_err(fail)?;
    let reader = pipe::Receiver::from_owned_fd(OwnedFd::from(reader)).map_err(fail)?;
    let mut command = Command::new(&invocation.program);
    command
        .args(&invocation.args)
        .current_dir(&invocation.dir)
        .env_clear()
        .envs(invocation.env.iter().map(|(name, value)| (name, value)))
        .stdin(match &invocation.input {
            Some(bytes) => in_memory(bytes).map_err(fail)?.into(),
            None => Stdio::null(),
        })
        .stdout(writer.try_clone().map_err(fail)?)
        .stderr(if invocation.prints_document {
            Stdio::null()
        } else {
            writer.into()
        })
        .process_group(0);
    let child = reaper::spawn(&mut command).map_err(fail)?;
    // The command still holds the writing end, and the pipe ends only when all writers are closed.
    drop(command);
    let pid = child
        .id()
        .and_then(|pid| i32::try_from(pid).ok())
        .expect("a child that was not awaited has a pid");
    Ok((
        Group {
            child,
            group: Pid::from_raw(pid),
        },
        reader,
    ))
}

fn failed(invocation: &Invocation, action: &str, source: &io::Error) -> StepError {
    let program = invocation.program.display();
    StepError::infrastructure(format!("could not {action} `{program}`")).because(source)
}

/// A file in memory, so that it needs no space on a disk.
fn in_memory(bytes: &[u8]) -> io::Result<File> {
    let mut file = memory_file::data("input")?;
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file)
}

/// A child and the process group it leads; the group never outlives this value.
#[derive(Debug)]
struct Group {
    child: Child,
    group: Pid,
}

impl Drop for Group {
    fn drop(&mut self) {
        // An error is normal here: the group has usually ended.
        let _ = killpg(self.group, Signal::SIGKILL);
    }
}

struct Supervision {
    child: Group,
    kill_at: Option<Instant>,
    /// Whether the child was interrupted or killed.
    stopped: bool,
    /// Whether the stop order has been handled.
    stop_handled: bool,
    consumer_panicked: bool,
}

impl Supervision {
    async fn watch(
        &mut self,
        limit: &Limit,
        output: &mut pipe::Receiver,
        consumer: &mut impl Consumer,
    ) -> io::Result<Completion> {
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut ended = None;
        let mut leftover_deadline = None;
        let mut open = true;
        while open || ended.is_none() {
            tokio::select! {
                read = output.read(&mut chunk), if open => match read? {
                    0 => open = false,
                    length => self.hand_over(&chunk[..length], consumer).await,
                },
                status = self.child.child.wait(), if ended.is_none() => {
                    ended = Some(Ended::from(status?));
                    leftover_deadline = Some(Instant::now() + LEFTOVER_GRACE);
                }
                order = limit.order(), if !self.stop_handled && ended.is_none() => {
                    self.stop_handled = true;
                    self.kill_at = Some(order.at + limit.grace);
                    self.interrupt(limit.interrupt);
                }
                () = at(self.kill_at), if ended.is_none() => {
                    self.stopped = true;
                    self.kill_at = None;
                    warn!(pid = self.child.group.as_raw(), "the process did not end in time: killing its group");
                    let _ = killpg(self.child.group, Signal::SIGKILL);
                }
                () = at(leftover_deadline), if open && ended.is_some() => {
                    warn!(pid = self.child.group.as_raw(), "the process has ended, but its background processes hold its output: killing them");
                    open = false;
                }
            }
        }
        let ended = ended.expect("the loop ends only after the child has");
        Ok(Completion {
            ended,
            stopped: self.stopped,
        })
    }

    /// Hands output to the consumer. After a panic it gets the later output too, which can be a state that the tool could not
    /// store.
    async fn hand_over(&mut self, chunk: &[u8], consumer: &mut impl Consumer) {
        let consuming = AssertUnwindSafe(consumer.consume(chunk)).catch_unwind();
        self.consumer_panicked |= consuming.await.is_err();
    }

    fn interrupt(&mut self, receiver: Option<Interrupt>) {
        let sent = match receiver {
            None => return,
            Some(Interrupt::Process) => kill(self.child.group, Signal::SIGINT),
            Some(Interrupt::Group) => killpg(self.child.group, Signal::SIGINT),
        };
        self.stopped = true;
        if let Err(error) = sent {
            debug!(%error, "the process has ended before the interrupt");
        }
    }
}

async fn at(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => pending().await,
    }
}

/// The environment of [`Invocation`] from pairs of any string type.
pub fn environment<N: Into<OsString>, V: Into<OsString>>(
    pairs: impl IntoIterator<Item = (N, V)>,
) -> Vec<(OsString, OsString)> {
    pairs
        .into_iter()
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Cause;
    use job_contract::Exit;
    use signal_hook::consts::SIGINT;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use test_peers::process::ends;
    use test_peers::wait::DEADLINE;
    use tokio::time::timeout;

    fn bash(script: &str) -> Invocation {
        Invocation {
            program: "bash".into(),
            args: vec!["-c".into(), script.into()],
            dir: std::env::temp_dir(),
            env: environment([("PATH", "/usr/bin:/bin")]),
            input: None,
            prints_document: false,
        }
    }

    fn limit(stop: &Stop) -> Limit {
        Limit {
            stop: stop.clone(),
            interrupt: Some(Interrupt::Process),
            grace: DEADLINE,
        }
    }

    /// Gives the stop order as soon as the output contains a certain word.
    struct StopOn<'a>(&'a Stop, &'static str, Capture);

    impl Consumer for StopOn<'_> {
        async fn consume(&mut self, chunk: &[u8]) {
            self.2.consume(chunk).await;
            if String::from_utf8_lossy(&self.2.bytes).contains(self.1) {
                self.0.order(Cause::Signal(15));
            }
        }
    }

    async fn run_until(
        word: &'static str,
        script: &str,
        interrupt: Interrupt,
        grace: Duration,
    ) -> (Completion, String) {
        // A process that handles the signal resets it to the default for its children. It does so even if the signal
        // was ignored at its own start, as in the background of a script.
        let end = Arc::new(AtomicBool::new(true));
        signal_hook::flag::register_conditional_default(SIGINT, end).unwrap();
        let stop = Stop::default();
        let mut consumer = StopOn(&stop, word, Capture::up_to(1 << 20));
        let limit = Limit {
            stop: stop.clone(),
            interrupt: Some(interrupt),
            grace,
        };
        let done = timeout(DEADLINE, run(&bash(script), &limit, &mut consumer))
            .await
            .unwrap()
            .unwrap();
        (done, String::from_utf8(consumer.2.bytes).unwrap())
    }

    #[tokio::test]
    async fn both_streams_arrive_complete_and_in_order() {
        let mut capture = Capture::up_to(1 << 22);
        let script = "for i in $(seq 20000); do echo out $i; echo err $i >&2; done; exit 3";
        let done = run(&bash(script), &limit(&Stop::default()), &mut capture)
            .await
            .unwrap();
        assert_eq!(
            done,
            Completion {
                ended: Ended::Code(3),
                stopped: false
            }
        );
        let lines: Vec<String> = (1..=20000).map(|i| format!("out {i}\nerr {i}\n")).collect();
        assert!(String::from_utf8(capture.bytes).unwrap() == lines.concat());
    }

    #[tokio::test]
    async fn a_document_has_standard_output_and_no_standard_error() {
        let invocation = Invocation {
            input: Some(Bytes::from(vec![b'x'; 1 << 20])),
            prints_document: true,
            ..bash("echo beside >&2; cat")
        };
        let mut capture = Capture::up_to(1 << 22);
        let done = run(&invocation, &limit(&Stop::default()), &mut capture).await;
        assert!(done.unwrap().ended.is_success());
        assert!(capture.bytes == invocation.input.unwrap());
    }

    /// Panics at its first output.
    struct PanicsFirst(Capture);

    impl Consumer for PanicsFirst {
        async fn consume(&mut self, chunk: &[u8]) {
            let is_first = self.0.bytes.is_empty();
            self.0.consume(chunk).await;
            assert!(!is_first, "on purpose");
        }
    }

    #[tokio::test]
    async fn a_process_ends_by_itself_although_its_consumer_panics() {
        let folder = tempfile::tempdir().unwrap();
        let ended = folder.path().join("ended");
        // More than a pipe holds.
        let script = format!(
            "for i in $(seq 20000); do echo line $i; done; echo last words; echo yes > {}",
            ended.display()
        );
        let mut consumer = PanicsFirst(Capture::up_to(1 << 22));
        let done = run(&bash(&script), &limit(&Stop::default()), &mut consumer).await;
        assert_eq!(done.unwrap_err().exit(), Exit::Defect);
        assert_eq!(std::fs::read_to_string(ended).unwrap(), "yes\n");
        assert!(consumer.0.bytes.ends_with(b"last words\n"));
    }

    #[tokio::test]
    async fn only_the_process_is_interrupted() {
        let script = "trap 'echo parent got it; kill $!' INT; \
                      bash -c 'trap \"echo child got it\" INT; trap \"echo child done; exit\" TERM; \
                      tail -f /dev/null & echo ready; wait; wait' & \
                      wait; wait; exit 7";
        let (done, output) = run_until("ready", script, Interrupt::Process, DEADLINE).await;
        assert_eq!(
            done,
            Completion {
                ended: Ended::Code(7),
                stopped: true
            }
        );
        assert!(
            output.contains("parent got it") && output.contains("child done"),
            "{output}"
        );
        assert!(!output.contains("child got it"), "{output}");
    }

    #[tokio::test]
    async fn a_script_and_its_foreground_child_are_interrupted_together() {
        let (done, _) = run_until(
            "ready",
            "echo ready; tail -f /dev/null; exit 9",
            Interrupt::Group,
            DEADLINE,
        )
        .await;
        assert_eq!(
            done,
            Completion {
                ended: Ended::Signal(2),
                stopped: true
            }
        );
    }

    #[tokio::test]
    async fn a_process_that_ignores_the_interrupt_is_killed_with_its_group() {
        let script = "trap '' INT; tail -f /dev/null & echo $! ready; wait";
        let (done, output) =
            run_until("ready", script, Interrupt::Group, Duration::from_millis(50)).await;
        assert_eq!(
            done,
            Completion {
                ended: Ended::Signal(9),
                stopped: true
            }
        );
        let pid: i32 = output.split_whitespace().next().unwrap().parse().unwrap();
        assert!(ends(pid), "the group must be gone");
    }

    #[tokio::test]
    async fn background_processes_neither_hang_the_run_nor_outlive_it() {
        let mut capture = Capture::up_to(1 << 10);
        let invocation = bash("tail -f /dev/null & echo $!");
        let done = timeout(
            DEADLINE,
            run(&invocation, &limit(&Stop::default()), &mut capture),
        )
        .await
        .unwrap()
        .unwrap();
        assert!(done.ended.is_success());
        let pid: i32 = String::from_utf8(capture.bytes)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        assert!(ends(pid), "the background process must be gone");
    }

    #[tokio::test]
    async fn a_process_that_saves_results_is_killed_only_after_its_grace() {
        let stop = Stop::default();
        stop.order(Cause::Signal(15));
        let limit = |grace| Limit {
            stop: stop.clone(),
            interrupt: None,
            grace,
        };
        let mut capture = Capture::up_to(1 << 10);
        let (brief, unlimited) = (bash("echo saved"), limit(DEADLINE));
        let quick = timeout(DEADLINE, run(&brief, &unlimited, &mut capture))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(
            quick,
            Completion {
                ended: Ended::Code(0),
                stopped: false
            }
        );
        let (endless, limit) = (bash("tail -f /dev/null"), limit(Duration::from_millis(200)));
        let slow = timeout(DEADLINE, run(&endless, &limit, &mut capture))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(
            slow,
            Completion {
                ended: Ended::Signal(9),
                stopped: true
            }
        );
    }

    #[tokio::test]
    async fn a_program_that_cannot_start_is_named() {
        let missing = Invocation {
            program: "/nonexistent/tool".into(),
            ..bash("")
        };
        let limit = limit(&Stop::default());
        let error = run(&missing, &limit, &mut Capture::default())
            .await
            .unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("could not start `/nonexistent/tool`: "),
            "{text}"
        );
        let mut huge = bash("true");
        huge.args.push("x".repeat(4 << 20).into());
        let refused = run(&huge, &limit, &mut Capture::default()).await;
        assert_eq!(refused.unwrap_err().exit(), Exit::BadJobData);
    }
}
