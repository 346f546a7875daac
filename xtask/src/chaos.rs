//! `cargo xtask chaos`: a chaos journey of any length. Checks the needed programs, builds the journey, starts a control plane,
//! and passes the options on.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};

use crate::cluster::{self, ControlPlane};
use crate::setup::kubernetes::Release;
use crate::setup::{self, Purpose};
use crate::suite::cargo;
use crate::terminal::{command_line, complain};

/// The journey defines its options and its help in `tests/chaos/src/main.rs`.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Do not check the needed programs; must be the first option
    #[arg(long)]
    no_setup: bool,
    /// Options of the journey; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if !args.no_setup {
        setup::ensure(&[Purpose::Tests])?;
    }
    let mut command = command(&args.options);
    let plane = if needs_cluster(&args.options) {
        let plane = ControlPlane::start("chaos", Release::NEWEST, build)?;
        let plane = plane.context("no run was made: without a cluster, use `--through hub`")?;
        command.envs(cluster::environment(&plane.kubeconfig));
        Some(plane)
    } else {
        None
    };
    complain(&format!("==> {}", command_line(&command)));
    let status = command.status().context("could not start cargo")?;
    plane.map_or(Ok(()), ControlPlane::end)?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Whether these options start a journey in a cluster. Help and a dry run start none, and a hub needs no cluster.
fn needs_cluster(options: &[OsString]) -> bool {
    let is_without = |option: &OsString| {
        ["--dry-run", "--help", "-h", "--through=hub"]
            .iter()
            .any(|word| option == word)
    };
    let is_through_hub = options
        .windows(2)
        .any(|pair| pair[0] == "--through" && pair[1] == "hub");
    !is_through_hub && !options.iter().any(is_without)
}

/// Builds the control plane together with the journey, so that both use the same crates.
fn build() -> Result<()> {
    let mut build = cargo(["build", "--quiet", "--locked", "--bins"]);
    build.args(["--package", "test-chaos", "--package", "test-cluster"]);
    let status = build.status().context("could not start cargo")?;
    ensure!(status.success(), "`{}` failed", command_line(&build));
    Ok(())
}

/// The command of the journey. Only the summary goes to stdout, so that `--output json` can be piped.
fn command(options: &[OsString]) -> Command {
    let mut command = cargo(["run", "--quiet", "--locked", "--package", "test-chaos"]);
    command.args(["--bin", "chaos", "--"]).args(options);
    command
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_journey_is_made_as_it_was_asked_for() {
        let asked = ["chaos", "--no-setup", "--seed", "7", "--help", "--dry-run"];
        let args = Line::try_parse_from(asked).unwrap().args;
        assert!(args.no_setup);
        let line = command_line(&command(&args.options));
        assert!(line.ends_with("-- --seed 7 --help --dry-run"), "{line}");
    }

    #[test]
    fn a_control_plane_is_for_journeys_that_are_made_in_a_cluster() {
        let needs_cluster = |options: &[&str]| {
            let options: Vec<OsString> = options.iter().map(OsString::from).collect();
            super::needs_cluster(&options)
        };
        assert!(needs_cluster(&["--seed", "7"]));
        assert!(needs_cluster(&["--through", "launcher"]));
        assert!(!needs_cluster(&["--seed", "7", "--dry-run"]));
        assert!(!needs_cluster(&["--help"]));
        assert!(!needs_cluster(&["--through", "hub", "--seed", "7"]));
        assert!(!needs_cluster(&["--through=hub"]));
    }
}
