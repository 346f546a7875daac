//! A hub or an agent as a child process of a run. The two are called companions.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStderr};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::PoolError;
use crate::local::executor::{Program, Streams};
use crate::local::run::error::RunError;
use crate::local::run::event::{Event, Level};

/// How long a hub may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);
/// When a stop is repeated. The second signal ends a hub at once.
const STOP_AGAIN: Duration = Duration::from_millis(200);
/// How many of the last complaints of a companion are kept.
const COMPLAINTS: usize = 3;

/// One process.
#[derive(Debug)]
pub(super) struct Companion {
    name: &'static str,
    child: Child,
    /// The last complaints in its log.
    complaints: Arc<Mutex<VecDeque<String>>>,
    address: Option<oneshot::Receiver<String>>,
    /// Reads the log of the child.
    reader: JoinHandle<()>,
}

/// A line of the log of a companion.
#[derive(Debug, Deserialize)]
struct Line {
    level: String,
    #[serde(default)]
    message: String,
    cause: Option<String>,
    address: Option<String>,
}

impl Companion {
    /// Starts this program with a subcommand and exactly this environment. Its log goes to `events`.
    pub(super) fn start(
        name: &'static str,
        subcommand: &'static str,
        environment: Vec<(OsString, OsString)>,
        events: mpsc::UnboundedSender<Event>,
    ) -> Result<Self, RunError> {
        let streams = Streams {
            stdin: Stdio::null(),
            stdout: Stdio::null(),
            stderr: Stdio::piped(),
        };
        let mut child = Program::this(subcommand)?.spawn(environment, streams)?;
        let stderr = child.stderr.take().expect("stderr is piped");
        let complaints = Arc::new(Mutex::default());
        let (sender, address) = oneshot::channel();
        let reader = Reader {
            name,
            events,
            complaints: Arc::clone(&complaints),
            address: Some(sender),
        };
        Ok(Self {
            name,
            child,
            complaints,
            address: Some(address),
            reader: tokio::spawn(reader.read(stderr)),
        })
    }

    /// Waits until the hub listens, and returns its address.
    pub(super) async fn address(&mut self) -> Result<String, PoolError> {
        if let Some(address) = self.address.take()
            && let Ok(address) = address.await
        {
            return Ok(address);
        }
        let said = self.ended().await;
        Err(PoolError::Ended {
            name: self.name,
            said,
            is_running: false,
        })
    }

    /// Waits for the end of the companion, and returns its last complaints. The future may be dropped and made again.
    pub(super) async fn ended(&mut self) -> String {
        // If the wait fails, the companion cannot be used any more.
        let _ = self.child.wait().await;
        if !self.reader.is_finished() {
            let _ = (&mut self.reader).await;
        }
        let complaints = self.complaints.lock();
        let complaints = complaints.unwrap_or_else(PoisonError::into_inner);
        let texts: Vec<&str> = complaints.iter().map(String::as_str).collect();
        texts.join(" ")
    }

    /// Asks the companion to stop.
    pub(super) fn terminate(&self) {
        if let Some(pid) = self.child.id() {
            // The companion may have ended by itself in between.
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM);
        }
    }

    /// Stops a hub, and waits for its end. An agent would kill its executor after the second signal.
    pub(super) async fn stop(&mut self) {
        let limit = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < limit {
            self.terminate();
            if timeout(STOP_AGAIN, self.ended()).await.is_ok() {
                return;
            }
        }
        let _ = self.child.kill().await;
    }
}

/// Reads the log of a companion.
#[derive(Debug)]
struct Reader {
    name: &'static str,
    events: mpsc::UnboundedSender<Event>,
    complaints: Arc<Mutex<VecDeque<String>>>,
    address: Option<oneshot::Sender<String>>,
}

impl Reader {
    async fn read(mut self, stderr: ChildStderr) {
        let mut lines = BufReader::new(stderr).lines();
        while let Ok(Some(text)) = lines.next_line().await {
            self.note(&text);
        }
    }

    fn note(&mut self, text: &str) {
        let Ok(line) = serde_json::from_str::<Line>(text) else {
            // A complaint about settings is no log.
            return self.complain(text.trim().to_owned());
        };
        let cause = line.cause.map(|cause| format!(": {cause}"));
        let message = line.message + &cause.unwrap_or_default();
        let level = Level::parse(&line.level);
        if level == Level::Error {
            self.complain(message.clone());
        }
        if let Some(address) = line.address
            && let Some(sender) = self.address.take()
        {
            let _ = sender.send(address);
        }
        // What matters for the run, the run says itself.
        let level = match level {
            Level::Debug => Level::Debug,
            _ => Level::Info,
        };
        let message = format!("{}: {message}", self.name);
        let _ = self.events.send(Event::Diagnostic { level, message });
    }

    fn complain(&self, text: String) {
        let complaints = self.complaints.lock();
        let mut complaints = complaints.unwrap_or_else(PoisonError::into_inner);
        if complaints.len() == COMPLAINTS {
            complaints.pop_front();
        }
        complaints.push_back(text);
    }
}
