//! The lock that is still on the state of a run, and who holds it.

use job_contract::report::{FinalReport, LockStatus, StateLock};
use k8s_openapi::api::core::v1::Pod;

use super::evidence::Evidence;
use super::facts;
use super::model::Verdict;

/// The source of the evidence about the holder.
const HOLDER: &str = "lock holder";

/// What is known of the pod a lock was taken in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LockHolder {
    /// It is there and has not ended; of which run, where it says so.
    AtWork { run: Option<String> },
    /// It is there and has ended.
    Ended,
    /// There is no such pod in the namespace that was looked in. A backend may be shared with runs of other namespaces
    /// and clusters, so this alone does not prove that no run uses the lock.
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
        let run = label(crate::kubernetes::cluster::labels::JOB_ID)
            .zip(label(crate::kubernetes::cluster::labels::STEP_ID));
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
        .filter(|lock| lock.status != LockStatus::Released)
}

/// Puts the holder of the lock into the evidence, in place of an earlier one.
pub(super) fn put_holder(evidence: &mut Vec<Evidence>, host: &str, holder: &LockHolder) {
    evidence.retain(|known| known.source != HOLDER);
    let lock = evidence
        .iter()
        .position(|known| known.source == "state lock");
    let at = lock.map_or(evidence.len(), |at| at + 1);
    evidence.insert(at, Evidence::new(HOLDER, holder.words(host)));
}

/// What the evidence says of the holder.
pub(super) fn holder_in(evidence: &[Evidence]) -> Option<&str> {
    let found = evidence.iter().find(|known| known.source == HOLDER);
    found.map(|known| known.text.as_str())
}

impl Verdict {
    /// Whether the launcher has something to add though the executor spoke.
    pub(crate) fn needs_supplement(&self) -> bool {
        self.lacks_log() || self.lock_host().is_some()
    }

    /// The host that the lock on the state names, if there is one: the name of a pod, if it was taken in one.
    pub fn lock_host(&self) -> Option<&str> {
        standing_lock(self.report.as_ref()?)?.host()
    }
}
