//! `chaos`: makes a journey and prints its summary. If its file name is one of Mayfly's programs, it is that program, so that a
//! journey needs no other build.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for a terminal"
)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use test_chaos::journey::{Options, run_journey};
use test_chaos::schedule::Through;

/// Makes many runs while their peers fail, and checks the rules afterwards.
#[derive(Debug, Parser)]
#[command(name = "chaos")]
struct Args {
    /// Seed of the runs and faults
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of runs
    #[arg(long, default_value_t = 200)]
    runs: u32,
    /// What takes the dispatches: launchers in front of a cluster, or a hub with agents
    #[arg(long, value_enum, default_value = "launcher")]
    through: Through,
    /// Number of runs at the same time
    #[arg(long, default_value_t = 8)]
    at_once: usize,
    /// Make only this run of the schedule
    #[arg(long, value_name = "RUN")]
    only: Option<u32>,
    /// Start no run after this time
    #[arg(long, value_name = "MINUTES")]
    within: Option<u64>,
    /// Print the runs and their faults without making them
    #[arg(long)]
    dry_run: bool,
    /// Keep journals, outputs and logs, and print their folder
    #[arg(long)]
    keep: bool,
    /// Format of the summary
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Text,
    Json,
}

fn main() -> ExitCode {
    let name = std::env::args_os().next().map(PathBuf::from);
    match name.as_deref().and_then(Path::file_name) {
        Some(name) if name == "launcher" => api_launcher::main_from_args(std::env::args_os()),
        Some(name) if name == "executor" => executor::main_from_env(),
        _ => match chaos(&Args::parse()) {
            Ok(code) => code,
            Err(error) => {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            }
        },
    }
}

fn chaos(args: &Args) -> Result<ExitCode> {
    let program = std::env::current_exe().context("this program does not know where it is")?;
    let options = Options {
        at_once: args.at_once.max(1),
        only: args.only,
        within: args.within.map(Duration::from_mins),
        keep: args.keep,
        ..Options::new(args.through, args.seed, args.runs, &program)
    };
    if args.dry_run {
        for run in options.schedule() {
            println!("{run}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let kubeconfig = match args.through {
        Through::Launcher => Some(test_cluster::kubeconfig()?),
        Through::Hub => None,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .enable_all()
        .build()?;
    let summary = runtime.block_on(run_journey(&options, kubeconfig.as_deref(), |line| {
        eprintln!("{line}");
    }))?;
    match args.output {
        Output::Text => println!("{summary}"),
        Output::Json => println!("{:#}", summary.as_json()),
    }
    if summary.passed() {
        return Ok(ExitCode::SUCCESS);
    }
    let (through, seed, runs) = (args.through, args.seed, args.runs);
    eprintln!("to repeat it: cargo xtask chaos --through {through} --seed {seed} --runs {runs}");
    Ok(ExitCode::FAILURE)
}
