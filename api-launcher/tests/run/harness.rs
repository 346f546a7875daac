//! A folder, a data directory and a scripted executor; and the launcher as a process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::unistd::Pid;
use serde_json::Value;
use test_peers::process::{Finished, Running, on_terminal};

const LAUNCHER: &str = env!("CARGO_BIN_EXE_api-launcher");

pub(crate) struct Fixture {
    temp: tempfile::TempDir,
}

impl Fixture {
    /// A stack of one file, and an executor that does this (see `tests/fixtures/fake-executor.sh`).
    pub(crate) fn new(scenario: &str) -> Self {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join("stack")).unwrap();
        fs::write(temp.path().join("stack/main.tf"), "# nothing\n").unwrap();
        fs::create_dir_all(temp.path().join("data")).unwrap();
        let fixture = Self { temp };
        fs::write(fixture.data().join("scenario.sh"), scenario).unwrap();
        fixture
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
        let mut command = Command::new(LAUNCHER);
        command.args(arguments(words));
        self.prepare(&mut command);
        command
    }

    /// The same on a terminal of its own.
    pub(crate) fn on_terminal(&self, words: &str) -> Command {
        let mut command = on_terminal(LAUNCHER, arguments(words));
        self.prepare(&mut command);
        command
    }

    fn prepare(&self, command: &mut Command) {
        command
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
            .env("SHELL", "/bin/sh")
            .env("UNRELATED_SECRET", "hunter2")
            .env_remove("NO_COLOR")
            .env_remove("CLICOLOR_FORCE");
    }

    pub(crate) fn run(&self, words: &str) -> Finished {
        self.start(words).wait()
    }

    pub(crate) fn start(&self, words: &str) -> Running {
        Running::start(&mut self.launcher(words))
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

fn arguments(words: &str) -> impl Iterator<Item = &str> {
    std::iter::once("run").chain(words.split_whitespace())
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
