//! Runs unit tests and journeys. Knows nothing of the stages.
//!
//! Tests use the default profile and the features of the whole workspace, so dependencies are compiled once.

use std::ffi::OsStr;
use std::process::Command;
use std::thread;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::terminal::{command_line, run_stage, run_together, say};
use crate::{fuzz, skips, workspace_root};

/// The variable with the file to which skipped tests write (`test_peers::skips`).
const SKIPS: &str = "MAYFLY_TEST_SKIPS";
/// Tests that measure how fast an error is reported, or how pools share the time of a hub. No other test may run at the same time.
/// `.config/nextest.toml` lists them too.
const ALONE: [&str; 3] = ["failure::", "wrong_inputs", "pressure::"];
/// The targets whose tests mostly wait, for processes and for servers that are away. The other tests run beside them.
const WAITING: [&str; 2] = ["it", "redis"];
/// The threads for tests that mostly wait.
const THREADS: usize = 4;
/// The threads for tests that mostly wait and that other tests run beside, and for these tests.
const BESIDE: [usize; 2] = [4, 4];

/// Runs the tests whose names contain one of the words of `only`, or all tests if it is empty. Tests with a word of `but` do
/// not run. `environment` is added to the tests' environment. `waits` means that the tests of `only` mostly wait.
pub(crate) fn run_tests(
    only: &[&str],
    but: &[&str],
    environment: &[(&str, &str)],
    waits: bool,
) -> Result<()> {
    let threads = if waits {
        processors().max(THREADS)
    } else {
        processors()
    };
    let targets = if only.is_empty() {
        test_targets()?
    } else {
        Vec::new()
    };
    let commands = test_commands(only, but, has_nextest(), threads, &targets);
    run_commands(commands, environment)
}

/// Runs the tests whose names contain one of the words. Each command runs under the command that `beside` returns.
pub(crate) fn run_tests_under(beside: impl Fn() -> Command, only: &[&str]) -> Result<()> {
    let threads = processors().max(THREADS);
    let mut commands = test_commands(only, &[], has_nextest(), threads, &[]);
    for tests in commands.iter_mut().flatten() {
        let mut command = beside();
        command
            .arg(tests.get_program())
            .args(tests.get_args())
            .current_dir(workspace_root());
        for (name, value) in tests.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        *tests = command;
    }
    run_commands(commands, &[])
}

/// Builds all tests with the options with which they run. With other options, they would be compiled again.
pub(crate) fn build(stage: &str) -> Result<()> {
    run_stage(stage, &mut build_command())
}

/// Does something that mostly waits for servers, while all tests are built.
pub(crate) fn while_building<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut command = build_command();
    say(&format!("\n==> build: {}", command_line(&command)));
    let mut build = command
        .arg("--quiet")
        .spawn()
        .context("could not start cargo")?;
    let done = work();
    if done.is_err() {
        build.kill()?;
    }
    // If it fails, the tests fail with the same errors.
    build.wait()?;
    done
}

fn build_command() -> Command {
    let mut command = cargo(["test", "--workspace", "--exclude", fuzz::PACKAGE]);
    command.args(["--locked", "--all-targets", "--no-run"]);
    command
}

fn has_nextest() -> bool {
    which::which("cargo-nextest").is_ok()
}

fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The names of all targets with tests that are not in a library or a program.
fn test_targets() -> Result<Vec<String>> {
    let mut command = cargo(["metadata", "--format-version=1", "--no-deps", "--locked"]);
    let output = command.output().context("could not start cargo")?;
    let metadata: Value =
        serde_json::from_slice(&output.stdout).context("cargo metadata printed no JSON")?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let targets = packages.filter_map(|package| package["targets"].as_array());
    let tests = targets
        .flatten()
        .filter(|target| target["kind"] == json!(["test"]));
    Ok(tests
        .filter_map(|target| Some(target["name"].as_str()?.to_owned()))
        .collect())
}

/// Runs commands one after another, and those of a group at the same time.
fn run_commands(groups: Vec<Vec<Command>>, environment: &[(&str, &str)]) -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let mut outcome = Ok(());
    for mut commands in groups {
        for command in &mut commands {
            command.envs(environment.iter().copied());
            command.env(SKIPS, file.path());
        }
        // All commands run even if one fails, so that all failures are reported.
        outcome = outcome.and(run_together("tests", &mut commands));
    }
    let skipped = skipped(&std::fs::read_to_string(file.path())?);
    say(&format!(
        "\n==> skipped tests: {}{}",
        skipped.len(),
        skips::list(&skipped)
    ));
    skipped.into_iter().for_each(skips::note);
    outcome
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

/// The commands that run the tests, in groups that run one after another. Each test runs in one of them. `named` is the number
/// of threads for the tests of `only`. `targets` are the names of all targets with tests.
fn test_commands(
    only: &[&str],
    but: &[&str],
    nextest: bool,
    named: usize,
    targets: &[String],
) -> Vec<Vec<Command>> {
    if nextest {
        let command = cargo(["nextest", "run", "--workspace", "--locked", "--"]);
        return vec![vec![with_words(command, only, but)]];
    }
    let test = |targets: &[&str], threads: usize| {
        let mut command = cargo(["test", "--workspace", "--locked"]);
        // They would start the fuzz targets without a limit.
        command.args(["--exclude", fuzz::PACKAGE]).args(targets);
        // All tests run even if one fails, as in the settings of nextest.
        command.args(["--no-fail-fast", "--"]);
        command.arg(format!("--test-threads={threads}"));
        command
    };
    if !only.is_empty() {
        let command = test(&["--all-targets"], named);
        return vec![vec![with_words(command, only, but)]];
    }
    let mut others = vec!["--lib", "--bins", "--examples", "--benches"];
    let is_waiting = |target: &&String| WAITING.contains(&target.as_str());
    for target in targets.iter().filter(|target| !is_waiting(target)) {
        others.extend(["--test", target]);
    }
    let waiting = WAITING.map(|target| ["--test", target]);
    let [of_waiting, of_others] = BESIDE;
    let together = [
        test(waiting.as_flattened(), of_waiting),
        test(&others, of_others),
    ];
    vec![
        together
            .map(|command| with_words(command, &[], &[&ALONE, but].concat()))
            .into(),
        vec![with_words(test(&["--all-targets"], 1), &ALONE, but)],
    ]
}

fn with_words(mut command: Command, only: &[&str], but: &[&str]) -> Command {
    command.args(only);
    command.args(but.iter().flat_map(|word| ["--skip", word]));
    command
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
    use super::*;

    fn lines(only: &[&str], but: &[&str], nextest: bool) -> Vec<String> {
        let targets = ["it", "redis", "run"].map(str::to_owned);
        let commands = test_commands(only, but, nextest, 2, &targets);
        commands.iter().flatten().map(command_line).collect()
    }

    #[test]
    fn cargo_is_called_as_on_the_command_line() {
        // Cargo has set this variable for this test.
        let command = cargo(["test"]);
        let mut removed = command.get_envs().filter(|(_, value)| value.is_none());
        assert!(removed.any(|(name, _)| name == "CARGO_MANIFEST_DIR"));
    }

    #[test]
    fn what_one_command_leaves_out_another_runs() {
        let [waiting, others, alone] = &lines(&[], &["chart::"], false)[..] else {
            panic!("not three commands");
        };
        let both = " --test it --test redis --no-fail-fast ";
        assert!(waiting.contains(both), "{waiting}");
        for target in WAITING {
            assert!(!others.contains(&format!(" --test {target} ")), "{others}");
        }
        for kind in ["--lib", "--bins", "--examples", "--benches", "--test run"] {
            assert!(others.contains(&format!(" {kind} ")), "{kind}: {others}");
        }
        for line in [waiting, others] {
            let but = " --skip failure:: --skip wrong_inputs --skip pressure:: --skip chart::";
            assert!(line.ends_with(but), "{line}");
        }
        assert!(
            alone.ends_with(" --test-threads=1 failure:: wrong_inputs pressure:: --skip chart::"),
            "{alone}"
        );
    }

    #[test]
    fn targets_with_tests_are_known() {
        let targets = test_targets().unwrap();
        for target in ["it", "redis", "run", "serve"] {
            assert!(targets.iter().any(|name| name == target), "{targets:?}");
        }
    }

    #[test]
    fn tests_that_are_named_are_run_by_one_command_whatever_fails_before_them() {
        let named = lines(&["plan"], &[], false);
        let [line] = &named[..] else {
            panic!("{named:?}");
        };
        assert!(line.contains(" --no-fail-fast -- "), "{line}");
        assert!(line.ends_with(" plan"), "{line}");
    }

    #[test]
    fn nextest_gets_the_same_arguments() {
        let lines = lines(&["plan"], &["chart::"], true);
        assert_eq!(lines.len(), 1);
        assert!(lines[0].ends_with(" -- plan --skip chart::"), "{lines:?}");
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
