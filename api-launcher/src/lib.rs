//! The API-side half of Mayfly: `api-launcher run`, which carries a step from a folder or a job document to its
//! end on this machine, and `api-launcher serve`, which does so for every dispatch that comes over HTTP. The
//! executor is a separate process in a pod's environment either way.

pub mod cli;
pub mod cluster;
pub mod commands;
pub mod config;
mod dispatch;
mod http;
pub mod manifest;
pub mod metrics;
pub mod render;
pub mod run;
pub mod serve;
mod shutdown;
mod table;
pub mod verdict;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::CommandFactory as _;
use job_contract::Exit;

pub use crate::http::auth;

use crate::cli::{Args, Command};

/// Parses the command line, does what it asks, and says how it ended.
pub fn main_from_args(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    runtime::telemetry::name_panics("the launcher");
    match cli::parse(args) {
        Ok(Args { command }) => dispatch(command),
        Err(error) => usage(&error),
    }
}

fn dispatch(command: Command) -> ExitCode {
    match command {
        Command::Run(args) => ExitCode::from(run::run(&args)),
        Command::Serve(args) => ExitCode::from(serve::serve(&args)),
        Command::Render(args) => ExitCode::from(render::run(&args).code()),
        Command::Launch(args) => ExitCode::from(commands::launch(&args).code()),
        Command::List(args) => ExitCode::from(commands::list(&args).code()),
        Command::Logs(args) => ExitCode::from(commands::logs(&args).code()),
        Command::Explain(args) => ExitCode::from(commands::explain(&args).code()),
        Command::Cancel(args) => ExitCode::from(commands::cancel(&args).code()),
        Command::Check(args) => ExitCode::from(commands::check(&args).code()),
        Command::Completions { shell } => completions(shell),
        Command::Executor => executor::main_from_env(),
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
    ExitCode::from(render::print(&script).code())
}
