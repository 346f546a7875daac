//! `cargo xtask chaos`: a journey of any length. Makes sure of what it needs, builds it, and hands its options on.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};

use crate::setup::{self, Purpose};
use crate::terminal::{command_line, complain};
use crate::workspace_root;

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
    complain(&format!("==> {}", command_line(&command)));
    let status = command.status().context("could not start cargo")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The tally alone goes to stdout, so that `--output json` can be piped.
fn command(options: &[OsString]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root());
    command.args(["run", "--quiet", "--locked", "--package", "test-chaos"]);
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
}
