//! `cargo xtask test`: unit tests and journeys, without the tests that the stages of `cargo xtask ci` run.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::setup::kubernetes::Release;
use crate::setup::{self, Purpose};
use crate::staged::Staged;
use crate::suite::{self, run_tests};
use crate::terminal::say;
use crate::{cluster, skips, staged};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Do not check the programs that the tests need
    #[arg(long)]
    no_setup: bool,
    /// Run the tests that need a cluster, or those on a real node
    #[arg(value_enum)]
    part: Option<Part>,
    /// Use the cluster of `KUBECONFIG` instead of a new control plane
    #[arg(long, requires = "part")]
    existing: bool,
    /// Use the release of Kubernetes with this minor instead of the newest
    #[arg(long, value_name = "MINOR", value_parser = Release::of, requires = "part", conflicts_with = "existing")]
    kubernetes: Option<Release>,
    /// Run only tests whose names contain one of these, also the tests of the stages of `cargo xtask ci`
    #[arg(last = true)]
    filters: Vec<String>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Part {
    /// With the control plane of Kubernetes
    Cluster,
    /// On a node with a real kubelet; needs root
    Node,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let started = Instant::now();
    if !args.no_setup {
        // The tests install the chart in a cluster.
        let needed: &[Purpose] = match args.part {
            Some(_) => &[Purpose::Tests, Purpose::Chart],
            None => &[Purpose::Tests],
        };
        suite::while_building(|| setup::ensure(needed))?;
    }
    let filters: Vec<_> = args.filters.iter().map(String::as_str).collect();
    match args.part {
        Some(Part::Cluster) if args.existing => {
            Staged::Cluster.run_in(Some(&cluster::existing()?), &filters)?;
        }
        Some(Part::Cluster) => {
            let release = args.kubernetes.unwrap_or(Release::NEWEST);
            Staged::Cluster.run_on(release, &filters)?;
        }
        Some(Part::Node) if args.kubernetes.is_some() => {
            bail!("the node is of the newest release: leave out `--kubernetes`")
        }
        Some(Part::Node) if args.existing => {
            bail!("the tests always start their own node: leave out `--existing`")
        }
        Some(Part::Node) => Staged::Node.run(&filters)?,
        None if filters.is_empty() => run_tests(&[], &staged::words(), &[], false)?,
        None => run_tests(&filters, &[], &[], false)?,
    }
    say(&format!(
        "==> all of it: {}, {:.1} s",
        skips::verdict(false, &skips::take()),
        started.elapsed().as_secs_f64()
    ));
    Ok(ExitCode::SUCCESS)
}
