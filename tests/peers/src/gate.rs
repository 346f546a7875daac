//! A point at which a script waits until the test opens it.

#![expect(clippy::unwrap_used, reason = "a harness fails a test by panicking")]

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use nix::libc::O_NONBLOCK;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::repository::{Repository, chain};
use crate::wait;

const SAID: [&str; 2] = ["at-the-gate", "past-the-gate"];
const WAITS: &str = "a script at the gate";
const OPEN: &[u8] = b"open\n";

/// A named pipe. Who opens it for reading waits at the gate.
#[derive(Debug)]
pub struct Gate {
    pipe: PathBuf,
}

impl Gate {
    /// Makes the pipe.
    pub fn new(pipe: impl Into<PathBuf>) -> Self {
        let pipe = pipe.into();
        mkfifo(&pipe, Mode::S_IRWXU).unwrap();
        Self { pipe }
    }

    /// The pipe.
    pub fn path(&self) -> &Path {
        &self.pipe
    }

    /// Shell commands that print a line, wait at the gate, and print another line.
    pub fn words(&self) -> String {
        let [here, past] = SAID;
        let pipe = self.pipe.display();
        format!("echo {here}; cat {pipe} > /dev/null; echo {past}")
    }

    /// Whether [`Gate::words`] print this line.
    pub fn says(line: &str) -> bool {
        SAID.contains(&line)
    }

    /// A module of three resources. The second one waits at the gate.
    pub fn module(&self) -> String {
        chain(&format!("command = \"{}\"", self.words()))
    }

    /// A repository of [`Gate::module`].
    pub fn repository(&self) -> Repository {
        Repository::module(&self.module())
    }

    /// Waits until a script is at the gate. It stays there as long as the file is open, and passes once it is dropped.
    #[must_use]
    pub fn reached(&self) -> File {
        wait::until_blocking(WAITS, || self.look())
    }

    /// Lets one script pass that is at the gate, or will be.
    pub async fn open(&self) {
        let mut pipe = wait::until(WAITS, async || self.look()).await;
        pipe.write_all(OPEN).unwrap();
    }

    /// The same, and blocks the thread meanwhile.
    pub fn open_blocking(&self) {
        self.reached().write_all(OPEN).unwrap();
    }

    /// Opens the pipe for writing, which fails without a reader.
    fn look(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options
            .write(true)
            .custom_flags(O_NONBLOCK)
            .open(&self.pipe)
    }
}
