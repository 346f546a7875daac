//! The lock that is still on the state of a run, and its holder.

use job_contract::report::{FinalReport, LockStatus, StateLock};
use k8s_openapi::api::core::v1::Pod;

use super::evidence::Evidence;
use super::facts;
use super::model::Verdict;

/// The source of the evidence about the holder.
const HOLDER: &str = "lock holder";

/// What is known about the pod that took a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LockHolder {
    /// The pod exists and has not ended. Its run, if the pod names it.
    AtWork { run: Option<String> },
    /// The pod exists and has ended.
    Ended,
    /// The namespace has no such pod. Runs of other namespaces and clusters may use the same backend. So this alone
    /// does not prove that no run uses the lock.
    Unseen { namespace: String },
    /// No pod of a run has such a name. The lock comes from a person's machine or from another program.
    Elsewhere,
}

impl LockHolder {
    /// Returns the holder, from the host in the lock and the pod of that name.
    pub fn of(host: &str, namespace: &str, pod: Option<&Pod>) -> Self {
        let Some(pod) = pod else {
            // The launcher and the platform use these names.
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
        let run = label(job_contract::labels::JOB_ID).zip(label(job_contract::labels::STEP_ID));
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

/// Returns the lock of a report, if it is still on the state.
pub(super) fn standing_lock(report: &FinalReport) -> Option<&StateLock> {
    report
        .lock
        .as_ref()
        .filter(|lock| lock.status != LockStatus::Released)
}

/// Adds the holder of the lock to the evidence, and removes an earlier one.
pub(super) fn put_holder(evidence: &mut Vec<Evidence>, host: &str, holder: &LockHolder) {
    evidence.retain(|known| known.source != HOLDER);
    let lock = evidence
        .iter()
        .position(|known| known.source == "state lock");
    let at = lock.map_or(evidence.len(), |at| at + 1);
    evidence.insert(at, Evidence::new(HOLDER, holder.words(host)));
}

/// Returns what the evidence contains about the holder.
pub(super) fn holder_in(evidence: &[Evidence]) -> Option<&str> {
    let found = evidence.iter().find(|known| known.source == HOLDER);
    found.map(|known| known.text.as_str())
}

impl Verdict {
    /// Whether the launcher can add something to the executor's report.
    pub fn needs_supplement(&self) -> bool {
        self.lacks_log() || self.lock_host().is_some()
    }

    /// Returns the host that the lock on the state names. If a pod took the lock, this is the pod's name.
    pub fn lock_host(&self) -> Option<&str> {
        standing_lock(self.report.as_ref()?)?.host()
    }
}
