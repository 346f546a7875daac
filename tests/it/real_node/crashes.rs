//! A launcher dies between two requests of its dispatches, while the release's own launcher watches. The platform delivers
//! again.

use std::collections::BTreeMap;
use std::fs;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use integration_tests::Repository;
use job_contract::env;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use test_platform::{Flow, NewJob, Status};
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::{PORT, Stage};
use test_platform::launcher::{self, Endpoint, Launcher};

const STEP: &str = "customScripts";
const SAID: &str = "the-script-ran";
/// Seconds after the death.
const DELIVERED_AGAIN: [u64; 4] = [20, 26, 30, 32];

/// The request that the dying launcher never gets an answer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    BeforeSecret,
    BeforeRelease,
}

impl Cut {
    fn falls_on(self, request: &Request) -> bool {
        let path = request.uri().path();
        match self {
            Self::BeforeSecret => request.method() == Method::POST && path.ends_with("/secrets"),
            Self::BeforeRelease => request.method() == Method::PATCH && path.contains("/jobs/"),
        }
    }
}

/// Passes requests to the API server, except those of the cut. Returns its address and how many it has kept.
/// `test_peers::proxy` cannot: this server speaks TLS, and wants the credentials of the client.
async fn cutting(client: Client, cut: Cut) -> (String, Arc<AtomicUsize>) {
    let kept = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&kept);
    let pass = move |request: Request| {
        let (client, counted) = (client.clone(), Arc::clone(&counted));
        async move {
            if cut.falls_on(&request) {
                counted.fetch_add(1, Ordering::SeqCst);
                return pending().await;
            }
            let (parts, body) = request.into_parts();
            let body = to_bytes(body, usize::MAX).await.unwrap();
            let request = axum::http::Request::from_parts(parts, body.to_vec().into());
            let answer = client.send(request).await;
            answer.map_or_else(
                |_| StatusCode::BAD_GATEWAY.into_response(),
                |answer| -> Response { answer.map(Body::new) },
            )
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let router = Router::new().fallback(pass);
    tokio::spawn(async move { axum::serve(listener, router).await });
    (address, kept)
}

/// A launcher beside the release's, as a process of this machine with the release's settings.
async fn beside(stage: &Stage, api_server: &str) -> Launcher {
    let fixture = &stage.fixture;
    // A colon would end the path in `KUBECONFIG`.
    let name = format!("{}-{api_server}", fixture.namespace).replace(':', "-");
    let folder = fixture.node.path(&name);
    fs::create_dir_all(&folder).unwrap();
    let written = |name: &str, content: &str| {
        let file = folder.join(name);
        fs::write(&file, content).unwrap();
        file
    };
    let named = |kind: &str, value: Value| json!([{"name": "front", kind: value}]);
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "front",
        "clusters": named("cluster", json!({"server": format!("http://{api_server}")})),
        "users": named("user", json!({})),
        "contexts": named("context", json!({"cluster": "front", "user": "front"})),
    });
    let release = fixture.all::<Deployment>().get("mayfly").await.unwrap();
    let pod = release.spec.unwrap().template.spec.unwrap();
    let variables = pod.containers[0].env.iter().flatten();
    // An empty value is left out of the object.
    let settings: BTreeMap<_, _> = variables
        .filter(|variable| variable.value_from.is_none())
        .map(|variable| {
            (
                &variable.name,
                variable.value.as_deref().unwrap_or_default(),
            )
        })
        .collect();
    let mut command = launcher::command(crate::LAUNCHER, &folder);
    // What the release sets counts less than what this launcher needs.
    launcher::serve(command.envs(settings), "kubernetes")
        .env(env::LOG_FORMAT, "json")
        .env("KUBECONFIG", written("kubeconfig", &kubeconfig.to_string()))
        .env(env::INTERNAL_SECRET, stage.platform.secret())
        .env(env::AWS_ACCESS_KEY, stage.store.access_key())
        .env(env::AWS_SECRET_KEY, stage.store.secret_key())
        .env(env::POD_NAME, "doomed");
    for map in fixture.list::<ConfigMap>().await {
        for (name, content) in map.data.unwrap_or_default() {
            let variable = match name.as_str() {
                "pod-template.yaml" => env::POD_TEMPLATE_FILE,
                "policy.yaml" => env::POLICY_FILE,
                _ => continue,
            };
            command.env(variable, written(&name, &content));
        }
    }
    Launcher::start(&mut command)
}

/// A job that this test dispatches.
fn waiting(stage: &Stage) -> u32 {
    let workspace = stage
        .platform
        .workspace(stage.workspace(Repository::fixture()));
    let template = vec![Flow::new(STEP, 100).with_script(&format!("echo {SAID}"))];
    stage
        .platform
        .store_job(NewJob::new(&workspace, template), |job| {
            job.status = Status::Queue;
            job.steps[0].status = Status::Queue;
            job.dispatched = Some(job.steps[0].id.clone());
        })
}

/// Delivers again until that is accepted, and returns when the run is done.
async fn deliver_again(stage: &Stage, service: &Endpoint, job: u32, document: &Value) {
    stage
        .fixture
        .until("the delivery is accepted", async || {
            let answer = service.post(document).await.unwrap();
            assert!(matches!(answer, 202 | 503), "{answer}");
            (answer == 202).then_some(())
        })
        .await;
    stage
        .fixture
        .until("the run is done", async || {
            let status = stage.platform.job(job).step_of(STEP).status;
            assert_ne!(status, Status::Failed, "{}", stage.output(job, STEP));
            (status == Status::Completed).then_some(())
        })
        .await;
    let pods = stage.pods_of(&stage.name(job, STEP)).await;
    assert_eq!(pods.len(), 1, "{pods:?}");
    let output = stage.output(job, STEP);
    let ran = output.lines().filter(|line| line.trim() == SAID).count();
    assert_eq!(ran, 1, "{output}");
}

/// The jobs that a launcher was killed over, each with the document of its next delivery and the time for it.
async fn orphans(stage: &Stage, cut: Cut) -> Vec<(u32, Value, Instant)> {
    let (api_server, kept) = cutting(stage.fixture.client.clone(), cut).await;
    let doomed = beside(stage, &api_server).await;
    let endpoint = stage.platform.endpoint(doomed.endpoint.address);
    // The platform encodes some steps anew. A run whose Secret is stored must not care.
    let documents = match cut {
        Cut::BeforeSecret => [false, true].as_slice(),
        Cut::BeforeRelease => &[true],
    };
    let mut orphans = Vec::new();
    for (is_other, after) in documents
        .iter()
        .flat_map(|is_other| DELIVERED_AGAIN.map(|after| (*is_other, after)))
    {
        let job = waiting(stage);
        let mut document = stage.platform.job_data(job);
        let first = document.clone();
        if is_other {
            document["encodedAgain"] = json!(true);
        }
        orphans.push((job, first, document, after));
    }
    let posts = orphans.iter().map(|(_, first, ..)| endpoint.post(first));
    let killed = async {
        stage
            .fixture
            .until("all dispatches reach the cut", async || {
                (kept.load(Ordering::SeqCst) >= orphans.len()).then_some(())
            })
            .await;
        doomed.crash();
        Instant::now()
    };
    let (answers, killed) = tokio::join!(futures_util::future::join_all(posts), killed);
    // A dispatch is accepted once its Secret is stored.
    let accepted = (cut == Cut::BeforeRelease).then_some(202);
    assert!(
        answers
            .iter()
            .all(|answer| answer.as_ref().ok() == accepted.as_ref()),
        "{answers:?}"
    );
    let orphans = orphans.into_iter();
    orphans
        .map(|(job, _, document, after)| (job, document, killed + Duration::from_secs(after)))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_killed_between_two_requests_loses_no_run_and_doubles_none() {
    let Some(stage) = Stage::with(json!({})).await else {
        return;
    };
    let service = stage.fixture.all::<Service>().get("mayfly").await.unwrap();
    let service = format!("{}:{PORT}", service.spec.unwrap().cluster_ip.unwrap());
    let service = stage.platform.endpoint(service.parse().unwrap());
    let mut runs = Vec::new();
    for cut in [Cut::BeforeSecret, Cut::BeforeRelease] {
        runs.extend(orphans(&stage, cut).await);
    }
    let (stage, service) = (&stage, &service);
    let runs = runs.iter().map(|(job, document, at)| async move {
        tokio::time::sleep_until(*at).await;
        deliver_again(stage, service, *job, document).await;
    });
    futures_util::future::join_all(runs).await;
    let made = stage.fixture.list::<Job>().await;
    let names: Vec<_> = made.iter().map(ResourceExt::name_any).collect();
    assert_eq!(names.len(), 3 * DELIVERED_AGAIN.len(), "{names:?}");
}
