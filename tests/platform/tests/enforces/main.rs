//! The test platform refuses what Terrakube refuses, and notes what breaks the contract. Each request here contains one
//! mistake.

#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

mod dispatch;
mod recorded;
mod reports;
mod requests;
mod streams;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jsonwebtoken::{Algorithm, EncodingKey, Header};
use redis::cmd;
use serde_json::{Value, json};
use test_peers::http::{Response, Server};
use test_peers::redis::RedisServer;
use test_peers::wait::DEADLINE;
use test_platform::{
    Builder, Flow, Job, NewJob, Outputs, Platform, Records, Release, Rule, Status, Workspace, java,
};

const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";
const JSON: &str = "application/json";
const JSON_API: &str = "application/vnd.api+json";

/// A platform, and an executor that accepts every dispatch.
struct Scene {
    platform: Platform,
    client: reqwest::Client,
    workspace: String,
    _executor: Server,
}

impl Scene {
    async fn new() -> Self {
        Self::of(Platform::builder()).await
    }

    async fn of(builder: Builder) -> Self {
        Self::answering(builder, accepted).await
    }

    /// A platform whose executor answers like this.
    async fn answering(
        builder: Builder,
        answer: impl Fn() -> Response + Send + Sync + 'static,
    ) -> Self {
        let platform = builder.start().await.unwrap();
        let executor = Server::start(move |_| answer()).unwrap();
        platform.dispatch_to(&format!("{}/api/v1/terraform-rs", executor.url()));
        let workspace = platform.workspace(Workspace::new("https://git.example.test/a.git"));
        Self {
            platform,
            client: reqwest::Client::builder()
                .no_proxy()
                .timeout(DEADLINE)
                .build()
                .unwrap(),
            workspace,
            _executor: executor,
        }
    }

    fn start(&self, template: Vec<Flow>) -> u32 {
        self.platform
            .start_job(NewJob::new(&self.workspace, template))
    }

    /// A job that an executor was given.
    async fn queued(&self, template: Vec<Flow>) -> Job {
        let job = self.start(template);
        self.platform.until_job(job, Status::Queue).await
    }

    fn job_path(&self, job: u32) -> String {
        format!(
            "/api/v1/organization/{}/job/{job}",
            self.platform.organization()
        )
    }

    fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        let url = format!("{}{path}", self.platform.url());
        let method = reqwest::Method::from_bytes(method.as_bytes()).unwrap();
        self.client
            .request(method, url)
            .bearer_auth(token(&json!({})))
    }

    async fn send(&self, method: &str, path: &str, media_type: &str, body: &Value) -> u16 {
        let request = self
            .request(method, path)
            .header("content-type", media_type);
        status(request.body(body.to_string())).await
    }

    async fn patch_job(&self, job: u32, attributes: Value) -> u16 {
        let body =
            json!({"data": {"type": "job", "id": job.to_string(), "attributes": attributes}});
        self.send("PATCH", &self.job_path(job), JSON_API, &body)
            .await
    }

    async fn patch_step(&self, job: u32, step: &str, attributes: Value) -> u16 {
        let body = json!({"data": {"type": "step", "id": step, "attributes": attributes}});
        let path = format!("{}/step/{step}", self.job_path(job));
        self.send("PATCH", &path, JSON_API, &body).await
    }

    fn output_url(&self, job: u32, step: &str) -> String {
        let (url, organization) = (self.platform.url(), self.platform.organization());
        format!("{url}/tfoutput/v1/organization/{organization}/job/{job}/step/{step}")
    }

    /// Reports the dispatched step as an executor does.
    async fn carry_out(&self, job: u32, end: Value) {
        let now = self.platform.until_job(job, Status::Queue).await;
        let step = now.dispatched.unwrap();
        let output = self.output_url(job, &step);
        let running = json!({"status": "running", "commitId": "9f1c"});
        assert_eq!(self.patch_job(job, running).await, 204);
        let running = json!({"status": "running", "output": output});
        assert_eq!(self.patch_step(job, &step, running).await, 204);
        let completed = json!({"status": "completed", "output": output});
        assert_eq!(self.patch_step(job, &step, completed).await, 204);
        assert_eq!(self.patch_job(job, end).await, 204);
    }

    fn broken(&self) -> Vec<Rule> {
        self.platform.ledger().broken()
    }
}

fn accepted() -> Response {
    Response::new(202, "{}").with_header("content-type", "application/json")
}

async fn status(request: reqwest::RequestBuilder) -> u16 {
    request.send().await.unwrap().status().as_u16()
}

/// A token of a program, with these claims instead of the usual.
fn token(claims: &Value) -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let mut all = json!({
        "iss": "TerrakubeInternal", "sub": "TerrakubeInternal (EXECUTOR)", "aud": "TerrakubeInternal",
        "iat": now, "exp": now + 60,
    });
    for (name, value) in claims.as_object().unwrap() {
        all[name] = value.clone();
    }
    let key = EncodingKey::from_secret(SECRET);
    jsonwebtoken::encode(&Header::new(Algorithm::HS256), &all, &key).unwrap()
}

fn gate() -> (Sender<()>, Mutex<Receiver<()>>) {
    let (open, wait) = channel();
    (open, Mutex::new(wait))
}
