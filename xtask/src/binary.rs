//! One binary of tests: which tests it has, and running them. Notes how long each test took and which failed, and ends a binary
//! in which nothing goes on. Knows the lines of libtest, but no test.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::terminal::{command_line, complain, say};
use crate::times;

/// No test takes so long, and each wait of a test has a limit of its own. So the limit never decides on a test that works.
const STUCK_AFTER: Duration = Duration::from_mins(15);

/// Which tests of a binary run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Words<'w> {
    /// Those with one of these words in their names. All, if there are none.
    pub(crate) only: &'w [&'w str],
    /// And none of these.
    pub(crate) but: &'w [&'w str],
}

impl Words<'_> {
    fn arguments(&self) -> impl Iterator<Item = &str> {
        let but = self.but.iter().flat_map(|word| ["--skip", word]);
        self.only.iter().copied().chain(but)
    }
}

/// A binary with tests, as cargo has built it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Binary {
    /// The name of its target. Several libraries and programs may share one.
    pub(crate) name: String,
    program: PathBuf,
    /// The folder of its package, in which cargo would run it.
    folder: PathBuf,
}

impl Binary {
    /// The binary of a message of cargo, if it is of one with tests.
    pub(crate) fn of(message: &Value) -> Option<Self> {
        if message["profile"]["test"] != true {
            return None;
        }
        let manifest = Path::new(message["manifest_path"].as_str()?);
        Some(Self {
            name: message["target"]["name"].as_str()?.to_owned(),
            program: message["executable"].as_str()?.into(),
            folder: manifest.parent()?.to_owned(),
        })
    }

    /// Whether it has tests with these words.
    pub(crate) fn has(&self, words: Words<'_>) -> Result<bool> {
        let mut command = self.command(None);
        command.args(words.arguments()).arg("--list");
        let line = command_line(&command);
        let output = command.output();
        let output = output.with_context(|| format!("could not start `{line}`"))?;
        ensure!(output.status.success(), "`{line}` failed");
        let list = String::from_utf8_lossy(&output.stdout);
        Ok(list.lines().any(|line| line.ends_with(": test")))
    }

    /// Its program, under another one if there is one.
    fn command(&self, under: Option<Command>) -> Command {
        let mut command = match under {
            Some(mut under) => {
                under.arg(&self.program);
                under
            }
            None => Command::new(&self.program),
        };
        command
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }

    /// Runs tests, and returns whether all of them passed. `environment` is added to that of the tests. `aside` shows the output
    /// at the end, because something else shows its own.
    pub(crate) fn run(
        &self,
        words: Words<'_>,
        threads: usize,
        under: Option<Command>,
        environment: &[(&str, OsString)],
        aside: bool,
    ) -> Result<bool> {
        let mut command = self.command(under);
        command
            .args(words.arguments())
            .arg(format!("--test-threads={threads}"))
            // libtest prints the times of tests only on request, and the request is not stable. It compiles nothing.
            .args(["-Zunstable-options", "--report-time"])
            .env("RUSTC_BOOTSTRAP", "1")
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut shown = format!("\n==> tests: {}", command_line(&command));
        let mut show = |line: &str| {
            if aside {
                shown.push('\n');
                shown.push_str(line);
            } else {
                say(line);
            }
        };
        if !aside {
            show(&format!("\n==> tests: {}", command_line(&command)));
        }
        let passed = follow(command, &mut show)?;
        if aside {
            say(&shown);
        }
        Ok(passed)
    }
}

/// Runs a binary to its end, and returns whether it succeeded. Each line of its output goes to `show`.
fn follow(mut command: Command, show: &mut impl FnMut(&str)) -> Result<bool> {
    let line = command_line(&command);
    let mut child = command
        .spawn()
        .with_context(|| format!("could not start `{line}`"))?;
    let output = child.stdout.take().context("its output is a pipe")?;
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let _ = sender.send(String::from_utf8_lossy(&line).into_owned());
        }
    });
    loop {
        match lines.recv_timeout(STUCK_AFTER) {
            Ok(line) => {
                if let Some(test) = Test::of(&line) {
                    test.note()?;
                }
                show(&line);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let minutes = STUCK_AFTER.as_secs() / 60;
                complain(&format!(
                    "error: no test of `{line}` has ended for {minutes} min: it is killed"
                ));
                child.kill()?;
                break;
            }
        }
    }
    let status = child.wait()?;
    if status.code().is_none() {
        complain(&format!("error: `{line}`: {status}"));
    }
    Ok(status.success())
}

/// A test that has ended.
#[derive(Debug, PartialEq)]
struct Test<'l> {
    name: &'l str,
    passed: bool,
    seconds: f64,
}

impl<'l> Test<'l> {
    /// Reads a line of libtest: `test NAME ... ok <0.012s>`.
    fn of(line: &'l str) -> Option<Self> {
        let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
        let (outcome, time) = rest.split_once(" <")?;
        let seconds = time.trim_end().strip_suffix("s>")?.parse().ok()?;
        let passed = match outcome {
            "ok" => true,
            "FAILED" => false,
            _ => return None,
        };
        let name = name.trim_end_matches(" - should panic");
        Some(Self {
            name,
            passed,
            seconds,
        })
    }

    fn note(&self) -> Result<()> {
        times::note(&format!("test\t{}\t{}", self.name, self.seconds))?;
        if self.passed {
            Ok(())
        } else {
            times::note(&format!("failed\t{}", self.name))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn own() -> Binary {
        Binary {
            name: "xtask".to_owned(),
            program: std::env::current_exe().unwrap(),
            folder: env!("CARGO_MANIFEST_DIR").into(),
        }
    }

    #[test]
    fn only_messages_of_binaries_with_tests_are_taken() {
        let message = |test: bool, executable: Value| {
            json!({"reason": "compiler-artifact", "manifest_path": "/w/tests/Cargo.toml", "target": {"name": "it"},
                   "profile": {"test": test}, "executable": executable})
        };
        let taken = Binary::of(&message(true, json!("/w/target/debug/deps/it-1")));
        assert_eq!(
            taken,
            Some(Binary {
                name: "it".to_owned(),
                program: "/w/target/debug/deps/it-1".into(),
                folder: "/w/tests".into()
            })
        );
        assert_eq!(
            Binary::of(&message(false, json!("/w/target/debug/mayfly"))),
            None
        );
        assert_eq!(Binary::of(&message(true, Value::Null)), None);
        assert_eq!(Binary::of(&json!({"reason": "build-finished"})), None);
    }

    #[test]
    fn the_time_of_a_test_is_read_from_its_line() {
        let test = |name, passed, seconds| {
            Some(Test {
                name,
                passed,
                seconds,
            })
        };
        assert_eq!(
            Test::of("test a::b ... ok <1.250s>"),
            test("a::b", true, 1.25)
        );
        assert_eq!(
            Test::of("test a::b - should panic ... FAILED <0.001s>"),
            test("a::b", false, 0.001)
        );
        for other in [
            "running 2 tests",
            "test a::b ... ignored",
            "test a::b has been running for over 60 seconds",
        ] {
            assert_eq!(Test::of(other), None, "{other}");
        }
    }

    #[test]
    fn tests_are_chosen_by_their_words() {
        let words = |only, but| Words { only, but };
        assert!(own().has(words(&["tests_are_chosen"], &[])).unwrap());
        assert!(
            !own()
                .has(words(&["tests_are_chosen"], &["chosen_by"]))
                .unwrap()
        );
        assert!(!own().has(words(&["no such test"], &[])).unwrap());
    }

    #[test]
    fn a_binary_is_run_and_its_lines_are_seen() {
        let mut command = own().command(None);
        let only = "binary::tests::only_messages_of_binaries_with_tests_are_taken";
        command.args(["--exact", only, "-Zunstable-options", "--report-time"]);
        command.env("RUSTC_BOOTSTRAP", "1").stdout(Stdio::piped());
        let mut lines = Vec::new();
        assert!(follow(command, &mut |line| lines.push(line.to_owned())).unwrap());
        let tests: Vec<_> = lines.iter().filter_map(|line| Test::of(line)).collect();
        assert!(
            matches!(tests[..], [Test { name, passed: true, .. }] if name == only),
            "{lines:?}"
        );
    }
}
