//! Tests that need a process of their own.

use std::env;
use std::process::Command;

const PART: &str = "MAYFLY_TEST_PART";

/// Runs the part in a process that runs this test alone. `test` is its path in this crate.
pub(crate) fn alone(test: &str, part: impl FnOnce()) {
    if env::var_os(PART).is_some() {
        return part();
    }
    let done = Command::new(env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(PART, "alone")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(String::from_utf8_lossy(&done.stdout).contains("1 passed"));
}
