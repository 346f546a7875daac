//! Tests that need a process of their own.

use std::env;
use std::process::Command;

const PART: &str = "MAYFLY_TEST_PART";

/// Runs the part in a process that runs this test alone. `test` is its path in this crate.
pub(crate) fn alone(test: &str, part: impl FnOnce()) {
    alone_behind(&[], test, part);
}

/// The same, with a program and its arguments that start the process.
pub(crate) fn alone_behind(starter: &[&str], test: &str, part: impl FnOnce()) {
    if env::var_os(PART).is_some() {
        return part();
    }
    let program = env::current_exe().unwrap();
    let words = [starter, &[program.to_str().unwrap(), test]].concat();
    let done = Command::new(words[0])
        .args(&words[1..])
        .args(["--exact", "--nocapture"])
        .env(PART, "alone")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(String::from_utf8_lossy(&done.stdout).contains("1 passed"));
}
