//! `cargo xtask ci`: what must hold besides unit tests and journeys, in named stages. `.ci/run` is `cargo xtask test`,
//! then all of them.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;

use crate::setup::{self, Purpose};
use crate::suite::{cargo, run_tests};
use crate::terminal::{complain, run_stage, say};
use crate::{bench, cluster, fuzz, node};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which stages; all of them unless named
    #[arg(value_enum)]
    stages: Vec<Stage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Stage {
    /// Formatting, lints, dependencies, examples in the documentation
    Lint,
    /// Every fuzz target for seconds
    Fuzz,
    /// The chart under a real Helm, and what it installs
    Chart,
    /// The tests that have a cluster, against the control plane of Kubernetes
    Cluster,
    /// Both images, built and started; needs root
    Images,
    /// Both images on a node with a real kubelet; needs root
    Node,
    /// A short journey in which everything fails once
    Chaos,
    /// Measurements against their floors and goals
    Bench,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let stages = if args.stages.is_empty() {
        Stage::value_variants()
    } else {
        &args.stages
    };
    let mut summary = String::new();
    let mut failed = false;
    for stage in stages {
        let name = stage.name();
        say(&format!("\n==> stage {name}"));
        let started = Instant::now();
        let outcome = stage.run();
        if let Err(error) = &outcome {
            complain(&format!("error: stage {name}: {error:#}"));
        }
        failed |= outcome.is_err();
        let word = if outcome.is_ok() { "passed" } else { "FAILED" };
        let line = format!(
            "==> stage {name}: {word}, {:.1} s",
            started.elapsed().as_secs_f64()
        );
        say(&line);
        summary.push('\n');
        summary.push_str(&line);
    }
    say(&summary);
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// What the names of the tests contain that are left to a stage.
pub(crate) fn staged_tests() -> Vec<&'static str> {
    let stages = Stage::value_variants().iter();
    stages.filter_map(|stage| stage.tests()).collect()
}

impl Stage {
    fn name(self) -> String {
        let value = self.to_possible_value().expect("no stage is hidden");
        value.get_name().to_owned()
    }

    /// What the names of its tests contain.
    fn tests(self) -> Option<&'static str> {
        match self {
            Self::Chart => Some("chart::"),
            Self::Images => Some("images::"),
            Self::Node => Some(node::TESTS),
            Self::Chaos => Some("in_chaos"),
            // The suite runs them too, in a cluster of their own process.
            Self::Lint | Self::Fuzz | Self::Cluster | Self::Bench => None,
        }
    }

    fn run(self) -> Result<()> {
        setup::ensure(self.needs())?;
        match self {
            Self::Lint => lint(),
            Self::Fuzz => fuzz::short(),
            Self::Chart | Self::Images | Self::Chaos => {
                let named: Vec<_> = self.tests().into_iter().collect();
                run_tests(&named, &[])
            }
            Self::Cluster => cluster::run(&[]),
            Self::Node => node::run(&[]),
            Self::Bench => bench::stage(),
        }
    }

    fn needs(self) -> &'static [Purpose] {
        match self {
            // Clippy compiles the engine of the fuzz targets too.
            Self::Lint | Self::Fuzz => &[Purpose::Fuzz],
            Self::Chart | Self::Cluster | Self::Node => &[Purpose::Tests, Purpose::Chart],
            Self::Images => &[Purpose::Tests, Purpose::Images],
            Self::Chaos | Self::Bench => &[Purpose::Tests],
        }
    }
}

/// Warnings are refused through clippy's arguments: `RUSTFLAGS` would compile the dependencies again.
fn lint() -> Result<()> {
    run_stage("formatting", &mut cargo(["fmt", "--all", "--check"]))?;
    let clippy = |what: &[&str]| {
        let mut command = cargo(["clippy", "--quiet", "--locked"]);
        command.args(what).args(["--", "-D", "warnings"]);
        command
    };
    run_stage("lints", &mut clippy(&["--workspace", "--all-targets"]))?;
    run_stage(
        "lints without Kubernetes",
        &mut clippy(&["--package", "api-launcher", "--no-default-features"]),
    )?;
    run_stage(
        "documentation tests",
        &mut cargo(["test", "--quiet", "--workspace", "--locked", "--doc"]),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ci_runs_the_tests_and_then_all_stages() {
        let script = std::fs::read_to_string(crate::workspace_root().join(".ci/run")).unwrap();
        let commands: Vec<_> = script
            .lines()
            .filter(|line| line.starts_with("cargo "))
            .collect();
        assert_eq!(commands, ["cargo xtask test", "cargo xtask ci"]);
    }

    #[test]
    fn the_tests_of_a_stage_are_those_the_suite_leaves_out() {
        assert_eq!(
            staged_tests(),
            ["chart::", "images::", "real_node::", "in_chaos"]
        );
    }
}
