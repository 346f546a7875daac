//! What the watcher remembers of Jobs and pods: trimmed to what verdicts read, and packed, because a typed pod is
//! several kilobytes even when it is empty and ten thousand runs are watched at once.

use std::collections::{BTreeMap, HashMap, HashSet};

use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{
    Container, ContainerStateTerminated, ContainerStatus, Pod, PodSpec, ResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::watcher::Event;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{label, labels};

/// An object, trimmed, as JSON.
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

/// What a watch told about Jobs.
#[derive(Debug)]
pub(super) enum Change {
    /// The Job is new or different.
    Seen(Box<Job>),
    /// The Job of that name is gone.
    Gone(String),
}

/// Turns the events of one watch into changes, a new list included: what is missing from it is gone.
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

/// What is known of one pod.
#[derive(Debug)]
struct Known {
    name: Box<str>,
    pod: Packed,
    gone: bool,
}

/// Pods by the Job they belong to.
#[derive(Debug, Default)]
pub(super) struct Pods {
    /// Nearly all have one.
    of_job: HashMap<String, Vec<Known>>,
    listing: Option<HashSet<String>>,
}

impl Pods {
    /// Takes an event in and names the Jobs it is about.
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
        let pod = if gone {
            buried(trimmed_pod(pod))
        } else {
            trimmed_pod(pod)
        };
        let packed = Packed::of(&pod);
        let pods = self.of_job.entry(job.clone()).or_default();
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
                    known.pod = Packed::of(&buried(known.pod.open()));
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

/// An earlier Job of the same name had pods of its own.
fn belongs_to(pod: &Pod, uid: &str) -> bool {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners.is_empty() || owners.iter().any(|owner| owner.uid == uid)
}

/// A pod that is gone runs nothing any more, whatever was last said of it.
fn buried(mut pod: Pod) -> Pod {
    let statuses = pod
        .status
        .iter_mut()
        .flat_map(|status| status.container_statuses.iter_mut().flatten());
    for status in statuses {
        let Some(state) = &mut status.state else {
            continue;
        };
        state.waiting = None;
        if let Some(running) = state.running.take() {
            state.terminated = Some(ContainerStateTerminated {
                exit_code: 137,
                reason: Some("ContainerStatusUnknown".to_owned()),
                started_at: running.started_at,
                ..ContainerStateTerminated::default()
            });
        }
    }
    if pod.metadata.deletion_timestamp.is_none() {
        pod.metadata.deletion_timestamp = pod.metadata.creation_timestamp.clone();
    }
    pod
}

fn trimmed_meta(meta: &ObjectMeta) -> ObjectMeta {
    let ours = |(name, _): &(&String, &String)| {
        name.starts_with("mayfly.dev/") || name.starts_with("kueue.x-k8s.io/")
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
        owner_references: meta.owner_references.clone(),
        labels: keep(&meta.labels),
        annotations: keep(&meta.annotations),
        ..ObjectMeta::default()
    }
}

/// A Job without its pod template.
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
