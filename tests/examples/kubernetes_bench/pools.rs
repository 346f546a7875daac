//! The hub of pools and its agents, as processes: how soon runs start, what an idle agent costs, and a hub with many runs and
//! many agents.

pub(crate) mod artifacts;
mod fleet;
mod hub;
mod load;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use integration_tests::{Machine, Repository};
use serde_json::{Value, json};
use test_peers::proxy::Proxy;

use self::fleet::{Agent, Starts};
use self::hub::Hub;
use crate::launcher::{self, Reports};
use crate::runs;
use crate::server::{ApiServer, RUNS};
use crate::sight::Sight;

/// How long an idle agent is watched, at least: more than two requests for tasks.
const IDLE: Duration = Duration::from_mins(2);
/// The agents of the journey with many runs, and what each runs at once.
const AGENTS: usize = 5;
const SLOTS: usize = 10;
const RUNS_AT_ONCE: usize = 100;

/// Measures with executors as processes.
pub(crate) async fn measure(program: &str, count: usize) -> Result<Value> {
    let hub = Arc::new(Hub::start(program).await?);
    let proxy = Proxy::of_calls(&[hub.address()])?;
    let idle = Agent::start(program, &hub, "idle", "idle", 25, &proxy.url(), None)?;
    idle.registered();
    let began = Instant::now();
    let before = proxy.calls().len();

    let starts = Starts::new(hub.folder())?;
    let late = late_agent(program, &hub, &starts, count).await?;
    let agent = Agent::start(program, &hub, "eu", "one", 25, &hub.url(), Some(&starts))?;
    let single = starts.one_by_one(&hub, "eu", count).await?;
    agent.stop()?;
    let agent = Agent::start(program, &hub, "eu", "narrow", 1, &hub.url(), Some(&starts))?;
    let freed = starts.in_turn(&hub, "eu", count).await?;
    agent.stop()?;
    let burst = starts
        .burst(program, &hub, RUNS_AT_ONCE, AGENTS, SLOTS)
        .await?;
    let runs = load::measure(&hub).await?;
    if let Some(left) = IDLE.checked_sub(began.elapsed()) {
        tokio::time::sleep(left).await;
    }
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    let calls = proxy.calls().into_iter().skip(before);
    let (heartbeats, others): (Vec<_>, Vec<_>) =
        calls.partition(|call| call.class.ends_with("/heartbeat"));
    idle.stop()?;
    Ok(json!({
        "store": hub.store(),
        "late": late,
        "single": single,
        "freed": freed,
        "burst": burst,
        "load": runs,
        "idle": {
            "minutes": minutes,
            "requests": others.len(),
            "heartbeats": heartbeats.len(),
        },
    }))
}

/// Seconds from the registration of an agent to the start of a run that has waited for it.
async fn late_agent(program: &str, hub: &Hub, starts: &Starts, count: usize) -> Result<Vec<f64>> {
    let mut late = Vec::new();
    for number in 0..count {
        hub.post("eu", "one", &hub.job()).await?;
        hub.until_available("eu", 1).await?;
        let name = format!("late-{number}");
        let agent = Agent::start(program, hub, "eu", &name, 1, &hub.url(), Some(starts))?;
        let registered = agent.registered();
        let run = starts.next().await?;
        late.push(run.at.saturating_duration_since(registered).as_secs_f64());
        run.end().await?;
        agent.stop()?;
    }
    Ok(late)
}

/// Measures with executors as Jobs: from a dispatch to the hub, and from a dispatch to the launcher of the cluster.
pub(crate) async fn jobs(server: [&str; 2], program: &str, count: usize) -> Result<Value> {
    let server = ApiServer::start(server).await?;
    let machine = Machine::new("");
    let client = server.client().await?;
    let mut sight = Sight::of(client, RUNS, runs::is_released).await?;
    let launcher = launcher::start(program, &server, &machine, Reports::Nowhere);
    let hub = Hub::start(program).await?;
    let agent = Agent::in_cluster(program, &hub, &server.kubeconfig);
    agent.registered();
    let step = integration_tests::job::plan(&Repository::fixture());
    let mut pairs = Vec::new();
    for number in 0..=count {
        let direct = integration_tests::job::in_job(&step, &(1_000_000 + number).to_string());
        let begun = Instant::now();
        launcher::post(&launcher.endpoint, &direct).await?;
        let direct = sight.when(&runs::name(&direct)).await? - begun;
        let pooled = hub.job();
        let begun = Instant::now();
        hub.post("eu", "one", &pooled).await?;
        let pooled = sight.when(&runs::name(&pooled)).await? - begun;
        // Once unmeasured each, so that both sides find open connections.
        if number > 0 {
            pairs.push(json!({"pooled": pooled.as_secs_f64(), "direct": direct.as_secs_f64()}));
        }
    }
    // Its Jobs never end here, so it is killed.
    drop(agent);
    Ok(json!({"server": server.name, "store": hub.store(), "pairs": pairs}))
}
