//! `cargo xtask test`: unit tests and journeys, but those that are left to the stages of `cargo xtask ci`.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::setup::kubernetes::Release;
use crate::setup::{self, Purpose};
use crate::staged::Staged;
use crate::suite::run_tests;
use crate::terminal::say;
use crate::{cluster, staged};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Skip making sure of the programs the tests use
    #[arg(long)]
    no_setup: bool,
    /// Run the tests that need a cluster, or those on a real node
    #[arg(value_enum)]
    part: Option<Part>,
    /// In the one `KUBECONFIG` names, instead of a control plane of their own
    #[arg(long, requires = "part")]
    existing: bool,
    /// On the release of Kubernetes with this minor; the newest one unless named
    #[arg(long, value_name = "MINOR", value_parser = Release::of, requires = "part", conflicts_with = "existing")]
    kubernetes: Option<Release>,
    /// Run only tests whose names contain one of these, those of the stages of `cargo xtask ci` among them
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
        // The chart is among what is installed in a cluster.
        let needed: &[Purpose] = match args.part {
            Some(_) => &[Purpose::Tests, Purpose::Chart],
            None => &[Purpose::Tests],
        };
        setup::ensure(needed)?;
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
            bail!("the node is always its own: leave out `--existing`")
        }
        Some(Part::Node) => Staged::Node.run(&filters)?,
        None if filters.is_empty() => run_tests(&[], &staged::words(), &[], false)?,
        None => run_tests(&filters, &[], &[], false)?,
    }
    say(&format!(
        "==> all of it: {:.1} s",
        started.elapsed().as_secs_f64()
    ));
    Ok(ExitCode::SUCCESS)
}
