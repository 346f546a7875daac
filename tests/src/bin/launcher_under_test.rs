//! The launcher, built where the journeys can find it.

use std::process::ExitCode;

fn main() -> ExitCode {
    api_launcher::main_from_args(std::env::args_os())
}
