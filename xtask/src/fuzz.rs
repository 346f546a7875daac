//! `cargo xtask fuzz`: gives random input to every reader of foreign data. The targets and their seeds are in `fuzz`; the
//! engine is linked into the targets. This module knows how to build and run them, but not what they read.
//!
//! The short run is the stage `cargo xtask ci fuzz`. It measures coverage only in Mayfly's own crates, so that it can use the
//! dependencies that the tests have compiled. The long run builds everything again, optimised, and with an address sanitizer
//! if there is a nightly toolchain.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::BufRead as _;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::terminal::{command_line, run_stage, say};
use crate::workspace_root;

/// The limits of each target in the short run; the first one that is reached ends the target. The inputs are the same in each
/// run, unless the time limit is reached first, or the code under test is not deterministic, as with the order of a hash map.
const SHORT_RUNS: u32 = 10_000;
const SHORT_TIME: Duration = Duration::from_secs(5);
/// The limits of time and memory for one input. The program itself needs a large part of the memory.
const LIMITS: [&str; 2] = ["-timeout=20", "-rss_limit_mb=2048"];
/// The coverage flags of cargo-fuzz.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";
pub(crate) const PACKAGE: &str = "mayfly-fuzz";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Names of files in `fuzz/fuzz_targets`, without `.rs` [default: all]
    targets: Vec<String>,
    /// The run of `cargo xtask ci fuzz`: seconds instead of minutes, and with a fast build
    #[arg(long, conflicts_with_all = ["time", "keep"])]
    short: bool,
    /// Running time of each target
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = humantime::parse_duration)]
    time: Duration,
    /// Number of targets that run at the same time [default: the number of processors]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Afterwards, copy the inputs that reach new code to `fuzz/corpus`
    #[arg(long)]
    keep: bool,
    /// Run one target with only this file, for example to repeat a failure
    #[arg(long, value_name = "FILE", conflicts_with_all = ["jobs", "keep"])]
    input: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let chosen = choose(&targets()?, &args.targets)?;
    let programs = if args.short {
        build_beside_tests(&chosen)?
    } else {
        build_everything()?
    };
    match &args.input {
        Some(input) => replay(&programs, &chosen, input)?,
        None if args.short => run_short(&programs, &chosen, args.jobs)?,
        None => run_long(&programs, &chosen, args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The short run of all targets: every seed, and a fixed number of inputs that are generated from the seeds.
pub(crate) fn short() -> Result<()> {
    let all = targets()?;
    run_short(&build_beside_tests(&all)?, &all, None)
}

fn replay(programs: &Programs, chosen: &[String], input: &Path) -> Result<()> {
    let [target] = chosen else {
        bail!("`--input` needs exactly one target");
    };
    let mut command = Command::new(program(programs, target)?);
    run_stage(target, command.arg(input).args(LIMITS))
}

fn run_short(programs: &Programs, chosen: &[String], jobs: Option<NonZeroUsize>) -> Result<()> {
    // New inputs are not kept, because the seeds in the repository are selected by hand.
    let found = tempfile::tempdir().context("no folder for temporary files")?;
    let limits = Limits {
        runs: Some(SHORT_RUNS),
        time: SHORT_TIME,
    };
    run_all(programs, chosen, &limits, found.path(), jobs)
}

fn run_long(programs: &Programs, chosen: &[String], args: &Args) -> Result<()> {
    let found = workspace_root().join("target/fuzz/corpus");
    let limits = Limits {
        runs: None,
        time: args.time,
    };
    run_all(programs, chosen, &limits, &found, args.jobs)?;
    for target in chosen.iter().filter(|_| args.keep) {
        let mut merge = Command::new(program(programs, target)?);
        merge
            .arg("-merge=1")
            .args([seeds(target), found.join(target)])
            .stderr(Stdio::null());
        run_stage(&format!("seeds of {target}"), &mut merge)?;
    }
    Ok(())
}

fn targets() -> Result<Vec<String>> {
    let folder = workspace_root().join("fuzz/fuzz_targets");
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).context("no fuzz targets")? {
        let path = entry.context("no fuzz targets")?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        names.push(name.into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

fn choose(all: &[String], named: &[String]) -> Result<Vec<String>> {
    if let Some(unknown) = named.iter().find(|name| !all.contains(name)) {
        bail!("`{unknown}` is not one of the targets: {}", all.join(", "));
    }
    Ok(if named.is_empty() { all } else { named }.to_vec())
}

fn seeds(target: &str) -> PathBuf {
    workspace_root().join("fuzz/corpus").join(target)
}

type Programs = BTreeMap<String, PathBuf>;

fn program<'p>(programs: &'p Programs, target: &str) -> Result<&'p Path> {
    let path = programs.get(target).map(PathBuf::as_path);
    path.with_context(|| format!("`{target}` is not listed in fuzz/Cargo.toml"))
}

/// Builds the targets like tests of the workspace, so that they share all dependencies and features.
fn build_beside_tests(targets: &[String]) -> Result<Programs> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["test", "--no-run", "--quiet", "--locked", "--workspace"])
        .args(targets.iter().flat_map(|target| ["--bin", target]))
        .env(
            "RUSTC_WORKSPACE_WRAPPER",
            workspace_root().join("fuzz/instrument"),
        );
    build(&mut cargo)
}

fn build_everything() -> Result<Programs> {
    let nightly = host_of(Command::new("rustup").args(["run", "nightly", "rustc", "-vV"]));
    let (mut cargo, host, flags) = if let Some(host) = nightly {
        let mut cargo = Command::new("rustup");
        cargo.args(["run", "nightly", "cargo"]);
        (cargo, host, format!("{COVERAGE} -Zsanitizer=address"))
    } else {
        say("there is no nightly toolchain, so the address sanitizer is off");
        let host = host_of(Command::new("rustc").arg("-vV")).context("`rustc` does not answer")?;
        let cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        (cargo, host, COVERAGE.to_owned())
    };
    cargo
        .args(["build", "--locked", "--package", PACKAGE, "--bins"])
        // With `--target`, the flags do not apply to build scripts.
        .args(["--profile", "fuzz", "--target", &host])
        .arg("--target-dir")
        .arg(workspace_root().join("target/fuzz"))
        .env("RUSTFLAGS", flags);
    build(&mut cargo)
}

fn host_of(rustc: &mut Command) -> Option<String> {
    let output = rustc.stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "))?;
    output.status.success().then(|| host.to_owned())
}

/// Runs cargo and reads the paths of the programs from its messages.
fn build(cargo: &mut Command) -> Result<Programs> {
    cargo
        .arg("--message-format=json-render-diagnostics")
        .current_dir(workspace_root())
        .stdout(Stdio::piped());
    let line = command_line(cargo);
    say(&format!("\n==> fuzz targets: {line}"));
    let mut child = cargo
        .spawn()
        .with_context(|| format!("could not start `{line}`"))?;
    let messages = child.stdout.take().context("its output is a pipe")?;
    let mut programs = Programs::new();
    for message in std::io::BufReader::new(messages).lines() {
        let message = message.with_context(|| format!("could not read from `{line}`"))?;
        let message: Value = serde_json::from_str(&message).unwrap_or_default();
        if let (Some(path), Some(name)) = (
            message["executable"].as_str(),
            message["target"]["name"].as_str(),
        ) {
            programs.insert(name.to_owned(), path.into());
        }
    }
    let status = child
        .wait()
        .with_context(|| format!("could not wait for `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(programs)
}

struct Limits {
    runs: Option<u32>,
    time: Duration,
}

/// Runs the targets, a few at a time, and fails with the names of the targets that failed. Inputs that reach new code go to
/// `found`, in a folder for each target.
fn run_all(
    programs: &Programs,
    targets: &[String],
    limits: &Limits,
    found: &Path,
    jobs: Option<NonZeroUsize>,
) -> Result<()> {
    let jobs = match jobs {
        Some(jobs) => jobs,
        None => thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
    };
    let waiting = Mutex::new(targets.iter());
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..jobs.get().min(targets.len()) {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().ok().and_then(|mut waiting| waiting.next());
                    let Some(target) = next else { break };
                    let outcome = run_one(programs, target, limits, found);
                    match outcome {
                        Ok(summary) => say(&format!("{target:>16}: {summary}")),
                        Err(error) => {
                            say(&format!("{target:>16}: {error:#}"));
                            if let Ok(mut failed) = failed.lock() {
                                failed.push(target.as_str());
                            }
                        }
                    }
                }
            });
        }
    });
    let mut failed = failed.into_inner().unwrap_or_default();
    failed.sort_unstable();
    if failed.is_empty() {
        return Ok(());
    }
    bail!("fuzz targets failed: {}", failed.join(", "))
}

fn run_one(programs: &Programs, target: &str, limits: &Limits, found: &Path) -> Result<String> {
    let own = found.join(target);
    let artifacts = workspace_root().join("fuzz/artifacts").join(target);
    for folder in [&own, &artifacts] {
        fs::create_dir_all(folder).with_context(|| format!("no folder {}", folder.display()))?;
    }
    let seeds = seeds(target);
    if !seeds.is_dir() {
        bail!("it has no seeds in fuzz/corpus/{target}");
    }
    let mut prefix = OsString::from("-artifact_prefix=");
    prefix.push(artifacts.join(""));
    // The files of an aborted target are removed with this folder.
    let temporary = tempfile::tempdir().context("no folder for temporary files")?;
    let mut command = Command::new(program(programs, target)?);
    command
        .arg(own)
        .args(LIMITS)
        .arg(prefix)
        .arg(format!("-max_total_time={}", limits.time.as_secs().max(1)))
        .args(["-print_final_stats=1", "-close_fd_mask=1"])
        .env("TMPDIR", temporary.path())
        .current_dir(workspace_root());
    match limits.runs {
        Some(runs) => command.args([&format!("-runs={runs}"), "-seed=1", &in_order(&seeds)?]),
        None => command.arg(seeds),
    };
    let output = command.output().context("it does not start")?;
    judge(
        target,
        output.status.success(),
        &String::from_utf8_lossy(&output.stderr),
    )
}

/// The option that lists the files of a folder, sorted by name. The generated inputs depend on the order of the seeds.
fn in_order(seeds: &Path) -> Result<String> {
    let mut files = Vec::new();
    for entry in fs::read_dir(seeds).context("no seeds")? {
        files.push(entry.context("no seeds")?.path().display().to_string());
    }
    files.sort_unstable();
    Ok(format!("-seed_inputs={}", files.join(",")))
}

/// The result of a target from the engine's output. `again` is the command that runs the target again.
fn judge(again: &str, passed: bool, log: &str) -> Result<String> {
    if !passed {
        let artifact = log
            .lines()
            .find_map(|line| line.split_once("Test unit written to "))
            .map(|(_, path)| path);
        let hint = artifact
            .map(|path| format!("\n  to repeat: {again} --input {path}"))
            .unwrap_or_default();
        bail!("{}{hint}", fault(log));
    }
    let reached = after(log, " cov: ").unwrap_or(0);
    if reached == 0 {
        bail!("the code of the target reports no coverage, so no input was useful");
    }
    let runs = after(log, "number_of_executed_units: ").unwrap_or(0);
    let new = after(log, "new_units_added: ").unwrap_or(0);
    Ok(format!(
        "{runs} inputs, {reached} places in the code, {new} inputs reached new ones"
    ))
}

/// The part of a log with the failure: from the panic or the engine's error to the stack.
fn fault(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    let first = lines
        .iter()
        .position(|line| line.contains(" panicked at ") || line.contains("ERROR: "));
    let first = first.unwrap_or(lines.len().saturating_sub(20));
    let told: Vec<_> = lines[first..]
        .iter()
        .take_while(|line| !line.starts_with("stack backtrace:"))
        .take(20)
        .copied()
        .collect();
    told.join("\n  ")
}

/// The last number after `label`.
fn after(log: &str, label: &str) -> Option<u64> {
    let (_, rest) = log.rsplit_once(label)?;
    let digits = rest.trim_start();
    let end = digits
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(digits.len());
    digits[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_built_and_has_seeds() {
        let manifest = fs::read_to_string(workspace_root().join("fuzz/Cargo.toml")).unwrap();
        let targets = targets().unwrap();
        assert!(!targets.is_empty());
        for target in targets {
            let listed = format!("\nname = \"{target}\"\npath = \"fuzz_targets/{target}.rs\"\n");
            assert!(manifest.contains(&listed), "{target}");
            assert!(
                fs::read_dir(seeds(&target)).unwrap().count() > 0,
                "{target}"
            );
        }
    }

    #[test]
    fn both_builds_report_the_same_coverage() {
        let wrapper = fs::read_to_string(workspace_root().join("fuzz/instrument")).unwrap();
        for flag in COVERAGE.split_whitespace() {
            assert!(wrapper.contains(flag), "{flag}");
        }
    }

    #[test]
    fn a_finding_is_shown_with_the_command_to_repeat_it() {
        let log = "INFO: Seed: 1\n\nthread '<unnamed>' (7) panicked at fuzz/fuzz_targets/pairs.rs:12:5:\n\
                   no\nstack backtrace:\n   0: rust\nartifact_prefix='x/'; Test unit written to x/crash-1\n";
        let told = judge("cargo xtask fuzz pairs", false, log)
            .unwrap_err()
            .to_string();
        assert_eq!(
            told,
            "thread '<unnamed>' (7) panicked at fuzz/fuzz_targets/pairs.rs:12:5:\n  no\n  \
             to repeat: cargo xtask fuzz pairs --input x/crash-1"
        );
    }

    #[test]
    fn a_target_that_learns_nothing_has_failed() {
        let stats = "stat::number_of_executed_units: 20\nstat::new_units_added:          3\n";
        assert!(judge("cargo xtask fuzz pairs", true, stats).is_err());
        let log =
            format!("#2\tINITED cov: 7 ft: 8\n#20\tDONE   cov: 12 ft: 30 corp: 3/9b\n{stats}");
        let summary = judge("cargo xtask fuzz pairs", true, &log).unwrap();
        assert_eq!(
            summary,
            "20 inputs, 12 places in the code, 3 inputs reached new ones"
        );
    }
}
