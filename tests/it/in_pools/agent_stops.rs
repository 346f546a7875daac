//! Tests of the stop modes of agents.

use integration_tests::Gate;
use integration_tests::{Repository, Running};
use nix::sys::signal::{Signal, kill};
use pool_protocol::token::PoolToken;
use test_peers::proxy::Moment;
use test_peers::wait::until;
use test_platform::{Flow, NewJob, Status, Workspace};

use super::agent::{ends_with, wait_for};
use super::fixture::{Fixture, Hub};
use super::kills::{ACCEPT, Run, STARTED};

/// Starts an agent with this stop mode, and a run that waits at the gate.
async fn at_the_gate(fixture: &Fixture, hub: &Hub, mode: &str) -> (Running, Gate, u32) {
    let mut command = fixture.agent(&hub.url());
    let agent = Running::start(command.env("MAYFLY_AGENT_ON_STOP", mode));
    let gate = fixture.gate();
    let job = fixture.start_script(&gate);
    fixture.platform.until_streamed(job, "at-the-gate").await;
    (agent, gate, job)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_agent_waits_for_its_run_and_stays_online() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let (agent, gate, job) = at_the_gate(&fixture, &hub, "drain").await;
    agent.signal(Signal::SIGTERM);
    wait_for(&agent, "no task is taken any more");
    let waiting = fixture.start_script(&gate);
    hub.until_metric(r#"mayfly_pool_tasks{pool="eu",state="available"} 1"#)
        .await;
    hub.until_metric(r#"mayfly_pool_agents{pool="eu",state="online"} 1"#)
        .await;
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    ends_with(agent, 0);
    // The agent has left the list, and the second run still waits.
    hub.until_metric(r#"mayfly_pool_agents{pool="eu",state="online"} 0"#)
        .await;
    hub.until_metric(r#"mayfly_pool_agents{pool="eu",state="offline"} 0"#)
        .await;
    assert_eq!(fixture.times_run(), 1);
    assert_eq!(fixture.platform.job(waiting).status, Status::Queue);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_stops_the_run() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let (agent, _gate, job) = at_the_gate(&fixture, &hub, "drain").await;
    agent.signal(Signal::SIGTERM);
    wait_for(&agent, "\"mode\":\"Some(Drain)\"");
    agent.signal(Signal::SIGTERM);
    wait_for(&agent, "\"mode\":\"Some(Grace)\"");
    fixture.platform.until_job(job, Status::Failed).await;
    ends_with(agent, 0);
    assert_eq!(fixture.runs().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_with_grace_asks_its_run_to_stop_and_a_second_signal_ends_it() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let (agent, _gate, job) = at_the_gate(&fixture, &hub, "grace").await;
    kill(fixture.executor(), Signal::SIGSTOP).unwrap();
    agent.signal(Signal::SIGTERM);
    wait_for(&agent, "\"mode\":\"Some(Grace)\"");
    hub.until_metric(r#"mayfly_pool_agents{pool="eu",state="online"} 1"#)
        .await;
    agent.signal(Signal::SIGTERM);
    wait_for(&agent, "\"mode\":\"Some(Force)\"");
    fixture.platform.until_job(job, Status::Failed).await;
    ends_with(agent, 0);
    assert_eq!(
        (fixture.runs().len(), fixture.reports(job, Status::Failed)),
        (0, 2)
    );
}

/// What becomes of a run whose executor has not made its claim when its agent stops.
#[derive(Clone, Copy, Debug)]
enum Unclaimed {
    /// It goes on, and the agent does not wait for it.
    GoesOn,
    /// The agent waits for it.
    IsAwaited,
    /// Another agent gets it.
    IsHandedBack,
    Fails,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_mode_does_what_it_says_to_a_run_that_starts() {
    for (mode, expected) in [
        ("detach", Unclaimed::GoesOn),
        ("drain", Unclaimed::IsAwaited),
        ("grace", Unclaimed::IsHandedBack),
        ("force", Unclaimed::Fails),
    ] {
        let mut run = Run::start().await;
        let mut command = run.fixture.agent(&run.to_hub.url());
        let agent = Running::start(command.env("MAYFLY_AGENT_ON_STOP", mode));
        run.until_asked_for_tasks().await;
        let held = run.to_hub.hold(|call| call.is(ACCEPT, 1, Moment::Sent));
        let job = run.fixture.start_note();
        let held = held.await.unwrap();
        agent.signal(Signal::SIGTERM);
        wait_for(&agent, "no task is taken any more");
        match expected {
            Unclaimed::GoesOn => {
                ends_with(agent, 0);
                held.release();
                run.fixture.platform.until_job(job, Status::Completed).await;
                run.start_agent();
            }
            Unclaimed::IsAwaited => {
                held.release();
                ends_with(agent, 0);
            }
            Unclaimed::IsHandedBack => {
                ends_with(agent, 0);
                drop(held);
                run.start_agent();
            }
            Unclaimed::Fails => {
                ends_with(agent, 0);
                drop(held);
            }
        }
        let end = match expected {
            Unclaimed::Fails => Status::Failed,
            _ => Status::Completed,
        };
        run.fixture.platform.until_job(job, end).await;
        run.assert_nothing_left().await;
        let times = usize::from(end == Status::Completed);
        assert_eq!(run.fixture.times_run(), times, "{mode}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_agent_that_is_forced_ends_its_run_also_without_the_hub() {
    let run = Run::start().await;
    let mut command = run.fixture.agent(&run.to_hub.url());
    let agent = Running::start(command.env("MAYFLY_AGENT_ON_STOP", "force"));
    run.until_asked_for_tasks().await;
    let held = run.to_hub.hold(|call| call.is(STARTED, 1, Moment::Sent));
    run.fixture.start_note();
    let held = held.await.unwrap();
    run.to_hub.cut();
    drop(held);
    agent.signal(Signal::SIGTERM);
    ends_with(agent, 0);
    // The hub, and no executor.
    until("no executor", async || run.processes() == 1).await;
    assert_eq!(run.fixture.times_run(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_forced_ends_its_run_and_says_so() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let (agent, _gate, job) = at_the_gate(&fixture, &hub, "force").await;
    agent.signal(Signal::SIGTERM);
    fixture.platform.until_job(job, Status::Failed).await;
    ends_with(agent, 0);
    let step = fixture
        .platform
        .job(job)
        .step_of("customScripts")
        .id
        .clone();
    let output = fixture.platform.step_output(job, &step).unwrap_or_default();
    assert!(output.contains("had to stop at once"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_run_of_a_detached_agent_continues() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let (agent, gate, job) = at_the_gate(&fixture, &hub, "detach").await;
    agent.signal(Signal::SIGTERM);
    ends_with(agent, 0);
    assert_eq!(fixture.runs().len(), 1);
    gate.open().await;
    fixture.platform.until_job(job, Status::Completed).await;
    assert_eq!(fixture.times_run(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_single_run_ends_its_agent_with_0() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let mut command = fixture.agent(&hub.url());
    let agent = Running::start(command.env("MAYFLY_AGENT_SINGLE_RUN", "true"));
    let repository = Repository::fixture();
    let workspace = fixture
        .platform
        .workspace(Workspace::new(&repository.url()));
    let fails = Flow::new("customScripts", 100).with_script("exit 3");
    let job = fixture
        .platform
        .start_job(NewJob::new(&workspace, vec![fails]));
    fixture.platform.until_job(job, Status::Failed).await;
    ends_with(agent, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_for_a_single_run_ends_with_1_if_the_hub_rejects_it() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let unknown = PoolToken::new("eu".parse().unwrap());
    let mut command = fixture.agent(&hub.url());
    command
        .env("MAYFLY_AGENT_SINGLE_RUN", "true")
        .env("MAYFLY_AGENT_TOKEN", unknown.reveal());
    let log = ends_with(Running::start(&mut command), 1);
    assert!(log.contains("does not accept the token"), "{log}");
    assert!(!log.contains(unknown.reveal()), "{log}");
}
