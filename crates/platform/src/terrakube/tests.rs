//! The client against the test platform.

mod api;

use std::net::TcpListener;
use std::time::Duration;

use job_contract::StepType;
use job_contract::final_statuses::{Ending, FinalStatuses};
use job_contract::status::{JobStatus, StepStatus};
use job_contract::{Exit, env};
use reqwest::{StatusCode, Url};
use rstest::rstest;
use serde_json::{Value, json};
use tokio::time::Instant;

use self::api::{Api, client, step};
use super::{Terrakube, TerrakubeConfig, TerrakubeError, TokenSource};
use crate::redis::{Redis, RedisArgs};
use crate::{Claim, History, Holder, Outcome, PlanReference, StartPermission, StartReport};
use runtime::Deadline;
use test_peers::port::Port;
use test_peers::redis::RedisServer;
use test_platform::{Effect, Release};

const PLAN: &str = "terraformPlan";

fn deadline() -> Deadline {
    Deadline::after(Duration::from_mins(2))
}

fn outcome(step_type: StepType, ending: Ending, plan: PlanReference) -> Outcome {
    Outcome {
        statuses: FinalStatuses::of(step_type, ending, true, false, 2),
        output: Some("https://api/log".into()),
        note: None,
        plan,
        commit_id: Some("abc".into()),
    }
}

fn planned() -> Outcome {
    let plan = PlanReference::Set("https://store/plan".into());
    outcome(StepType::Plan, Ending::Changes, plan)
}

#[tokio::test]
async fn a_step_waits_until_its_dispatch_is_recorded() {
    let api = Api::with_status("pending").await;
    api.becomes(&["pending", "queue"]);
    let mut config = api.config();
    config.dispatch_wait = Duration::from_mins(2);
    let admission = client(config)
        .start_permission(&step("plan-id", PLAN))
        .await;
    let Ok(StartPermission::Granted(view)) = admission else {
        panic!("{admission:?}");
    };
    assert_eq!(view.status, JobStatus::Queue);
    assert_eq!(view.step, Some(StepStatus::Pending));
    assert_eq!(view.template_steps, 2);
    assert_eq!(api.reads(), 3);
    assert!(api.changes().is_empty());
}

#[rstest]
#[case("queue", PLAN, StartPermission::Granted(granted("queue")))]
#[case("rejected", "approval", StartPermission::Granted(granted("rejected")))]
#[case("rejected", PLAN, StartPermission::JobEnded(JobStatus::Rejected))]
#[case("cancelled", PLAN, StartPermission::JobEnded(JobStatus::Cancelled))]
#[case("failed", "approval", StartPermission::JobEnded(JobStatus::Failed))]
#[case("completed", PLAN, StartPermission::JobEnded(JobStatus::Completed))]
#[case("approved", PLAN, StartPermission::NotDispatched(JobStatus::Approved))]
#[case("pending", PLAN, StartPermission::NotDispatched(JobStatus::Pending))]
#[tokio::test]
async fn only_a_dispatched_job_runs_and_no_other_job_is_changed(
    #[case] status: &str,
    #[case] step_type: &str,
    #[case] expected: StartPermission,
) {
    let api = Api::with_status(status).await;
    let admission = api
        .client()
        .start_permission(&step("plan-id", step_type))
        .await;
    assert_eq!(admission.unwrap(), expected);
    assert!(api.changes().is_empty());
}

/// The dispatch is repeated after the step has ended.
#[rstest]
#[case(
    "running",
    "completed",
    StartPermission::StepEnded(StepStatus::Completed)
)]
#[case(
    "pending",
    "completed",
    StartPermission::StepEnded(StepStatus::Completed)
)]
#[case("approved", "failed", StartPermission::StepEnded(StepStatus::Failed))]
#[case(
    "completed",
    "completed",
    StartPermission::JobEnded(JobStatus::Completed)
)]
#[tokio::test]
async fn a_step_that_is_over_does_not_run_again_though_its_job_goes_on(
    #[case] job: &str,
    #[case] status: &str,
    #[case] expected: StartPermission,
) {
    let api = Api::with_status(job).await;
    api.set_step(0, status);
    let admission = api.client().start_permission(&step("plan-id", PLAN)).await;
    assert_eq!(admission.unwrap(), expected);
    assert_eq!(api.reads(), 1);
    assert!(api.changes().is_empty());
}

fn granted(status: &str) -> crate::StepView {
    crate::StepView {
        status: serde_json::from_value(status.into()).unwrap(),
        step: Some(StepStatus::Pending),
        template_steps: 2,
        terraform_plan: None,
        planned: false,
        half_reported: false,
    }
}

#[tokio::test]
async fn a_start_is_reported_for_job_and_step_with_changed_fields_only() {
    let api = Api::with_status("queue").await;
    let start = api
        .client()
        .report_running(&step("plan-id", PLAN), &"c".repeat(70), "https://api/log")
        .await;
    assert_eq!(start.unwrap(), StartReport::Accepted);
    assert_eq!(
        api.changes(),
        [
            (
                "412".to_owned(),
                json!({"status": "running", "commitId": "c".repeat(64)})
            ),
            (
                "plan-id".to_owned(),
                json!({"status": "running", "output": "https://api/log"})
            ),
        ]
    );
}

#[rstest]
#[case("cancelled", PLAN, StartReport::Ended(JobStatus::Cancelled), 0)]
#[case("failed", PLAN, StartReport::Ended(JobStatus::Failed), 0)]
#[case("completed", PLAN, StartReport::Ended(JobStatus::Completed), 0)]
#[case("pending", PLAN, StartReport::Ended(JobStatus::Pending), 0)]
#[case("rejected", PLAN, StartReport::Ended(JobStatus::Rejected), 0)]
#[case("rejected", "approval", StartReport::Accepted, 1)]
#[tokio::test]
async fn an_ended_job_is_not_set_to_running(
    #[case] status: &str,
    #[case] step_type: &str,
    #[case] expected: StartReport,
    #[case] changes: usize,
) {
    let api = Api::with_status(status).await;
    let start = api
        .client()
        .report_running(&step("plan-id", step_type), "abc", "https://api/log")
        .await;
    assert_eq!(start.unwrap(), expected);
    assert_eq!(api.changes().len(), changes);
    assert_eq!(api.status(), status);
}

/// If the template counted as one of a single step, a plan with changes would complete its job, and nothing would be applied.
#[tokio::test]
async fn a_job_document_without_its_steps_is_read_again_and_is_no_job_of_one_step() {
    let api = Api::with_status("queue").await;
    let steps = api.edit(|job| std::mem::take(&mut job.steps));
    let (client, plan) = (api.client(), step("plan-id", PLAN));
    let deadline = deadline();
    for error in [
        client.start_permission(&plan).await.unwrap_err(),
        client.step_view(&plan, &deadline).await.unwrap_err(),
    ] {
        assert!(matches!(error, TerrakubeError::NoSteps { .. }), "{error}");
        assert_eq!(error.exit(), Exit::Infrastructure);
        let hint = error.hint().unwrap();
        assert!(
            hint.contains("tokens") && hint.contains("InternalSecret"),
            "{hint}"
        );
    }
    assert_eq!(api.reads(), 12, "read and read again five times, twice");

    let told = async {
        while api.reads() < 14 {
            tokio::task::yield_now().await;
        }
        api.edit(|job| job.steps = steps);
    };
    let (view, ()) = tokio::join!(client.step_view(&plan, &deadline), told);
    assert_eq!(view.unwrap().template_steps, 2);
}

/// The dispatch came twice. The job may already be about to run the next step.
#[rstest]
#[case("queue", "completed")]
#[case("running", "completed")]
#[case("running", "failed")]
#[tokio::test]
async fn a_step_that_ended_is_not_run_again_and_its_job_is_left_alone(
    #[case] status: &str,
    #[case] known: &str,
) {
    let api = Api::with_status(status).await;
    api.set_step(0, known);
    let (client, plan) = (api.client(), step("plan-id", PLAN));
    let admission = client.start_permission(&plan).await.unwrap();
    assert!(
        matches!(admission, StartPermission::StepEnded(_)),
        "{admission:?}"
    );
    let start = client.report_running(&plan, "abc", "https://api/log").await;
    assert!(matches!(start, Ok(StartReport::Ended(_))), "{start:?}");
    assert!(api.changes().is_empty(), "{:?}", api.changes());
}

#[tokio::test]
async fn a_job_cancelled_while_the_api_was_unavailable_is_not_set_to_running() {
    let api = Api::with_status("queue").await;
    api.becomes(&["cancelled"]);
    api.refuse("PATCH", "/job/412", StatusCode::BAD_GATEWAY);
    let start = api
        .client()
        .report_running(&step("plan-id", PLAN), "abc", "https://api/log")
        .await;
    assert_eq!(start.unwrap(), StartReport::Ended(JobStatus::Cancelled));
    assert!(api.changes().is_empty());
}

#[tokio::test]
async fn an_outcome_is_reported_for_the_step_before_the_job() {
    let api = Api::with_status("running").await;
    api.client()
        .report_outcome(&step("plan-id", PLAN), &planned(), &deadline())
        .await
        .unwrap();
    assert_eq!(
        api.changes(),
        [
            (
                "plan-id".to_owned(),
                json!({"status": "completed", "output": "https://api/log"})
            ),
            (
                "412".to_owned(),
                json!({
                    "status": "pending", "planChanges": true, "output": "",
                    "terraformPlan": "https://store/plan", "commitId": "abc",
                })
            ),
        ]
    );
}

/// The stock executor reports the same for a source that it could not read.
#[rstest]
#[case::never_read(None, Some(json!("")))]
#[case::read_by_an_earlier_step(Some("abc"), None)]
#[tokio::test]
async fn a_job_without_a_known_commit_gets_an_empty_one(
    #[case] known: Option<&str>,
    #[case] told: Option<Value>,
) {
    let api = Api::with_status("running").await;
    api.edit(|job| job.commit_id = known.map(str::to_owned));
    let outcome = Outcome {
        commit_id: None,
        ..outcome(StepType::Plan, Ending::NotReached, PlanReference::Keep)
    };
    api.client()
        .report_outcome(&step("plan-id", PLAN), &outcome, &deadline())
        .await
        .unwrap();
    assert_eq!(api.changes()[1].1.get("commitId"), told.as_ref());
}

#[rstest]
#[case(PlanReference::Keep, None)]
#[case(PlanReference::Clear, Some(json!("")))]
#[tokio::test]
async fn the_outcome_decides_whether_a_plan_is_kept_or_cleared(
    #[case] plan: PlanReference,
    #[case] expected: Option<Value>,
) {
    let api = Api::with_status("running").await;
    api.edit(|job| job.output = Some("Before.".to_owned()));
    let outcome = outcome(StepType::Apply, Ending::Success, plan);
    api.client()
        .report_outcome(&step("apply-id", "terraformApply"), &outcome, &deadline())
        .await
        .unwrap();
    let (_, job) = &api.changes()[1];
    assert_eq!(job.get("terraformPlan"), expected.as_ref());
    assert_eq!(job["output"], "Before. Step apply-id completed\n");
}

#[tokio::test]
async fn an_output_that_fits_no_more_is_left_as_it_is() {
    let api = Api::with_status("running").await;
    api.edit(|job| job.output = Some("x".repeat(1010)));
    api.client()
        .report_outcome(&step("plan-id", PLAN), &planned(), &deadline())
        .await
        .unwrap();
    assert!(api.changes()[1].1.get("output").is_none());
    assert_eq!(api.status(), "pending");
}

#[tokio::test]
async fn a_plan_without_a_reference_is_a_failure() {
    let api = Api::with_status("running").await;
    let outcome = outcome(
        StepType::Plan,
        Ending::Changes,
        PlanReference::Set("x".repeat(1025)),
    );
    api.client()
        .report_outcome(&step("plan-id", PLAN), &outcome, &deadline())
        .await
        .unwrap();
    assert_eq!(api.changes()[0].1["status"], "failed");
    assert_eq!(api.changes()[1].1["terraformPlan"], "");
    assert_eq!(api.status(), "failed");
}

#[rstest]
#[case("cancelled", "running", json!({"status": "failed", "output": "https://api/log"}))]
#[case("cancelled", "cancelled", json!({"output": "https://api/log"}))]
#[case("failed", "failed", json!({"output": "https://api/log"}))]
#[case("rejected", "pending", json!({"status": "failed", "output": "https://api/log"}))]
#[tokio::test]
async fn a_job_that_ended_keeps_its_status_and_its_step_too(
    #[case] job: &str,
    #[case] known: &str,
    #[case] told: Value,
) {
    let api = Api::with_status(job).await;
    api.set_step(1, known);
    let outcome = outcome(StepType::Apply, Ending::Failure, PlanReference::Keep);
    api.client()
        .report_outcome(&step("apply-id", "terraformApply"), &outcome, &deadline())
        .await
        .unwrap();
    assert_eq!(api.changes(), [("apply-id".to_owned(), told)]);
    assert_eq!(api.status(), job);
}

#[rstest]
#[case("pending")]
#[case("approved")]
#[case("waitingApproval")]
#[tokio::test]
async fn a_job_that_waits_for_its_dispatch_is_not_touched(#[case] status: &str) {
    let api = Api::with_status(status).await;
    api.client()
        .report_outcome(&step("plan-id", PLAN), &planned(), &deadline())
        .await
        .unwrap();
    assert!(api.changes().is_empty());
}

#[tokio::test]
async fn a_failure_without_output_is_reported_in_the_name_of_the_step() {
    let api = Api::with_status("running").await;
    let outcome = Outcome {
        output: None,
        note: Some("n".repeat(200)),
        ..outcome(StepType::Plan, Ending::NotReached, PlanReference::Keep)
    };
    api.client()
        .report_outcome(&step("plan-id", PLAN), &outcome, &deadline())
        .await
        .unwrap();
    assert_eq!(
        api.changes()[0].1,
        json!({"status": "failed", "name": "n".repeat(128)})
    );
}

#[tokio::test]
async fn a_report_is_tried_until_the_platform_is_back() {
    let api = Api::with_status("running").await;
    for _ in 0..20 {
        api.refuse("GET", "/job/412", StatusCode::SERVICE_UNAVAILABLE);
    }
    api.fault("PATCH", "/plan-id", Effect::RetryAfter(429, 0));
    api.refuse("PATCH", "/job/412", StatusCode::INTERNAL_SERVER_ERROR);
    api.client()
        .report_outcome(&step("plan-id", PLAN), &planned(), &deadline())
        .await
        .unwrap();
    assert_eq!(api.status(), "pending");
    assert!(!api.has_faults());
}

/// The platform took the report and dispatched the next step before the client could ask again.
#[rstest]
#[case("pending")]
#[case("queue")]
#[case("waitingApproval")]
#[tokio::test]
async fn a_report_whose_response_was_lost_does_not_overwrite_the_next_step(
    #[case] now: &'static str,
) {
    let api = Api::with_status("running").await;
    api.fault("PATCH", "/job/412", Effect::StatusAfter(502));
    let (client, plan) = (api.client(), step("plan-id", PLAN));
    let (outcome, deadline) = (planned(), deadline());
    let report = client.report_outcome(&plan, &outcome, &deadline);
    let move_on = async {
        while api.status() != "pending" {
            tokio::task::yield_now().await;
        }
        api.edit(|job| job.status = api::status(now));
    };
    let (told, ()) = tokio::join!(report, move_on);
    told.unwrap();
    assert_eq!(api.changes().len(), 2);
    assert_eq!(api.status(), now);
}

#[tokio::test]
async fn the_last_failure_is_the_error_when_time_is_up() {
    let api = Api::with_status("running").await;
    for _ in 0..1000 {
        api.refuse("GET", "/job/412", StatusCode::BAD_GATEWAY);
    }
    let error = api
        .client()
        .report_outcome(
            &step("plan-id", PLAN),
            &planned(),
            &Deadline::after(Duration::from_secs(2)),
        )
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("GET http://127.0.0.1:"), "{text}");
    assert!(
        text.ends_with("was answered 502 Bad Gateway: out of order"),
        "{text}"
    );
    assert_eq!(error.exit(), Exit::Infrastructure);
}

#[tokio::test]
async fn a_retry_after_of_the_platform_is_respected() {
    let api = Api::with_status("running").await;
    api.fault("GET", "/job/412", Effect::RetryAfter(429, 30));
    let error = api
        .client()
        .step_view(
            &step("plan-id", PLAN),
            &Deadline::after(Duration::from_secs(3)),
        )
        .await
        .unwrap_err();
    assert!(error.to_string().contains("429"), "{error}");
    assert_eq!(api.reads(), 0, "asked again before the time was over");
}

#[rstest]
#[case(StatusCode::UNAUTHORIZED, Exit::BadConfiguration, env::INTERNAL_SECRET)]
#[case(StatusCode::FORBIDDEN, Exit::BadConfiguration, env::INTERNAL_SECRET)]
#[case::rules(
    StatusCode::FORBIDDEN,
    Exit::BadConfiguration,
    "this release of Terrakube reads tokens"
)]
#[case(StatusCode::NOT_FOUND, Exit::StepFailed, env::API_URL)]
#[case::hidden(StatusCode::NOT_FOUND, Exit::StepFailed, "hides jobs from the tokens")]
#[tokio::test]
async fn permanent_failures_are_not_retried_and_have_a_hint(
    #[case] status: StatusCode,
    #[case] exit: Exit,
    #[case] hint: &str,
) {
    let api = Api::with_status("queue").await;
    api.refuse("GET", "/job/412", status);
    let error = api
        .client()
        .start_permission(&step("plan-id", PLAN))
        .await
        .unwrap_err();
    assert_eq!(error.exit(), exit);
    assert!(error.hint().unwrap().contains(hint), "{error}");
    assert_eq!(api.reads(), 0, "asked again");
}

#[tokio::test]
async fn a_wrong_secret_is_refused_and_no_token_is_shown() {
    let api = Api::with_status("queue").await;
    let config = TerrakubeConfig {
        tokens: TokenSource::parse(&"QUJD".repeat(12)).unwrap(),
        ..api.config()
    };
    let error = client(config)
        .start_permission(&step("plan-id", PLAN))
        .await
        .unwrap_err();
    assert!(matches!(error, TerrakubeError::Refused { .. }), "{error}");
    assert!(!format!("{error:?}").contains("eyJ"), "{error:?}");
}

/// A launcher has tokens for all jobs, and an executor has those of its step.
#[tokio::test]
async fn both_kinds_of_tokens_are_enough_for_old_and_new_platforms() {
    for release in Release::ALL {
        for is_of_step in [false, true] {
            let (api, plan) = (Api::of(release, "queue").await, step("plan-id", PLAN));
            let config = api.config();
            let client = client(if is_of_step {
                config.for_step(&plan)
            } else {
                config
            });
            let permission = client.start_permission(&plan).await.unwrap();
            assert!(matches!(permission, StartPermission::Granted(_)));
            let running = client.report_running(&plan, "abc", "https://api/log").await;
            assert_eq!(running.unwrap(), StartReport::Accepted);
            let patch = json!({"planStructuredOutput": {"plan-id": []}});
            let merged = client.merge_context(&plan, patch.as_object().unwrap());
            merged.await.unwrap();
            let state = state_of(&client, &plan, "f");
            let until = deadline();
            let recorded = client.record_history(&plan, &state, &until);
            recorded.await.unwrap();
            let outcome = planned();
            let reported = client.report_outcome(&plan, &outcome, &until);
            reported.await.unwrap();
            assert_eq!(api.status(), "pending", "{release:?} {is_of_step}");
            assert_eq!(api.histories().len(), 1);
            let context = api.context().unwrap();
            let stored = json!({"state": "PERSISTED"});
            assert_eq!(context["structuredOutputStatus"], stored);
        }
    }
}

#[tokio::test]
async fn the_error_of_a_token_without_rights_names_the_rules_for_tokens() {
    let (api, plan) = (Api::with_status("queue").await, step("plan-id", PLAN));
    let another = crate::StepRef {
        job_id: "413".to_owned(),
        ..plan.clone()
    };
    let client = client(api.config().for_step(&another));
    let error = client.start_permission(&plan).await.unwrap_err();
    assert!(matches!(error, TerrakubeError::Refused { .. }), "{error}");
    assert_eq!(error.exit(), Exit::BadConfiguration);
    let hint = error.hint().unwrap();
    assert!(
        hint.contains("this release of Terrakube reads tokens"),
        "{hint}"
    );
}

#[tokio::test]
async fn no_redirect_sends_a_token_to_another_host() {
    let (api, other) = (
        Api::with_status("queue").await,
        Api::with_status("queue").await,
    );
    let elsewhere = other
        .config()
        .api_url
        .join("api/v1/organization/org/job/412");
    let elsewhere: &'static str = String::from(elsewhere.unwrap()).leak();
    api.fault("GET", "/job/412", Effect::Redirect(elsewhere));
    let error = api
        .client()
        .start_permission(&step("plan-id", PLAN))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("302"), "{error}");
    assert_eq!(other.reads(), 0);
}

/// The server accepts every connection and answers none, so each call would take the whole minute of its timeout.
#[tokio::test(start_paused = true)]
async fn a_platform_that_never_answers_is_given_up_in_time_and_not_called_once_more() {
    let api = Api::with_status("running").await;
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    silent.set_nonblocking(true).unwrap();
    let calls = || std::iter::from_fn(|| silent.accept().ok()).count();
    let url = format!("http://{}/", silent.local_addr().unwrap());
    let config = TerrakubeConfig {
        api_url: Url::parse(&url).unwrap(),
        ..api.config()
    };
    let begun = Instant::now();
    // The deadline passes during a call.
    let deadline = Deadline::after(Duration::from_secs(330));
    let error = client(config)
        .report_outcome(&step("plan-id", PLAN), &planned(), &deadline)
        .await
        .unwrap_err();
    assert_eq!(begun.elapsed().as_secs(), 330);
    assert!(matches!(error, TerrakubeError::Transfer { .. }), "{error}");
    assert_eq!(calls(), 6);
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert_eq!(calls(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_platform_that_is_not_there_is_named() {
    let api = Api::with_status("queue").await;
    let port = Port::take().unwrap();
    let nobody = format!("http://{}/", port.address());
    let config = TerrakubeConfig {
        api_url: Url::parse(&nobody).unwrap(),
        ..api.config()
    };
    let deadline = Deadline::after(Duration::from_secs(2));
    let error = client(config)
        .step_view(&step("plan-id", PLAN), &deadline)
        .await
        .unwrap_err();
    assert!(matches!(error, TerrakubeError::Transfer { .. }), "{error}");
    assert!(error.to_string().contains(&nobody), "{error}");
    assert!(error.hint().unwrap().contains(env::API_URL));
}

#[tokio::test]
async fn a_response_that_is_no_document_of_the_platform_is_an_error() {
    let api = Api::with_status("queue").await;
    api.fault("GET", "/job/412", Effect::Status(200));
    let error = api
        .client()
        .start_permission(&step("plan-id", PLAN))
        .await
        .unwrap_err();
    assert!(matches!(error, TerrakubeError::Malformed { .. }), "{error}");
}

#[tokio::test]
async fn an_answer_without_end_is_not_read_to_its_end() {
    let api = Api::with_status("queue").await;
    api.edit(|job| job.output = Some("x".repeat(5 * 1024 * 1024)));
    let error = api
        .client()
        .start_permission(&step("plan-id", PLAN))
        .await
        .unwrap_err();
    assert!(matches!(error, TerrakubeError::TooLarge { .. }), "{error}");
}

#[tokio::test]
async fn a_context_is_merged_into_what_others_wrote() {
    let (api, plan) = (Api::with_status("running").await, step("plan-id", PLAN));
    let client = api.client();
    assert!(client.context(&plan).await.unwrap().is_empty());
    api.set_context(Some(json!({"script": 1, "plans": {"a": [1]}})));
    let patch = json!({"plans": {"b": [2]}});
    client
        .merge_context(&plan, patch.as_object().unwrap())
        .await
        .unwrap();
    assert_eq!(
        Value::Object(client.context(&plan).await.unwrap()),
        json!({"script": 1, "plans": {"a": [1], "b": [2]}})
    );
}

#[tokio::test]
async fn structured_output_is_marked_as_stored_in_the_place_of_the_platforms_status() {
    let (api, plan) = (Api::with_status("running").await, step("plan-id", PLAN));
    let client = api.client();
    api.set_context(Some(
        json!({"structuredOutputStatus": {"state": "PENDING"}, "own": 1}),
    ));
    let known = client.context(&plan).await.unwrap();
    assert_eq!(Value::Object(known), json!({"own": 1}));
    for patch in [
        json!({"planStructuredOutput": {"plan-id": []}}),
        json!({"mayflyPlan": {"plan-id": 1}}),
    ] {
        let merged = client.merge_context(&plan, patch.as_object().unwrap());
        merged.await.unwrap();
        let status = &api.context().unwrap()["structuredOutputStatus"];
        assert_eq!(*status, json!({"state": "PERSISTED"}), "{patch}");
    }
    assert_eq!(api.context().unwrap()["own"], 1);
}

#[tokio::test]
async fn merges_of_one_run_do_not_overtake_one_another() {
    let (api, plan) = (Api::with_status("running").await, step("plan-id", PLAN));
    let client = api.client();
    let merges = (0..10).map(|n| {
        let (client, plan) = (client.clone(), plan.clone());
        tokio::spawn(async move {
            let patch = json!({"k": {n.to_string(): true}});
            client
                .merge_context(&plan, patch.as_object().unwrap())
                .await
        })
    });
    for merge in merges.collect::<Vec<_>>() {
        merge.await.unwrap().unwrap();
    }
    assert_eq!(
        client.context(&plan).await.unwrap()["k"]
            .as_object()
            .unwrap()
            .len(),
        10
    );
}

#[rstest]
#[case(StatusCode::NOT_FOUND, true)]
#[case(StatusCode::CONFLICT, true)]
#[case(StatusCode::BAD_REQUEST, false)]
#[tokio::test]
async fn a_removed_context_is_no_error(#[case] status: StatusCode, #[case] tolerated: bool) {
    let (api, plan) = (Api::with_status("failed").await, step("plan-id", PLAN));
    api.refuse("POST", CONTEXT, status);
    let patch = json!({"k": 1});
    let merged = api
        .client()
        .merge_context(&plan, patch.as_object().unwrap())
        .await;
    assert_eq!(merged.is_ok(), tolerated);
}

#[tokio::test]
async fn a_state_is_recorded_with_its_own_serial_and_lineage() {
    let api = Api::with_status("running").await;
    let (client, apply) = (api.client(), step("apply-id", "terraformApply"));
    let history = History {
        output: client.state_output(&apply, "f"),
        job_reference: "4".repeat(40),
        serial: 7,
        md5: "d41d8cd98f00b204e9800998ecf8427e".into(),
        lineage: "11111111-2222".into(),
    };
    api.refuse("POST", "/history", StatusCode::BAD_GATEWAY);
    client
        .record_history(&apply, &history, &deadline())
        .await
        .unwrap();
    let records = api.histories();
    let [record] = records.as_slice() else {
        panic!("{records:?}");
    };
    let url = api.config().api_url;
    let path = "tfstate/v1/organization/org/workspace/ws/state/f.json";
    assert_eq!(record.output, format!("{url}{path}"));
    assert_eq!(record.job_reference, "4".repeat(36));
    assert_eq!((record.serial, &record.md5), (7, &history.md5));
    assert_eq!(record.lineage, history.lineage);
}

fn state_of(client: &Terrakube, step: &crate::StepRef, name: &str) -> History {
    History {
        output: client.state_output(step, name),
        job_reference: "412".into(),
        serial: 7,
        md5: "d41d8cd98f00b204e9800998ecf8427e".into(),
        lineage: "11111111-2222".into(),
    }
}

#[tokio::test]
async fn a_state_whose_record_was_not_answered_is_on_record_once() {
    let api = Api::with_status("running").await;
    let (client, apply) = (api.client(), step("apply-id", "terraformApply"));
    let (first, second) = (
        state_of(&client, &apply, "f"),
        state_of(&client, &apply, "g"),
    );
    client
        .record_history(&apply, &first, &deadline())
        .await
        .unwrap();
    assert_eq!(api.reads(), 0, "there is nothing to look for yet");

    // The answer is lost, and so is the first answer of the lookup.
    api.fault("POST", "/history", Effect::StatusAfter(502));
    api.refuse("GET", "/history", StatusCode::BAD_GATEWAY);
    client
        .record_history(&apply, &second, &deadline())
        .await
        .unwrap();
    let records = api.histories().into_iter();
    let outputs: Vec<_> = records.map(|record| record.output).collect();
    assert_eq!(outputs, [first.output, second.output]);
}

#[tokio::test]
async fn a_state_that_is_recorded_below_another_address_is_not_recorded_again() {
    let api = Api::with_status("running").await;
    let (client, apply) = (api.client(), step("apply-id", "terraformApply"));
    let state = state_of(&client, &apply, "f");
    let relayed = History {
        output: "https://hub.example.test/tfstate/v1/organization/org/workspace/ws/state/f.json"
            .into(),
        ..state.clone()
    };
    client
        .record_history(&apply, &relayed, &deadline())
        .await
        .unwrap();
    api.refuse("POST", "/history", StatusCode::BAD_GATEWAY);
    client
        .record_history(&apply, &state, &deadline())
        .await
        .unwrap();
    assert_eq!(api.histories().len(), 1);
}

#[rstest]
#[case::refused(StatusCode::FORBIDDEN)]
#[case::not_understood(StatusCode::BAD_REQUEST)]
#[tokio::test]
async fn a_state_is_recorded_again_if_the_platform_does_not_show_its_records(
    #[case] answer: StatusCode,
) {
    let api = Api::with_status("running").await;
    let (client, apply) = (api.client(), step("apply-id", "terraformApply"));
    api.refuse("POST", "/history", StatusCode::SERVICE_UNAVAILABLE);
    api.refuse("GET", "/history", answer);
    let state = state_of(&client, &apply, "f");
    client
        .record_history(&apply, &state, &deadline())
        .await
        .unwrap();
    assert_eq!(api.histories().len(), 1);
}

#[tokio::test]
async fn records_name_artifacts_by_the_public_address() {
    let api = Api::with_status("running").await;
    let config = TerrakubeConfig {
        public_url: Url::parse("https://terrakube-api.example.test/base/").unwrap(),
        ..api.config()
    };
    assert_eq!(
        client(config).step_output(&step("../plan id", PLAN)),
        "https://terrakube-api.example.test/base/tfoutput/v1/organization/org/job/412/step/..%2Fplan%20id"
    );
}

#[rstest]
#[case(None, None)]
#[case(Some(""), None)]
#[case(
    Some("https://host/content.tar.gz"),
    Some("https://host/content.tar.gz")
)]
#[tokio::test]
async fn the_content_of_a_run_is_at_the_address_in_its_job(
    #[case] said: Option<&str>,
    #[case] expected: Option<&str>,
) {
    let api = Api::with_status("running").await;
    api.edit(|job| job.override_source = said.map(str::to_owned));
    let source = api.client().override_source(&step("plan-id", PLAN)).await;
    assert_eq!(source.unwrap().as_deref(), expected);
}

#[rstest]
#[case("cancelled")]
#[case("failed")]
#[tokio::test]
async fn a_cancellation_is_noticed(#[case] status: &'static str) {
    let api = Api::with_status("running").await;
    api.becomes(&["running", "running", status]);
    api.refuse("GET", "/job/412", StatusCode::NOT_FOUND);
    let heard = api.client().cancelled(&step("plan-id", PLAN)).await;
    assert_eq!(heard.to_string(), status);
    assert!(api.reads() >= 3);
}

#[tokio::test]
async fn a_job_that_was_removed_is_over() {
    let api = Api::with_status("running").await;
    let gone = |times| {
        for _ in 0..times {
            api.refuse("GET", "/job/412", StatusCode::NOT_FOUND);
        }
    };
    // The job exists in between.
    gone(8);
    let client = api.client();
    let step = step("plan-id", PLAN);
    let mut heard = std::pin::pin!(client.cancelled(&step));
    tokio::select! {
        status = &mut heard => panic!("{status}"),
        () = async {
            while api.reads() == 0 {
                tokio::task::yield_now().await;
            }
        } => {}
    }
    gone(20);
    assert_eq!(heard.await, JobStatus::Cancelled);
}

#[rstest]
#[case("running", "pending", true)]
#[case("running", "running", false)]
#[case("running", "completed", false)]
#[case("running", "failed", false)]
#[case("rejected", "failed", true)]
#[case("rejected", "running", false)]
#[tokio::test]
async fn a_step_is_claimed_by_its_status(
    #[case] job: &str,
    #[case] known: &str,
    #[case] granted: bool,
) {
    let api = Api::with_status(job).await;
    api.set_step(0, known);
    let holder = Holder {
        pod: "pod".into(),
        uid: "uid".into(),
        since: "now".into(),
    };
    let claim = api
        .client()
        .claim(&step("plan-id", "approval"), &holder)
        .await;
    assert_eq!(matches!(claim.unwrap(), Claim::Granted), granted);
}

fn with_redis(api: &Api, server: &RedisServer) -> Terrakube {
    let args = RedisArgs {
        redis_hostname: Some("127.0.0.1".into()),
        redis_port: Some(server.port().to_string().into()),
        ..RedisArgs::default()
    };
    let redis = Redis::new(args.resolve().unwrap().unwrap());
    Terrakube::new(api.config(), Some(redis)).unwrap()
}

#[tokio::test]
async fn of_many_claimants_redis_grants_the_step_to_one_whatever_its_status_says() {
    let (api, server) = (
        Api::with_status("queue").await,
        RedisServer::start().unwrap(),
    );
    let client = with_redis(&api, &server);
    let holder = |n: u32| Holder {
        pod: format!("pod-{n}"),
        uid: n.to_string(),
        since: "now".into(),
    };
    let claims = (0..8).map(|n| {
        let (client, holder) = (client.clone(), holder(n));
        tokio::spawn(async move {
            client
                .claim(&step("apply-id", "terraformApply"), &holder)
                .await
        })
    });
    let mut answers = Vec::new();
    for claim in claims.collect::<Vec<_>>() {
        answers.push(claim.await.unwrap().unwrap());
    }
    let winner = answers
        .iter()
        .position(|claim| *claim == Claim::Granted)
        .unwrap();
    let winner = holder(u32::try_from(winner).unwrap());
    let held = Claim::Taken(winner.clone());
    assert_eq!(
        answers.iter().filter(|claim| **claim == held).count(),
        7,
        "{answers:?}"
    );

    // After a lost response the request is repeated. A running step has a claim, and Redis has its holder.
    let apply = step("apply-id", "terraformApply");
    assert_eq!(client.claim(&apply, &winner).await.unwrap(), Claim::Granted);
    api.set_step(1, "running");
    assert_eq!(client.claim(&apply, &holder(9)).await.unwrap(), held);
    drop(server);
    assert_eq!(
        client.claim(&apply, &holder(9)).await.unwrap(),
        Claim::Taken(Holder::unknown())
    );
}

#[tokio::test]
async fn of_many_claimants_without_redis_the_job_context_grants_the_step_to_one_and_names_it() {
    let api = Api::with_status("queue").await;
    let apply = step("apply-id", "terraformApply");
    let holder = |n: u32| Holder {
        pod: format!("pod-{n}"),
        uid: n.to_string(),
        since: "now".into(),
    };
    let claims = (0..8).map(|n| {
        // Each claimant is a process of its own.
        let (client, apply) = (api.claiming_client(3000, 4000), apply.clone());
        tokio::spawn(async move { client.claim(&apply, &holder(n)).await })
    });
    let mut answers = Vec::new();
    for claim in claims.collect::<Vec<_>>() {
        answers.push(claim.await.unwrap().unwrap());
    }
    let granted: Vec<usize> = (0..8).filter(|n| answers[*n] == Claim::Granted).collect();
    assert_eq!(granted.len(), 1, "{answers:?}");
    let winner = holder(u32::try_from(granted[0]).unwrap());
    // Some may have read a note that the winner's note replaced.
    let claimants: Vec<Holder> = (0..8).map(holder).collect();
    let is_held =
        |claim: &&Claim| matches!(claim, Claim::Taken(holder) if claimants.contains(holder));
    assert_eq!(answers.iter().filter(is_held).count(), 7, "{answers:?}");

    // A running step has a claim, and the context has its holder.
    let held = Claim::Taken(winner);
    api.set_step(1, "running");
    assert_eq!(api.client().claim(&apply, &holder(9)).await.unwrap(), held);
}

const CONTEXT: &str = "/v1/412";
/// Longer than the runner lets any test take.
const NEVER: Duration = Duration::from_hours(1);

fn claimant(n: u32) -> Holder {
    Holder {
        pod: format!("pod-{n}"),
        uid: n.to_string(),
        since: "now".into(),
    }
}

/// An executor claimed the step while Redis did not answer, and died before it reported its start.
#[tokio::test]
async fn a_step_claimed_without_redis_is_not_granted_once_redis_is_available() {
    let (api, mut server) = (
        Api::with_status("queue").await,
        RedisServer::start().unwrap(),
    );
    let client = with_redis(&api, &server);
    let apply = step("apply-id", "terraformApply");
    server.kill();
    let first = client.claim(&apply, &claimant(1)).await;
    assert_eq!(first.unwrap(), Claim::Granted);
    server.restart().unwrap();
    let second = client.claim(&apply, &claimant(2)).await;
    assert_eq!(second.unwrap(), Claim::Taken(claimant(1)));
    // A plan may run twice. A context that cannot be read prevents no claim.
    let plan = step("apply-id", PLAN);
    let again = client.claim(&plan, &claimant(2)).await;
    assert_eq!(again.unwrap(), Claim::Granted);
    api.refuse("GET", CONTEXT, StatusCode::BAD_REQUEST);
    let other = step("plan-id", "terraformApply");
    let claim = client.claim(&other, &claimant(2)).await;
    assert_eq!(claim.unwrap(), Claim::Granted);
    assert!(!api.has_faults());
}

/// The faults of one claim, in their order.
#[rstest]
#[case::no_look(&[("GET", Effect::Status(400))])]
#[case::no_right_to_look(&[("GET", Effect::Status(403))])]
#[case::no_write(&[("POST", Effect::Status(503))])]
#[case::job_takes_none(&[("POST", Effect::Status(409))])]
#[case::write_unanswered(&[("POST", Effect::StatusAfter(502))])]
#[case::write_late(&[("POST", Effect::Slow(NEVER))])]
#[case::write_forgotten(&[("POST", Effect::Status(200))])]
#[case::no_second_look(&[
    ("GET", Effect::Slow(Duration::ZERO)),
    ("GET", Effect::Status(400)),
])]
#[tokio::test]
async fn a_claim_that_is_not_certain_is_none_and_what_may_be_repeated_needs_none(
    #[case] faults: &[(&'static str, Effect)],
) {
    let api = Api::with_status("queue").await;
    let is_late = matches!(faults, [(_, Effect::Slow(NEVER))]);
    let (client, kinds) = if is_late {
        (api.claiming_client(2000, 20), &["terraformApply", PLAN][..])
    } else {
        let kinds = &["terraformApply", "terraformDestroy", "customScripts", PLAN];
        (api.client(), &kinds[..])
    };
    for kind in kinds.iter().copied() {
        api.set_context(None);
        for (method, fault) in faults {
            api.fault(method, CONTEXT, *fault);
        }
        let claim = client.claim(&step("apply-id", kind), &claimant(1)).await;
        if kind == PLAN {
            assert_eq!(claim.unwrap(), Claim::Granted);
            continue;
        }
        let error = claim.expect_err(kind);
        assert!(
            matches!(error, TerrakubeError::ClaimUncertain(_)),
            "{error}"
        );
        assert_eq!(error.exit(), Exit::Infrastructure);
        assert!(!api.has_faults(), "{kind}: {error}");
    }
    assert!(api.changes().is_empty());
}

#[tokio::test]
async fn a_slow_read_is_repeated_before_anything_is_written() {
    let api = Api::with_status("queue").await;
    // One is too late for a write, and the other one has no end.
    let late = Effect::Slow(Duration::from_millis(1100));
    api.fault("GET", CONTEXT, late);
    api.fault("GET", CONTEXT, Effect::Slow(NEVER));
    let apply = step("apply-id", "terraformApply");
    let client = api.claiming_client(2000, 20);
    assert_eq!(
        client.claim(&apply, &claimant(1)).await.unwrap(),
        Claim::Granted
    );
    assert!(!api.has_faults());
}

#[rstest]
#[case(json!({"pod": "pod-1", "uid": "1", "since": "now"}), claimant(1))]
#[case(json!("in a form of later days"), Holder::unknown())]
#[tokio::test]
async fn the_note_of_another_run_is_not_changed(#[case] note: Value, #[case] expected: Holder) {
    let api = Api::with_status("queue").await;
    let context = json!({"mayflyClaims": {"apply-id": note}, "own": 1});
    api.set_context(Some(context.clone()));
    let claim = api
        .client()
        .claim(&step("apply-id", "terraformApply"), &claimant(2))
        .await;
    assert_eq!(claim.unwrap(), Claim::Taken(expected));
    assert_eq!(api.context(), Some(context));
}

#[tokio::test]
async fn a_note_joins_what_others_have_written() {
    let api = Api::with_status("queue").await;
    let first = serde_json::to_value(claimant(1)).unwrap();
    api.set_context(Some(json!({"mayflyClaims": {"plan-id": first}, "own": 1})));
    let apply = step("apply-id", "terraformApply");
    let claim = api.client().claim(&apply, &claimant(2)).await;
    assert_eq!(claim.unwrap(), Claim::Granted);
    let second = serde_json::to_value(claimant(2)).unwrap();
    let both = json!({"mayflyClaims": {"plan-id": first, "apply-id": second}, "own": 1});
    assert_eq!(api.context(), Some(both));
}

/// The holder has its claim in a Redis that has failed since.
#[tokio::test]
async fn a_step_that_begins_while_a_note_settles_is_its_beginners() {
    let api = Api::with_status("queue").await;
    let (client, apply, me) = (
        api.client(),
        step("apply-id", "terraformApply"),
        claimant(1),
    );
    let begins = async {
        // This task has its turn before the claim can read anything once more.
        while api.context().is_none() {
            tokio::task::yield_now().await;
        }
        api.set_step(1, "running");
    };
    let (claim, ()) = tokio::join!(client.claim(&apply, &me), begins);
    assert_eq!(claim.unwrap(), Claim::Taken(Holder::unknown()));
}

#[tokio::test]
async fn a_job_whose_plan_is_lost_is_still_a_planned_one() {
    let api = Api::with_status("queue").await;
    let (client, apply) = (api.client(), step("apply-id", "terraformApply"));
    assert!(!client.step_view(&apply, &deadline()).await.unwrap().planned);
    api.set_step(0, "completed");
    assert!(client.step_view(&apply, &deadline()).await.unwrap().planned);
}

#[tokio::test]
async fn a_platform_without_security_is_shown_no_token() {
    let api = Api::with_status("queue").await;
    let config = TerrakubeConfig {
        tokens: TokenSource::disabled(),
        ..api.config()
    };
    let error = client(config)
        .start_permission(&step("plan-id", PLAN))
        .await
        .unwrap_err();
    assert!(matches!(error, TerrakubeError::Refused { .. }), "{error}");
}
