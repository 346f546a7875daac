//! A platform that waits for every run it is asked about: as much as a hub with many runs in its queue calls. It keeps no
//! records, so that ten thousand runs cost it nothing.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::response::IntoResponse;
use axum::routing::get;
use job_contract::job::StepType;
use job_contract::{JobData, env};
use serde_json::{Value, json};
use test_peers::redis::RedisServer;
use test_platform::Secret;
use tokio::net::TcpListener;

/// The platform, with the Redis of its heartbeats. It serves as long as the runtime.
#[derive(Debug)]
pub struct WaitingPlatform {
    address: SocketAddr,
    redis: RedisServer,
}

impl WaitingPlatform {
    pub async fn start() -> Self {
        // Clients need one, and this may be the first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().route("/api/v1/organization/{organization}/job/{job}", get(queued));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self {
            address,
            redis: RedisServer::start().unwrap(),
        }
    }

    /// What a hub needs to know of it.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let url = format!("http://{}", self.address);
        vec![
            (env::API_URL, url.clone()),
            (env::PUBLIC_API_URL, url),
            (env::INTERNAL_SECRET, Secret::long().text()),
            (env::REDIS_HOSTNAME, "127.0.0.1".to_owned()),
            (env::REDIS_PORT, self.redis.port().to_string()),
        ]
    }

    /// A token as it comes with a dispatch, good for an hour.
    pub fn dispatch_token() -> String {
        Secret::long().dispatch_token(Duration::from_hours(1))
    }

    /// A plan of this organization in a job of this number, of about 16 kB.
    pub fn plan(organization: &str, number: usize) -> JobData {
        let mut plan = JobData {
            step_type: Some(StepType::Plan.name().to_owned()),
            organization_id: organization.to_owned(),
            // Runs of one workspace would wait for each other.
            workspace_id: format!("workspace-{number}"),
            job_id: number.to_string(),
            step_id: step_of(&number.to_string()),
            terraform_version: "1.11.4".to_owned(),
            source: Some("https://git.example.test/network.git".to_owned()),
            branch: "main".to_owned(),
            vcs_type: Some("PUBLIC".to_owned()),
            ..JobData::default()
        };
        for variable in 0..120 {
            let value =
                "a value of usual length, such as the name of a network, a subnet or an image"
                    .into();
            plan.variables.insert(format!("variable_{variable}"), value);
        }
        plan
    }
}

/// The only step of a job.
fn step_of(job: &str) -> String {
    format!("step-{job}")
}

async fn queued(Path((_, job)): Path<(String, String)>) -> impl IntoResponse {
    let step = step_of(&job);
    let document: Value = json!({
        "data": {
            "type": "job", "id": job, "attributes": {"status": "queue"},
            "relationships": {"step": {"data": [{"type": "step", "id": step}]}},
        },
        "included": [{"type": "step", "id": step, "attributes": {"status": "pending", "stepNumber": 100}}],
    });
    (
        [("Content-Type", "application/vnd.api+json")],
        document.to_string(),
    )
}
