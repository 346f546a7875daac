//! The configuration file of an agent, read by the program itself.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use integration_tests::Running;
use integration_tests::process::Stream;
use job_contract::env;
use nix::sys::signal::Signal;
use serde_json::Value;
use test_peers::port::Port;
use test_platform::launcher;

use super::agent::ends_with;
use super::fixture::Fixture;

/// An agent that knows its home folder, and nothing else from the environment.
fn agent(fixture: &Fixture) -> Command {
    let mut command = launcher::command(crate::LAUNCHER, &fixture.path(""));
    command.arg("agent").current_dir("/");
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn the_file_configures_an_agent_and_the_environment_counts_before_it() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let file = fixture.path("mayfly-agent.yaml");
    let text = format!(
        "service_url: {}\ntoken: {}\nname: from-the-file\ndeploy_target: process\nslot: 3\nworking_directory: {}\n",
        hub.url(),
        fixture.token.reveal(),
        fixture.path("data").display()
    );
    fs::write(&file, text).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let mut command = agent(&fixture);
    let agent = Running::start(command.env("MAYFLY_AGENT_NAME", "from-the-environment"));
    let registered =
        tokio::task::block_in_place(|| agent.line_with(Stream::Stderr, "\"registered\""));
    let registered: Value = serde_json::from_str(&registered).unwrap();
    assert_eq!(registered["agent"], "from-the-environment");
    agent.signal(Signal::SIGTERM);
    let log = ends_with(agent, 0);
    let first = log.lines().next().unwrap();
    assert!(first.contains(&*file.to_string_lossy()), "{log}");
    assert!(log.contains("`slots`"), "the key that was meant: {log}");
    assert!(!log.contains(fixture.token.reveal()), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_everybody_can_change_ends_the_agent() {
    let fixture = Fixture::new().await;
    let file = fixture.path("mayfly-agent.yaml");
    fs::write(&file, format!("token: {}\n", fixture.token.reveal())).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    let log = ends_with(Running::start(&mut agent(&fixture)), 64);
    assert!(log.contains(&*file.to_string_lossy()), "{log}");
    assert!(!log.contains(fixture.token.reveal()), "{log}");
}

/// A stock executor accepts no lease, so the hub would give its run away while it works.
#[tokio::test(flavor = "multi_thread")]
async fn an_image_without_mayflys_executor_ends_the_agent() {
    let fixture = Fixture::new().await;
    let mut command = agent(&fixture);
    command
        .env("MAYFLY_AGENT_SERVICE_URL", "https://hub.example.test")
        .env("MAYFLY_AGENT_TOKEN", fixture.token.reveal())
        .env(
            env::IMAGE,
            "registry.example.test/azbuilder/executor:2.32.0",
        );
    let log = ends_with(Running::start(&mut command), 64);
    assert!(log.contains(env::EXECUTOR_KIND), "{log}");
    assert!(log.contains("azbuilder/executor:2.32.0"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_has_not_reached_its_hub_is_not_ready() {
    let fixture = Fixture::new().await;
    let nobody = Port::take().unwrap();
    let mut command = fixture.agent(&format!("http://{}", nobody.address()));
    let agent = Running::start(command.env("MAYFLY_AGENT_LISTEN", "127.0.0.1:0"));
    let line = "\"answers health checks\"";
    let line = tokio::task::block_in_place(|| agent.line_with(Stream::Stderr, line));
    let line: Value = serde_json::from_str(&line).unwrap();
    let address = line["address"].as_str().unwrap();
    let answer = async |path: &str| {
        let answer = reqwest::get(format!("http://{address}{path}")).await;
        let answer = answer.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    assert_eq!(answer("/healthz").await.0, 200);
    let unready = (503, "the hub was not reached yet\n".to_owned());
    assert_eq!(answer("/readyz").await, unready);
    agent.signal(Signal::SIGTERM);
    ends_with(agent, 0);
}
