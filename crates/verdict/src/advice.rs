//! Advises what to do about a verdict. The reader knows Terraform and can contact the operator of the cluster.

use job_contract::report::{ApplyProgress, FinalReport, StateLock, StateStatus};

use super::kind::VerdictKind;
use super::lock::{LockHolder, holder_in, put_holder, standing_lock};
use super::model::Verdict;
use super::step_start::Started;

impl Verdict {
    /// Adds what is known about the pod that took the lock.
    pub fn tell_lock_holder(&mut self, holder: &LockHolder) {
        let Some(host) = self.lock_host().map(str::to_owned) else {
            return;
        };
        put_holder(&mut self.evidence, &host, holder);
        self.advice = advice(self, Some(holder));
    }

    /// Returns what [`Verdict::tell_lock_holder`] added, for the run log.
    pub fn lock_remark(&self) -> Option<String> {
        let told = holder_in(&self.evidence)?;
        let lock = standing_lock(self.report.as_ref()?)?;
        let advice = self.advice.as_deref().unwrap_or_default();
        Some(format!(
            "The lock {} on the state: {told}. What to do: {advice}",
            lock.id
        ))
    }
}

/// Returns the advice, from the executor's hint, the kind of verdict, and what the run left behind.
pub(super) fn advice(verdict: &Verdict, holder: Option<&LockHolder>) -> Option<String> {
    let Verdict { kind, started, .. } = *verdict;
    let remedy = remedy(kind);
    let next = next_step(kind, started, verdict.may_change);
    let Some(report) = &verdict.report else {
        let parts: Vec<&str> = remedy.into_iter().chain(next).collect();
        return (!parts.is_empty()).then(|| parts.join("; "));
    };
    let mut parts = Vec::new();
    let hint = report.hint.as_deref();
    let lock = standing_lock(report);
    parts.extend(hint.or(remedy).map(str::to_owned));
    // The report replaces general advice on changes and locks with exact facts.
    if kind != VerdictKind::Completed {
        let left = report.progress.as_ref().map(advice_on_changes);
        let next = next.filter(|_| hint.is_none()).map(str::to_owned);
        parts.extend(left.or(next));
    }
    parts.extend(match report.state {
        Some(StateStatus::Kept) => Some(
            "before anything else is applied, store the kept `errored.tfstate` (`api-launcher state store`)"
                .to_owned(),
        ),
        Some(StateStatus::Unknown) => {
            Some("compare the state with what is there before applying again".to_owned())
        }
        _ => None,
    });
    parts.extend(lock.and_then(|lock| unlock_advice(report, lock, holder)));
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// What to do about the lock on the state.
fn unlock_advice(
    report: &FinalReport,
    lock: &StateLock,
    holder: Option<&LockHolder>,
) -> Option<String> {
    let tool = report.tool.as_ref();
    let binary = tool.map_or("terraform", |tool| tool.name.binary());
    let unlock = format!("`{binary} force-unlock {}`", lock.id);
    let is_told = report
        .hint
        .as_deref()
        .is_some_and(|hint| hint.contains(&lock.id));
    match holder {
        Some(LockHolder::AtWork { .. }) => {
            Some("wait until the pod that holds the lock has ended".to_owned())
        }
        Some(LockHolder::Ended) => Some(format!(
            "no run uses the lock any more: release it with {unlock}"
        )),
        Some(LockHolder::Unseen { .. }) => Some(format!(
            "if runs of another namespace, cluster or launcher use this state, look there first; once it is \
                 certain that no run uses the lock, {unlock} releases it"
        )),
        Some(LockHolder::Elsewhere) => Some(format!(
            "ask the owner of the lock; if it is not in use, release it with {unlock}"
        )),
        None if is_told => None,
        None => Some(format!(
            "once no run uses the lock any more, release it with {unlock}"
        )),
    }
}

fn advice_on_changes(progress: &ApplyProgress) -> String {
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

/// What to do about the cause of a verdict.
const fn remedy(kind: VerdictKind) -> Option<&'static str> {
    Some(match kind {
        VerdictKind::StepFailed => "see the log of the step",
        VerdictKind::NeverScheduled => {
            "ask for less (EPHEMERAL_*_REQUEST), check node selector and tolerations, or give the cluster more nodes"
        }
        VerdictKind::ImageNotPulled => {
            "check the image's name and tag, the pull secret, and that the nodes reach the registry"
        }
        VerdictKind::ConfigMissing => {
            "create what is named here in the namespace of the runs, or correct its name; `api-launcher check` looks for it"
        }
        VerdictKind::QuotaExceeded => {
            "wait until other runs have ended, or raise the quota of the namespace"
        }
        VerdictKind::AdmissionRefused => {
            "change the setting the policy objects to, or have the policy changed"
        }
        VerdictKind::OomKilled => "raise the memory limit of the run or lower its parallelism",
        VerdictKind::DeadlineExceeded => {
            "raise the deadline, or find out from the log what the run was waiting for"
        }
        VerdictKind::MemoryStop => {
            "raise the memory limit of the run or lower the tool's parallelism"
        }
        VerdictKind::Silence => "find out what the tool waits for, or raise the limit on silence",
        VerdictKind::StateLocked => {
            "start the run again once the lock is gone; nothing was changed"
        }
        VerdictKind::BadJobData => {
            "the releases of launcher and executor may be too far apart; report it with both versions"
        }
        VerdictKind::Claimed => {
            "look at what the first pod of this step left: state, log, and a state lock; then plan again"
        }
        VerdictKind::Defect => "report it, with the log of the run",
        VerdictKind::Completed
        | VerdictKind::Evicted
        | VerdictKind::Preempted
        | VerdictKind::NodeLost
        | VerdictKind::Deleted
        | VerdictKind::Lost
        | VerdictKind::Signalled
        | VerdictKind::Cancelled
        | VerdictKind::AgentForced
        | VerdictKind::Infrastructure => return None,
    })
}

/// Advises about what the run may have left behind, if its executor did not report it. A new run is advised only if it
/// is proven that nothing was started.
pub(super) const fn next_step(
    kind: VerdictKind,
    started: Started,
    may_change: bool,
) -> Option<&'static str> {
    let is_cause_outside_the_step = matches!(
        kind,
        VerdictKind::NeverScheduled
            | VerdictKind::ImageNotPulled
            | VerdictKind::ConfigMissing
            | VerdictKind::QuotaExceeded
            | VerdictKind::AdmissionRefused
    );
    let is_cut_off = matches!(
        kind,
        VerdictKind::OomKilled
            | VerdictKind::Evicted
            | VerdictKind::Preempted
            | VerdictKind::NodeLost
            | VerdictKind::DeadlineExceeded
            | VerdictKind::Deleted
            | VerdictKind::Lost
            | VerdictKind::Signalled
            | VerdictKind::Cancelled
            | VerdictKind::AgentForced
            | VerdictKind::Infrastructure
    );
    match started {
        Started::No if is_cut_off => Some("nothing had been started: start the run again"),
        Started::Yes | Started::Unknown if !(is_cut_off || is_cause_outside_the_step) => None,
        Started::No => None,
        Started::Yes | Started::Unknown if !may_change => {
            Some("plan again: a plan changes nothing, but a state lock may be left")
        }
        Started::Yes => Some(
            "plan again before applying: some changes may have been made, and a state lock may be left",
        ),
        Started::Unknown => Some(
            "plan again before applying: it is not known whether the step had begun, so changes may have been made, \
             and a state lock may be left",
        ),
    }
}
