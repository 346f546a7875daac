//! The executor, built where the journeys can find it. A test can make it panic.

use std::process::ExitCode;

fn main() -> ExitCode {
    integration_tests::panic_at::listen();
    executor::main_from_args(std::env::args_os())
}
