//! A program of a journey, as a process.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_peers::wait::within;
use test_platform::launcher::address_in;

/// How long a program may take until it listens.
const LISTENING: Duration = Duration::from_mins(5);

/// A process. It ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Process(Child);

impl Process {
    /// Starts a command that writes its log into this file.
    pub(crate) fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let started = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(log)?)
            .spawn();
        Ok(Self(started?))
    }

    /// Sends it a signal. Nothing happens if it has ended.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.0.id()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a program listens, and returns the address in its log.
pub(crate) async fn listening(log: &Path) -> Result<SocketAddr> {
    let address = || async {
        let said = fs::read_to_string(log).unwrap_or_default();
        // The last line may be incomplete.
        said.lines().find_map(address_in).context(said)
    };
    Ok(within(LISTENING, "a program listens", address).await?)
}
