//! Tests that cannot run on this machine. A skipped test passes, so it says that it was skipped: to the file that
//! `cargo xtask test` names, because the runner hides what a passing test prints. In CI a test that cannot run fails.

use std::ffi::OsString;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::panic::Location;
use std::path::Path;

/// Names the file that gets a line for each skipped test.
pub const SKIPS: &str = "MAYFLY_TEST_SKIPS";

/// What a test needs, or `None` where it is missing and the test has to return.
///
/// # Panics
/// If `CI` is set, or the skip cannot be noted.
#[track_caller]
pub fn needed<T>(found: Result<T, impl Display>) -> Option<T> {
    let missing = match found {
        Ok(found) => return Some(found),
        Err(missing) => missing,
    };
    let caller = Location::caller();
    let thread = std::thread::current();
    let line = format!(
        "SKIPPED {}: {missing} ({}:{})\n",
        thread.name().unwrap_or("a test"),
        caller.file(),
        caller.line()
    );
    let noted = note(
        &line,
        std::env::var_os("CI").is_none(),
        std::env::var_os(SKIPS),
    );
    let error = noted.err().map(|error| error.to_string());
    assert_eq!(error, None);
    None
}

/// Notes a line where tests may be skipped.
fn note(line: &str, may_skip: bool, file: Option<OsString>) -> io::Result<()> {
    if !may_skip {
        return Err(io::Error::other(format!(
            "in CI no test is skipped. {line}"
        )));
    }
    // Hidden as well, unless the test is run with `--nocapture`.
    io::stderr().write_all(line.as_bytes())?;
    match file {
        Some(file) => append(Path::new(&file), line),
        None => Ok(()),
    }
}

/// In one write, because tests run at the same time.
fn append(file: &Path, line: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(file)?;
    file.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_are_noted_one_behind_the_other() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("skips");
        for line in ["SKIPPED one: no kubectl\n", "SKIPPED two: no root\n"] {
            note(line, true, Some(file.clone().into_os_string())).unwrap();
        }
        assert_eq!(
            std::fs::read_to_string(&file).unwrap(),
            "SKIPPED one: no kubectl\nSKIPPED two: no root\n"
        );
    }

    #[test]
    fn in_ci_a_skip_is_an_error_that_names_what_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("skips");
        let error = note(
            "SKIPPED one: no kubectl\n",
            false,
            Some(file.clone().into_os_string()),
        );
        assert!(error.unwrap_err().to_string().contains("no kubectl"));
        assert!(!file.exists());
    }

    #[test]
    fn an_available_peer_is_returned() {
        assert_eq!(needed(Ok::<_, &str>(7)), Some(7));
    }
}
