//! `cargo xtask test`: everything that must hold before a change lands, cheapest first.
//!
//! Lints and tests use the default profile and features, so dependencies are compiled once for checking and
//! once for running. Warnings are refused through clippy's arguments: `RUSTFLAGS` would compile them again.

use std::ffi::OsStr;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::Result;

use crate::terminal::{run_stage, say};
use crate::{fuzz, setup, workspace_root};

/// Names the file to which tests write that they are skipped (`test_peers::skips`).
const SKIPS: &str = "MAYFLY_TEST_SKIPS";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Skip formatting, lints and dependency checks
    #[arg(long)]
    no_lint: bool,
    /// Skip making sure of the programs the tests use
    #[arg(long)]
    no_setup: bool,
    /// Skip the short run of the fuzz targets
    #[arg(long)]
    no_fuzz: bool,
    /// Run only tests whose names contain one of these
    #[arg(last = true)]
    filters: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let started = Instant::now();
    if !args.no_setup {
        setup::ensure()?;
    }
    if !args.no_lint {
        lint()?;
    }
    if args.filters.is_empty() {
        run_stage(
            "documentation tests",
            &mut cargo(["test", "--quiet", "--workspace", "--locked", "--doc"]),
        )?;
    }
    if args.filters.is_empty() && !args.no_fuzz {
        fuzz::short()?;
    }
    // Last, so that the runner's own summary closes the output.
    let nextest = which::which("cargo-nextest").is_ok();
    let skips = tempfile::NamedTempFile::new()?;
    let mut command = test_command(&args.filters, nextest);
    let tests = run_stage("tests", command.env(SKIPS, skips.path()));
    say(&skipped(&std::fs::read_to_string(skips.path())?));
    tests?;
    say(&format!(
        "==> all of it: {:.1} s",
        started.elapsed().as_secs_f64()
    ));
    Ok(ExitCode::SUCCESS)
}

/// How many tests were skipped, and why.
fn skipped(lines: &str) -> String {
    let mut lines: Vec<&str> = lines.lines().collect();
    lines.sort_unstable();
    let mut told = format!("\n==> skipped tests: {}", lines.len());
    for line in lines {
        told.push_str("\n    ");
        told.push_str(line);
    }
    told
}

fn lint() -> Result<()> {
    run_stage("formatting", &mut cargo(["fmt", "--all", "--check"]))?;
    run_stage(
        "lints",
        &mut cargo([
            "clippy",
            "--quiet",
            "--workspace",
            "--all-targets",
            "--locked",
            "--",
            "-D",
            "warnings",
        ]),
    )?;
    if which::which("cargo-deny").is_ok() {
        // Advisories need the network and change by the day; CI asks for them apart.
        run_stage(
            "dependencies",
            &mut cargo(["deny", "check", "bans", "licenses", "sources"]),
        )
    } else {
        say("\n==> dependencies: not checked, cargo-deny is not installed");
        Ok(())
    }
}

fn test_command(filters: &[String], nextest: bool) -> Command {
    let mut command = if nextest {
        cargo(["nextest", "run", "--workspace", "--locked"])
    } else {
        let mut command = cargo(["test", "--workspace", "--locked", "--all-targets"]);
        // `--all-targets` would start the fuzz targets without a limit.
        command.args(["--exclude", fuzz::PACKAGE]);
        // As the settings of nextest say: one failure tells less than all of them.
        command.arg("--no-fail-fast");
        command
    };
    if !filters.is_empty() && !nextest {
        command.arg("--");
    }
    command.args(filters);
    command
}

fn cargo<I: IntoIterator<Item: AsRef<OsStr>>>(args: I) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(workspace_root());
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::command_line;

    #[test]
    fn without_nextest_every_binary_runs_whatever_fails_before_it() {
        let command = command_line(&test_command(&["plan".to_owned()], false));
        assert!(command.ends_with(" --no-fail-fast -- plan"), "{command}");
    }

    #[test]
    fn skipped_tests_are_counted_and_shown_with_their_reasons() {
        assert_eq!(skipped(""), "\n==> skipped tests: 0");
        assert_eq!(
            skipped("SKIPPED b: no root\nSKIPPED a: no kubectl\n"),
            "\n==> skipped tests: 2\n    SKIPPED a: no kubectl\n    SKIPPED b: no root"
        );
    }
}
