//! What does not run on this machine, and why. In CI nothing is skipped.

use std::env;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;

use crate::terminal::complain;

/// What this process has skipped since the last summary.
static SKIPPED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Returns what a part needs. Outside CI, `None` if it is missing: the part is then skipped.
pub(crate) fn unless_skipped<T>(what: &str, needed: Result<T>) -> Result<Option<T>> {
    let error = match needed {
        Ok(needed) => return Ok(Some(needed)),
        Err(error) if env::var_os("CI").is_none() => error,
        Err(error) => return Err(error.context("in CI nothing is skipped")),
    };
    let line = format!("{what}: {error:#}");
    complain(&format!("\n==> SKIPPED {line}"));
    note(line);
    Ok(None)
}

/// Notes what was skipped, and why.
pub(crate) fn note(line: String) {
    let mut skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
    skipped.push(line);
}

/// What was skipped since the last call.
pub(crate) fn take() -> Vec<String> {
    let mut skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::take(&mut *skipped)
}

/// How work ended. If anything was skipped, it has not passed.
pub(crate) fn verdict(failed: bool, skipped: &[String]) -> String {
    match (failed, skipped.len()) {
        (true, _) => "failed".to_owned(),
        (false, 0) => "passed".to_owned(),
        (false, count) => format!("skipped {count}"),
    }
}

/// What was skipped, one line each.
pub(crate) fn list(skipped: &[String]) -> String {
    let lines = skipped.iter().map(|line| format!("\n    skipped: {line}"));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_skipped_has_not_passed() {
        let skipped = ["node: no root".to_owned(), "a test: no kubectl".to_owned()];
        assert_eq!(verdict(false, &[]), "passed");
        assert_eq!(verdict(false, &skipped), "skipped 2");
        assert_eq!(verdict(true, &skipped), "failed");
        assert_eq!(
            list(&skipped),
            "\n    skipped: node: no root\n    skipped: a test: no kubectl"
        );
    }
}
