//! Prints a whole text to standard output.

use std::io::{self, Write as _};

use job_contract::Exit;

/// Writes all of a text to standard output. A reader that closed the pipe has seen what it wanted.
pub(crate) fn print(text: &[u8]) -> Exit {
    match io::stdout().lock().write_all(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            // Where the terminal is gone, the exit code still tells.
            let _ = writeln!(
                io::stderr(),
                "error: could not write to standard output: {error}"
            );
            Exit::Infrastructure
        }
        _ => Exit::Done,
    }
}
