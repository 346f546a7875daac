//! `cargo xtask chaos`: a journey of any length. Builds what it needs and hands its options on.

use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};

use crate::terminal::{command_line, complain};
use crate::{setup, workspace_root};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Decides what is run and what happens to it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many runs
    #[arg(long, default_value_t = 200)]
    runs: u32,
    /// How many runs at a time
    #[arg(long, default_value_t = 8)]
    at_once: u32,
    /// Only this run of the schedule
    #[arg(long, value_name = "RUN")]
    only: Option<u32>,
    /// Print what would be run and what would happen to it
    #[arg(long)]
    dry_run: bool,
    /// Leave journals, outputs and logs where they are, and say where
    #[arg(long)]
    keep: bool,
    /// How to print the tally
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
    /// Skip making sure of the programs it uses
    #[arg(long)]
    no_setup: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Output {
    Text,
    Json,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if !args.no_setup {
        setup::ensure()?;
    }
    let mut command = command(args);
    complain(&format!("==> {}", command_line(&command)));
    let status = command.status().context("could not start cargo")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The tally alone goes to stdout, so that `--output json` can be piped.
fn command(args: &Args) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root());
    command.args(["run", "--quiet", "--locked", "--package", "test-chaos"]);
    command.args(["--bin", "chaos", "--"]);
    for (name, value) in [
        ("--seed", args.seed.to_string()),
        ("--runs", args.runs.to_string()),
        ("--at-once", args.at_once.to_string()),
    ] {
        command.args([name, &value]);
    }
    if let Some(only) = args.only {
        command.args(["--only", &only.to_string()]);
    }
    if args.dry_run {
        command.arg("--dry-run");
    }
    if args.keep {
        command.arg("--keep");
    }
    command.arg("--output");
    command.arg(match args.output {
        Output::Text => "text",
        Output::Json => "json",
    });
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journey_is_made_as_it_was_asked_for() {
        let args = Args {
            seed: 7,
            runs: 40,
            at_once: 3,
            only: Some(4),
            dry_run: true,
            keep: false,
            output: Output::Json,
            no_setup: true,
        };
        let line = command_line(&command(&args));
        let wanted = "--seed 7 --runs 40 --at-once 3 --only 4 --dry-run --output json";
        assert!(line.ends_with(wanted), "{line}");
    }
}
