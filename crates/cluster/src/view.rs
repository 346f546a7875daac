//! Runs as lists show them.

use std::collections::HashMap;

use job_contract::{annotations, labels};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;
use manifest::check;
use serde::Serialize;
use serde::de::DeserializeOwned;
use verdict::{LockHolder, Observation, Timeouts, Verdict, VerdictKind, WaitReason};

use super::{Cluster, ClusterError, RunRef, annotation, label, report_seal};

/// Objects in one page of a list. Annotations of workspaces may have hundreds of KiB.
const PAGE: u32 = 50;

/// Where a run stands, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// Suspended until it is released.
    Queued,
    /// Released, but the executor has not started.
    Waiting,
    Running,
    /// Its Job or its pod is being deleted.
    Stopping,
    /// Ended successfully.
    Completed,
    /// Ended in another way.
    Failed,
}

/// One run of the cluster.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RunView {
    #[serde(flatten)]
    pub key: RunRef,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub organization: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    pub state: RunState,
    /// Why it waits, or how it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sentence: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<VerdictKind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    pub created: Option<Timestamp>,
    /// When the executor started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started: Option<Timestamp>,
    /// When the run was over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Timestamp>,
}

impl Cluster {
    /// Every run of the namespace, oldest first.
    pub async fn list(&self) -> Result<Vec<RunView>, ClusterError> {
        let mut pods: HashMap<String, Vec<Pod>> = HashMap::new();
        let api = self.pods();
        let listed = self.each_of(&api, "list the pods", |mut pod: Pod| {
            report_seal::mark_unproven(&mut pod, self.report_key.as_ref());
            if let Some(job) = label(&pod.metadata, labels::JOB_NAME) {
                pods.entry(job.to_owned()).or_default().push(pod);
            }
        });
        match listed.await {
            // The Role in Terrakube's documentation can read only Jobs. Then the details of pods are missing.
            Err(error) if error.is_forbidden() => pods.clear(),
            listed => listed?,
        }
        let now = self.now();
        let mut views = Vec::new();
        self.each_job(|job| {
            let key = RunRef::of(&job.metadata);
            views.extend(key.map(|key| {
                let pods = pods.remove(&key.name).unwrap_or_default();
                view(key, &job, &pods, now)
            }));
        })
        .await?;
        views.sort_by(|a, b| (a.created, &a.key.name).cmp(&(b.created, &b.key.name)));
        Ok(views)
    }

    /// Every run whose Job is not over.
    pub async fn unfinished(&self) -> Result<Vec<RunRef>, ClusterError> {
        let mut found = Vec::new();
        self.each_job(|job| {
            if verdict::terminal(&job).is_none() {
                found.extend(RunRef::of(&job.metadata));
            }
        })
        .await?;
        Ok(found)
    }

    async fn each_job(&self, look: impl FnMut(Job)) -> Result<(), ClusterError> {
        self.each_of(&self.jobs(), "list the runs", look).await
    }

    /// Calls a function for every object of a run, and keeps none in memory.
    async fn each_of<K>(
        &self,
        api: &Api<K>,
        action: &'static str,
        mut look: impl FnMut(K),
    ) -> Result<(), ClusterError>
    where
        K: Clone + std::fmt::Debug + DeserializeOwned,
    {
        let mut params = ListParams::default().labels(labels::SELECTOR).limit(PAGE);
        loop {
            let page = self
                .request_with_retries(action, || api.list(&params))
                .await?;
            page.items.into_iter().for_each(&mut look);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(()),
            }
        }
    }

    /// Returns the pods of one Job. Empty if they may not be read.
    pub(super) async fn pods_of(&self, job: &Job) -> Result<Vec<Pod>, ClusterError> {
        Ok(self.visible_pods_of(job).await?.unwrap_or_default())
    }

    /// The verdict with what is known of the pod that took the lock on the state, if there is a lock and pods may be
    /// looked at.
    pub(super) async fn with_lock_holder(&self, mut verdict: Verdict) -> Verdict {
        let Some(host) = verdict.lock_host() else {
            return verdict;
        };
        // A user who can write the state can write anything there, and a selector would use it as it is.
        if check::object_name(host).is_err() {
            verdict.tell_lock_holder(&LockHolder::Elsewhere);
            return verdict;
        }
        let api = self.pods();
        let params = ListParams::default().fields(&format!("metadata.name={host}"));
        let found = self
            .request_with_retries("look for the holder of a lock", || api.list(&params))
            .await;
        if let Ok(found) = found {
            let holder = LockHolder::of(host, &self.namespace, found.items.first());
            verdict.tell_lock_holder(&holder);
        }
        verdict
    }

    /// Returns the pods of one Job. `None`: they may not be read.
    pub(super) async fn visible_pods_of(
        &self,
        job: &Job,
    ) -> Result<Option<Vec<Pod>>, ClusterError> {
        let api = self.pods();
        let name = job.metadata.name.as_deref().unwrap_or_default();
        let params = ListParams::default().labels(&format!("{}={name}", labels::JOB_NAME));
        let found = self
            .request_with_retries("list the pods of the run", || api.list(&params))
            .await;
        let mut pods = match found {
            Err(error) if error.is_forbidden() => return Ok(None),
            pods => pods?.items,
        };
        pods.retain(|pod| {
            let mut owners = pod.metadata.owner_references.iter().flatten();
            owners.any(|owner| Some(&owner.uid) == job.metadata.uid.as_ref())
        });
        for pod in &mut pods {
            report_seal::mark_unproven(pod, self.report_key.as_ref());
        }
        Ok(Some(pods))
    }
}

/// Whether the executor of a pod has started.
pub(super) fn has_begun(pod: &Pod) -> bool {
    verdict::executor_state(pod)
        .is_some_and(|state| state.running.is_some() || state.terminated.is_some())
}

/// Observes a run, unless its verdict is recorded on the Job.
pub(super) fn observe(job: &Job, pods: &[Pod], events: &[Event], now: Timestamp) -> Observation {
    recorded_verdict(job).map_or_else(
        || verdict::observe(job, pods, events, now, &Timeouts::default()),
        |verdict| Observation::Ended(Box::new(verdict)),
    )
}

/// Returns the verdict that is recorded on the Job.
pub(super) fn recorded_verdict(job: &Job) -> Option<Verdict> {
    serde_json::from_str(annotation(&job.metadata, annotations::VERDICT)?).ok()
}

fn view(key: RunRef, job: &Job, pods: &[Pod], now: Timestamp) -> RunView {
    let observation = observe(job, pods, &[], now);
    let terminal = verdict::terminal(job);
    let ended = terminal
        .and_then(|condition| condition.last_transition_time.as_ref())
        .map(|time| time.0)
        // A run may be over before its Job is.
        .or_else(|| match &observation {
            Observation::Ended(_) => verdict::newest(pods).and_then(verdict::executor_ended),
            _ => None,
        });
    let (state, sentence, verdict) = match observation {
        Observation::Waiting(wait) => {
            let state = match wait.reason {
                WaitReason::Queued => RunState::Queued,
                WaitReason::Stopping => RunState::Stopping,
                _ => RunState::Waiting,
            };
            (state, Some(wait.sentence), None)
        }
        Observation::InProgress => (RunState::Running, None, None),
        Observation::Ended(verdict) => {
            let state = if verdict.kind == VerdictKind::Completed {
                RunState::Completed
            } else {
                RunState::Failed
            };
            (state, Some(verdict.sentence), Some(verdict.kind))
        }
    };
    let pod = verdict::newest(pods);
    let text = |name| label(&job.metadata, name).map(str::to_owned);
    RunView {
        key,
        step_type: text(labels::STEP_TYPE),
        organization: text(labels::ORGANIZATION),
        workspace: text(labels::WORKSPACE),
        state,
        sentence,
        verdict,
        pod: pod.and_then(|pod| pod.metadata.name.clone()),
        node: pod.and_then(|pod| pod.spec.as_ref()?.node_name.clone()),
        created: job.metadata.creation_timestamp.as_ref().map(|time| time.0),
        started: pod.and_then(verdict::executor_started),
        ended,
    }
}

#[cfg(test)]
mod tests {
    use job_contract::Exit;
    use job_contract::report::{FinalReport, LockStatus, StateLock};
    use serde_json::{Value, json};

    use super::super::fake_server::Server;
    use super::*;
    use verdict::Started;

    fn state_of(deletion: &Value) -> RunState {
        let job: Job = serde_json::from_value(json!({
            "metadata": {"name": "job-412-step", "uid": "u-1", "deletionTimestamp": deletion},
            "spec": {"suspend": false, "template": {}},
            "status": {"startTime": "2026-01-01T00:00:00Z"},
        }))
        .unwrap();
        let key = RunRef {
            job_id: "412".into(),
            step_id: "step".into(),
            name: "job-412-step".into(),
            organization_id: "org".into(),
            workspace_id: "ws".into(),
            step_type: "terraformPlan",
            lease: None,
        };
        let now = Timestamp::from_second(1_767_225_601).unwrap();
        view(key, &job, &[], now).state
    }

    /// A run that found the state locked by a process of this host.
    fn locked_on(host: &str) -> Verdict {
        let lock = StateLock {
            id: "9db590f1".into(),
            who: format!("mayfly@{host}"),
            operation: "OperationTypeApply".into(),
            created: "2026-01-01".into(),
            path: String::new(),
            status: LockStatus::InTheWay,
        };
        Verdict {
            kind: VerdictKind::StateLocked,
            sentence: "The state is locked.".into(),
            evidence: Vec::new(),
            advice: None,
            outcome: Exit::StepFailed,
            started: Started::Yes,
            may_change: true,
            job_over: true,
            pod: None,
            report: Some(FinalReport {
                lock: Some(lock),
                ..FinalReport::default()
            }),
        }
    }

    #[tokio::test]
    async fn only_what_may_be_the_name_of_a_pod_is_looked_for() {
        let server = Server::start();
        for host in [
            "job-1,status.phase=Running",
            "job-1!",
            "Laptop",
            "job-1\n",
            "",
        ] {
            let verdict = server.cluster().with_lock_holder(locked_on(host)).await;
            assert_eq!(server.requests(), [""; 0], "{host:?}");
            let words = &verdict.evidence[0].text;
            assert!(words.contains("taken elsewhere"), "{words}");
        }
        let _ = server
            .cluster()
            .with_lock_holder(locked_on("job-1-a-x.local"))
            .await;
        assert_eq!(server.requests(), ["get pods"]);
    }

    #[test]
    fn a_run_whose_job_is_being_deleted_is_stopping() {
        assert_eq!(state_of(&json!("2026-01-01T00:00:00Z")), RunState::Stopping);
        assert_eq!(state_of(&Value::Null), RunState::Waiting);
    }
}
