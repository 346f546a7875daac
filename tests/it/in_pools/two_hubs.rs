//! Two hubs on one PostgreSQL database, behind one address.

use std::collections::HashMap;
use std::fs;

use base64::Engine as _;
use integration_tests::{Repository, Running};
use job_contract::env;
use nix::sys::signal::Signal;
use test_peers::postgres::PostgresServer;
use test_peers::proxy::Proxy;
use test_peers::skips::needed;
use test_peers::wait::until;
use test_platform::{Flow, NewJob, Status, Workspace};

use super::agent::{ends_with, tasks_taken, wait_for};
use super::fixture::{Fixture, Hub};
use test_platform::launcher::Launcher;

const AGENTS: usize = 4;
const SLOTS: usize = 2;
const RUNS: usize = 12;

/// Jobs of one script each, which notes that it runs, and waits until the lock of a file is free. Each is of its own
/// workspace, because a workspace runs one job at a time.
fn start_runs(fixture: &Fixture, repository: &Repository) -> Vec<u32> {
    let script = format!(
        "echo ran >> {}; flock --shared {} true",
        fixture.path("ledger").display(),
        fixture.path("gate").display()
    );
    let start = |_| {
        let workspace = Workspace::new(&repository.url());
        let workspace = fixture.platform.workspace(workspace);
        let flow = Flow::new("customScripts", 100).with_script(&script);
        fixture
            .platform
            .start_job(NewJob::new(&workspace, vec![flow]))
    };
    (0..RUNS).map(start).collect()
}

fn serve(fixture: &Fixture) -> Hub {
    Hub(Launcher::start(&mut fixture.command()))
}

async fn until_run(fixture: &Fixture, count: usize) {
    let enough = async || match fixture.times_run() {
        times if times >= count => Ok(()),
        times => Err(times),
    };
    until(&format!("{count} run"), enough).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hub_that_is_killed_under_load_loses_no_run_and_doubles_none() {
    let Some(postgres) = needed(PostgresServer::shared()) else {
        return;
    };
    let key = base64::engine::general_purpose::STANDARD.encode([7; 32]);
    let fixture = Fixture::new()
        .await
        .with(env::POOL_STORE, &postgres.database().unwrap())
        .with(env::JOB_TOKEN_KEYS, &key);
    let (doomed, hub) = (serve(&fixture), serve(&fixture));
    let proxy = Proxy::start(&[doomed.address(), hub.address()]).unwrap();
    let dispatch = format!("{}/pools/eu/api/v1/terraform-rs", proxy.url());
    fixture.platform.dispatch_to(&dispatch);
    let agents: Vec<_> = (1..=AGENTS)
        .map(|number| {
            let name = format!("eu-{number}");
            let mut command = fixture.agent_named(&name, &name, &proxy.url());
            Running::start(command.env("MAYFLY_AGENT_SLOTS", SLOTS.to_string()))
        })
        .collect();
    for agent in &agents {
        wait_for(agent, "\"registered\"");
    }

    let gate = fs::File::create(fixture.path("gate")).unwrap();
    gate.lock().unwrap();
    let repository = Repository::fixture();
    let jobs = start_runs(&fixture, &repository);
    until_run(&fixture, AGENTS * SLOTS).await;
    doomed.crash();
    // No slot is free, so nothing more has run.
    assert_eq!(fixture.times_run(), AGENTS * SLOTS);
    gate.unlock().unwrap();
    for &job in &jobs {
        fixture.platform.until_job(job, Status::Completed).await;
        // Of the step. The platform ends the job itself.
        assert_eq!(fixture.reports(job, Status::Completed), 1, "{job}");
    }
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="running"} 0"#)
        .await;

    let mut taken: HashMap<String, usize> = HashMap::new();
    for agent in agents {
        agent.signal(Signal::SIGTERM);
        for task in tasks_taken(&ends_with(agent, 0)) {
            *taken.entry(task["run"].to_string()).or_default() += 1;
        }
    }
    assert_eq!(fixture.times_run(), RUNS);
    assert_eq!(taken.len(), RUNS, "{taken:?}");
    assert!(taken.values().all(|times| *times == 1), "{taken:?}");
}
