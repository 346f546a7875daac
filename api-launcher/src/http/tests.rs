//! Every answer of the service, without a socket.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderValue, Request, StatusCode, header};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use git_address::{AllowList, Match};
use http_service::{Readiness, Shutdown};
use job_contract::Document;
use reporter::dispatch::{Acceptance, DispatchError, ResponseSent};
use rstest::rstest;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tower::ServiceExt as _;

use super::auth::Gate;
use super::auth::{PLATFORM_TOKEN, gate, when_issued};
use super::{AT_ONCE, AppState, MAX_BODY_BYTES, router};
use crate::dispatch::DispatchTarget;
use crate::dispatch::route::Routing;
use crate::metrics::Metrics;

struct Service {
    target: Arc<KeepingTarget>,
    router: Router,
    shutdown: Shutdown,
}

/// A target that keeps the steps of dispatches and starts nothing.
#[derive(Debug, Default)]
struct KeepingTarget {
    steps: Mutex<BTreeSet<String>>,
    /// Why it cannot keep one.
    problem: Mutex<Option<&'static str>>,
}

impl DispatchTarget for KeepingTarget {
    fn accept(
        &self,
        job: Document,
        _response_sent: ResponseSent,
    ) -> BoxFuture<'_, Result<Acceptance, DispatchError>> {
        let accepted = match *self.problem.lock().unwrap() {
            Some(problem) => Err(DispatchError::Unavailable(problem.to_owned())),
            None if self.steps.lock().unwrap().insert(job.step_id.clone()) => Ok(Acceptance::New),
            None => Ok(Acceptance::Duplicate),
        };
        std::future::ready(accepted).boxed()
    }

    fn readiness(&self) -> BoxFuture<'_, Readiness> {
        let problem = *self.problem.lock().unwrap();
        let not_ready = |problem: &str| Readiness::NotReady(problem.to_owned());
        std::future::ready(problem.map_or(Readiness::Ready, not_ready)).boxed()
    }

    fn work(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }

    fn name(&self) -> &'static str {
        "keeping"
    }
}

struct Answer {
    status: StatusCode,
    kind: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("{}", self.body))
    }

    fn error(&self) -> String {
        self.json()["error"].as_str().unwrap().to_owned()
    }
}

impl Service {
    fn new() -> Self {
        Self::with(gate(when_issued))
    }

    fn with(gate: Gate) -> Self {
        let shutdown = Shutdown::default();
        let target = Arc::new(KeepingTarget::default());
        Self {
            router: router(Self::state(gate, &target, &shutdown), true),
            target,
            shutdown,
        }
    }

    fn state(gate: Gate, target: &Arc<KeepingTarget>, shutdown: &Shutdown) -> AppState {
        AppState::new(
            gate,
            Routing::All,
            Arc::clone(target) as Arc<dyn DispatchTarget>,
            None,
            None,
            Metrics::default(),
            shutdown.draining.clone(),
        )
    }

    async fn ask(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let kind = response.headers().get(header::CONTENT_TYPE);
        let kind = kind.map_or("", |kind| kind.to_str().unwrap()).to_owned();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        Answer {
            status,
            kind,
            body: String::from_utf8(body.to_vec()).unwrap(),
        }
    }

    async fn get(&self, path: &str) -> Answer {
        self.ask(Request::get(path).body(Body::empty()).unwrap())
            .await
    }

    async fn post(&self, body: impl Into<Body>) -> Answer {
        self.ask(dispatch(Some(&format!("Bearer {PLATFORM_TOKEN}")), body))
            .await
    }

    /// How many steps the target keeps.
    fn kept(&self) -> usize {
        self.target.steps.lock().unwrap().len()
    }
}

fn dispatch(authorization: Option<&str>, body: impl Into<Body>) -> Request<Body> {
    let mut request =
        Request::post("/api/v1/terraform-rs").header(header::CONTENT_TYPE, "application/json");
    if let Some(authorization) = authorization {
        request = request.header(header::AUTHORIZATION, authorization);
    }
    request.body(body.into()).unwrap()
}

fn job() -> Value {
    json!({
        "type": "terraformPlan",
        "organizationId": "org",
        "workspaceId": "ws",
        "jobId": "412",
        "stepId": "step",
        "commandList": null,
        "artifactPatterns": ["unknown to us"],
    })
}

#[tokio::test]
async fn a_dispatch_is_accepted_as_often_as_it_comes_and_counts_once() {
    let service = Service::new();
    for _ in 0..3 {
        let answer = service.post(job().to_string()).await;
        assert_eq!(answer.status, StatusCode::ACCEPTED);
        assert_eq!(
            (answer.kind.as_str(), answer.body.as_str()),
            ("application/json", "{}")
        );
        assert_eq!(service.kept(), 1);
    }
    let metrics = service.get("/metrics").await.body;
    assert!(
        metrics.contains("mayfly_dispatches_total{result=\"duplicate\"} 2"),
        "{metrics}"
    );
}

#[tokio::test(start_paused = true)]
async fn answers_with_metrics_share_one_text_for_a_second() {
    let service = Service::new();
    let first = service.get("/metrics").await.body;
    service.post(job().to_string()).await;
    assert_eq!(service.get("/metrics").await.body, first);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_ne!(service.get("/metrics").await.body, first);
}

#[rstest]
#[case(None, "no bearer token")]
#[case(Some("Basic dXNlcg=="), "no bearer token")]
#[case(Some("Bearer nonsense"), "not a JSON Web Token")]
#[case(
    Some("Bearer eyJhbGciOiJub25lIn0.e30."),
    "algorithm HS256, HS384 or HS512"
)]
#[case(
    Some("Bearer eyJhbGciOiJIUzI1NiJ9.e30.AAAA"),
    "signature does not match"
)]
#[tokio::test]
async fn requests_without_the_platforms_token_are_refused(
    #[case] authorization: Option<&str>,
    #[case] expected: &str,
) {
    let service = Service::new();
    let answer = service
        .ask(dispatch(authorization, job().to_string()))
        .await;
    assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
    assert!(answer.error().contains(expected), "{}", answer.body);
    assert_eq!(service.kept(), 0);
}

#[tokio::test]
async fn without_authentication_a_web_page_cannot_dispatch() {
    let service = Service::with(Gate::new(None, when_issued));
    let request = || dispatch(None, job().to_string());
    let mut of_a_page = request();
    let origin = HeaderValue::from_static("http://127.0.0.1:8090");
    of_a_page.headers_mut().insert(header::ORIGIN, origin);
    let refused = service.ask(of_a_page).await;
    assert_eq!(refused.status, StatusCode::UNAUTHORIZED);
    assert!(refused.error().contains("Origin"), "{}", refused.body);
    assert_eq!(service.kept(), 0);
    assert_eq!(service.ask(request()).await.status, StatusCode::ACCEPTED);
}

#[rstest]
#[case("{\n  \"type\": hunter2}", "not valid JSON at line 2")]
#[case("", "ends too early at line 1")]
#[case(r#"{"commandList":"hunter2"}"#, "wrong type at line 1 column")]
#[case("{}", "`type` is missing")]
#[case(
    r#"{"type":"terraformPlan","organizationId":"o","workspaceId":"w","jobId":"1"}"#,
    "`stepId` is missing"
)]
#[tokio::test]
async fn a_document_that_cannot_run_is_refused_with_its_place(
    #[case] body: &'static str,
    #[case] expected: &str,
) {
    let service = Service::new();
    let answer = service.post(body).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert!(answer.error().contains(expected), "{}", answer.body);
    assert!(!answer.body.contains("hunter2"), "{}", answer.body);
}

#[tokio::test]
async fn a_source_that_is_not_allowed_is_refused_and_the_target_is_not_asked() {
    let mut service = Service::new();
    let rule = AllowList::new("https://git.acme.com/.*", Match::Full).unwrap();
    let target = Arc::clone(&service.target);
    let state = Service::state(gate(when_issued), &target, &service.shutdown);
    service.router = router(state.with_allowed(Some(rule)), true);
    let mut job = job();
    job["source"] = "https://bob:hunter2@git.evil.com/x".into();
    let answer = service.post(job.to_string()).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert_eq!(
        answer.error(),
        "the git URL `https://git.evil.com/x` is not allowed by `ALLOWED_VCS_URL_REGEX`"
    );
    assert!(service.target.steps.lock().unwrap().is_empty());
    // The platform keeps the content of such a run.
    job["branch"] = "remote-content".into();
    assert_eq!(
        service.post(job.to_string()).await.status,
        StatusCode::ACCEPTED
    );
    let mut other = self::job();
    other["stepId"] = "another".into();
    other["source"] = "https://git.acme.com/x".into();
    let answer = service.post(other.to_string()).await;
    assert_eq!(answer.status, StatusCode::ACCEPTED);
}

#[tokio::test]
async fn bodies_up_to_eight_mebibytes_are_read() {
    let service = Service::new();
    let document = |length: usize| {
        let mut job = job();
        job["variables"] = json!({"big": ""});
        let rest = job.to_string().len();
        job["variables"]["big"] = "x".repeat(length - rest).into();
        job.to_string()
    };
    let answer = service.post(document(MAX_BODY_BYTES)).await;
    assert_eq!(answer.status, StatusCode::ACCEPTED, "{}", answer.body);
    let answer = service.post(document(MAX_BODY_BYTES + 1)).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(answer.error().contains("8 MiB"), "{}", answer.body);
}

#[tokio::test]
async fn nothing_is_accepted_that_cannot_be_kept() {
    let service = Service::new();
    *service.target.problem.lock().unwrap() = Some("the disk is full");
    let answer = service.post(job().to_string()).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(
        answer.error().contains("the disk is full"),
        "{}",
        answer.body
    );
    let health = service.get("/actuator/health/readiness").await;
    assert_eq!(health.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(health.json()["status"], "DOWN");
    let reason = health.json()["problem"].to_string();
    assert!(reason.contains("the disk is full"), "{reason}");
    let alive = service.get("/actuator/health/liveness").await;
    assert_eq!(alive.status, StatusCode::OK);

    *service.target.problem.lock().unwrap() = None;
    let answer = service.post(job().to_string()).await;
    assert_eq!(answer.status, StatusCode::ACCEPTED, "the next try counts");
}

#[tokio::test]
async fn health_is_open_and_leaves_service_first_when_stopping() {
    let service = Service::new();
    for path in [
        "/actuator/health",
        "/actuator/health/liveness",
        "/actuator/health/readiness",
    ] {
        let answer = service.get(path).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}");
        assert_eq!(answer.kind, "application/json");
        assert_eq!(answer.json(), json!({"status": "UP"}));
    }
    service.shutdown.draining.cancel();
    let answer = service.get("/actuator/health/readiness").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.json(), json!({"status": "OUT_OF_SERVICE"}));
}

#[tokio::test]
async fn other_paths_and_methods_are_refused_as_such() {
    let service = Service::new();
    assert_eq!(service.get("/").await.status, StatusCode::NOT_FOUND);
    let answer = service.get("/api/v1/terraform-rs").await;
    assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED);
    assert!(answer.error().contains("another method"));
}

/// A target that accepts nothing before the test lets it.
#[derive(Debug)]
struct SlowTarget {
    /// One permit for each call of `accept`.
    calls: Semaphore,
    released: Semaphore,
}

impl DispatchTarget for SlowTarget {
    fn accept(
        &self,
        _job: Document,
        _response_sent: ResponseSent,
    ) -> BoxFuture<'_, Result<Acceptance, DispatchError>> {
        async {
            self.calls.add_permits(1);
            self.released.acquire().await.unwrap().forget();
            Ok(Acceptance::New)
        }
        .boxed()
    }

    fn readiness(&self) -> BoxFuture<'_, Readiness> {
        std::future::ready(Readiness::Ready).boxed()
    }

    fn work(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }

    fn name(&self) -> &'static str {
        "slow"
    }
}

/// A target that lets dispatches wait, and dispatches to it.
fn slow(requests: impl IntoIterator<Item = Value>) -> (Arc<SlowTarget>, AppState, Dispatches) {
    let target = Arc::new(SlowTarget {
        calls: Semaphore::new(0),
        released: Semaphore::new(0),
    });
    let state = AppState::new(
        gate(when_issued),
        Routing::All,
        Arc::clone(&target) as Arc<dyn DispatchTarget>,
        None,
        None,
        Metrics::default(),
        Shutdown::default().draining,
    );
    let mut dispatches = JoinSet::new();
    for job in requests {
        let request = dispatch(Some(&format!("Bearer {PLATFORM_TOKEN}")), job.to_string());
        dispatches.spawn(router(state.clone(), true).oneshot(request));
    }
    (target, state, dispatches)
}

type Dispatches = JoinSet<Result<axum::response::Response, std::convert::Infallible>>;

async fn all_accepted(mut dispatches: Dispatches) {
    while let Some(response) = dispatches.join_next().await {
        assert_eq!(response.unwrap().unwrap().status(), StatusCode::ACCEPTED);
    }
}

#[tokio::test]
async fn a_dispatch_keeps_its_turn_until_it_is_accepted() {
    let (target, state, dispatches) = slow((0..=AT_ONCE).map(|_| job()));
    let all = u32::try_from(AT_ONCE).unwrap();
    target.calls.acquire_many(all).await.unwrap().forget();
    // The last dispatch waits, because each call of the target holds a permit.
    assert_eq!(state.turns.available_permits(), 0);
    assert_eq!(target.calls.available_permits(), 0);
    target.released.add_permits(AT_ONCE + 1);
    all_accepted(dispatches).await;
    assert_eq!(target.calls.available_permits(), 1);
}

#[tokio::test]
async fn a_dispatch_keeps_its_memory_until_it_is_accepted() {
    // Each takes 30 of the 80 MiB.
    let mut large = job();
    large["accessToken"] = json!("x".repeat(3 << 20));
    let (target, state, dispatches) = slow([large.clone(), large.clone(), large]);
    target.calls.acquire_many(2).await.unwrap().forget();
    assert!(state.memory.available_permits() < 30 << 10);
    assert_eq!(target.calls.available_permits(), 0);
    target.released.add_permits(3);
    all_accepted(dispatches).await;
    assert_eq!(target.calls.available_permits(), 1);
}
