//! Turns an executor's report of changes, state and lock into evidence.

use std::fmt::Write as _;

use job_contract::report::{ApplyProgress, FinalReport, LockStatus, StateLock, StateStatus};

use super::evidence::Evidence;

/// Returns the report's content about changes, state and lock.
pub(super) fn evidence(report: &FinalReport) -> Vec<Evidence> {
    let changes = report.progress.as_ref().map(changes_text);
    let state = report.state.map(|state| match state {
        StateStatus::Stored => "stored, and a copy is published",
        StateStatus::Rescued => {
            "the tool could not store it; what it left in `errored.tfstate` was stored in its place"
        }
        StateStatus::Kept => {
            "the tool could not store it; what it left in `errored.tfstate` is kept in the artifact store"
        }
        StateStatus::Unknown => "it is not known whether the backend has it",
    });
    let lock = report.lock.as_ref().map(lock_text);
    [
        changes.map(|text| Evidence::new("changes", text)),
        state.map(|text| Evidence::new("state", text)),
        lock.map(|text| Evidence::new("state lock", text)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn changes_text(progress: &ApplyProgress) -> String {
    let mut text = format!("{} made", progress.applied);
    for (what, addresses) in [
        ("failed", &progress.failed),
        ("begun, and not known to have ended", &progress.unfinished),
    ] {
        if !addresses.is_empty() {
            let _ = write!(text, "; {what}: {}", addresses.join(", "));
        }
    }
    match progress.not_begun {
        Some(0) => {}
        Some(count) => {
            let _ = write!(text, "; {count} not begun");
        }
        None => text.push_str("; how many were not begun is not known"),
    }
    text
}

fn lock_text(lock: &StateLock) -> String {
    let status = match lock.status {
        LockStatus::InTheWay => "it stood in the way",
        LockStatus::Released => "its tool died with it, and the executor released it",
        LockStatus::LeftBehind => "it is this run's own and could not be released",
    };
    let path = if lock.path.is_empty() {
        String::new()
    } else {
        format!(" on `{}`", lock.path)
    };
    format!(
        "{} of {} since {} ({}){path}: {status}",
        lock.id, lock.who, lock.created, lock.operation
    )
}
