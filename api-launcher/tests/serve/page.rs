//! The status page of target `process`, and the same as JSON.

use serde_json::Value;
use std::fs;
use test_peers::wait::until;

use crate::harness::Fixture;

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).expect(text)
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_of_this_machine_are_on_the_page_from_the_queue_to_their_end() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[
        ("MAYFLY_CONCURRENCY", "1"),
        ("MAYFLY_ALLOW_UNAUTHENTICATED", "page"),
    ]);
    let page = launcher.wait_for("status page", |_| true);
    assert_eq!(page["url"], launcher.url("/ui"));
    let gate = fixture.gate();
    let script = format!("echo working; {}; exit 3", gate.words());
    launcher.post(&fixture.script(1, &script)).await;
    let at_gate = gate.reached();
    let mut second = fixture.script(2, "echo done");
    second["workspaceId"] = "other".into();
    launcher.post(&second).await;

    // The agent tells its free slots with its next heartbeat.
    let runs = until("a run waits for a slot", async || {
        let runs = parsed(&launcher.get("/pools/local/runs").await);
        let waits = runs["runs"][1]["waitsFor"] == "no_free_slot";
        if waits { Ok(runs) } else { Err(runs) }
    });
    let runs = runs.await;
    assert_eq!(runs["runs"][0]["state"], "RUNNING");
    let pools = parsed(&launcher.get("/pools").await);
    let pool = &pools["pools"][0];
    assert_eq!((&pool["waiting"], &pool["active"]), (&1.into(), &1.into()));
    let html = launcher.get("/ui/pools/local").await;
    for expected in ["Waits because", "No agent has a free slot", "this-machine"] {
        assert!(html.contains(expected), "{expected} not in {html}");
    }
    let id = runs["runs"][0]["run"].as_str().unwrap().to_owned();
    launcher.until_log("working").await;
    let live = launcher.get(&format!("/ui/runs/{id}")).await;
    assert!(live.contains("working"), "{live}");

    drop(at_gate);
    launcher.wait_for_end(1, "step");
    launcher.wait_for_end(2, "step");
    // The agent removes them once the hub has the ends.
    fixture.until_no_folders();
    let run = parsed(&launcher.get(&format!("/pools/local/runs/{id}")).await);
    assert_eq!(run["state"], "FAILED");
    assert_eq!(run["end"]["exitCode"], 1);
    let events = run["events"].as_array().unwrap();
    let states = events.iter().map(|event| &event["to"]);
    // An executor may be faster than the word of its agent that it was started.
    let states: Vec<_> = states.filter(|state| *state != "started").collect();
    let expected = ["submitted", "available", "leased", "running", "failed"];
    assert_eq!(states, expected);
    // The log outlives the folder of the run.
    let log = launcher.get(&format!("/pools/local/runs/{id}/log")).await;
    assert!(log.contains("working"), "{log}");
    let over = parsed(&launcher.get("/pools/local/runs?state=over").await);
    assert_eq!(over["runs"][0]["jobId"], "2");
    assert_eq!(over["runs"][0]["state"], "COMPLETED");
    let wrong = parsed(&launcher.get("/pools/local/runs?state=ended").await);
    assert_eq!(wrong["status"], 400);
    let elsewhere = parsed(&launcher.get("/pools/eu/runs").await);
    assert_eq!(elsewhere["status"], 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_open_page_is_not_for_clients_of_a_proxy_or_of_another_name() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[("MAYFLY_ALLOW_UNAUTHENTICATED", "page")]);
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    for (name, value, expected) in [
        ("Accept", "text/html", 200),
        ("Host", "localhost:8090", 200),
        ("Host", "runs.example.com", 401),
        ("Via", "1.1 proxy", 401),
        ("X-Real-IP", "192.0.2.1", 401),
        ("X-Forwarded-For", "127.0.0.1", 401),
        ("X-Forwarded-Proto", "https", 401),
        ("Forwarded", "for=127.0.0.1", 401),
    ] {
        for path in ["/ui", "/pools"] {
            let request = client.get(launcher.url(path)).header(name, value);
            let status = request.send().await.unwrap().status();
            assert_eq!(status, expected, "{path} with {name}: {value}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pools_of_a_file_are_served_beside_that_of_the_machine() {
    let fixture = Fixture::new();
    let file = fixture.path("pools.yaml");
    fs::write(&file, "pools: {eu: {organizations: [org]}}").unwrap();
    let launcher = fixture.serve(&[
        ("MAYFLY_POOLS_FILE", file.to_str().unwrap()),
        ("MAYFLY_ALLOW_UNAUTHENTICATED", "page"),
    ]);
    let elsewhere = launcher.request_at("/pools/eu/api/v1/terraform-rs", &fixture.script(1, ""));
    assert_eq!(elsewhere.send().await.unwrap().status(), 202);
    launcher.post(&fixture.script(2, "")).await;
    launcher.wait_for_end(2, "step");
    let pools = parsed(&launcher.get("/pools").await);
    let names: Vec<_> = pools["pools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pool| &pool["pool"])
        .collect();
    assert_eq!(names, ["eu", "local"]);
    let waiting = parsed(&launcher.get("/pools/eu/runs").await);
    assert_eq!(waiting["runs"][0]["jobId"], "1");
    assert_eq!(fixture.times_run(1), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_permission_there_is_no_page() {
    let fixture = Fixture::new();
    let launcher = fixture.serve(&[]);
    let answer = launcher.get("/ui").await;
    assert!(answer.contains("there is nothing at this path"), "{answer}");
    assert_eq!(launcher.count("status page"), 0);
}
