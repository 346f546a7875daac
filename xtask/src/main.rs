//! `cargo xtask`: the commands of contributors and CI. Knows how to call cargo and the programs under test, but not how they
//! work.

mod bench;
mod binary;
mod chaos;
mod ci;
mod cluster;
mod conformance;
mod fuzz;
mod image;
mod node;
mod report;
mod setup;
mod skips;
mod staged;
mod suite;
mod terminal;
mod test;
mod times;

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
    /// Check the programs that the tests need: as root, install missing Debian packages, else list what is missing
    Setup(setup::Args),
    /// Build everything, and run unit tests and journeys
    Test(test::Args),
    /// Run the other checks of CI, in named stages
    Ci(ci::Args),
    /// Measure Mayfly and compare it with its baselines: the tool without Mayfly, plain copying, the goals of size and memory
    Bench(bench::Args),
    /// Start many runs while their peers fail, and check their outcomes
    Chaos(chaos::Args),
    /// Run journeys on a live Terrakube through its public API, and check their outcomes
    Conformance(conformance::Args),
    /// Give hostile input to every reader of foreign data; inputs that fail are written to `fuzz/artifacts`
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
        Command::Ci(args) => ci::run(&args),
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

/// Root of the workspace.
fn workspace_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is in the workspace root")
}

/// Cargo's target folder.
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
