//! The executor's process. Its code is in the library.

fn main() -> std::process::ExitCode {
    executor::main_from_args(std::env::args_os())
}
