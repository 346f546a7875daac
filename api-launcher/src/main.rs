//! `api-launcher`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    api_launcher::main_from_args(std::env::args_os())
}
