//! Caches Jobs and pods for the watcher. The watcher watches ten thousand runs at once, and an empty typed pod takes
//! several kilobytes. So objects are reduced to what verdicts read, and packed.

use std::collections::{BTreeMap, HashMap, HashSet};

use job_contract::labels;
use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{
    Container, ContainerStateTerminated, ContainerStatus, Pod, PodSpec, PodStatus,
    ResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::SignedDuration;
use kube::runtime::watcher::Event;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::label;

/// A reduced object, as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packed(Box<[u8]>);

impl Packed {
    pub(super) fn of<K: Serialize>(object: &K) -> Self {
        let text = serde_json::to_vec(object).expect("an API object has no failing serialiser");
        Self(text.into_boxed_slice())
    }

    pub(super) fn open<K: DeserializeOwned>(&self) -> K {
        serde_json::from_slice(&self.0).expect("what was packed here can be opened")
    }
}

#[derive(Debug)]
pub(super) enum Change {
    /// The Job is new or different.
    Seen(Box<Job>),
    /// The Job of that name is gone.
    Gone(String),
}

/// Turns the events of one watch into changes. Jobs that are missing in a new list are gone.
#[derive(Debug, Default)]
pub(super) struct JobFeed {
    known: HashSet<String>,
    listing: Option<HashSet<String>>,
}

impl JobFeed {
    pub(super) fn changes(&mut self, event: Event<Job>) -> Vec<Change> {
        match event {
            Event::Init => {
                self.listing = Some(HashSet::new());
                Vec::new()
            }
            Event::InitApply(job) | Event::Apply(job) => {
                let Some(name) = job.metadata.name.clone() else {
                    return Vec::new();
                };
                if let Some(listing) = &mut self.listing {
                    listing.insert(name.clone());
                }
                self.known.insert(name);
                vec![Change::Seen(Box::new(job))]
            }
            Event::Delete(job) => {
                let Some(name) = job.metadata.name.clone() else {
                    return Vec::new();
                };
                self.known.remove(&name);
                // The last state may say how it ended.
                vec![Change::Seen(Box::new(job)), Change::Gone(name)]
            }
            Event::InitDone => {
                let Some(listed) = self.listing.take() else {
                    return Vec::new();
                };
                let gone = self.known.difference(&listed).cloned().collect::<Vec<_>>();
                self.known = listed;
                gone.into_iter().map(Change::Gone).collect()
            }
        }
    }
}

/// The cached data of one pod.
#[derive(Debug)]
struct Known {
    name: Box<str>,
    pod: Packed,
    gone: bool,
}

#[derive(Debug, Default)]
pub(super) struct Pods {
    /// Nearly all have one.
    of_job: HashMap<String, Vec<Known>>,
    listing: Option<HashSet<String>>,
}

impl Pods {
    /// Adds an event, and returns the Jobs that it concerns.
    pub(super) fn apply(&mut self, event: Event<Pod>) -> Vec<String> {
        match event {
            Event::Init => {
                self.listing = Some(HashSet::new());
                Vec::new()
            }
            Event::InitApply(pod) | Event::Apply(pod) => self.put(&pod, false),
            // The last state of a pod is kept for as long as its Job is there.
            Event::Delete(pod) => self.put(&pod, true),
            Event::InitDone => self.mark_missing(),
        }
    }

    fn put(&mut self, pod: &Pod, gone: bool) -> Vec<String> {
        let (Some(job), Some(name)) = (
            label(&pod.metadata, labels::JOB_NAME).map(str::to_owned),
            pod.metadata.name.clone(),
        ) else {
            return Vec::new();
        };
        if let Some(listing) = &mut self.listing {
            listing.insert(name.clone());
        }
        let mut pod = if gone {
            buried(trimmed_pod(pod))
        } else {
            trimmed_pod(pod)
        };
        let pods = self.of_job.entry(job.clone()).or_default();
        if let Some(known) = pods.iter().find(|known| *known.name == *name) {
            keep_starts(&known.pod.open(), &mut pod);
        }
        let packed = Packed::of(&pod);
        match pods.iter_mut().find(|known| *known.name == *name) {
            Some(known) if known.pod == packed && known.gone == gone => return Vec::new(),
            Some(known) => (known.pod, known.gone) = (packed, gone),
            None => {
                pods.reserve_exact(1);
                pods.push(Known {
                    name: name.into_boxed_str(),
                    pod: packed,
                    gone,
                });
            }
        }
        vec![job]
    }

    fn mark_missing(&mut self) -> Vec<String> {
        let Some(listed) = self.listing.take() else {
            return Vec::new();
        };
        let mut touched = Vec::new();
        for (job, pods) in &mut self.of_job {
            for known in pods.iter_mut() {
                if !listed.contains(&*known.name) {
                    let pod = without_doubtful_states(known.pod.open());
                    known.pod = Packed::of(&buried(pod));
                    known.gone = true;
                    touched.push(job.clone());
                }
            }
        }
        touched
    }

    pub(super) fn of(&self, job: &str, uid: &str) -> Vec<Pod> {
        self.which(job, uid, |_| true)
    }

    /// Those that are still there.
    pub(super) fn present_of(&self, job: &str, uid: &str) -> Vec<Pod> {
        self.which(job, uid, |known| !known.gone)
    }

    fn which(&self, job: &str, uid: &str, which: impl Fn(&Known) -> bool) -> Vec<Pod> {
        let pods = self.of_job.get(job).into_iter().flatten();
        pods.filter(|known| which(known))
            .map(|known| known.pod.open::<Pod>())
            .filter(|pod| belongs_to(pod, uid))
            .collect()
    }

    /// Whether the pods of a Job are being deleted, or are gone.
    pub(super) fn are_going(&self, job: &str, uid: &str) -> bool {
        let pods = self.of(job, uid);
        pods.iter()
            .all(|pod| pod.metadata.deletion_timestamp.is_some())
    }

    pub(super) fn forget(&mut self, job: &str) {
        self.of_job.remove(job);
    }
}

/// An earlier Job of the same name had its own pods.
fn belongs_to(pod: &Pod, uid: &str) -> bool {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners.is_empty() || owners.iter().any(|owner| owner.uid == uid)
}

/// The kubelet removes the start time from the status of a lost container. The earlier start time is kept, because it
/// proves that the container started.
fn keep_starts(known: &Pod, pod: &mut Pod) {
    if known.metadata.uid != pod.metadata.uid {
        return;
    }
    let started = |name: &str| {
        let mut known = known.status.iter().flat_map(statuses);
        let state = known.find(|status| status.name == name)?.state.as_ref()?;
        let running = state
            .running
            .as_ref()
            .and_then(|running| running.started_at.clone());
        running.or_else(|| state.terminated.as_ref()?.started_at.clone())
    };
    for status in pod.status.iter_mut().flat_map(statuses_mut) {
        if let Some(end) = status
            .state
            .as_mut()
            .and_then(|state| state.terminated.as_mut())
            && end.started_at.is_none()
        {
            end.started_at = started(&status.name);
        }
    }
}

fn statuses(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status.container_statuses.iter().flatten()
}

fn statuses_mut(status: &mut PodStatus) -> impl Iterator<Item = &mut ContainerStatus> {
    status.container_statuses.iter_mut().flatten()
}

fn unknown_end(started_at: Option<Time>) -> ContainerStateTerminated {
    ContainerStateTerminated {
        exit_code: 137,
        reason: Some(verdict::STATUS_UNKNOWN.to_owned()),
        started_at,
        ..ContainerStateTerminated::default()
    }
}

/// Handles a pod that is gone without a last event. A container that was waiting may have started since.
fn without_doubtful_states(mut pod: Pod) -> Pod {
    let has_node = pod
        .spec
        .as_ref()
        .is_some_and(|spec| spec.node_name.is_some());
    for status in pod
        .status
        .iter_mut()
        .flat_map(statuses_mut)
        .filter(|_| has_node)
    {
        let state = status.state.get_or_insert_default();
        if state.running.is_none() && state.terminated.is_none() {
            state.terminated = Some(unknown_end(None));
        }
    }
    pod
}

/// A pod that is gone runs nothing, whatever its last status was.
fn buried(mut pod: Pod) -> Pod {
    for status in pod.status.iter_mut().flat_map(statuses_mut) {
        let Some(state) = &mut status.state else {
            continue;
        };
        state.waiting = None;
        if let Some(running) = state.running.take() {
            state.terminated = Some(unknown_end(running.started_at));
        }
    }
    if pod.metadata.deletion_timestamp.is_none() {
        // It was deleted at some time after its executor ended, if that is known.
        pod.metadata.deletion_timestamp = match verdict::executor_ended(&pod) {
            Some(ended) => Some(Time(ended + SignedDuration::from_secs(1))),
            None => pod.metadata.creation_timestamp.clone(),
        };
    }
    pod
}

fn trimmed_meta(meta: &ObjectMeta) -> ObjectMeta {
    // Workspaces may set others, of any length.
    let ours = |(name, _): &(&String, &String)| {
        name.starts_with("mayfly.dev/") || *name == labels::KUEUE_QUEUE
    };
    let keep = |map: &Option<BTreeMap<String, String>>| {
        map.as_ref().map(|map| {
            map.iter()
                .filter(ours)
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect()
        })
    };
    ObjectMeta {
        name: meta.name.clone(),
        uid: meta.uid.clone(),
        creation_timestamp: meta.creation_timestamp.clone(),
        deletion_timestamp: meta.deletion_timestamp.clone(),
        deletion_grace_period_seconds: meta.deletion_grace_period_seconds,
        owner_references: meta.owner_references.clone(),
        labels: keep(&meta.labels),
        annotations: keep(&meta.annotations),
        ..ObjectMeta::default()
    }
}

/// Returns a Job without its pod template.
pub(super) fn trimmed_job(job: &Job) -> Job {
    Job {
        metadata: trimmed_meta(&job.metadata),
        spec: job.spec.as_ref().map(|spec| JobSpec {
            suspend: spec.suspend,
            active_deadline_seconds: spec.active_deadline_seconds,
            backoff_limit: spec.backoff_limit,
            ttl_seconds_after_finished: spec.ttl_seconds_after_finished,
            ..JobSpec::default()
        }),
        status: job.status.clone(),
    }
}

fn trimmed_container(container: &Container) -> Container {
    let limits = container.resources.as_ref().and_then(|resources| {
        let memory = resources.limits.as_ref()?.get("memory")?;
        Some([("memory".to_owned(), memory.clone())].into())
    });
    Container {
        name: container.name.clone(),
        restart_policy: container.restart_policy.clone(),
        resources: limits.map(|limits| ResourceRequirements {
            limits: Some(limits),
            ..ResourceRequirements::default()
        }),
        ..Container::default()
    }
}

fn trimmed_pod(pod: &Pod) -> Pod {
    let containers = |list: &[Container]| list.iter().map(trimmed_container).collect();
    let mut status = pod.status.clone();
    if let Some(status) = &mut status {
        status.pod_ips = None;
        status.host_ips = None;
        status.ephemeral_container_statuses = None;
        trim_statuses(status.container_statuses.as_deref_mut());
        trim_statuses(status.init_container_statuses.as_deref_mut());
    }
    Pod {
        metadata: trimmed_meta(&pod.metadata),
        spec: pod.spec.as_ref().map(|spec| PodSpec {
            node_name: spec.node_name.clone(),
            containers: containers(&spec.containers),
            init_containers: spec.init_containers.as_deref().map(containers),
            ..PodSpec::default()
        }),
        status,
    }
}

fn trim_statuses(statuses: Option<&mut [ContainerStatus]>) {
    for status in statuses.into_iter().flatten() {
        status.volume_mounts = None;
        status.allocated_resources = None;
        status.allocated_resources_status = None;
        status.resources = None;
        status.container_id = None;
        status.image_id = String::new();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use verdict::Started;

    fn pod(state: &Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "uid": "p1", "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": {labels::JOB_NAME: "j"}},
            "spec": {"nodeName": "node-1", "containers": []},
            "status": {"phase": "Running", "containerStatuses": [{"name": "executor", "image": "", "imageID": "",
                "ready": false, "restartCount": 0, "state": state}]}}))
        .unwrap()
    }

    fn started(pods: &Pods) -> Started {
        verdict::started_by(&pods.of("j", "u")[0], &[])
    }

    /// The kubelet lost the container together with the time at which it had started it.
    #[test]
    fn an_executor_that_was_seen_running_has_begun_whatever_a_later_status_shows() {
        let running = pod(&json!({"running": {"startedAt": "2026-01-01T00:00:05Z"}}));
        let unknown =
            json!({"exitCode": 137, "reason": verdict::STATUS_UNKNOWN, "startedAt": null});
        let lost = pod(&json!({"terminated": unknown}));
        let mut pods = Pods::default();
        pods.apply(Event::Apply(running));
        pods.apply(Event::Apply(lost.clone()));
        assert_eq!(started(&pods), Started::Yes);
        // Seen only afterwards, it may never have been there.
        let mut pods = Pods::default();
        pods.apply(Event::Apply(lost));
        assert_eq!(started(&pods), Started::Unknown);
    }

    #[test]
    fn whether_a_pod_deleted_between_watches_has_begun_is_unknown() {
        let mut waits = pod(&json!({"waiting": {"reason": "ContainerCreating"}}));
        waits.status.as_mut().unwrap().phase = Some("Pending".to_owned());
        let mut pods = Pods::default();
        pods.apply(Event::Apply(waits));
        assert_eq!(started(&pods), Started::No);
        pods.apply(Event::Init);
        pods.apply(Event::InitDone);
        assert_eq!(started(&pods), Started::Unknown);
    }

    #[test]
    fn a_pod_that_ended_before_its_deletion_was_not_ended_by_it() {
        let ended = pod(&json!({"terminated": {"exitCode": 143, "reason": "Error",
            "startedAt": "2026-01-01T00:00:05Z", "finishedAt": "2026-01-01T00:00:09Z"}}));
        let mut pods = Pods::default();
        pods.apply(Event::Apply(ended));
        let end = |pods: &Pods| verdict::end_of_pod(&pods.of("j", "u")[0], &[]).unwrap();
        let before = end(&pods);
        pods.apply(Event::Init);
        pods.apply(Event::InitDone);
        assert!(pods.are_going("j", "u"));
        assert_eq!(end(&pods), before);
    }
}
