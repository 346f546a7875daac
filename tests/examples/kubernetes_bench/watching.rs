//! A launcher that watches many live runs: what it takes of memory, and how soon it speaks when one of them ends or
//! gets stuck.

use std::time::Instant;

use crate::launcher::{self, Reports, memory_of};
use anyhow::{Context as _, Result, ensure};
use integration_tests::process::Stream;
use integration_tests::{Machine, job};
use job_contract::JobData;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use test_platform::launcher::Launcher;

use crate::launches::at_once;
use crate::runs;
use crate::server::{ApiServer, RUNS};
use crate::sight::Sight;

pub(crate) async fn measure(
    server: [&str; 2],
    program: &str,
    runs: usize,
    count: usize,
) -> Result<Value> {
    ensure!(
        count > 2 * runs,
        "too few Jobs for {runs} measurements of each kind"
    );
    let server = ApiServer::start(server).await?;
    let machine = Machine::new("");
    let field = Field::new(server.client().await?);
    let step = runs::step();
    let jobs: Vec<JobData> = (1..=count)
        .map(|number| job::in_job(&step, &number.to_string()))
        .collect();
    // The first ends are told, the next stick; the others are there.
    let (ending, others) = jobs.split_at(runs);
    let (sticking, _) = others.split_at(runs);
    for job in ending.iter().chain(sticking) {
        machine.queue(&[job]);
    }
    let populate = field.clone();
    at_once(jobs.clone(), move |job| {
        let field = populate.clone();
        async move { field.live_run(&job).await }
    })
    .await?;
    let last = job::in_job(&step, &(count + 1).to_string());
    field.unschedulable_run(&last).await?;

    let launcher = launcher::start(program, &server, &machine, Reports::ToRecords);
    let pid = launcher.running.pid();
    // Runs are judged once all of them are listed.
    told(&launcher, &last);
    let (resident, peak) = (memory_of(pid, "VmRSS")?, memory_of(pid, "VmHWM")?);

    let mut reported = Sight::of(field.client.clone(), RUNS, is_reported).await?;
    let (mut verdicts, mut reasons) = (Vec::new(), Vec::new());
    for (ending, sticking) in ending.iter().zip(sticking) {
        let begun = Instant::now();
        field.kill(ending).await?;
        let seen = reported.when(&runs::name(ending)).await?;
        verdicts.push((seen - begun).as_secs_f64());
        ensure!(
            machine.statuses(ending).1 == "failed"
                && machine.step_output(ending).contains("memory"),
            "the platform was told {:?}",
            machine.statuses(ending)
        );

        let begun = Instant::now();
        field.stick(sticking).await?;
        told(&launcher, sticking);
        reasons.push(begun.elapsed().as_secs_f64());
    }
    let busy = memory_of(pid, "VmHWM")?;
    Ok(json!({
        "server": server.name, "jobs": count, "resident": resident, "peak": peak.max(busy),
        "verdicts": verdicts, "reasons": reasons,
    }))
}

/// Returns when the launcher says that the run waits, and for what.
fn told(launcher: &Launcher, job: &JobData) {
    let run = format!("\"run\":\"{}/{}\"", job.job_id, job.step_id);
    launcher.running.wait_for(Stream::Stderr, &run);
}

fn is_reported(job: &Job) -> bool {
    job.annotations().contains_key("mayfly.dev/reported-at")
}

/// The part of a cluster that makes pods and moves them.
#[derive(Clone)]
struct Field {
    client: Client,
    jobs: Api<Job>,
    pods: Api<Pod>,
}

impl Field {
    fn new(client: Client) -> Self {
        Self {
            jobs: Api::namespaced(client.clone(), RUNS),
            pods: Api::namespaced(client.clone(), RUNS),
            client,
        }
    }

    /// A run whose executor is at work.
    async fn live_run(&self, job: &JobData) -> Result<()> {
        self.run(job, Some("node-1"), &running()).await
    }

    /// A run no node takes.
    async fn unschedulable_run(&self, job: &JobData) -> Result<()> {
        let status = json!({"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient memory.", "lastTransitionTime": now(),
        }]});
        self.run(job, None, &status).await
    }

    async fn run(&self, job: &JobData, node: Option<&str>, pod_status: &Value) -> Result<()> {
        let mut job = runs::manifest_in(RUNS, job)?.job;
        if let Some(spec) = &mut job.spec {
            spec.suspend = Some(false);
        }
        let released = ("mayfly.dev/released-at".to_owned(), now());
        job.annotations_mut().extend([released]);
        let job = self.jobs.create(&PostParams::default(), &job).await?;
        let status =
            json!({"status": {"startTime": now(), "active": 1, "ready": 1, "terminating": 0}});
        self.job_status(&job.name_any(), status).await?;
        let pod = pod_of(&job, node)?;
        let made = self.pods.create(&PostParams::default(), &pod).await?;
        self.pod_status(&made.name_any(), pod_status).await
    }

    /// The kernel kills the executor for its memory, and the Job has failed.
    async fn kill(&self, job: &JobData) -> Result<()> {
        let name = runs::name(job);
        let ended = json!({"exitCode": 137, "reason": "OOMKilled", "startedAt": now(), "finishedAt": now()});
        let mut status = running();
        status["phase"] = "Failed".into();
        status["containerStatuses"][0]["state"] = json!({"running": null, "terminated": ended});
        self.pod_status(&pod_name(&name), &status).await?;
        let condition = |kind: &str| {
            json!({
                "type": kind, "status": "True", "reason": "PodFailurePolicy",
                "message": "Container executor failed with exit code 137 matching FailJob rule at index 0",
                "lastProbeTime": now(), "lastTransitionTime": now(),
            })
        };
        let status = json!({"status": {
            "active": 0, "ready": 0, "failed": 1,
            "conditions": [condition("FailureTarget"), condition("Failed")],
        }});
        self.job_status(&name, status).await
    }

    /// The pod is started again by nobody: its image is gone.
    async fn stick(&self, job: &JobData) -> Result<()> {
        let why = json!({"reason": "ImagePullBackOff", "message": "Back-off pulling image"});
        let mut status = running();
        status["phase"] = "Pending".into();
        status["containerStatuses"][0]["state"] = json!({"running": null, "waiting": why});
        self.pod_status(&pod_name(&runs::name(job)), &status).await
    }

    async fn job_status(&self, name: &str, status: Value) -> Result<()> {
        let patch = Patch::Merge(status);
        let params = PatchParams::default();
        self.jobs.patch_status(name, &params, &patch).await?;
        Ok(())
    }

    async fn pod_status(&self, name: &str, status: &Value) -> Result<()> {
        let patch = Patch::Merge(json!({"status": status}));
        let params = PatchParams::default();
        self.pods.patch_status(name, &params, &patch).await?;
        Ok(())
    }
}

fn pod_name(job: &str) -> String {
    format!("{job}-abcde")
}

/// The pod the Job controller would make.
fn pod_of(job: &Job, node: Option<&str>) -> Result<Pod> {
    let template = job
        .spec
        .as_ref()
        .context("a Job has a spec")?
        .template
        .clone();
    let mut meta: ObjectMeta = template.metadata.unwrap_or_default();
    meta.name = Some(pod_name(&job.name_any()));
    meta.owner_references = Some(vec![runs::owner(job)]);
    let labels = meta.labels.get_or_insert_default();
    for (name, value) in [
        ("batch.kubernetes.io/job-name", job.name_any()),
        ("job-name", job.name_any()),
        (
            "batch.kubernetes.io/controller-uid",
            job.uid().unwrap_or_default(),
        ),
        ("controller-uid", job.uid().unwrap_or_default()),
    ] {
        labels.insert(name.to_owned(), value);
    }
    let mut spec = template.spec.context("a template has a spec")?;
    spec.node_name = node.map(str::to_owned);
    Ok(Pod {
        metadata: meta,
        spec: Some(spec),
        status: None,
    })
}

/// What a kubelet says of a pod that runs.
fn running() -> Value {
    let condition =
        |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": now()});
    let conditions = [
        "PodReadyToStartContainers",
        "Initialized",
        "Ready",
        "ContainersReady",
        "PodScheduled",
    ];
    json!({
        "phase": "Running", "hostIP": "10.1.2.3", "podIP": "10.4.5.6", "podIPs": [{"ip": "10.4.5.6"}],
        "qosClass": "Burstable", "startTime": now(),
        "conditions": conditions.map(condition),
        "containerStatuses": [{
            "name": "executor", "image": "mayfly-executor:1", "ready": true, "started": true, "restartCount": 0,
            "imageID": "registry.example/mayfly-executor@sha256:6c3c624b58dbbcd3c0dd82b4c53f04194d1247c6eebdaab7c610cf7d66709b3b",
            "containerID": "containerd://6c3c624b58dbbcd3c0dd82b4c53f04194d1247c6eebdaab7c610cf7d66709b3b",
            "state": {"running": {"startedAt": now()}},
        }],
    })
}

/// As the API writes times: in whole seconds.
fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
