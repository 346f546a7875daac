//! `cargo xtask test`: unit tests and journeys, without the tests that the stages of `cargo xtask ci` run. Or the named stages.
//! Either of them several times, also on a busy machine.

use std::num::NonZeroUsize;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;

use anyhow::{Context as _, Result};

use crate::ci::{End, Options, Stage};
use crate::setup::kubernetes::Release;
use crate::setup::{self, Purpose};
use crate::suite::{self, Selection, run_tests};
use crate::terminal::{complain, say};
use crate::times::SUITE;
use crate::{cluster, staged};

/// Keeps one processor busy for as long as the process that started it lives.
const LOOP: &str =
    "while kill -0 $PPID; do i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; done";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Do not check the programs that the tests need; stages always do
    #[arg(long, conflicts_with = "stages")]
    no_setup: bool,
    /// Run these stages of `cargo xtask ci` instead of the tests that belong to no stage
    #[arg(value_enum)]
    stages: Vec<Stage>,
    /// Run them so many times, and say how often each failed
    #[arg(long, value_name = "N", default_value = "1")]
    repeat: NonZeroUsize,
    /// Keep all processors busy meanwhile, as on a machine that others use too
    #[arg(long)]
    busy: bool,
    /// Use the cluster of `KUBECONFIG` instead of a new control plane
    #[arg(long, requires = "stages")]
    existing: bool,
    /// Use the release of Kubernetes with this minor instead of the newest
    #[arg(long, value_name = "MINOR", value_parser = Release::of, requires = "stages", conflicts_with = "existing")]
    kubernetes: Option<Release>,
    /// Run only tests whose names contain one of these; without a stage, those of all stages too
    #[arg(last = true)]
    filters: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let options = Options {
        filters: args.filters.clone(),
        existing: args.existing.then(cluster::existing).transpose()?,
        release: args.kubernetes,
    };
    let _load = args.busy.then(Load::start).transpose()?;
    let mut ends = Vec::new();
    for _ in 0..args.repeat.get() {
        if args.stages.is_empty() {
            ends.push(End::of(SUITE, || suite(args))?);
        }
        for stage in &args.stages {
            ends.push(End::of(&stage.name(), || stage.run(&options))?);
        }
    }
    let passed = ends.iter().filter(|end| end.passed).count();
    if ends.len() > 1 {
        let lines: Vec<_> = ends.iter().map(|end| end.line.as_str()).collect();
        say(&format!(
            "\n{}\n==> passed {passed} of {}",
            lines.join("\n"),
            ends.len()
        ));
    }
    Ok(if passed == ends.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The tests that belong to no stage, or all with the words that were asked for.
fn suite(args: &Args) -> Result<()> {
    if !args.no_setup {
        suite::while_building(|| setup::ensure(&[Purpose::Tests]))?;
    }
    let filters: Vec<_> = args.filters.iter().map(String::as_str).collect();
    let of_stages = staged::words();
    run_tests(&Selection {
        only: &filters,
        // What is named is run, whichever stage it belongs to.
        but: if filters.is_empty() { &of_stages } else { &[] },
        ..Selection::default()
    })
}

/// A process for each processor that does nothing else. Ended on drop.
struct Load(Vec<Child>);

impl Load {
    fn start() -> Result<Self> {
        let count = thread::available_parallelism().map_or(1, usize::from);
        let mut load = Self(Vec::new());
        for _ in 0..count {
            let process = Command::new("sh")
                .args(["-c", LOOP])
                .stderr(Stdio::null())
                .spawn();
            load.0.push(process.context("no shell")?);
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for process in &mut self.0 {
            let ended = process.kill().and_then(|()| process.wait());
            if let Err(error) = ended {
                complain(&format!("a busy process may still run: {error}"));
            }
        }
    }
}
