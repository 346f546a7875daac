//! `cargo xtask conformance`: builds the journeys for a live Terrakube and replaces itself with them. So a signal reaches only
//! the journeys, and they can remove what they have created.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};

use crate::workspace_root;

/// The journeys define their options and their help in `tests/conformance/src/main.rs`.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Options of the journeys; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let error = command(&args.options).exec();
    Err(error).context("could not start cargo")
}

/// The command of the journeys. It stays in the caller's folder, because `--token-file` may be relative to it.
fn command(options: &[OsString]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--quiet", "--locked", "--manifest-path"]);
    command.arg(workspace_root().join("tests/conformance/Cargo.toml"));
    command.arg("--").args(options);
    command
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::terminal::command_line;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn options_are_passed_on_unchanged() {
        let asked = [
            "conformance",
            "--api",
            "https://t.example",
            "--only",
            "plan",
            "--help",
        ];
        let args = Line::try_parse_from(asked).unwrap().args;
        let line = command_line(&command(&args.options));
        assert!(
            line.ends_with("-- --api https://t.example --only plan --help"),
            "{line}"
        );
    }
}
