//! Exactly one Job for each run, after any number of deliveries from any client, and whatever dies.

use std::fs;

use base64::Engine as _;
use integration_tests::{Repository, job};
use job_contract::{Document, JobData, env};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use test_cluster::{ADMIN, Fault, State};
use test_platform::launcher::DISPATCH;

use super::{Fixture, LAUNCHER, deliver_all, job_data, many, name, post_all, suspended};

/// Jobs of a busy platform that comes back.
const BURST: usize = 300;
const QUEUE: &str = "team";
const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_duplicates_at_two_replicas_make_one_job() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let plan = job::plan(&Repository::fixture());
    let replicas = [fixture.serve(), fixture.serve()];
    let posts = (0..20).map(|number| (replicas[number % 2].endpoint.clone(), plan.clone()));
    let answers = post_all(posts.collect()).await;
    assert_eq!(answers, vec![Some(202); 20]);
    fixture.assert_exactly_one_each(&[plan]).await;
    assert_eq!(fixture.jobs_created(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_killed_in_a_burst_leaves_exactly_one_job_each() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let jobs = many(&job::plan(&Repository::fixture()), BURST);
    let (doomed, other) = (fixture.serve(), fixture.serve());
    // Some deliveries hang between Job and Secret, so that the crash finds them there however fast the rest is.
    fixture
        .cluster
        .faults()
        .next(20, "create", "secrets", Fault::Hang);
    let posts = jobs
        .iter()
        .map(|job| (doomed.endpoint.clone(), job.clone()));
    let burst = tokio::spawn(post_all(posts.collect()));
    fixture
        .until("the burst is under way", |state| {
            (!state.secrets.is_empty()).then_some(())
        })
        .await;
    doomed.crash();
    let answers = burst.await.unwrap();
    // What was accepted before the crash is in the cluster, whatever the platform does next.
    let state = fixture.state().await;
    for (job, answer) in jobs.iter().zip(&answers) {
        let there = state.job(&name(job)).is_some();
        assert!(there || *answer != Some(202), "{} is lost", name(job));
    }
    assert!(
        answers.contains(&None),
        "the crash came after the burst: {answers:?}"
    );

    let restarted = fixture.serve();
    deliver_all(&[restarted.endpoint.clone(), other.endpoint.clone()], &jobs).await;
    fixture.assert_exactly_one_each(&jobs).await;
    assert_eq!(fixture.jobs_created(), BURST, "no Job was made twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_replica_had_accepted_is_released_without_another_delivery() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let jobs = many(&job::plan(&Repository::fixture()), 3);
    let doomed = fixture.serve();
    let faults = fixture.cluster.faults();
    faults.next_of(LAUNCHER, 1000, "patch", "jobs", Fault::InternalError);
    for job in &jobs {
        doomed.endpoint.accept(job).await;
    }
    assert!(fixture.state().await.jobs.iter().all(suspended));
    doomed.crash();
    faults.clear();
    let _other = fixture.serve();
    fixture.assert_exactly_one_each(&jobs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_cut_between_job_and_secret_is_completed_by_the_next() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let plan = fixture.cut_between_job_and_secret().await;
    assert!(fixture.state().await.secrets.is_empty());
    let other = fixture.serve();
    other.endpoint.accept(&plan).await;
    fixture.assert_exactly_one_each(&[plan]).await;
    assert_eq!(fixture.jobs_created(), 1);
}

/// What Kueue does for a queue with room: it releases each Job that names the queue, as soon as it sees it. Unlike Kueue, it
/// has no webhooks, makes no workload, and suspends no Job again.
async fn admit(fixture: &Fixture) {
    let client = fixture.cluster.client(ADMIN).unwrap();
    let jobs = Api::<Job>::namespaced(client, &fixture.runs);
    let queue = ListParams::default().labels(&format!("{QUEUE_LABEL}={QUEUE}"));
    for job in jobs.list(&queue).await.unwrap().items {
        let release = Patch::Merge(json!({"spec": {"suspend": false}}));
        let name = job.metadata.name.unwrap();
        let released = jobs.patch(&name, &PatchParams::default(), &release).await;
        released.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_of_the_cluster_gets_no_job_before_its_secret() {
    let fixture = or_skip!(Fixture::new().await);
    let repository = Repository::fixture();
    let plan = job::plan(&repository);
    fixture.machine.queue(&[&plan]);
    let data = fixture.machine.data_dir();
    let labels = format!("{QUEUE_LABEL}={QUEUE}");
    let settings = [
        (env::DATA_DIR, data.to_str().unwrap()),
        (env::EPHEMERAL_LABELS, &labels),
    ];
    let doomed = fixture.serve_with(&settings);
    let faults = fixture.cluster.faults();
    faults.next_of(LAUNCHER, 20, "create", "secrets", Fault::InternalError);
    assert_eq!(doomed.endpoint.post(&plan).await.unwrap(), 503);
    admit(&fixture).await;
    assert!(fixture.state().await.jobs.iter().all(suspended));
    // The next delivery is cut between its Secret and the queue. Another launcher completes it.
    faults.clear();
    faults.next_of(LAUNCHER, 1000, "patch", "jobs", Fault::InternalError);
    assert_eq!(doomed.endpoint.post(&plan).await.unwrap(), 503);
    doomed.crash();
    admit(&fixture).await;
    assert!(fixture.state().await.jobs.iter().all(suspended));
    faults.clear();
    let _other = fixture.serve_with(&settings);
    let is_queued = |state: &State| {
        let labels = state.job(&name(&plan))?.metadata.labels.as_ref()?;
        (labels[QUEUE_LABEL] == QUEUE).then_some(())
    };
    fixture.until("the Job is in its queue", is_queued).await;
    assert!(fixture.state().await.jobs.iter().all(suspended));
    admit(&fixture).await;
    fixture.until_over(&plan, "Complete").await;
    assert_eq!(fixture.jobs_created(), 1);
}

/// Somebody who may create Secrets, and sees the Job, is faster than the launcher.
#[tokio::test(flavor = "multi_thread")]
async fn a_document_that_somebody_else_stored_for_a_job_is_not_run() {
    let fixture = or_skip!(Fixture::new().await);
    let repository = Repository::fixture();
    let plan = job::plan(&repository);
    let marker = fixture.machine.data_dir().join("foreign-code-ran");
    let script = format!("touch '{}'", marker.display());
    let foreign = job::scripts(&repository, vec![job::bash(1, &script)]);
    let foreign = job::in_job(&foreign, "13");
    fixture.machine.queue(&[&plan]);
    fixture.machine.queue(&[&foreign]);
    let before = fixture.machine.record(&foreign);
    let data = fixture.machine.data_dir();
    let launcher = fixture.serve_with(&[(env::DATA_DIR, data.to_str().unwrap())]);
    let faults = fixture.cluster.faults();
    faults.next_of(LAUNCHER, 20, "create", "secrets", Fault::InternalError);
    assert_eq!(launcher.endpoint.post(&plan).await.unwrap(), 503);
    let state = fixture.state().await;
    let secret = job_data(state.job(&name(&plan)).unwrap()).unwrap();
    let secret = json!({
        "metadata": {"name": secret},
        "stringData": {"job-data": Document::written(&foreign).encode()},
    });
    let secret: Secret = serde_json::from_value(secret).unwrap();
    let client = fixture.cluster.client(ADMIN).unwrap();
    let secrets = Api::<Secret>::namespaced(client, &fixture.runs);
    let stored = secrets.create(&PostParams::default(), &secret).await;
    stored.unwrap();
    faults.clear();
    launcher.endpoint.accept(&plan).await;
    fixture.until_over(&plan, "Failed").await;
    fixture
        .until_reported(&plan, "the job data are not those of this run")
        .await;
    assert!(!marker.exists(), "the code of somebody else ran");
    assert_eq!(fixture.machine.record(&foreign), before);
}

/// Documents of the platform, and one that no launcher would write so.
fn documents() -> Vec<String> {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../crates/job-contract/fixtures/documents"
    );
    let files = fs::read_dir(folder).unwrap();
    // Which environment a workspace may give its executor is for other tests.
    let accepted = |text: String| text.replace(env::EPHEMERAL_ENV, "EXAMPLE_ENV_VARS");
    let mut all: Vec<String> = files
        .map(|file| accepted(fs::read_to_string(file.unwrap().path()).unwrap()))
        .collect();
    assert_eq!(all.len(), 42);
    all.push(
        concat!(
            " {\n  \"zebra\": {\"b\": 1, \"a\": [null, 1.50]}, \"type\":\"terraformPlan\",\r\n",
            "\t\"organizationId\":\"o\", \"workspaceId\" : \"w\", \"jobId\":9999, \"stepId\":\"odd\",",
            "\"variables\":[{\"key\":\"list\",\"value\":\"[1]\",\"hcl\":true,\"sensitive\":null}],",
            "\"commandList\":null,\"environmentVariables\":{\"A\":null,\"B\":7}} \n"
        )
        .to_owned(),
    );
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn the_executor_receives_every_document_byte_for_byte() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let launcher = fixture.serve();
    let endpoint = launcher.endpoint.clone();
    for document in documents() {
        let job: JobData = serde_json::from_str(&document).unwrap();
        let answer = endpoint.request(DISPATCH, document.clone()).send().await;
        assert_eq!(answer.unwrap().status(), 202, "{document}");
        let is_stored = |state: &State| {
            let secret = job_data(state.job(&name(&job))?)?;
            let mut secrets = state.secrets.iter();
            let stored = secrets.find(|stored| stored.metadata.name.as_deref() == Some(secret))?;
            Some(stored.data.as_ref()?["job-data"].0.clone())
        };
        let stored = fixture.until("the Secret is there", is_stored).await;
        let received = base64::prelude::BASE64_STANDARD.decode(stored).unwrap();
        assert_eq!(String::from_utf8(received).unwrap(), document);
    }
}
