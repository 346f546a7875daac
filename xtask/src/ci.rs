//! `cargo xtask ci`: the checks besides unit tests and journeys, in named stages. `.ci/run` runs `cargo xtask test` and all
//! stages.

use std::fs::File;
use std::io::{self, Seek as _};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::setup::kubernetes::Release;
use crate::setup::{self, Purpose, unittest};
use crate::skips::{self, unless_skipped};
use crate::staged::Staged;
use crate::suite::{self, cargo};
use crate::terminal::{command_line, complain, run_stage, say};
use crate::times::{self, Part, SUITE};
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
    /// Run these stages beside the others with the lowest priority, and show their output at the end
    #[arg(long, value_enum, value_name = "STAGES", value_delimiter = ',')]
    beside: Vec<Stage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stage {
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

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let stages: Vec<_> = if args.stages.is_empty() {
        let all = Stage::value_variants().iter().copied();
        all.filter(|stage| !args.beside.contains(stage)).collect()
    } else {
        args.stages.clone()
    };
    let beside = Beside::start(&args.beside)?;
    let ends: Vec<_> = stages
        .iter()
        .map(|stage| End::of(&stage.name(), || stage.run(&Options::default())))
        .collect::<Result<_>>()?;
    let passed = beside.end()? && ends.iter().all(|end| end.passed);
    for end in &ends {
        say(&end.line);
    }
    // A stage without tests shows its time itself. Often it is one that runs beside others.
    if stages.iter().any(|stage| stage.staged().is_some()) {
        let names = stages.iter().chain(&args.beside);
        let names = std::iter::once(SUITE.to_owned()).chain(names.map(|stage| stage.name()));
        say(&format!("\n{}", times::tables(&names.collect::<Vec<_>>())));
    }
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Processes that each run a stage while this one runs others. Where one uses a single processor, as to link the benchmarks'
/// program, another uses the second. Ended on drop.
#[derive(Default)]
struct Beside(Vec<(Child, File)>);

impl Beside {
    fn start(stages: &[Stage]) -> Result<Self> {
        let mut beside = Self::default();
        if !stages.is_empty() {
            // Cargo locks its folder while it builds. From here on, only the other processes call it.
            suite::build()?;
        }
        for stage in stages {
            let output = tempfile::tempfile()?;
            let mut command = Command::new("nice");
            command
                .arg("-n19")
                .arg(std::env::current_exe()?)
                .args(["ci", &stage.name()])
                .stdin(Stdio::null())
                .stdout(output.try_clone()?)
                .stderr(output.try_clone()?);
            say(&format!("\n==> beside: {}", command_line(&command)));
            let child = command.spawn().context("could not start `nice`")?;
            beside.0.push((child, output));
        }
        Ok(beside)
    }

    /// Waits for the ends, shows the outputs, and returns whether all stages passed.
    fn end(mut self) -> Result<bool> {
        let mut passed = true;
        for (child, output) in &mut self.0 {
            passed &= child.wait()?.success();
            output.rewind()?;
            say("\n==> beside:");
            io::copy(output, &mut io::stdout())?;
        }
        Ok(passed)
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            if !matches!(child.try_wait(), Ok(None)) {
                continue;
            }
            let ended = child.kill().and_then(|()| child.wait());
            if let Err(error) = ended {
                complain(&format!("stages may still run beside: {error}"));
            }
        }
    }
}

/// How a stage ended.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) passed: bool,
    /// The same with its time, what it skipped, and how to repeat what failed.
    pub(crate) line: String,
}

impl End {
    /// Runs a stage, or the tests that belong to none, and notes its times.
    pub(crate) fn of(name: &str, run: impl FnOnce() -> Result<()>) -> Result<Self> {
        say(&format!("\n==> stage {name}"));
        times::begin(name)?;
        let started = Instant::now();
        let outcome = run();
        if let Err(error) = &outcome {
            complain(&format!("error: stage {name}: {error:#}"));
        }
        let skipped = skips::take();
        let whole = started.elapsed().as_secs_f64();
        let again = times::failed()?;
        let again = again
            .iter()
            .map(|test| format!("\n    failed: {}", again_command(name, test)));
        let line = format!(
            "==> stage {name}: {}, {whole:.1} s{}{}",
            skips::verdict(outcome.is_err(), &skipped),
            again.collect::<String>(),
            skips::list(&skipped)
        );
        times::end(whole)?;
        say(&line);
        Ok(Self {
            passed: outcome.is_ok(),
            line,
        })
    }
}

/// The command that runs one test again.
fn again_command(stage: &str, test: &str) -> String {
    match stage {
        SUITE => format!("cargo xtask test -- {test}"),
        stage => format!("cargo xtask test {stage} -- {test}"),
    }
}

/// What of a stage is run, and with what.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// Only tests whose names contain one of these.
    pub(crate) filters: Vec<String>,
    /// The kubeconfig of a cluster that runs already.
    pub(crate) existing: Option<String>,
    /// Another release of Kubernetes than that of the stage.
    pub(crate) release: Option<Release>,
}

impl Stage {
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value().expect("no stage is hidden");
        value.get_name().to_owned()
    }

    pub(crate) fn run(self, options: &Options) -> Result<()> {
        let filters: Vec<_> = options.filters.iter().map(String::as_str).collect();
        let Some(staged) = self.staged() else {
            ensure!(
                filters.is_empty(),
                "the stage `{}` has no tests to choose from",
                self.name()
            );
            return times::spent(Part::SetUp, || setup::ensure(self.needs())).and_then(|()| {
                match self {
                    Self::Lint => lint(),
                    Self::Fuzz => fuzz::short(),
                    _ => bench::stage(),
                }
            });
        };
        ensure!(
            self == Self::Cluster || (options.existing.is_none() && options.release.is_none()),
            "the stage `{}` chooses its cluster itself: leave out `--existing` and `--kubernetes`",
            self.name()
        );
        times::spent(Part::SetUp, || setup::ensure(self.needs()))?;
        let release = options.release.unwrap_or(Release::NEWEST);
        match self {
            Self::Oldest if filters.is_empty() => staged.run_on(Release::OLDEST, &ON_OLDEST),
            Self::Oldest => staged.run_on(Release::OLDEST, &filters),
            Self::Chart if filters.is_empty() => chart(),
            Self::Tools => tools(&filters),
            _ => match &options.existing {
                Some(kubeconfig) => staged.run_in(Some(kubeconfig), &filters),
                None => staged.run_on(release, &filters),
            },
        }
    }

    /// How its tests are chosen, if it is made of tests.
    fn staged(self) -> Option<Staged> {
        match self {
            Self::Lint | Self::Fuzz | Self::Bench => None,
            Self::Chart => Some(Staged::Chart),
            Self::Cluster | Self::Oldest => Some(Staged::Cluster),
            Self::Tools => Some(Staged::Tools),
            Self::Images => Some(Staged::Images),
            Self::Node => Some(Staged::Node),
            Self::Chaos => Some(Staged::Chaos),
            Self::Pools => Some(Staged::Pools),
            Self::Terrakube => Some(Staged::Terrakube),
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
            Self::Pools => &[Purpose::Tests, Purpose::Pools],
            Self::Tools | Self::Chaos | Self::Terrakube | Self::Bench => &[Purpose::Tests],
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
fn tools(filters: &[&str]) -> Result<()> {
    times::spent(Part::SetUp, || {
        unless_skipped("some tests of the tools", setup::opentofu::ensure())
    })?;
    Staged::Tools.run(filters)
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
    fn what_failed_is_named_with_the_command_that_repeats_it() {
        assert_eq!(again_command(SUITE, "a::b"), "cargo xtask test -- a::b");
        assert_eq!(
            again_command("pools", "a::b"),
            "cargo xtask test pools -- a::b"
        );
    }

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
        let lines: Vec<_> = script.lines().collect();
        // Without `CI`, what cannot run would be skipped.
        assert!(lines.contains(&"export CI=true"));
        assert!(lines.contains(&"cargo xtask test || passed=false"));
        assert_eq!(lines.last(), Some(&"$passed"));
        let tests = lines
            .iter()
            .position(|line| line.starts_with("cargo xtask test "));
        let calls = lines.iter().enumerate();
        let mut calls =
            calls.filter_map(|(at, line)| Some((at, line.split_once("\"$xtask\" ci ")?.1)));
        let (at, call) = calls.next().unwrap();
        assert!(calls.next().is_none() && tests.unwrap() < at);
        assert!(call.ends_with(" || passed=false"), "{call}");
        let mut stages: Vec<_> = call
            .split(" || ")
            .next()
            .unwrap()
            .split([' ', ','])
            .filter(|word| *word != "--beside")
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
