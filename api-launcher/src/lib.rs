//! The API-side half of Mayfly: the command line, and what puts the other crates together.
//!
//! - [`run`] is `api-launcher run`: one job on this machine. [`state_command`] is `api-launcher state`: states that runs could not
//!   store.
//! - `serve` is `api-launcher serve`: it takes the dispatches of the platform, and gives them to the target `kubernetes`, or to a
//!   hub. With target `process`, a hub and an agent are in this process.
//! - `kubernetes` has that target, and the commands for people.
//!
//! The executor is a separate process in each case. This crate must not know how Terraform is run, and has no client of
//! Kubernetes: that is `cluster`.

#[cfg(feature = "kubernetes")]
pub mod allowed_urls;
#[cfg(feature = "kubernetes")]
mod cache_command;
pub mod cli;
#[cfg(feature = "kubernetes")]
mod dispatch;
mod document;
mod failure;
#[cfg(feature = "kubernetes")]
mod http;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
#[cfg(feature = "kubernetes")]
pub mod metrics;
#[cfg(feature = "kubernetes")]
mod pool_command;
pub mod run;
#[cfg(feature = "kubernetes")]
pub mod serve;
pub mod state_command;
pub mod terminal;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::CommandFactory as _;
use job_contract::{Exit, env};
use runtime::hardening::{self, Hardened};
use runtime::{failed_writes, handover};

#[cfg(feature = "kubernetes")]
pub use crate::http::auth;

use crate::cli::{Args, Command};

/// Parses the command line, does what it asks, and says how it ended.
pub fn main_from_args(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if matches!(&args[..], [_, word] if word == processes::executor::SUBCOMMAND) {
        return executor::main_from_env();
    }
    failed_writes::survive();
    // The secrets stay in this process's memory and environment, out of reach of what runs beside it.
    let hardened = hardening::process();
    runtime::telemetry::name_panics("the launcher");
    if let Err(error) = handover::receive() {
        let _ = writeln!(io::stderr(), "error: {error}");
        return ExitCode::from(Exit::Infrastructure.code());
    }
    let secret = handover::receive_file(env::INTERNAL_SECRET, env::INTERNAL_SECRET_FILE);
    match cli::parse(args) {
        Ok(Args { command }) => match secret {
            Err(error) if command.needs_secret() => {
                let _ = writeln!(io::stderr(), "error: {error}");
                ExitCode::from(Exit::BadConfiguration.code())
            }
            _ => dispatch(command, &hardened),
        },
        Err(error) => usage(&error),
    }
}

#[cfg_attr(
    not(feature = "kubernetes"),
    expect(unused_variables, reason = "`run` and `state` have no log")
)]
fn dispatch(command: Command, hardened: &Hardened) -> ExitCode {
    match command {
        Command::Run(args) => ExitCode::from(run::run(&args)),
        Command::State(args) => ExitCode::from(args.run().code()),
        #[cfg(feature = "kubernetes")]
        Command::Kubernetes(command) => command.run(hardened),
        Command::Completions { shell } => completions(shell),
    }
}

/// Help and version end with 0. A wrong command line is bad configuration: clap's own code for it, 2, means a
/// defect of ours in the table of exit codes.
fn usage(error: &clap::Error) -> ExitCode {
    let exit = if error.use_stderr() {
        Exit::BadConfiguration
    } else {
        Exit::Done
    };
    // A reader that closed the pipe has seen what it wanted.
    let _ = error.print();
    ExitCode::from(exit.code())
}

fn completions(shell: clap_complete::Shell) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "api-launcher", &mut script);
    ExitCode::from(terminal::sink::print(&script).code())
}
