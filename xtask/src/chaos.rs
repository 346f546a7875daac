//! `cargo xtask chaos`: a journey of any length. Makes sure of what it needs, builds it, and hands its options on, and a control
//! plane with them.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};

use crate::cluster::{self, ControlPlane};
use crate::setup::kubernetes::Release;
use crate::setup::{self, Purpose};
use crate::suite::cargo;
use crate::terminal::{command_line, complain};

/// The options are the journey's own, its help among them: they stand in `tests/chaos/src/main.rs` alone.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Skip making sure of the programs it uses; comes first
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
    let plane = if travels(&args.options) {
        let Some(plane) = ControlPlane::start("chaos", Release::NEWEST, build)? else {
            return Ok(ExitCode::SUCCESS);
        };
        command.envs(cluster::environment(&plane.kubeconfig));
        Some(plane)
    } else {
        None
    };
    complain(&format!("==> {}", command_line(&command)));
    let status = command.status().context("could not start cargo")?;
    drop(plane);
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Whether a journey is made, and not only spoken of.
fn travels(options: &[OsString]) -> bool {
    let speaks = |option: &OsString| {
        ["--dry-run", "--help", "-h"]
            .iter()
            .any(|word| option == word)
    };
    !options.iter().any(speaks)
}

/// With the journey, so that both are built of the same crates.
fn build() -> Result<()> {
    let mut build = cargo(["build", "--quiet", "--locked", "--bins"]);
    build.args(["--package", "test-chaos", "--package", "test-cluster"]);
    let status = build.status().context("could not start cargo")?;
    ensure!(status.success(), "`{}` failed", command_line(&build));
    Ok(())
}

/// The summary alone goes to stdout, so that `--output json` can be piped.
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
    fn a_control_plane_is_for_journeys_that_are_made() {
        let travels = |options: &[&str]| {
            let options: Vec<OsString> = options.iter().map(OsString::from).collect();
            super::travels(&options)
        };
        assert!(travels(&["--seed", "7"]));
        assert!(!travels(&["--seed", "7", "--dry-run"]));
        assert!(!travels(&["--help"]));
    }
}
