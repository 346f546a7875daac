//! The executor, built where the journeys can find it.

use std::process::ExitCode;

fn main() -> ExitCode {
    executor::main_from_args(std::env::args_os())
}
