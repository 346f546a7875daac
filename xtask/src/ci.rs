//! `cargo xtask ci`: the checks besides unit tests and journeys, in named stages. `.ci/run` runs `cargo xtask test` and all
//! stages.

use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;

use crate::setup::kubernetes::Release;
use crate::setup::{self, Purpose, unittest};
use crate::skips::{self, unless_skipped};
use crate::staged::Staged;
use crate::suite::cargo;
use crate::terminal::{complain, run_stage, say};
use crate::{bench, fuzz, workspace_root};

/// Where tests depend on the Job controller, events, deletion, times to live, suspension, admission or the kinds of the API
/// server. What the others do with Kubernetes, these do too.
const ON_OLDEST: [&str; 6] = [
    "in_cluster::chart",
    "in_cluster::disruptions",
    "in_cluster::endings",
    "in_cluster::rights",
    "in_cluster::settings",
    "in_cluster::verdicts",
];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The stages to run [default: all]
    #[arg(value_enum)]
    stages: Vec<Stage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Stage {
    /// Formatting, lints, documentation, dependencies
    Lint,
    /// Every fuzz target, for a few seconds each
    Fuzz,
    /// The journeys of the tool, with OpenTofu, Terraform and providers
    Tools,
    /// The journeys of pools, also with runs that lose each process and each call once, and are cut off for a while
    Pools,
    /// The journeys under a platform, with executors as processes
    Terrakube,
    /// Measurements, compared with their baselines and goals
    Bench,
    // Kubernetes may still be built while the stages before run.
    /// The chart with a real Helm, and the objects that it installs
    Chart,
    /// Both images, built and started; needs root
    Images,
    /// Two short journeys, through launchers and through a hub, in which each fault happens once
    Chaos,
    /// The tests that need a cluster, with the control plane of Kubernetes
    Cluster,
    /// Both images on a node with a real kubelet; needs root
    Node,
    /// The tests that depend on what Kubernetes does, with the oldest control plane that the chart supports
    Oldest,
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
        let skipped = skips::take();
        let line = format!(
            "==> stage {name}: {}, {:.1} s{}",
            skips::verdict(outcome.is_err(), &skipped),
            started.elapsed().as_secs_f64(),
            skips::list(&skipped)
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

impl Stage {
    fn name(self) -> String {
        let value = self.to_possible_value().expect("no stage is hidden");
        value.get_name().to_owned()
    }

    fn run(self) -> Result<()> {
        setup::ensure(self.needs())?;
        match self {
            Self::Lint => lint(),
            Self::Fuzz => fuzz::short(),
            Self::Chart => chart(),
            Self::Cluster => Staged::Cluster.run(&[]),
            Self::Oldest => Staged::Cluster.run_on(Release::OLDEST, &ON_OLDEST),
            Self::Tools => tools(),
            Self::Images => Staged::Images.run(&[]),
            Self::Node => Staged::Node.run(&[]),
            Self::Chaos => Staged::Chaos.run(&[]),
            Self::Pools => Staged::Pools.run(&[]),
            Self::Terrakube => Staged::Terrakube.run(&[]),
            Self::Bench => bench::stage(),
        }
    }

    fn needs(self) -> &'static [Purpose] {
        match self {
            // Clippy also compiles the engine of the fuzz targets.
            Self::Lint | Self::Fuzz => &[Purpose::Fuzz],
            Self::Chart | Self::Cluster | Self::Oldest | Self::Node => {
                &[Purpose::Tests, Purpose::Chart]
            }
            Self::Images => &[Purpose::Tests, Purpose::Images],
            Self::Tools | Self::Chaos | Self::Pools | Self::Terrakube | Self::Bench => {
                &[Purpose::Tests]
            }
        }
    }
}

/// The chart's own suites, and its tests that need no cluster.
fn chart() -> Result<()> {
    let program = unless_skipped("suites of the chart", unittest::program());
    let suites = program.and_then(|program| match program {
        Some(program) => run_stage(
            "suites of the chart",
            Command::new(program)
                .args(["--strict", "helm/mayfly"])
                .current_dir(workspace_root()),
        ),
        None => Ok(()),
    });
    // Both run even if the first fails, so that all failures are reported.
    Staged::Chart.run(&[]).and(suites)
}

/// Outside CI, each test whose program is missing is skipped and reported.
fn tools() -> Result<()> {
    unless_skipped("some tests of the tools", setup::opentofu::ensure())?;
    Staged::Tools.run(&[])
}

/// Denies warnings with clippy's arguments, because `RUSTFLAGS` would compile the dependencies again.
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
        "documentation",
        cargo(["doc", "--quiet", "--workspace", "--no-deps", "--locked"])
            .env("RUSTDOCFLAGS", "-D warnings"),
    )?;
    let Some(program) = unless_skipped("dependencies", setup::cargo_deny())? else {
        return Ok(());
    };
    // Advisories change every day, so CI checks them separately.
    run_stage(
        "dependencies",
        Command::new(program)
            .args(["--locked", "check", "bans", "licenses", "sources"])
            .current_dir(workspace_root()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_modules_of_the_oldest_kubernetes_exist() {
        for module in ON_OLDEST {
            let file = format!("tests/it/{}.rs", module.replace("::", "/"));
            assert!(workspace_root().join(&file).is_file(), "{file}");
        }
    }

    #[test]
    fn ci_runs_the_tests_and_each_stage_once() {
        let script = std::fs::read_to_string(workspace_root().join(".ci/run")).unwrap();
        let lines = script.lines().map(str::trim);
        let lines: Vec<_> = lines.filter(|line| !line.starts_with('#')).collect();
        // Without `CI`, what cannot run would be skipped. The lints run beside the rest, and their failure counts too.
        for line in [
            "export CI=true",
            "cargo xtask test",
            "wait \"$beside\" || passed=false",
        ] {
            assert!(lines.contains(&line), "{line}");
        }
        assert_eq!(lines.last(), Some(&"$passed"));
        let mut stages: Vec<_> = lines
            .iter()
            .filter_map(|line| Some(line.split_once("\"$xtask\" ci ")?.1))
            .flat_map(|stages| {
                stages
                    .split(" || ")
                    .next()
                    .unwrap_or_default()
                    .split_whitespace()
            })
            .collect();
        let mut expected: Vec<_> = Stage::value_variants()
            .iter()
            .map(|stage| stage.name())
            .collect();
        stages.sort_unstable();
        expected.sort_unstable();
        assert_eq!(stages, expected);
    }
}
