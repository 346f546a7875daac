//! The target before an API server of a few lines.

use std::convert::Infallible;
use std::sync::Mutex as Record;
use std::time::Duration;

use artifact_store::Store;
use axum::http::{Method, Request, Response, StatusCode};
use cluster::RetryPolicy;
use cluster::lease::LeaseState;
use job_contract::keys::ObjectKey;
use job_contract::labels;
use job_contract::status::StepStatus;
use kube::Client;
use kube::client::Body;
use manifest::executor_kind::{ExecutorKind, ExecutorKindSetting};
use reporter::StepState;
use reporter::dispatch::response_signal;
use serde_json::{Value, json};
use tower::service_fn;

use super::start_failure::CheckedBy;
use super::*;

type Requests = Arc<Record<Vec<String>>>;

/// An API server that stores what it is given, or answers every request with one error.
fn target(error: Option<(u16, &'static str)>) -> (KubernetesTarget, Requests) {
    let requests = Requests::default();
    let record = Arc::clone(&requests);
    let service = service_fn(move |request: Request<Body>| {
        let record = Arc::clone(&record);
        async move {
            let (head, body) = request.into_parts();
            let kind = head.uri.path().rsplit('/').next().unwrap().to_owned();
            let line = format!("{} {kind}", head.method);
            let is_there = record.lock().unwrap().contains(&"POST jobs".to_owned());
            record.lock().unwrap().push(line.clone());
            let body = axum::body::to_bytes(axum::body::Body::new(body), usize::MAX);
            let body = body.await.unwrap();
            if line == "GET job-412-step" && error.is_none_or(|(code, _)| code < 500) {
                let is_there = is_there && error.is_none();
                return Ok(if is_there {
                    reply(200, &known())
                } else {
                    absent()
                });
            }
            Ok::<_, Infallible>(answer(error, &head.method, &body))
        }
    });
    let retry_policy = RetryPolicy {
        attempts: 2,
        first_pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(1),
        answer: Duration::from_secs(10),
    };
    let cluster =
        Cluster::from_client(Client::new(service, "runs"), "runs").with_retry_policy(retry_policy);
    (target_of(cluster), requests)
}

fn target_of(cluster: Cluster) -> KubernetesTarget {
    KubernetesTarget::new(
        cluster,
        Deployment::default(),
        ClusterSettings::default(),
        None,
        Metrics::default(),
        Shutdown::default(),
    )
}

/// An API server that takes requests and never says anything, or never ends what it says.
fn hanging(speaks: bool, answer: Duration) -> KubernetesTarget {
    let service = service_fn(move |_: Request<Body>| async move {
        if !speaks {
            std::future::pending::<()>().await;
        }
        let silence = futures_util::stream::pending::<Result<String, Infallible>>();
        Ok::<_, Infallible>(Response::new(axum::body::Body::from_stream(silence)))
    });
    let retry_policy = RetryPolicy {
        attempts: 2,
        first_pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(1),
        answer,
    };
    target_of(
        Cluster::from_client(Client::new(service, "runs"), "runs").with_retry_policy(retry_policy),
    )
}

#[tokio::test]
async fn settings_without_effect_are_named_in_the_runs_log() {
    let folder = tempfile::tempdir().unwrap();
    let (mut target, _) = target(None);
    target.reporter = Some(Arc::new(LocalReporter::new(folder.path())));
    target.submitter.deployment.executor_kind = ExecutorKindSetting::Always(ExecutorKind::Stock);
    let mut job = job();
    job.environment_variables.insert(
        env::EPHEMERAL_ENV.to_owned(),
        "LOCALDOMAIN=elsewhere.example;TF_LOG=info".to_owned(),
    );
    let key = ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id);
    assert_eq!(accept(&target, job).await, Ok(Acceptance::New));
    target.background.finish().await;
    let store = Store::local(folder.path());
    let output = folder.path().join("output");
    let reference = store.reference(&key).await.unwrap();
    store.fetch(&reference, &output).await.unwrap();
    let output = std::fs::read_to_string(output).unwrap();
    assert!(
        output.contains("`LOCALDOMAIN`, which has no effect"),
        "{output}"
    );
    assert!(
        !output.contains("elsewhere") && !output.contains("TF_LOG"),
        "{output}"
    );
}

const SOON: Duration = Duration::from_secs(5);
const NEVER: Duration = Duration::from_hours(1);

#[tokio::test(start_paused = true)]
async fn a_cluster_that_hangs_is_for_later() {
    for (speaks, answer, acceptance) in [
        (false, SOON, NEVER),
        (true, SOON, NEVER),
        (false, NEVER, SOON),
    ] {
        let mut target = hanging(speaks, answer);
        target.submitter.timeout = acceptance;
        let accepted = tokio::time::timeout(NEVER / 2, accept(&target, job()));
        let refused = accepted.await.expect("it is answered").unwrap_err();
        assert!(
            matches!(refused, DispatchError::Unavailable(_)),
            "{refused:?}"
        );
    }
    assert!(submitter::TIMEOUT < Duration::from_mins(1));
}

fn answer(error: Option<(u16, &'static str)>, method: &Method, body: &[u8]) -> Response<Body> {
    let (code, value) = match (error, method) {
        (Some((code, message)), _) => (
            code,
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                   "reason": "Refused", "message": message}),
        ),
        (None, &Method::POST) => {
            let mut object: Value = serde_json::from_slice(body).unwrap();
            object["metadata"]["uid"] = "u-1".into();
            (201, object)
        }
        (None, &Method::GET) => return absent(),
        (None, _) => (200, known()),
    };
    reply(code, &value)
}

fn absent() -> Response<Body> {
    let value = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                       "reason": "NotFound", "message": "not found"});
    reply(404, &value)
}

fn known() -> Value {
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job-412-step",
           "labels": {labels::JOB_ID: "412", labels::STEP_ID: "step"}}})
}

fn reply(code: u16, value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string().into_bytes()));
    *response.status_mut() = StatusCode::from_u16(code).unwrap();
    response
}

async fn accept(target: &KubernetesTarget, job: JobData) -> Result<Acceptance, DispatchError> {
    let (pending, response_sent) = response_signal();
    let accepted = target.accept(Document::written(&job), response_sent).await;
    drop(pending);
    accepted
}

/// A record of a job that waits, as the platform makes it before it dispatches.
fn on_record(data: &std::path::Path) -> Arc<LocalReporter> {
    let reporter = Arc::new(LocalReporter::new(data));
    reporter.mark_queued(&job()).unwrap();
    reporter
}

async fn state_of(reporter: &Arc<LocalReporter>) -> StepState {
    let reporter: Arc<dyn PlatformReporter> = reporter.clone();
    reporter.step_state(&StepRef::of(&job())).await.unwrap()
}

fn with_reporter(
    error: Option<(u16, &'static str)>,
    reporter: &Arc<LocalReporter>,
) -> KubernetesTarget {
    let (mut target, _) = target(error);
    target.reporter = Some(reporter.clone());
    target
}

#[tokio::test]
async fn a_refused_run_is_recorded_as_failed_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let reporter = on_record(folder.path());
    let target = with_reporter(None, &reporter);
    assert!(matches!(
        accept(&target, wrong_job()).await,
        Err(DispatchError::Invalid(_))
    ));
    let state = state_of(&reporter).await;
    assert_eq!(
        (state.job, state.step),
        (JobStatus::Failed, StepStatus::Failed)
    );
    let record = reporter.records().job("412").unwrap().unwrap();
    let output = record.step("step").unwrap().output.clone().unwrap();
    let output = std::fs::read_to_string(output).unwrap();
    assert!(output.contains("EPHEMERAL_CPU_REQUEST"), "{output}");
}

#[tokio::test]
async fn what_cannot_be_accepted_yet_leaves_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let reporter = Arc::new(LocalReporter::new(folder.path()));
    let target = with_reporter(Some((503, "overloaded")), &reporter);
    assert!(matches!(
        accept(&target, job()).await,
        Err(DispatchError::Unavailable(_))
    ));
    assert_eq!(reporter.records().job("412").unwrap(), None);
    // No heartbeat is sent for a job that the platform has never recorded.
    let target = with_reporter(Some((422, "spec is invalid")), &reporter);
    assert!(matches!(
        accept(&target, job()).await,
        Err(DispatchError::Invalid(_))
    ));
    assert_eq!(reporter.records().job("412").unwrap(), None);
}

#[tokio::test]
async fn a_step_that_is_over_gets_no_second_job_unless_its_job_was_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let reporter = on_record(folder.path());
    let step = StepRef::of(&job());
    let put = |status: JobStatus| {
        let change = |record: &mut platform::local::JobRecord| {
            record.status = status;
            record.steps[0].status = StepStatus::Completed;
        };
        reporter.records().update_job(&step, change).unwrap();
    };
    put(JobStatus::Completed);
    let (mut target, requests) = target(None);
    target.reporter = Some(reporter.clone());
    assert_eq!(accept(&target, job()).await, Ok(Acceptance::Duplicate));
    assert!(requests.lock().unwrap().is_empty(), "no Job is made");
    put(JobStatus::Rejected);
    assert_eq!(accept(&target, job()).await, Ok(Acceptance::New));
}

#[tokio::test]
async fn an_accepted_run_is_on_record_as_queued() {
    let folder = tempfile::tempdir().unwrap();
    let reporter = Arc::new(LocalReporter::new(folder.path()));
    let target = with_reporter(None, &reporter);
    assert_eq!(accept(&target, job()).await, Ok(Acceptance::New));
    let state = state_of(&reporter).await;
    assert_eq!(
        (state.job, state.step),
        (JobStatus::Queue, StepStatus::Pending)
    );
}

fn job() -> JobData {
    serde_json::from_value(json!({
        "type": "terraformPlan",
        "organizationId": "org",
        "workspaceId": "ws",
        "jobId": "412",
        "stepId": "step",
    }))
    .unwrap()
}

/// One with a setting that breaks a rule.
fn wrong_job() -> JobData {
    let wrong = ("EPHEMERAL_CPU_REQUEST".to_owned(), "a lot".to_owned());
    JobData {
        environment_variables: [wrong].into(),
        ..job()
    }
}

#[tokio::test]
async fn a_dispatch_becomes_a_job_with_its_secret_that_is_released() {
    let (target, requests) = target(None);
    assert_eq!(accept(&target, job()).await, Ok(Acceptance::New));
    assert_eq!(
        *requests.lock().unwrap(),
        ["POST jobs", "POST secrets", "PATCH job-412-step"]
    );
}

#[tokio::test]
async fn what_concerns_every_run_is_for_later_and_what_concerns_one_is_not() {
    let forbidden = "jobs.batch is forbidden: User \"x\" cannot create resource \"jobs\"";
    for (code, message, later) in [
        (503, "overloaded", true),
        (401, "Unauthorized", true),
        (403, forbidden, true),
        (403, "admission webhook \"p\" denied the request", false),
        (422, "spec is invalid", false),
    ] {
        let (target, _) = target(Some((code, message)));
        let refused = accept(&target, job()).await.unwrap_err();
        assert_eq!(
            matches!(refused, DispatchError::Unavailable(_)),
            later,
            "{code} {message}: {refused:?}"
        );
    }
}

#[tokio::test]
async fn a_right_that_stays_missing_fails_the_run_with_the_reason() {
    let forbidden = "jobs.batch is forbidden: User \"x\" cannot create resource \"jobs\"";
    let folder = tempfile::tempdir().unwrap();
    let reporter = on_record(folder.path());
    let mut target = with_reporter(Some((403, forbidden)), &reporter);
    assert!(matches!(
        accept(&target, job()).await,
        Err(DispatchError::Unavailable(_))
    ));
    let use_impatient_tracker = |target: &mut KubernetesTarget| {
        let start_failures = Arc::new(StartFailureTracker::new(Duration::ZERO, Metrics::default()));
        target.readiness.start_failures = Arc::clone(&start_failures);
        target.submitter.start_failures = start_failures;
    };
    use_impatient_tracker(&mut target);
    let refused = accept(&target, job()).await.unwrap_err();
    assert!(matches!(refused, DispatchError::Invalid(_)), "{refused:?}");
    let state = state_of(&reporter).await;
    assert_eq!(state.job, JobStatus::Failed);
    let record = reporter.records().job("412").unwrap().unwrap();
    let output = record.step("step").unwrap().output.clone().unwrap();
    let output = std::fs::read_to_string(output).unwrap();
    assert!(output.contains("cannot create resource"), "{output}");
    assert!(output.contains("`api-launcher check`"), "{output}");
    // The readiness probe shows it, and dispatches are still accepted.
    let barred = target.readiness().await;
    assert!(
        matches!(&barred, Readiness::Impaired(why) if why.contains("cannot")),
        "{barred:?}"
    );
    // Where a Job can be made again, nothing is in the way.
    let (mut mended, _) = super::tests::target(None);
    use_impatient_tracker(&mut mended);
    mended
        .submitter
        .start_failures
        .record_failure(CheckedBy::Dispatch, forbidden);
    assert_eq!(accept(&mended, job()).await, Ok(Acceptance::New));
    assert_eq!(mended.readiness().await, Readiness::Ready);
}

#[tokio::test]
async fn a_setting_that_breaks_a_rule_is_named_and_no_job_is_made() {
    let (target, requests) = target(None);
    let refused = accept(&target, wrong_job()).await.unwrap_err();
    assert!(matches!(refused, DispatchError::Invalid(_)), "{refused:?}");
    assert!(refused.to_string().contains("EPHEMERAL_CPU_REQUEST"));
    assert_eq!(*requests.lock().unwrap(), ["GET job-412-step"]);
}

#[tokio::test]
async fn a_run_accepted_earlier_is_accepted_again_though_a_setting_breaks_a_rule_now() {
    let folder = tempfile::tempdir().unwrap();
    for has_reporter in [false, true] {
        let (mut target, _) = target(None);
        if has_reporter {
            target.reporter = Some(Arc::new(LocalReporter::new(folder.path())));
        }
        assert_eq!(accept(&target, job()).await, Ok(Acceptance::New));
        let again = accept(&target, wrong_job()).await;
        assert_eq!(again, Ok(Acceptance::Duplicate));
    }
    let record = LocalReporter::new(folder.path())
        .records()
        .job("412")
        .unwrap()
        .unwrap();
    assert_eq!(record.status, JobStatus::Queue);
    // Where that cannot be told, it may come again.
    let (away, _) = target(Some((503, "overloaded")));
    let refused = accept(&away, wrong_job()).await.unwrap_err();
    assert!(
        matches!(refused, DispatchError::Unavailable(_)),
        "{refused:?}"
    );
}

#[tokio::test]
async fn readiness_asks_the_cluster_once_in_a_while() {
    let (ready, requests) = target(None);
    for _ in 0..5 {
        assert_eq!(ready.readiness().await, Readiness::Ready);
    }
    assert_eq!(
        *requests.lock().unwrap(),
        ["GET mayfly-readiness", "POST jobs"]
    );
    *ready.readiness.last.lock().await = None;
    ready.readiness().await;
    let last = requests.lock().unwrap().last().cloned();
    assert_eq!(last.as_deref(), Some("GET mayfly-readiness"));
    let (away, _) = target(Some((403, "forbidden")));
    assert!(matches!(away.readiness().await, Readiness::NotReady(_)));
}

#[tokio::test]
async fn a_replica_that_stands_by_is_ready_and_one_that_could_not_take_over_is_not() {
    let (target, _) = target(None);
    let readiness = async |lease_state| {
        *target.readiness.lease.lock().unwrap() = Some(lease_state);
        *target.readiness.last.lock().await = None;
        target.readiness().await
    };
    assert_eq!(readiness(LeaseState::StandsBy).await, Readiness::Ready);
    assert_eq!(readiness(LeaseState::Holder).await, Readiness::Ready);
    // Under the Role of Terrakube's documentation a single launcher does its work.
    let alone = readiness(LeaseState::NotAllowed).await;
    assert!(
        matches!(&alone, Readiness::Impaired(why) if why.contains("rbac/launcher.yaml")),
        "{alone:?}"
    );
    let away = readiness(LeaseState::OutOfReach("no such namespace".into())).await;
    assert!(
        matches!(&away, Readiness::NotReady(why) if why.ends_with("no such namespace")),
        "{away:?}"
    );
}
