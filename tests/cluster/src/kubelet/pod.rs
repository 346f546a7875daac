//! One pod from its arrival on a node to its last status.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use super::container::{End, Running};
use super::events::emit;
use super::{Order, Runner, volumes};
use crate::clock::now;

const RETRY: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
struct Known {
    states: BTreeMap<String, Value>,
    restarts: BTreeMap<String, i32>,
    phase: String,
    /// The volumes are mounted, and the sandbox is there.
    is_set_up: bool,
    reason: Option<(String, String)>,
    disruption: Option<(String, String)>,
    lost: bool,
}

/// What is said of a pod in its status.
#[derive(Debug)]
pub(crate) struct Report {
    api: Api<Pod>,
    pod: Pod,
    started: String,
    known: Mutex<Known>,
}

impl Report {
    fn new(client: &Client, pod: &Pod) -> Self {
        let api = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
        let known = Known {
            phase: "Pending".to_owned(),
            ..Known::default()
        };
        Self {
            api,
            pod: pod.clone(),
            started: now(),
            known: Mutex::new(known),
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Known) -> T) -> T {
        work(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn container(&self, name: &str, state: Value) {
        self.with(|known| {
            if state["running"].is_object() {
                "Running".clone_into(&mut known.phase);
            }
            known.states.insert(name.to_owned(), state);
        });
    }

    pub(crate) fn restarted(&self, name: &str) {
        self.with(|known| *known.restarts.entry(name.to_owned()).or_default() += 1);
    }

    /// What a kubelet says at the end of a pod of the containers it has no end of, those that never were among them.
    fn end_unknown(&self, containers: &[Container]) {
        let unknown = json!({"terminated": {
            "exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": null, "finishedAt": null,
            "message": "The container could not be located when the pod was terminated",
        }});
        self.with(|known| {
            for container in containers {
                let state = known.states.entry(container.name.clone()).or_default();
                if !state["terminated"].is_object() {
                    *state = unknown.clone();
                }
            }
        });
    }

    fn statuses(known: &Known, containers: &[Container]) -> Vec<Value> {
        containers
            .iter()
            .map(|container| {
                let name = &container.name;
                let state = known.states.get(name).cloned();
                let state = state.unwrap_or_else(|| json!({"waiting": {"reason": "ContainerCreating"}}));
                let running = state["running"].is_object();
                json!({
                    "name": name, "image": container.image, "imageID": "", "ready": running, "started": running,
                    "restartCount": known.restarts.get(name).copied().unwrap_or(0), "state": state,
                })
            })
            .collect()
    }

    fn patch(&self) -> Value {
        self.with(|known| {
            let spec = self.pod.spec.clone().unwrap_or_default();
            let over = matches!(known.phase.as_str(), "Succeeded" | "Failed");
            let running = known.phase == "Running";
            let completed = if known.phase == "Succeeded" { "PodCompleted" } else { "ContainersNotReady" };
            let flag = |value: bool| if value { "True" } else { "False" };
            let mut conditions = vec![
                json!({"type": "Initialized", "status": "True", "lastTransitionTime": self.started}),
                json!({"type": "PodReadyToStartContainers", "status": flag(known.is_set_up && !over), "lastTransitionTime": self.started}),
            ];
            for kind in ["Ready", "ContainersReady"] {
                let mut condition = json!({"type": kind, "status": flag(running), "lastTransitionTime": now()});
                if !running {
                    condition["reason"] = completed.into();
                }
                conditions.push(condition);
            }
            if let Some((reason, message)) = &known.disruption {
                conditions.push(json!({
                    "type": "DisruptionTarget", "status": "True", "reason": reason, "message": message,
                    "lastTransitionTime": now(),
                }));
            }
            let mut status = json!({
                "phase": known.phase, "conditions": conditions, "startTime": self.started, "hostIP": "127.0.0.1",
                "podIP": "127.0.0.1", "containerStatuses": Self::statuses(known, &spec.containers),
            });
            if let Some(init) = &spec.init_containers {
                status["initContainerStatuses"] = Self::statuses(known, init).into();
            }
            if let Some((reason, message)) = &known.reason {
                status["reason"] = reason.clone().into();
                status["message"] = message.clone().into();
            }
            json!({"metadata": {"uid": self.pod.metadata.uid}, "status": status})
        })
    }

    /// Tells the API server, again until it listens. A pod that is gone needs no status.
    pub(crate) async fn push(&self) {
        for _ in 0..50 {
            if self.with(|known| known.lost) {
                return;
            }
            let patch = Patch::Strategic(self.patch());
            match self
                .api
                .patch_status(&self.pod.name_any(), &PatchParams::default(), &patch)
                .await
            {
                Ok(_) => return,
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    }
}

/// Runs a pod from beginning to end.
pub(crate) async fn work(
    client: Client,
    runner: Arc<Runner>,
    pod: Pod,
    seen: watch::Receiver<Option<Pod>>,
    orders: mpsc::UnboundedReceiver<Order>,
) {
    let over = |pod: &Pod| {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Succeeded" | "Failed"))
    };
    let report = Report::new(&client, &pod);
    if !over(&pod) {
        let (end, ending) = watch::channel(None);
        let control = control(&pod, &report, &end, seen.clone(), orders);
        let run = run(&client, &runner, &pod, &report, ending);
        tokio::select! {
            () = run => {}
            () = control => {}
        }
    }
    if report.with(|known| known.lost) {
        return;
    }
    remove_when_deleted(&report, seen).await;
}

/// A pod that is deleted goes for good once its containers have ended.
async fn remove_when_deleted(report: &Report, mut seen: watch::Receiver<Option<Pod>>) {
    let deleted = seen
        .wait_for(|pod| {
            pod.as_ref()
                .is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())
        })
        .await;
    let Ok(pod) = deleted.map(|pod| pod.clone()) else {
        return;
    };
    if let Some(pod) = pod {
        let mut options = DeleteParams {
            grace_period_seconds: Some(0),
            ..DeleteParams::default()
        };
        options.preconditions = Some(Preconditions {
            uid: pod.uid(),
            resource_version: None,
        });
        for _ in 0..50 {
            match report.api.delete(&pod.name_any(), &options).await {
                Ok(_) | Err(kube::Error::Api(_)) => return,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    }
}

/// Turns deletion, deadline and orders into the end of containers. Returns when the node is lost.
async fn control(
    pod: &Pod,
    report: &Report,
    end: &watch::Sender<Option<End>>,
    mut seen: watch::Receiver<Option<Pod>>,
    mut orders: mpsc::UnboundedReceiver<Order>,
) {
    let deadline = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.active_deadline_seconds);
    let deadline = deadline
        .and_then(|seconds| u64::try_from(seconds).ok())
        .map(Duration::from_secs);
    let mut deadline = std::pin::pin!(tokio::time::sleep(
        deadline.unwrap_or(Duration::from_hours(8760))
    ));
    loop {
        tokio::select! {
            changed = seen.changed() => {
                if changed.is_err() {
                    return std::future::pending().await;
                }
                match &*seen.borrow_and_update() {
                    None => {
                        end.send_replace(Some(End::Kill));
                    }
                    Some(pod) if pod.metadata.deletion_timestamp.is_some() => {
                        let seconds = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
                        let grace = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
                        end.send_if_modified(|end| {
                            let new = end.is_none();
                            if new {
                                *end = Some(End::Terminate(grace));
                            } else if grace.is_zero() {
                                *end = Some(End::Kill);
                            }
                            new || grace.is_zero()
                        });
                    }
                    Some(_) => {}
                }
            }
            () = &mut deadline => {
                let message = "Pod was active on the node longer than the specified deadline";
                report.with(|known| known.reason = Some(("DeadlineExceeded".into(), message.into())));
                end.send_replace(Some(End::Terminate(Duration::from_secs(30))));
                deadline.set(tokio::time::sleep(Duration::from_hours(8760)));
            }
            order = orders.recv() => match order {
                None => return std::future::pending().await,
                Some(Order::OomKill) => {
                    end.send_replace(Some(End::OomKill));
                }
                Some(Order::Reboot) => {
                    end.send_replace(Some(End::Lost));
                }
                Some(Order::Evict) => {
                    let message = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi.";
                    report.with(|known| {
                        known.reason = Some(("Evicted".into(), message.into()));
                        known.disruption = Some(("TerminationByKubelet".into(), message.into()));
                    });
                    end.send_replace(Some(End::Kill));
                }
                Some(Order::NodeLost) => {
                    report.with(|known| known.lost = true);
                    // The containers end with what runs them.
                    end.send_replace(Some(End::Kill));
                }
            }
        }
    }
}

async fn mounted(
    client: &Client,
    runner: &Arc<Runner>,
    pod: &Pod,
    ending: &watch::Receiver<Option<End>>,
) -> Option<Vec<(String, std::path::PathBuf)>> {
    let mut told = String::new();
    loop {
        if ending.borrow().is_some() {
            return None;
        }
        match volumes::mount_all(client, runner, pod).await {
            Ok(volumes) => return Some(volumes),
            Err(why) if why != told => {
                emit(client, pod, "Warning", "FailedMount", &why).await;
                told = why;
            }
            Err(_) => {}
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn run(
    client: &Client,
    runner: &Arc<Runner>,
    pod: &Pod,
    report: &Report,
    ending: watch::Receiver<Option<End>>,
) {
    // Without its folder every container fails to start, which says so.
    let _ = std::fs::create_dir_all(runner.pod_dir(&pod.uid().unwrap_or_default()));
    report.push().await;
    let code = match mounted(client, runner, pod, &ending).await {
        None => None,
        Some(volumes) => {
            report.with(|known| known.is_set_up = true);
            let spec = pod.spec.clone().unwrap_or_default();
            let start = |container| Running {
                client,
                runner,
                pod,
                container,
                volumes: &volumes,
                report,
                end: ending.clone(),
            };
            let mut code = Some(0);
            for container in spec.init_containers.iter().flatten() {
                code = start(container).run().await;
                if code != Some(0) {
                    break;
                }
            }
            if code == Some(0) {
                let codes = join_all(
                    spec.containers
                        .iter()
                        .map(|container| start(container).run()),
                )
                .await;
                code = codes
                    .into_iter()
                    .reduce(|one, other| if one == Some(0) { other } else { one })
                    .flatten();
            }
            code
        }
    };
    let spec = pod.spec.clone().unwrap_or_default();
    let is_initialised = report.with(|known| {
        let mut init = spec.init_containers.iter().flatten();
        init.all(|init| {
            let end = known
                .states
                .get(&init.name)
                .map(|state| &state["terminated"]);
            end.is_some_and(|end| end["exitCode"] == 0)
        })
    });
    if is_initialised {
        report.end_unknown(&spec.containers);
    }
    report.with(|known| {
        let fine = code == Some(0) && known.reason.is_none();
        if fine { "Succeeded" } else { "Failed" }.clone_into(&mut known.phase);
    });
    if report.with(|known| {
        known
            .reason
            .as_ref()
            .is_some_and(|(reason, _)| reason == "Evicted")
    }) {
        emit(
            client,
            pod,
            "Warning",
            "Evicted",
            "The node was low on resource: memory.",
        )
        .await;
    }
    report.push().await;
}
