//! One program of ours beside the other one of a stock installation: our executor in the Jobs that the platform makes
//! itself, and containers of other programs in the Jobs that our launcher makes.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use integration_tests::Repository;
use integration_tests::process::Stream;
use job_contract::env;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use test_cluster::ADMIN;
use test_platform::{Flow, Ledger, Native, Platform, Status, Variable};

use crate::in_cluster::{Fixture, IMAGE};
use crate::with_terrakube::{RunTarget, SETTINGS, Stage, default_template};

/// The Job as the platform's own client submits it, which knows nothing of retries, deadlines or claims. Only that it has
/// half a minute to live after its end; here it stays until it was looked at.
pub(super) fn manifest(data: &Value, milliseconds: u128) -> Value {
    let labels = json!({
        "terrakube.io/organization": data["organizationId"],
        "terrakube.io/workspace": data["workspaceId"],
    });
    let name = format!("job-{}-{milliseconds}", data["jobId"].as_str().unwrap());
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "ttlSecondsAfterFinished": 3600,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "restartPolicy": "Never",
                    "securityContext": {"fsGroup": 1000},
                    "containers": [{
                        "name": "executor",
                        "image": IMAGE,
                        "env": [
                            {"name": "EphemeralFlagBatch", "value": "true"},
                            {"name": "EphemeralJobData", "value": STANDARD.encode(data.to_string())},
                        ],
                        "envFrom": [{"secretRef": {"name": SETTINGS}}],
                        "securityContext": {},
                    }],
                },
            },
        },
    })
}

/// A platform that makes Jobs itself in this cluster.
async fn native(fixture: Fixture) -> Stage {
    native_that_first(fixture, || async {}).await
}

/// The same, whose dispatch takes as long as `wait` once the Job is there.
async fn native_that_first<F>(
    fixture: Fixture,
    wait: impl Fn() -> F + Clone + Send + Sync + 'static,
) -> Stage
where
    F: Future<Output = ()> + Send + 'static,
{
    let client = fixture.cluster.client(ADMIN).unwrap();
    let jobs = Api::<Job>::namespaced(client, &fixture.runs);
    let create = move |data: Value| {
        let jobs = jobs.clone();
        let wait = wait.clone();
        async move {
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap();
            let manifest = manifest(&data, now.as_millis());
            let name = manifest["metadata"]["name"].as_str().unwrap();
            let applied = jobs
                .patch(
                    name,
                    &PatchParams::apply("fabric8"),
                    &Patch::Apply(&manifest),
                )
                .await;
            wait().await;
            applied.map(|_| ()).map_err(|error| error.to_string())
        }
    };
    let platform = Platform::builder().native(Native::new(create));
    let stage = Stage::on(RunTarget::Cluster(Box::new(fixture)), platform).await;
    asking_for_jobs(stage)
}

/// Every workspace asks for Jobs.
pub(super) fn asking_for_jobs(stage: Stage) -> Stage {
    stage.platform.edit(|records| {
        records
            .globals
            .push(Variable::env(env::EPHEMERAL_SWITCH, "true"));
    });
    stage
}

fn exit_codes(pods: &[Pod]) -> Vec<i32> {
    let statuses = pods.iter().filter_map(|pod| pod.status.as_ref());
    statuses
        .flat_map(|status| status.container_statuses.iter().flatten())
        .filter_map(|container| container.state.as_ref()?.terminated.as_ref())
        .map(|terminated| terminated.exit_code)
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_platforms_own_jobs_run_our_executor_to_completed() {
    let stage = native(or_skip!(Fixture::new().await)).await;
    default_template(&stage).await;
    stage.until_pods_ended(3).await;
    let cluster = stage.fixture().state().await;
    assert_eq!(cluster.jobs.len(), 3, "plan, approval and apply");
    assert_eq!(exit_codes(&cluster.pods), [0; 3]);
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_was_reported_looks_like_success_to_a_job_that_would_repeat_failures() {
    let stage = native(or_skip!(Fixture::new().await)).await;
    let failing =
        Repository::module("resource \"terraform_data\" \"a\" {\n  input = var.missing\n}\n");
    let failed = stage.start(failing, Flow::plan_apply());
    stage.platform.until_job(failed, Status::Failed).await;

    let gate = stage.machine().gate();
    let cancelled = stage.start(gate.repository(), Flow::only("terraformApply"));
    stage
        .platform
        .until_streamed(cancelled, "at-the-gate")
        .await;
    stage.platform.cancel(cancelled).await;

    stage.until_pods_ended(2).await;
    let cluster = stage.fixture().state().await;
    assert_eq!(exit_codes(&cluster.pods), [0, 0]);
    assert_eq!(cluster.pods.len(), 2, "nothing was repeated");
    let publications = stage.platform.records().histories.len();
    assert_eq!(publications, 1, "the state of the cancelled apply");
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_gets_sigterm_publishes_its_state_and_reports_before_it_ends() {
    let stage = native(or_skip!(Fixture::new().await)).await;
    let gate = stage.machine().gate();
    let job = stage.start(gate.repository(), Flow::only("terraformApply"));
    stage.platform.until_streamed(job, "at-the-gate").await;
    let client = stage.fixture().cluster.client(ADMIN).unwrap();
    let pods = Api::<Pod>::namespaced(client, &stage.fixture().runs);
    let pod = stage.fixture().state().await.pods[0]
        .metadata
        .name
        .clone()
        .unwrap();
    pods.delete(&pod, &kube::api::DeleteParams::default())
        .await
        .unwrap();
    let job = stage.platform.until_job(job, Status::Failed).await;
    assert_eq!(job.step_statuses(), [Status::Failed]);
    assert!(stage.resources(job.id).contains(&"first".to_owned()));
    assert_eq!(stage.platform.records().histories.len(), 1);
    assert!(
        stage
            .output(job.id, "terraformApply")
            .contains("at-the-gate")
    );
    // It ended well, so that the Job is complete, unless the pod was replaced before it had ended. What replaces it finds the
    // job over, and lets it be.
    stage.until_pods_ended(0).await;
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_is_there_before_its_dispatch_is_on_record_waits_for_it() {
    let recorded = Arc::new(tokio::sync::Semaphore::new(0));
    let wait = Arc::clone(&recorded);
    let until_recorded = move || {
        let wait = Arc::clone(&wait);
        async move { wait.acquire().await.unwrap().forget() }
    };
    let stage = native_that_first(or_skip!(Fixture::new().await), until_recorded).await;
    let job = stage.start(Repository::fixture(), Flow::only("terraformPlan"));
    let asked = |ledger: &Ledger| {
        let early = ledger
            .requests
            .iter()
            .filter(|request| request.during_dispatch);
        (early.filter(|request| request.status == 200).count() >= 2).then_some(())
    };
    stage
        .platform
        .until_asked("the executor looks twice", asked)
        .await;
    recorded.add_permits(1);
    stage.platform.until_job(job, Status::Completed).await;
    // Neither a status nor a line came before.
    stage.platform.assert_kept().await;
}

/// A stock executor ends with 0 whatever its step came to, and leaves no final report.
#[tokio::test(flavor = "multi_thread")]
async fn the_report_of_an_executor_without_a_final_report_stays_as_it_is() {
    for status in [Status::Completed, Status::Failed] {
        let stage = or_skip!(Stage::in_cluster().await);
        let gate = stage.machine().gate();
        let at_work = stage.machine().scratch("at-work");
        let words = format!(": > '{}'\n{}\nexit 0", at_work.display(), gate.words());
        stage.fixture().image_that_first(&words);
        let launcher = stage.serve();
        let job = stage.start(Repository::fixture(), Flow::only("terraformPlan"));
        let started = || at_work.exists().then_some(());
        stage.until("the container is at work", started).await;
        stage.platform.until_job(job, Status::Queue).await;
        stage.platform.edit(|records| {
            let job = records.jobs.get_mut(&job).unwrap();
            (job.status, job.steps[0].status) = (status, status);
        });
        gate.open().await;
        launcher.running.wait_for(Stream::Stderr, "a run has ended");
        stage.until_pods_ended(1).await;
        let job = stage.platform.job(job);
        assert_eq!((job.status, job.steps[0].status), (status, status));
        assert!(stage.platform.ledger().changes().is_empty());
        stage.platform.assert_kept().await;
    }
}

/// It prints what it pleases, and no secret is taken out.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_container_of_another_make_printed_is_no_log_of_the_run() {
    let stage = or_skip!(Stage::in_cluster().await);
    let at_work = stage.machine().scratch("at-work");
    stage.fixture().image_that_first(&format!(
        "echo 'password = hunter2'\n: > '{}'\nexec sleep 600",
        at_work.display()
    ));
    let _launcher = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::only("terraformApply"));
    let working = |state: &test_cluster::State| {
        let pod = state.pods.first()?;
        let phase = pod.status.as_ref()?.phase.as_deref()?;
        (phase == "Running" && at_work.exists()).then(|| pod.clone())
    };
    let pod = stage.fixture().until("the pod is at work", working).await;
    assert!(stage.fixture().cluster.oom_kill(&pod));
    stage.platform.until_job(job, Status::Failed).await;
    let output = stage.output(job, "terraformApply");
    assert!(output.contains("memory"), "{output}");
    assert!(!output.contains("hunter2"), "{output}");
    stage.platform.assert_kept().await;
}

impl Stage {
    /// Waits until so many pods have ended, and every Job is over.
    async fn until_pods_ended(&self, count: usize) {
        let ended = |state: &test_cluster::State| {
            let over = |job: &Job| {
                let name = job.metadata.name.as_deref().unwrap_or_default();
                state.has_condition(name, "Complete")
            };
            (exit_codes(&state.pods).len() >= count && state.jobs.iter().all(over)).then_some(())
        };
        self.fixture().until("the pods have ended", ended).await;
    }
}
