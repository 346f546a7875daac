//! Tells `cargo xtask` how long tests waited for the programs that they start.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Names the file that gets a line for each program. It has other facts of the stage too (`xtask/src/times.rs`).
const TIMES: &str = "MAYFLY_TEST_TIMES";

/// A start that is not over yet.
#[derive(Debug)]
pub(crate) struct Start {
    program: String,
    began: Instant,
}

impl Start {
    pub(crate) fn of(command: &Command) -> Self {
        let program = Path::new(command.get_program());
        let name = program.file_name().unwrap_or(program.as_os_str());
        Self::named(name.to_string_lossy())
    }

    /// Of a program that another one starts.
    pub(crate) fn named(program: impl Into<String>) -> Self {
        Self {
            program: program.into(),
            began: Instant::now(),
        }
    }

    /// The program is ready.
    pub(crate) fn ready(self) -> io::Result<()> {
        let Some(file) = std::env::var_os(TIMES) else {
            return Ok(());
        };
        let seconds = self.began.elapsed().as_secs_f64();
        let line = format!("peer\t{}\t{seconds}\n", self.program);
        // In one write, because tests run at the same time.
        let mut file = OpenOptions::new().append(true).create(true).open(file)?;
        file.write_all(line.as_bytes())
    }
}
