//! A hub with 10,000 runs in its queue and 500 agents, which are clients of this process.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use pool_protocol::IDEMPOTENCY_KEY;
use pool_protocol::id::{InstanceId, LeaseId};
use pool_protocol::path::{self, LeaseCall};
use pool_protocol::task::LeasedTask;
use pool_protocol::version;
use reqwest::{Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::{Barrier, Mutex, mpsc};
use tokio::task::JoinSet;

use super::hub::{Hub, PATIENCE};
use crate::launches::at_once;

const POOL: &str = "load";
/// A pool without runs.
const EMPTY: &str = "empty";
const RUNS: usize = 10_000;
const AGENTS: usize = 500;
const ORGANIZATIONS: usize = 50;
/// Each agent sends a heartbeat once in this time.
const PERIOD: Duration = Duration::from_secs(10);
/// It takes a run once in so many of them: together 30,000 runs an hour.
const ROUNDS: usize = 6;

/// An agent.
#[derive(Clone)]
struct Client {
    http: reqwest::Client,
    url: String,
    token: String,
    instance: InstanceId,
}

/// Takes the samples.
pub(super) async fn measure(hub: &Arc<Hub>) -> Result<Value> {
    let posted = post(hub, RUNS).await?;
    let began = Instant::now();
    hub.until_available(POOL, RUNS).await?;
    let confirmed = began.elapsed();
    let queued = hub.memory("VmRSS")?;
    let mut agents = Vec::new();
    for number in 0..AGENTS {
        agents.push(Client::register(hub, POOL, number).await?);
    }
    let paced = paced(&agents).await?;
    let together = together(&agents).await?;
    let waiting = waiting(hub).await?;
    Ok(json!({
        "runs": RUNS,
        "agents": AGENTS,
        "posted": posted,
        "confirmed": confirmed.as_secs_f64(),
        "paced": paced,
        "together": together,
        "waiting": waiting,
        "resident_queued": queued,
        "peak": hub.memory("VmHWM")?,
    }))
}

/// Posts runs of all organizations, and returns the seconds until each answer. No agent is there.
async fn post(hub: &Arc<Hub>, count: usize) -> Result<Vec<f64>> {
    let (sender, mut times) = mpsc::unbounded_channel();
    at_once((0..count).collect(), |number| {
        let (hub, sender) = (Arc::clone(hub), sender.clone());
        async move {
            let organization = format!("organization-{}", number % ORGANIZATIONS);
            let took = hub.post(POOL, &organization, &hub.job()).await?;
            Ok(sender.send(took.as_secs_f64())?)
        }
    })
    .await?;
    drop(sender);
    let mut all = Vec::new();
    while let Some(time) = times.recv().await {
        all.push(time);
    }
    Ok(all)
}

/// Seconds of a request for a run, while all agents send heartbeats and take runs in turn.
async fn paced(agents: &[Client]) -> Result<Vec<f64>> {
    let mut all = JoinSet::new();
    for (number, agent) in agents.iter().cloned().enumerate() {
        let phase = PERIOD * u32::try_from(number)? / u32::try_from(agents.len())?;
        all.spawn(async move {
            let mut turn = tokio::time::interval_at(tokio::time::Instant::now() + phase, PERIOD);
            let mut time = f64::NAN;
            for round in 0..ROUNDS {
                turn.tick().await;
                if round == number % ROUNDS {
                    time = agent.run().await?;
                }
                agent.beat().await?;
            }
            Ok(time)
        });
    }
    gather(all).await
}

/// Seconds of a request for a run, when all agents send one at the same time.
async fn together(agents: &[Client]) -> Result<Vec<f64>> {
    let start = Arc::new(Barrier::new(agents.len()));
    let mut all = JoinSet::new();
    for agent in agents {
        let (agent, start) = (agent.clone(), Arc::clone(&start));
        all.spawn(async move {
            // So that there is a connection.
            agent.beat().await?;
            start.wait().await;
            agent.run().await
        });
    }
    gather(all).await
}

/// Seconds from a dispatch to the answer of an agent's request, which waits for it. As many agents of
/// another pool wait.
async fn waiting(hub: &Arc<Hub>) -> Result<Vec<f64>> {
    let mut agents = Vec::new();
    for number in 0..AGENTS {
        agents.push(Client::register(hub, EMPTY, number).await?);
    }
    let posted = Arc::<Mutex<HashMap<String, Instant>>>::default();
    let mut all = JoinSet::new();
    for agent in agents {
        let posted = Arc::clone(&posted);
        all.spawn(async move {
            let lease = agent.request(50).await?.context("no run came")?;
            let now = Instant::now();
            let posted = posted.lock().await.remove(&lease.task.job_id);
            let time = now - posted.context("a run that was not posted")?;
            agent.finish(&lease).await?;
            Ok(time.as_secs_f64())
        });
    }
    // And the idle agent.
    hub.until_line(&format!("mayfly_pool_polls_waiting {}", AGENTS + 1))
        .await?;
    for _ in 0..AGENTS {
        let job = hub.job();
        let began = Instant::now();
        posted.lock().await.insert(job.job_id.clone(), began);
        hub.post(EMPTY, "one", &job).await?;
    }
    gather(all).await
}

async fn gather(mut all: JoinSet<Result<f64>>) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    while let Some(time) = all.join_next().await {
        times.push(time??);
    }
    Ok(times)
}

impl Client {
    async fn register(hub: &Hub, pool: &str, number: usize) -> Result<Self> {
        let mut client = Self {
            // Of its own: each agent has its own connection.
            http: reqwest::Client::builder()
                .no_proxy()
                .timeout(PATIENCE)
                .build()?,
            url: hub.url(),
            token: hub.token(pool).to_owned(),
            instance: InstanceId::new(),
        };
        let registration = json!({
            "systemId": number.to_string(),
            "name": format!("agent-{number}"),
            "executorVersion": "0",
            "protocolMinVersion": version::VERSION,
            "protocolMaxVersion": version::VERSION,
            "platform": "linux",
            "architecture": "amd64",
            "capacity": 25,
            "installation": number.to_string(),
        });
        let registered = client.post(path::REGISTER, &registration).await?;
        let registered: Value = registered.json().await?;
        client.instance = serde_json::from_value(registered["instanceId"].clone())?;
        Ok(client)
    }

    async fn beat(&self) -> Result<()> {
        let body = json!({"state": "ONLINE", "availableCapacity": 25});
        let path = path::instance_heartbeat(self.instance);
        self.post(&path, &body).await.map(drop)
    }

    async fn request(&self, wait: u32) -> Result<Option<LeasedTask>> {
        let body = json!({
            "instanceId": self.instance,
            "availableCapacity": 25,
            "waitSeconds": wait,
            "holding": [],
        });
        let answer = self.post(path::REQUEST_TASK, &body).await?;
        if answer.status() == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        Ok(Some(answer.json().await?))
    }

    /// Takes a run and ends it. Returns the seconds until it was there.
    async fn run(&self) -> Result<f64> {
        let began = Instant::now();
        let lease = self.request(0).await?.context("the queue is empty")?;
        let took = began.elapsed();
        self.finish(&lease).await?;
        Ok(took.as_secs_f64())
    }

    /// Does what an executor does that succeeds.
    async fn finish(&self, lease: &LeasedTask) -> Result<()> {
        let executor = Self {
            token: lease.job_token.clone(),
            ..self.clone()
        };
        let holder = json!({"holder": {"uid": lease.lease_id, "name": "bench"}});
        let end = json!({"exitCode": 0, "reported": true});
        for (call, body) in [(LeaseCall::Accept, holder), (LeaseCall::Complete, end)] {
            let path = path::lease(lease.task_id, lease.lease_id, call);
            executor.post(&path, &body).await?;
        }
        Ok(())
    }

    /// Makes a call that must succeed.
    async fn post(&self, path: &str, body: &Value) -> Result<Response> {
        let request = self
            .http
            .post(format!("{}{path}", self.url))
            .bearer_auth(&self.token)
            .header(version::HEADER, version::VERSION)
            .header(IDEMPOTENCY_KEY, LeaseId::new().to_string());
        let answer = request.json(body).send().await?;
        let status = answer.status();
        ensure!(status.is_success(), "{path} was answered {status}");
        Ok(answer)
    }
}
