//! A folder, a data directory and a scripted executor; and the launcher as a process.

use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Generous: a busy machine is slow, and nothing waits this long unless it is broken.
const PATIENCE: Duration = Duration::from_secs(90);

pub(crate) struct Bench {
    temp: tempfile::TempDir,
}

impl Bench {
    /// A stack of one file, and an executor that does this (see `tests/fixtures/fake-executor.sh`).
    pub(crate) fn new(scenario: &str) -> Self {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join("stack")).unwrap();
        fs::write(temp.path().join("stack/main.tf"), "# nothing\n").unwrap();
        fs::create_dir_all(temp.path().join("data")).unwrap();
        let bench = Self { temp };
        fs::write(bench.data().join("scenario.sh"), scenario).unwrap();
        bench
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.path("data")
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.data().join(name)).unwrap_or_default()
    }

    /// The launcher with these words after `run`, without a terminal.
    pub(crate) fn launcher(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_api-launcher"));
        command
            .arg("run")
            .args(words.split_whitespace())
            .current_dir(self.temp.path())
            .env("MAYFLY_DATA_DIR", self.data())
            .env(
                "MAYFLY_EXECUTOR",
                concat!(
                    env!("CARGO_MANIFEST_DIR"),
                    "/tests/fixtures/fake-executor.sh"
                ),
            )
            .env("TERM", "xterm-256color")
            .env("UNRELATED_SECRET", "hunter2")
            .env_remove("NO_COLOR")
            .env_remove("CLICOLOR_FORCE")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn run(&self, words: &str) -> Done {
        self.start(words).finish()
    }

    pub(crate) fn start(&self, words: &str) -> Process {
        Process::spawn(&mut self.launcher(words))
    }

    /// The record of a job.
    pub(crate) fn record(&self, job: &str) -> Value {
        serde_json::from_str(&self.read(&format!("platform/jobs/{job}.json"))).unwrap()
    }

    /// The process the scenario wrote down.
    pub(crate) fn noted_pid(&self) -> Pid {
        Pid::from_raw(self.read("pid").trim().parse().unwrap())
    }

    /// What is left of runs that should be over.
    pub(crate) fn leftovers(&self) -> Vec<PathBuf> {
        fs::read_dir(self.data().join("launcher/work"))
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_dir())
            .collect()
    }
}

/// A running launcher, its output collected line by line.
pub(crate) struct Process {
    child: Child,
    lines: mpsc::Receiver<(bool, String)>,
    seen: Vec<(bool, String)>,
}

pub(crate) struct Done {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Done {
    pub(crate) fn code(&self) -> i32 {
        self.status.code().unwrap_or(-1)
    }

    /// Standard output as events.
    pub(crate) fn events(&self) -> Vec<Value> {
        self.stdout
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
            .collect()
    }
}

impl Process {
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let (send, lines) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            collect(stdout, false, send.clone());
        }
        if let Some(stderr) = child.stderr.take() {
            collect(stderr, true, send);
        }
        Self {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// Reads a terminal instead of pipes.
    pub(crate) fn on_terminal(command: &mut Command, terminal: &Pty) -> Self {
        let side = || Stdio::from(terminal.slave.try_clone().unwrap());
        let mut process = Self::spawn(command.stdin(side()).stdout(side()).stderr(side()));
        let (send, lines) = mpsc::channel();
        collect(
            fs::File::from(terminal.master.try_clone().unwrap()),
            false,
            send,
        );
        process.lines = lines;
        process
    }

    /// Waits until one of the streams holds `text`, in whatever pieces it comes.
    pub(crate) fn wait_for(&mut self, text: &str) {
        while ![false, true]
            .map(|stderr| self.text(stderr).contains(text))
            .contains(&true)
        {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => self.seen.push(line),
                Err(error) => panic!("no {text:?}: {error}, but {:?}", self.seen),
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    pub(crate) fn finish(mut self) -> Done {
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.seen.push(line);
        }
        self.end()
    }

    /// Does not wait for the streams, which a terminal never ends.
    pub(crate) fn end(mut self) -> Done {
        let status = self.child.wait().unwrap();
        self.seen.extend(self.lines.try_iter());
        Done {
            status,
            stdout: self.text(false),
            stderr: self.text(true),
        }
    }

    /// What was read of a stream so far.
    fn text(&self, stderr: bool) -> String {
        let pieces = self.seen.iter().filter(|(from, _)| *from == stderr);
        pieces.map(|(_, piece)| piece.as_str()).collect()
    }
}

/// Pieces end at a line's end or at what ends a question, so that a question can be waited for.
fn collect(stream: impl Read + Send + 'static, stderr: bool, send: mpsc::Sender<(bool, String)>) {
    thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        loop {
            // A terminal whose other side is closed reads as an error.
            let Ok(piece) = reader.fill_buf() else { return };
            if piece.is_empty() {
                return;
            }
            let end = piece.iter().position(|byte| *byte == b'\n');
            let length = end.map_or(piece.len(), |end| end + 1);
            let text = String::from_utf8_lossy(&piece[..length]).into_owned();
            reader.consume(length);
            if send.send((stderr, text)).is_err() {
                return;
            }
        }
    });
}

pub(crate) struct Pty {
    master: OwnedFd,
    slave: OwnedFd,
}

impl Pty {
    pub(crate) fn open() -> Self {
        let pty = nix::pty::openpty(None, None).unwrap();
        Self {
            master: pty.master,
            slave: pty.slave,
        }
    }

    pub(crate) fn type_line(&self, line: &str) {
        use std::io::Write as _;
        let mut master = fs::File::from(self.master.try_clone().unwrap());
        writeln!(master, "{line}").unwrap();
    }
}

/// Names in an archive.
pub(crate) fn names_in(tarball: &Path) -> Vec<String> {
    let file = fs::File::open(tarball).unwrap();
    tar::Archive::new(flate2::read::GzDecoder::new(file))
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().display().to_string())
        .collect()
}
