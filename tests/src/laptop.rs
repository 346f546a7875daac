//! A person's machine: a home, a folder with a root module, and `api-launcher run` on a terminal or off it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::machine::files_below;
use crate::process::{self, Finished, Running};

/// A home that dies with its test.
#[derive(Debug)]
pub struct Laptop {
    home: TempDir,
    launcher: PathBuf,
}

impl Laptop {
    /// A home whose folder `stack` holds this root module.
    pub fn new(launcher: impl Into<PathBuf>, module: &str) -> Self {
        let laptop = Self {
            home: tempfile::tempdir().unwrap(),
            launcher: launcher.into(),
        };
        laptop.write("stack/main.tf", module);
        laptop
    }

    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Writes a file below the home.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.home().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// `api-launcher` with these arguments, in the home.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.launcher);
        command.args(args);
        self.at_home(&mut command);
        command
    }

    fn at_home(&self, command: &mut Command) {
        command
            .current_dir(self.home())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.home())
            .env("LANG", "C.UTF-8")
            .env("TERM", "xterm-256color")
            .env("SHELL", "/bin/sh")
            .env("TMPDIR", self.home());
    }

    /// Runs `api-launcher` with its output in pipes.
    pub fn run(&self, args: &[&str]) -> Finished {
        Running::start(&mut self.command(args)).wait()
    }

    /// Starts `api-launcher` on a terminal of its own.
    pub fn on_terminal(&self, args: &[&str]) -> Running {
        let launcher = self.launcher.to_str().unwrap();
        let mut command = process::on_terminal(launcher, args.iter().copied());
        self.at_home(&mut command);
        Running::start_interactive(&mut command)
    }

    /// The state of the only workspace this home has.
    pub fn state(&self) -> Option<Value> {
        let states: Vec<_> = files_below(self.home())
            .into_iter()
            .filter(|path| path.ends_with("terraform.tfstate"))
            .collect();
        assert!(states.len() <= 1, "{states:?}");
        let state = fs::read(states.first()?).unwrap();
        Some(serde_json::from_slice(&state).unwrap())
    }

    /// Names of the resources in that state, which must be there.
    pub fn resources(&self) -> Vec<String> {
        let state = self.state().expect("no state is stored");
        let resources = state["resources"].as_array().cloned().unwrap_or_default();
        resources
            .iter()
            .map(|resource| resource["name"].as_str().unwrap().to_owned())
            .collect()
    }
}

/// The text without what colours it and moves the cursor.
pub fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c != '\u{1b}' {
            plain.push(c);
            continue;
        }
        if rest.next() == Some('[') {
            for c in rest.by_ref() {
                if c.is_ascii_alphabetic() {
                    break;
                }
            }
        }
    }
    plain
}
