//! Builds and runs unit tests and journeys. Knows nothing of the stages.
//!
//! Tests use the default profile and the features of the whole workspace, so dependencies are compiled once. Cargo only builds
//! them, once for all stages of a process: each call of cargo looks at every file first, and waits for others that build.

use std::ffi::{OsStr, OsString};
use std::io::BufReader;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Deserializer, Value};
use tempfile::NamedTempFile;

use crate::binary::{Binary, Words};
use crate::terminal::{command_line, say};
use crate::times::{self, Part, TIMES};
use crate::{fuzz, skips, workspace_root};

/// The variable with the file to which skipped tests write (`test_peers::skips`).
const SKIPS: &str = "MAYFLY_TEST_SKIPS";
/// The threads for tests that mostly wait. More of them run at a time than there are processors.
const THREADS: usize = 6;
/// How many binaries run at a time, where their tests belong to no stage, and the threads of each but the first.
const AT_ONCE: usize = 3;
const THREADS_OF_EACH: usize = 4;
/// The binaries that take longest begin first, so that none is left over at the end.
const FIRST: [&str; 6] = ["it", "executor", "pool_store", "redis", "services", "serve"];

/// All binaries with tests, once they are built.
static BINARIES: OnceLock<Vec<Binary>> = OnceLock::new();

/// Which tests run, and how.
#[derive(Clone, Copy, Default)]
pub(crate) struct Selection<'s> {
    /// Only tests with one of these words in their names. All, if there are none.
    pub(crate) only: &'s [&'s str],
    /// No test with one of these words.
    pub(crate) but: &'s [&'s str],
    pub(crate) environment: &'s [(&'s str, &'s str)],
    /// They mostly wait, so more of them run at a time than there are processors.
    pub(crate) wait: bool,
    /// The command under which each binary with such tests runs.
    pub(crate) under: Option<&'s (dyn Fn() -> Command + Sync)>,
}

/// Runs tests.
pub(crate) fn run_tests(selection: &Selection<'_>) -> Result<()> {
    let binaries = build()?;
    times::spent(Part::Tests, || run_built(binaries, selection))
}

/// Builds all tests, unless this process has done so.
pub(crate) fn build() -> Result<&'static [Binary]> {
    if let Some(binaries) = BINARIES.get() {
        return Ok(binaries);
    }
    times::spent(Part::Build, || Build::start()?.end())
}

/// Does something that mostly waits for servers, while all tests are built.
pub(crate) fn while_building<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut build = Build::start()?;
    let done = times::spent(Part::SetUp, work);
    if done.is_err() {
        build.cargo.kill()?;
        build.cargo.wait()?;
    } else {
        times::spent(Part::Build, || build.end())?;
    }
    done
}

/// Cargo, while it builds the tests.
struct Build {
    line: String,
    cargo: Child,
    messages: thread::JoinHandle<Result<Vec<Binary>>>,
}

impl Build {
    fn start() -> Result<Self> {
        let mut command = cargo(["test", "--workspace", "--exclude", fuzz::PACKAGE]);
        command.args(["--locked", "--tests", "--no-run", "--quiet"]);
        command.arg("--message-format=json-render-diagnostics");
        let line = command_line(&command);
        say(&format!("\n==> build: {line}"));
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .context("could not start cargo")?;
        let output = child.stdout.take().context("its output is a pipe")?;
        let messages = thread::spawn(move || {
            let messages = Deserializer::from_reader(BufReader::new(output)).into_iter();
            let mut binaries = Vec::new();
            for message in messages {
                let message: Value = message.context("cargo printed no JSON")?;
                binaries.extend(Binary::of(&message));
            }
            Ok(binaries)
        });
        Ok(Self {
            line,
            cargo: child,
            messages,
        })
    }

    fn end(mut self) -> Result<&'static [Binary]> {
        let built = self
            .messages
            .join()
            .unwrap_or_else(|_| bail!("a thread panicked"));
        let status = self.cargo.wait()?;
        ensure!(status.success(), "`{}` failed ({status})", self.line);
        let mut built = built.with_context(|| format!("could not read from `{}`", self.line))?;
        ensure!(!built.is_empty(), "`{}` built no tests", self.line);
        built.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(BINARIES.get_or_init(|| built))
    }
}

fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

fn run_built(binaries: &[Binary], selection: &Selection<'_>) -> Result<()> {
    let file = NamedTempFile::new()?;
    let skips = (SKIPS, file.path().into());
    let times = times::file().map(|file| (TIMES, file.into()));
    let own = selection.environment.iter();
    let own = own.map(|(name, value)| (*name, OsString::from(*value)));
    let environment: Vec<_> = own.chain([skips]).chain(times).collect();
    let words = Words {
        only: selection.only,
        but: selection.but,
    };
    let run = |binary: &Binary, threads, aside| {
        let passed = !binary.has(words)? || {
            let under = selection.under.map(|under| under());
            binary.run(words, threads, under, &environment, aside)?
        };
        anyhow::Ok((!passed).then(|| binary.name.clone()))
    };
    // All binaries run even if one fails, so that all failures are reported.
    let failed = if selection.only.is_empty() {
        let waiting = Mutex::new(in_order(binaries).into_iter());
        let worker = || {
            let mut failed = Vec::new();
            loop {
                let next = waiting
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .next();
                let Some(binary) = next else { break };
                let is_first = binary.name == FIRST[0];
                let threads = if is_first { THREADS } else { THREADS_OF_EACH };
                failed.extend(run(binary, threads, !is_first)?);
            }
            anyhow::Ok(failed)
        };
        thread::scope(|scope| {
            let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(worker)).collect();
            let ends = workers.into_iter().map(thread::ScopedJoinHandle::join);
            let ends = ends.map(|end| end.unwrap_or_else(|_| bail!("a thread panicked")));
            anyhow::Ok(ends.collect::<Result<Vec<_>>>()?.concat())
        })?
    } else {
        let threads = if selection.wait { THREADS } else { 0 };
        let threads = threads.max(processors());
        let ends = binaries.iter().map(|binary| run(binary, threads, false));
        ends.filter_map(Result::transpose).collect::<Result<_>>()?
    };
    let skipped = skipped(&std::fs::read_to_string(file.path())?);
    say(&format!(
        "\n==> skipped tests: {}{}",
        skipped.len(),
        skips::list(&skipped)
    ));
    skipped.into_iter().for_each(skips::note);
    ensure!(failed.is_empty(), "tests failed in {}", failed.join(", "));
    Ok(())
}

/// The binaries in the order in which they begin.
fn in_order(binaries: &[Binary]) -> Vec<&Binary> {
    let mut ordered: Vec<_> = binaries.iter().collect();
    ordered.sort_by_key(|binary| {
        let mut first = FIRST.iter();
        first
            .position(|name| *name == binary.name)
            .unwrap_or(FIRST.len())
    });
    ordered
}

/// The skipped tests and their reasons, from the lines of `test_peers::skips`.
fn skipped(lines: &str) -> Vec<String> {
    let lines = lines.lines();
    let mut skipped: Vec<String> = lines
        .map(|line| line.trim_start_matches("SKIPPED ").to_owned())
        .collect();
    skipped.sort_unstable();
    skipped
}

pub(crate) fn cargo<I: IntoIterator<Item: AsRef<OsStr>>>(args: I) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(workspace_root());
    // The cargo that started this process has set these variables. A build script that reads them would compile its crate
    // again, and once more in a direct call of cargo.
    for (name, _) in std::env::vars_os() {
        let of_package = |name: &str| {
            ["CARGO_PKG_", "CARGO_MANIFEST_"]
                .iter()
                .any(|start| name.starts_with(start))
        };
        if name.to_str().is_some_and(of_package) {
            command.env_remove(name);
        }
    }
    command
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    /// The crates of registries in a selection, each as `NAME VERSION|FEATURES`.
    fn crates(selection: &str) -> BTreeSet<String> {
        let options = [
            "tree", "--locked", "--prefix", "none", "--format", "{p}|{f}",
        ];
        let mut tree = cargo(options);
        let output = tree.args(selection.split(' ')).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let lines = String::from_utf8(output.stdout).unwrap();
        let lines = lines.lines().map(|line| line.trim_end_matches(" (*)"));
        // Crates of the workspace have a path.
        lines
            .filter(|line| !line.is_empty() && !line.contains('/'))
            .map(str::to_owned)
            .collect()
    }

    /// A crate with other features is another crate to cargo.
    #[test]
    fn no_crate_is_compiled_twice() {
        let exclude = fuzz::PACKAGE;
        let all = crates(&format!(
            "--workspace --exclude {exclude} --edges normal,build,dev"
        ));
        let of_xtask = crates("--package xtask --edges normal");
        assert!(of_xtask.len() > 40, "{of_xtask:?}");
        let not_shared: Vec<_> = of_xtask.difference(&all).collect();
        assert!(
            not_shared.is_empty(),
            "tests use these with more features, which belong into `dependencies` of xtask: {not_shared:?}"
        );
        let all: Vec<_> = all.iter().filter_map(|line| line.split_once('|')).collect();
        let twice = all.windows(2).filter(|pair| pair[0].0 == pair[1].0);
        let twice: Vec<_> = twice.collect();
        assert!(
            twice.is_empty(),
            "macros use these with fewer features, which belong into `build-dependencies` of xtask: {twice:?}"
        );
    }

    #[test]
    fn cargo_is_called_as_on_the_command_line() {
        // Cargo has set this variable for this test.
        let command = cargo(["test"]);
        let mut removed = command.get_envs().filter(|(_, value)| value.is_none());
        assert!(removed.any(|(name, _)| name == "CARGO_MANIFEST_DIR"));
    }

    #[test]
    fn what_takes_longest_begins_first() {
        let binary = |name: &str| {
            let message = json!({"profile": {"test": true}, "manifest_path": "/w/Cargo.toml",
                                 "target": {"name": name}, "executable": "/w/it"});
            Binary::of(&message).unwrap()
        };
        let binaries = ["agent", "executor", "hub", "it"].map(binary);
        let ordered: Vec<_> = in_order(&binaries)
            .iter()
            .map(|binary| binary.name.as_str())
            .collect();
        assert_eq!(ordered, ["it", "executor", "agent", "hub"]);
    }

    #[test]
    fn each_skipped_test_is_known_with_its_reason() {
        assert_eq!(skipped(""), <[String; 0]>::default());
        assert_eq!(
            skipped("SKIPPED b: no root\nSKIPPED a: no kubectl\n"),
            ["a: no kubectl", "b: no root"]
        );
    }
}
