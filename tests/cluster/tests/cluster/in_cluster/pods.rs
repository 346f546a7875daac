//! The nodes of a test: a pod becomes a process, and its end the end of its Job.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, LogParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Resource, ResourceExt};
use serde_json::{Value, json};
use test_cluster::{ADMIN, Cluster, State};
use test_peers::process::ends;
use test_peers::wait::DEADLINE;

use super::cluster;

struct Fixture {
    cluster: Cluster,
    namespace: String,
    dir: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Option<Self> {
        let cluster = cluster().await?;
        let namespace = cluster.fresh_namespace("runs").await.unwrap();
        Some(Self {
            cluster,
            namespace,
            dir: tempfile::tempdir().unwrap(),
        })
    }

    fn image(&self, name: &str, script: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        self.cluster.image(name, &path);
        path
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.cluster.client(ADMIN).unwrap(), &self.namespace)
    }

    fn jobs(&self) -> Api<Job> {
        self.api()
    }

    async fn create(&self, job: Value) -> Job {
        self.jobs()
            .create(
                &PostParams::default(),
                &serde_json::from_value(job).unwrap(),
            )
            .await
            .unwrap()
    }

    async fn until<T>(&self, look: impl Fn(&State) -> Option<T>) -> T {
        self.cluster
            .wait_for(&self.namespace, DEADLINE, "what the test looks for", look)
            .await
            .unwrap_or_else(|error| panic!("{error}"))
    }
}

fn job(image: &str, spec: &Value) -> Value {
    let mut job = json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run"},
        "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "executor", "image": image}]}}},
    });
    merge(&mut job["spec"], spec);
    job
}

fn merge(target: &mut Value, patch: &Value) {
    match (target.as_object_mut(), patch.as_object()) {
        (Some(target), Some(patch)) => {
            for (key, value) in patch {
                merge(target.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        _ => *target = patch.clone(),
    }
}

fn container(extra: &Value) -> Value {
    let mut container = json!({"name": "executor", "image": "tool"});
    merge(&mut container, extra);
    json!({"template": {"spec": {"containers": [container]}}})
}

fn reason(state: &State) -> Option<String> {
    let pod = state.pods_of("run").into_iter().next()?;
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses
        .first()?
        .state
        .as_ref()?
        .waiting
        .as_ref()?
        .reason
        .clone()
}

#[tokio::test]
async fn a_job_runs_its_program_with_the_environment_of_its_pod() {
    let Some(fixture) = Fixture::new().await else {
        return;
    };
    fixture.image(
        "tool",
        "echo \"$GREETING from $POD\"; cat \"$FILE\"; printf done > \"$MAYFLY_TERMINATION_LOG\"",
    );
    let secrets = fixture.api::<Secret>();
    let secret = json!({"metadata": {"name": "data"}, "stringData": {"word": "hello"}});
    secrets
        .create(
            &PostParams::default(),
            &serde_json::from_value(secret).unwrap(),
        )
        .await
        .unwrap();
    let mut spec = container(&json!({
        "env": [
            {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "data", "key": "word"}}},
            {"name": "GREETING", "value": "$(WORD)!"},
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "FILE", "value": "/run/data/word"},
        ],
        "volumeMounts": [{"name": "data", "mountPath": "/run/data"}],
    }));
    spec["template"]["spec"]["volumes"] =
        json!([{"name": "data", "secret": {"secretName": "data"}}]);
    fixture.create(job("tool", &spec)).await;
    let pod = fixture
        .until(|state| {
            state
                .has_condition("run", "Complete")
                .then(|| state.pods_of("run")[0].clone())
        })
        .await;
    let pods = fixture.api::<Pod>();
    let log = pods
        .logs(&pod.name_any(), &LogParams::default())
        .await
        .unwrap();
    assert_eq!(log, format!("hello! from {}\nhello", pod.name_any()));
    let stamped = LogParams {
        timestamps: true,
        ..LogParams::default()
    };
    let log = pods.logs(&pod.name_any(), &stamped).await.unwrap();
    let (at, text) = log.lines().last().unwrap().split_once(' ').unwrap();
    assert_eq!(text, "hello");
    let later = LogParams {
        since_time: Some(at.parse::<Timestamp>().unwrap() + SignedDuration::from_secs(1)),
        ..LogParams::default()
    };
    assert_eq!(pods.logs(&pod.name_any(), &later).await.unwrap(), "");
    let status = &pod.status.unwrap().container_statuses.unwrap()[0];
    let terminated = status.state.as_ref().unwrap().terminated.as_ref().unwrap();
    assert_eq!(
        (terminated.exit_code, terminated.message.as_deref()),
        (0, Some("done"))
    );
}

#[tokio::test]
async fn an_exit_code_named_by_the_failure_policy_ends_the_job_at_once() {
    let Some(fixture) = Fixture::new().await else {
        return;
    };
    fixture.image("tool", "exit 3");
    let codes = json!({"containerName": "executor", "operator": "NotIn", "values": [75]});
    let policy =
        json!({"podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]}});
    fixture.create(job("tool", &policy)).await;
    // Events are left once the status is stored.
    let state = fixture
        .until(|state| {
            let told = state.has_event("PodFailurePolicy");
            (state.has_condition("run", "Failed") && told).then(|| state.clone())
        })
        .await;
    assert_eq!(state.pods_of("run").len(), 1);
}

#[tokio::test]
async fn the_reason_why_a_pod_waits_is_in_its_status() {
    let Some(fixture) = Fixture::new().await else {
        return;
    };
    fixture.create(job("missing", &json!({}))).await;
    fixture
        .until(|state| (reason(state)? == "ImagePullBackOff").then_some(()))
        .await;
    fixture.image("missing", "exit 0");
    fixture
        .until(|state| state.has_condition("run", "Complete").then_some(()))
        .await;

    fixture
        .jobs()
        .delete("run", &DeleteParams::background())
        .await
        .unwrap();
    fixture.image("tool", "exit 0");
    let env = json!({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "none", "key": "a"}}}]});
    fixture.create(job("tool", &container(&env))).await;
    fixture
        .until(|state| (reason(state)? == "CreateContainerConfigError").then_some(()))
        .await;
    fixture
        .jobs()
        .delete("run", &DeleteParams::background())
        .await
        .unwrap();
    fixture
        .until(|state| state.pods.is_empty().then_some(()))
        .await;

    fixture
        .create(job(
            "tool",
            &json!({"template": {"spec": {"nodeSelector": {"disk": "ssd"}}}}),
        ))
        .await;
    fixture
        .until(|state| state.has_event("FailedScheduling").then_some(()))
        .await;
}

#[tokio::test]
async fn deleting_a_job_ends_its_process_with_sigterm_and_removes_what_it_owns() {
    let Some(fixture) = Fixture::new().await else {
        return;
    };
    let marker = fixture.dir.path().join("ended");
    fixture.image(
        "tool",
        &format!(
            "trap 'touch {}; exit 0' TERM; echo up; while :; do sleep 0.05; done",
            marker.display()
        ),
    );
    let job = fixture.create(job("tool", &json!({}))).await;
    let secrets = fixture.api::<Secret>();
    let owner = json!({"apiVersion": "batch/v1", "kind": "Job", "name": "run", "uid": job.uid()});
    let secret = json!({"metadata": {"name": "data", "ownerReferences": [owner]}});
    secrets
        .create(
            &PostParams::default(),
            &serde_json::from_value(secret).unwrap(),
        )
        .await
        .unwrap();
    let pod = fixture
        .until(|state| {
            let pod = state.pods_of("run").into_iter().next()?;
            (pod.status.as_ref()?.phase.as_deref() == Some("Running")).then(|| pod.name_any())
        })
        .await;
    let pods = fixture.api::<Pod>();
    // The trap is set once the first line is out.
    while pods
        .logs(&pod, &LogParams::default())
        .await
        .unwrap_or_default()
        .is_empty()
    {}
    fixture
        .jobs()
        .delete("run", &DeleteParams::foreground())
        .await
        .unwrap();
    fixture
        .until(|state| {
            (state.jobs.is_empty() && state.pods.is_empty() && state.secrets.is_empty())
                .then_some(())
        })
        .await;
    assert!(marker.exists());
}

#[tokio::test]
async fn an_out_of_memory_kill_and_an_eviction_look_like_those_of_a_node() {
    let Some(fixture) = Fixture::new().await else {
        return;
    };
    fixture.image("tool", "sleep 60");
    fixture
        .create(job("tool", &json!({"backoffLimit": 1})))
        .await;
    let running = |state: &State, not: Option<String>| {
        state
            .pods_of("run")
            .into_iter()
            .find(|pod| {
                pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running")
                    && pod.uid() != not
            })
            .cloned()
    };
    let first = fixture.until(|state| running(state, None)).await;
    assert!(fixture.cluster.oom_kill(&first));
    let second = fixture.until(|state| running(state, first.uid())).await;
    assert!(fixture.cluster.evict(&second));
    let state = fixture
        .until(|state| state.has_condition("run", "Failed").then(|| state.clone()))
        .await;
    let status = |pod: &Pod| {
        let pod = state
            .pods
            .iter()
            .find(|other| other.uid() == pod.uid())
            .unwrap();
        serde_json::to_value(&pod.status).unwrap()
    };
    assert_eq!(
        status(&first)["containerStatuses"][0]["state"]["terminated"]["reason"],
        "OOMKilled"
    );
    assert_eq!(status(&second)["reason"], "Evicted");
    let conditions = status(&second)["conditions"].clone();
    assert!(
        conditions
            .as_array()
            .unwrap()
            .iter()
            .any(|c| c["reason"] == "TerminationByKubelet")
    );
}

#[tokio::test]
async fn no_process_outlives_the_cluster() {
    let Some(fixture) = Fixture::new().await else {
        return;
    };
    let pid = fixture.dir.path().join("pid");
    fixture.image(
        "tool",
        &format!("sleep 60 & echo $! > {}; wait", pid.display()),
    );
    fixture.create(job("tool", &json!({}))).await;
    let read = || {
        std::fs::read_to_string(&pid)
            .ok()?
            .trim()
            .parse::<i32>()
            .ok()
    };
    let child = fixture.until(|_| read()).await;
    let Fixture { cluster, .. } = fixture;
    drop(cluster);
    assert!(ends(child), "process {child} is still there");
}
