//! `cargo xtask`: what a contributor and CI run. Knows how to call cargo and the programs under test; knows
//! nothing of how they work inside.

mod bench;
mod chaos;
mod ci;
mod cluster;
mod conformance;
mod fuzz;
mod image;
mod node;
mod report;
mod setup;
mod staged;
mod suite;
mod terminal;
mod test;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Set-up, test, CI, fuzz, image and bench commands of the Mayfly workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make sure of the programs the tests use: installs Debian packages when root, else names what is missing
    Setup(setup::Args),
    /// Build everything, and run unit tests and journeys
    Test(test::Args),
    /// Run what else CI checks, in named stages
    Ci(ci::Args),
    /// Measure Mayfly against its floors: the bare tool, plain copying, the size and memory goals
    Bench(bench::Args),
    /// Many runs while their peers fail, and the check of their outcomes
    Chaos(chaos::Args),
    /// Journeys against any live Terrakube, through its public API, and what holds of them
    Conformance(conformance::Args),
    /// Give hostile input to every reader of foreign data, for as long as you like; finds go to `fuzz/artifacts`
    Fuzz(fuzz::Args),
    /// Build the container images without a daemon
    Image(image::Args),
    /// Write the SBOM and the list of licences of both programs
    Sbom(image::SbomArgs),
}

fn main() -> ExitCode {
    let outcome = match Args::parse().command {
        Command::Setup(args) => setup::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Ci(args) => Ok(ci::run(&args)),
        Command::Bench(args) => bench::run(&args),
        Command::Chaos(args) => chaos::run(&args),
        Command::Conformance(args) => conformance::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Image(args) => image::run(&args),
        Command::Sbom(args) => image::sbom(&args),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            terminal::complain(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Root of the workspace, wherever the command was called from.
fn workspace_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace root")
}

/// Folder of what cargo builds.
fn target_folder() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace_root().join("target"), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }
}
