//! What a step left behind, from its executor's report: the changes it made and did not make, where its state is, and
//! the lock that is on it.

use std::fmt::Write as _;

use job_contract::report::{ApplyProgress, FinalReport, LockStanding, StateLock, StateStanding};
use k8s_openapi::api::core::v1::Pod;

use super::{Evidence, Verdict, VerdictKind, ending, facts};

/// Where whoever holds a lock is told of.
const HOLDER: &str = "lock holder";

/// What is known of the pod a lock was taken in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LockHolder {
    /// It is there and has not ended; of which run, where it says so.
    AtWork { run: Option<String> },
    /// It is there and has ended.
    Ended,
    /// There is no such pod in the namespace that was looked in. A backend may be shared with runs of other namespaces
    /// and clusters, so this alone does not say that nobody works.
    Unseen { namespace: String },
    /// Its name is not one that pods of runs have: a person's machine, or another program's.
    Elsewhere,
}

impl LockHolder {
    /// Of the host a lock names, and the pod of that name in the namespace.
    pub(crate) fn of(host: &str, namespace: &str, pod: Option<&Pod>) -> Self {
        let Some(pod) = pod else {
            // As the launcher and the platform itself name them.
            return if host.starts_with("job-") {
                Self::Unseen {
                    namespace: namespace.to_owned(),
                }
            } else {
                Self::Elsewhere
            };
        };
        if matches!(facts::phase(pod), "Succeeded" | "Failed") {
            return Self::Ended;
        }
        let label = |name| pod.metadata.labels.as_ref()?.get(name);
        let run = label(crate::cluster::labels::JOB_ID).zip(label(crate::cluster::labels::STEP_ID));
        Self::AtWork {
            run: run.map(|(job, step)| format!("{job}/{step}")),
        }
    }

    fn words(&self, host: &str) -> String {
        match self {
            Self::AtWork { run } => {
                let of = run
                    .as_ref()
                    .map_or_else(String::new, |run| format!(", of run {run},"));
                format!("the pod `{host}`{of} is still there and has not ended")
            }
            Self::Ended => format!("the pod `{host}` has ended"),
            Self::Unseen { namespace } => {
                format!("there is no pod `{host}` in the namespace `{namespace}` of this cluster")
            }
            Self::Elsewhere => {
                format!("`{host}` is no pod of a run: the lock was taken elsewhere")
            }
        }
    }
}

/// The lock of a report that still is on the state.
pub(super) fn standing_lock(report: &FinalReport) -> Option<&StateLock> {
    report
        .lock
        .as_ref()
        .filter(|lock| lock.standing != LockStanding::Released)
}

/// What the report says of changes, state and lock.
pub(super) fn evidence(report: &FinalReport) -> Vec<Evidence> {
    let changes = report.progress.as_ref().map(told);
    let state = report.state.map(|state| match state {
        StateStanding::Stored => "stored, and a copy is published",
        StateStanding::Rescued => {
            "the tool could not store it; what it left in `errored.tfstate` was stored in its place"
        }
        StateStanding::Kept => {
            "the tool could not store it; what it left in `errored.tfstate` is kept in the artifact store"
        }
        StateStanding::Unknown => "it is not known whether the backend has it",
    });
    let lock = report.lock.as_ref().map(lock_words);
    [
        changes.map(|text| Evidence::new("changes", text)),
        state.map(|text| Evidence::new("state", text)),
        lock.map(|text| Evidence::new("state lock", text)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Tells of the holder of the lock in place of what was told before.
pub(super) fn tell_holder(evidence: &mut Vec<Evidence>, host: &str, holder: &LockHolder) {
    evidence.retain(|known| known.source != HOLDER);
    let lock = evidence
        .iter()
        .position(|known| known.source == "state lock");
    let at = lock.map_or(evidence.len(), |at| at + 1);
    evidence.insert(at, Evidence::new(HOLDER, holder.words(host)));
}

/// What there is to say of the holder, for the run's log.
pub(super) fn holder_told(evidence: &[Evidence]) -> Option<&str> {
    let found = evidence.iter().find(|known| known.source == HOLDER);
    found.map(|known| known.text.as_str())
}

fn told(progress: &ApplyProgress) -> String {
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

fn lock_words(lock: &StateLock) -> String {
    let standing = match lock.standing {
        LockStanding::InTheWay => "it stood in the way",
        LockStanding::Released => "its tool died with it, and the executor released it",
        LockStanding::LeftBehind => "it is this run's own and could not be released",
    };
    let path = if lock.path.is_empty() {
        String::new()
    } else {
        format!(" on `{}`", lock.path)
    };
    format!(
        "{} of {} since {} ({}){path}: {standing}",
        lock.id, lock.who, lock.created, lock.operation
    )
}

/// What to do, from the executor's own advice, the kind of verdict, and what was left behind.
pub(super) fn advice(verdict: &Verdict, holder: Option<&LockHolder>) -> Option<String> {
    let Verdict { kind, begun, .. } = *verdict;
    let remedy = ending::remedy(kind);
    let next = ending::next_step(kind, begun, verdict.may_change);
    let Some(report) = &verdict.report else {
        let parts: Vec<&str> = remedy.into_iter().chain(next).collect();
        return (!parts.is_empty()).then(|| parts.join("; "));
    };
    let mut parts = Vec::new();
    let hint = report.hint.as_deref();
    let lock = standing_lock(report);
    parts.extend(hint.or(remedy).map(str::to_owned));
    // What is said in general of changes and locks, the report knows in particular.
    if kind != VerdictKind::Completed {
        let left = report.progress.as_ref().map(after);
        let next = next.filter(|_| hint.is_none()).map(str::to_owned);
        parts.extend(left.or(next));
    }
    parts.extend(match report.state {
        Some(StateStanding::Kept) => Some(
            "before anything else is applied, push the kept `errored.tfstate` (`state push`)"
                .to_owned(),
        ),
        Some(StateStanding::Unknown) => {
            Some("compare the state with what is there before applying again".to_owned())
        }
        _ => None,
    });
    if let Some(lock) = lock {
        let binary = report
            .tool
            .as_ref()
            .map_or("terraform", |tool| tool.name.binary());
        let unlock = format!("`{binary} force-unlock {}`", lock.id);
        let is_told = hint.is_some_and(|hint| hint.contains(&lock.id));
        parts.extend(match holder {
            Some(LockHolder::AtWork { .. }) => {
                Some("wait until the pod that holds the lock has ended".to_owned())
            }
            Some(LockHolder::Ended) => Some(format!(
                "nobody works under the lock any more: release it with {unlock}"
            )),
            Some(LockHolder::Unseen { .. }) => Some(format!(
                "if runs of another namespace, cluster or launcher use this state, look there first; once it is \
                 certain that nobody works under the lock, {unlock} releases it"
            )),
            Some(LockHolder::Elsewhere) => Some(format!(
                "ask whoever took the lock; if nobody uses it, release it with {unlock}"
            )),
            None if is_told => None,
            None => Some(format!(
                "once nobody works under the lock any more, release it with {unlock}"
            )),
        });
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn after(progress: &ApplyProgress) -> String {
    let ApplyProgress {
        applied,
        failed,
        unfinished,
        not_begun: _,
    } = progress;
    if *applied == 0 && failed.is_empty() && unfinished.is_empty() {
        "nothing had been changed: the step may be run again".to_owned()
    } else {
        "plan again before applying: what was made stays".to_owned()
    }
}
