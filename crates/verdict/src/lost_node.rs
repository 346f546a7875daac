//! Finds pods whose node does not answer any more. Kubernetes shows their last state for minutes or for ever:
//! containers that run, or a pod that is being deleted and never disappears.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::evidence::Evidence;
use super::kind::VerdictKind;
use super::model::Verdict;
use super::step_start::Started;
use super::{advice, facts, step_start};

/// How long a pod may still exist after its deletion time. A node that answers has killed it by then.
const OVERDUE: SignedDuration = SignedDuration::from_secs(30);

/// Returns when a pod is overdue whose deletion must be complete at this time.
pub(super) fn overdue(gone_by: Timestamp) -> Timestamp {
    gone_by.checked_add(OVERDUE).unwrap_or(Timestamp::MAX)
}

/// A pod that seems to be at work, on a node that may be lost.
#[derive(Clone, Copy, Debug)]
pub struct Suspect<'p> {
    pod: &'p Pod,
    unready: Option<&'p PodCondition>,
    /// When its deletion is overdue.
    pub overdue_from: Option<Timestamp>,
}

/// Returns the pod of a run that is not over, if something shows that its node is lost, or will show it later.
pub fn suspect(pods: &[Pod]) -> Option<Suspect<'_>> {
    let pod = facts::newest(pods)?;
    if matches!(facts::phase(pod), "Succeeded" | "Failed") || facts::executor_end(pod).is_some() {
        return None;
    }
    // The deletion time includes the grace period: it is the time at which the pod must be gone.
    let deletion = pod.metadata.deletion_timestamp.as_ref();
    let found = Suspect {
        pod,
        unready: unready(pod),
        overdue_from: deletion.map(|time| overdue(time.0)),
    };
    (found.unready.is_some() || found.overdue_from.is_some()).then_some(found)
}

/// The kubelet marks a pod unready when one of its containers is unready. If a node does not answer, the node
/// controller marks its pods unready, and does not change the containers.
fn unready(pod: &Pod) -> Option<&PodCondition> {
    let runs = facts::executor_state(pod).is_some_and(|state| state.running.is_some());
    let containers = facts::condition(pod, "ContainersReady")?;
    let condition = facts::condition(pod, "Ready")?;
    let by_gate = condition.reason.as_deref() == Some("ReadinessGatesNotReady");
    (runs && containers.status == "True" && condition.status != "True" && !by_gate)
        .then_some(condition)
}

impl Suspect<'_> {
    /// Whether the cluster reports that the node does not answer.
    pub fn is_unready(&self) -> bool {
        self.unready.is_some()
    }

    /// Whether the pod should have been gone for a long time.
    pub fn is_overdue(&self, now: Timestamp) -> bool {
        self.overdue_from.is_some_and(|from| from <= now)
    }

    /// Returns the verdict on its run. Its executor sends nothing any more. The Job must still be stopped, so that no
    /// other pod replaces this one. It is not known whether this one still runs.
    pub fn verdict(&self, job: &Job) -> Verdict {
        let node = facts::node(self.pod).unwrap_or("?");
        let mut evidence = vec![Evidence::new("pod", facts::name(self.pod))];
        if let Some(condition) = self.unready {
            let text = format!("{} although its containers run", condition.status);
            evidence.push(Evidence::new("pod condition Ready", text));
        }
        if let Some(time) = &self.pod.metadata.deletion_timestamp {
            let text = format!("it had to be gone at {}", time.0);
            evidence.push(Evidence::new("pod deletion", text));
        }
        let kind = VerdictKind::NodeLost;
        let mut verdict = Verdict {
            kind,
            sentence: format!(
                "the node `{node}` does not answer any more, and nothing is heard of the executor on it"
            ),
            evidence,
            advice: None,
            outcome: kind.outcome(),
            // A container without an observed start may have started since.
            started: step_start::of_pod(self.pod, &[]).max(Started::Unknown),
            may_change: facts::may_change(job),
            job_over: false,
            pod: self.pod.metadata.name.clone(),
            report: None,
        };
        verdict.advice = advice::advice(&verdict, None);
        verdict
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A pod at work, with these statuses of its conditions, and when it has to be gone.
    fn pod(ready: &str, containers: &str, reason: Value, deletion: &Value) -> Pod {
        let condition = |type_: &str, status: &str, reason: Value| json!({"type": type_, "status": status, "reason": reason});
        serde_json::from_value(json!({
            "metadata": {"name": "run-x", "deletionTimestamp": deletion},
            "spec": {"nodeName": "node-3", "containers": []},
            "status": {"phase": "Running",
                "conditions": [condition("Ready", ready, reason), condition("ContainersReady", containers, Value::Null)],
                "containerStatuses": [{"name": "executor", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}]}}))
        .unwrap()
    }

    fn is_unready(ready: &str, containers: &str, reason: Value) -> bool {
        let pods = [pod(ready, containers, reason, &Value::Null)];
        suspect(&pods).is_some_and(|suspect| suspect.is_unready())
    }

    #[test]
    fn a_node_is_suspected_by_statuses_that_its_kubelet_never_sets() {
        assert!(is_unready("False", "True", Value::Null));
        assert!(is_unready("Unknown", "True", Value::Null));
        assert!(!is_unready("True", "True", Value::Null));
        // A container beside the executor is not ready.
        assert!(!is_unready("False", "False", json!("ContainersNotReady")));
        assert!(!is_unready(
            "False",
            "True",
            json!("ReadinessGatesNotReady")
        ));
    }

    #[test]
    fn a_deletion_is_overdue_a_while_after_the_time_the_pod_had() {
        let pods = [pod(
            "True",
            "True",
            Value::Null,
            &json!("2026-01-01T00:05:00Z"),
        )];
        let found = suspect(&pods).unwrap();
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        assert!(!found.is_unready() && !found.is_overdue(at("2026-01-01T00:05:29Z")));
        assert!(found.is_overdue(at("2026-01-01T00:05:30Z")));
        let verdict = found.verdict(&Job::default());
        assert_eq!(verdict.started, Started::Yes);
        assert!(!verdict.job_over);
        assert!(verdict.sentence.contains("`node-3`"), "{verdict:?}");
    }

    #[test]
    fn a_pod_whose_executor_has_ended_is_not_waited_for() {
        let mut ended = pod("False", "True", Value::Null, &json!("2026-01-01T00:05:00Z"));
        let status = ended.status.as_mut().unwrap();
        let executor = &mut status.container_statuses.as_mut().unwrap()[0];
        executor.state = serde_json::from_value(json!({"terminated": {"exitCode": 0}})).unwrap();
        assert!(suspect(&[ended]).is_none());
    }
}
