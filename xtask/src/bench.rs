//! `cargo xtask bench`: measures Mayfly and compares it with baselines from the same run, so that numbers of different machines
//! are comparable.

mod executor;
mod first_run;
mod kubernetes;
mod log_path;
mod memory;
mod pipeline;
mod pools;
mod providers;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};

use crate::report::{self, Goal, Measurement};
use crate::terminal::{command_line, complain, say};
use crate::{fuzz, skips, target_folder, workspace_root};

const MEGABYTE: f64 = 1_000_000.0;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of runs of each side of a comparison
    #[arg(long, default_value_t = 15)]
    runs: usize,
    /// Fail if a goal is missed, or if something cannot be measured
    #[arg(long)]
    check: bool,
    /// Format of the results
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
    /// Measure only these
    #[arg(value_enum)]
    only: Vec<Subject>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Output {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Subject {
    /// Wall time of plan and apply, divided by the time of the tool without Mayfly
    Pipeline,
    /// Wall time of `api-launcher run` on `examples/hello`, divided by the time of the same commands of the tool
    Run,
    /// Size of the executor binary
    Size,
    /// Peak memory of the executor with 100 MB of tool output: with a folder alone, and with S3 and Redis
    Memory,
    /// Lines per second through the log path, compared with copying the same bytes
    Log,
    /// Time from a dispatch to its Job, and launches per second, compared with only creating the same objects
    Launches,
    /// Time of the README's first command on a fresh clone, and the crates that take most of it
    FirstRun,
    /// Memory with 10,000 live Jobs watched, and time from a pod's status to its verdict
    Watching,
    /// Plan and apply through the store of a hub, divided by the time with the keys of the same store
    Artifacts,
    /// `init` with three large providers, compared with the tool alone: from an empty store, and from a full one
    Providers,
    /// Time from a dispatch to a pool until its executor starts, the cost of an idle agent, and a hub with 10,000 runs and 500 agents
    Pools,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let wanted = |subject| args.only.is_empty() || args.only.contains(&subject);
    let executor = || {
        let built = build(&["--package", "executor", "--bin", "executor"])?;
        anyhow::Ok(built.join("executor"))
    };
    let mut measurements = Vec::new();
    if wanted(Subject::Pipeline) {
        measurements.extend(pipeline::measure(&executor()?, args.runs)?);
    }
    if wanted(Subject::Run) {
        let built = build(&["--package", "api-launcher", "--bin", "api-launcher"])?;
        let launcher = built.join("api-launcher");
        measurements.push(pipeline::measure_run(&launcher, args.runs)?);
    }
    if wanted(Subject::Size) {
        measurements.push(size(&executor()?)?);
    }
    if wanted(Subject::Memory) {
        measurements.extend(memory::measure(&executor()?)?);
    }
    if wanted(Subject::Log) {
        measurements.extend(log_path::measure(args.runs)?);
    }
    if wanted(Subject::Launches) {
        measurements.extend(kubernetes::launches(args.runs)?);
    }
    if wanted(Subject::Watching) {
        measurements.extend(kubernetes::watching(args.runs)?);
    }
    if wanted(Subject::Artifacts) {
        measurements.extend(pools::artifacts(&executor()?, args.runs)?);
    }
    if wanted(Subject::Providers) {
        measurements.extend(providers::measure(&executor()?, args.runs)?);
    }
    if wanted(Subject::Pools) {
        measurements.extend(pools::measure(args.runs)?);
    }
    if wanted(Subject::FirstRun) {
        measurements.extend(first_run::measure()?);
    }
    match args.output {
        Output::Text => say(&format!("\n{}", report::table(&measurements))),
        Output::Json => say(&format!("{:#}", report::as_json(&measurements))),
    }
    ensure_measured(&measurements)?;
    if args.check {
        judge(&measurements, &skips::take())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails if a measurement has measured nothing: each of them takes time, memory or requests.
fn ensure_measured(measurements: &[Measurement]) -> Result<()> {
    for Measurement { name, value, .. } in measurements {
        // The median of no samples is no number.
        let is_measured = value.is_finite() && *value > 0.0;
        ensure!(is_measured, "`{name}` has measured nothing: {value}");
    }
    Ok(())
}

/// Fails if a goal is missed, or if something was not measured.
fn judge(measurements: &[Measurement], skipped: &[String]) -> Result<()> {
    let missed = measurements.iter().filter(|measurement| !measurement.met());
    let missed: Vec<_> = missed.map(|measurement| measurement.name).collect();
    ensure!(missed.is_empty(), "goals are missed: {}", missed.join(", "));
    ensure!(
        skipped.is_empty(),
        "not everything was measured:{}",
        skips::list(skipped)
    );
    Ok(())
}

/// The stage of CI. Checks the goals of measurements that do not depend on the machine's load. Prints the others that need no
/// additional build.
pub(crate) fn stage() -> Result<()> {
    let judged = vec![Subject::Memory, Subject::Size];
    let shown = vec![Subject::Pipeline];
    for (check, only) in [(true, judged), (false, shown)] {
        let args = Args {
            runs: 5,
            check,
            output: Output::Text,
            only,
        };
        run(&args)?;
    }
    Ok(())
}

/// Builds one target statically, as for an image, and returns the folder of the binaries.
fn build(what: &[&str]) -> Result<PathBuf> {
    let mut command = cargo();
    command
        .args(["rustc", "--quiet", "--profile", "dist", "--locked"])
        .args(what)
        .args(["--", "-C", "target-feature=+crt-static"])
        .args(["-C", "link-arg=-Wl,-z,pack-relative-relocs"]);
    run_stage_quietly(&mut command)?;
    Ok(target_folder().join("dist"))
}

/// Builds a program that measures nothing itself, with the profile and the features of the tests: in CI most of it is built.
fn build_of_tests(example: &str) -> Result<PathBuf> {
    let mut command = cargo();
    command
        .args(["build", "--quiet", "--locked", "--workspace"])
        .args(["--exclude", fuzz::PACKAGE, "--example", example]);
    run_stage_quietly(&mut command)?;
    Ok(target_folder().join("debug/examples").join(example))
}

/// Runs a stage with its output on stderr. Only results go to stdout, so that `--output json` can be piped.
fn run_stage_quietly(command: &mut Command) -> Result<()> {
    let line = command_line(command);
    complain(&format!("==> {line}"));
    let status = command.status();
    let status = status.with_context(|| format!("could not start `{line}`"))?;
    ensure!(status.success(), "`{line}` failed ({status})");
    Ok(())
}

fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root());
    command
}

/// The size of the binary as in an image, without symbols.
fn size(binary: &std::path::Path) -> Result<Measurement> {
    let folder = tempfile::tempdir()?;
    let stripped = folder.path().join("executor");
    let mut strip = Command::new("strip");
    run_stage_quietly(strip.arg("-o").arg(&stripped).arg(binary))?;
    #[expect(
        clippy::cast_precision_loss,
        reason = "a binary is far below 2^52 bytes"
    )]
    let bytes = stripped.metadata()?.len() as f64;
    Ok(Measurement {
        name: "executor binary",
        value: bytes / MEGABYTE,
        unit: "MB",
        goal: Some(Goal::AtMost(16.0)),
        detail: "`dist` profile, static, stripped".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_fails_with_a_missed_goal_and_with_what_was_not_measured() {
        let size = |value| Measurement {
            name: "executor binary",
            value,
            unit: "MB",
            goal: Some(Goal::AtMost(16.0)),
            detail: String::new(),
        };
        ensure_measured(&[size(14.0)]).unwrap();
        judge(&[size(14.0)], &[]).unwrap();
        let missed = judge(&[size(14.0), size(17.0)], &[]).unwrap_err();
        assert_eq!(missed.to_string(), "goals are missed: executor binary");
        let skipped = ["launches: no API server".to_owned()];
        let skipped = judge(&[size(14.0)], &skipped).unwrap_err().to_string();
        assert!(skipped.contains("no API server"), "{skipped}");
        for nothing in [0.0, f64::NAN, f64::INFINITY] {
            let error = ensure_measured(&[size(nothing)]).unwrap_err().to_string();
            assert!(error.contains("has measured nothing"), "{error}");
        }
    }
}
