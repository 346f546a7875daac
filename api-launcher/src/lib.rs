//! The API-side half of Mayfly. `local` runs steps on this machine: one job with `api-launcher run`, dispatches with
//! `api-launcher serve --target process`. `kubernetes` runs dispatches as Jobs of a cluster. The executor is a separate
//! process in either case.

#![cfg_attr(
    not(feature = "kubernetes"),
    expect(
        unused_imports,
        reason = "`run` shares some parts with what is left out"
    )
)]

#[cfg(feature = "kubernetes")]
mod agent;
pub mod cli;
mod data;
#[cfg(feature = "kubernetes")]
mod dispatch;
mod document;
#[cfg(feature = "kubernetes")]
mod http;
#[cfg(feature = "kubernetes")]
mod hub;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod local;
#[cfg(feature = "kubernetes")]
pub mod metrics;
#[cfg(feature = "kubernetes")]
mod reporter;
#[cfg(feature = "kubernetes")]
mod sealing;
#[cfg(feature = "kubernetes")]
pub mod serve;
#[cfg(feature = "kubernetes")]
mod shutdown;
pub mod terminal;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::CommandFactory as _;
use job_contract::Exit;
use runtime::handover;
use runtime::hardening::{self, Hardened};

#[cfg(feature = "kubernetes")]
pub use crate::http::auth;

use crate::cli::{Args, Command};

/// The argument that makes this program the executor that is built into it.
pub(crate) const EXECUTOR: &str = "executor";

/// Parses the command line, does what it asks, and says how it ended.
pub fn main_from_args(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if matches!(&args[..], [_, word] if word == EXECUTOR) {
        return executor::main_from_env();
    }
    // The secrets stay in this process's memory and environment, out of reach of what runs beside it.
    let hardened = hardening::process();
    runtime::telemetry::name_panics("the launcher");
    if let Err(error) = handover::receive() {
        let _ = writeln!(io::stderr(), "error: {error}");
        return ExitCode::from(Exit::Infrastructure.code());
    }
    match cli::parse(args) {
        Ok(Args { command }) => dispatch(command, &hardened),
        Err(error) => usage(&error),
    }
}

#[cfg_attr(
    not(feature = "kubernetes"),
    expect(unused_variables, reason = "`run` has no log")
)]
fn dispatch(command: Command, hardened: &Hardened) -> ExitCode {
    match command {
        Command::Run(args) => ExitCode::from(local::run::run(&args)),
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
    ExitCode::from(terminal::stdout::print(&script).code())
}
