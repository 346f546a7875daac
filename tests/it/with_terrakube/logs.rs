//! Live and stored logs.

use std::fs;

use integration_tests::Repository;
use job_contract::env;
use test_peers::wait;
use test_platform::{Flow, NewJob, Platform, Status, Workspace};

use super::{RunTarget, Stage};
use crate::machine;

#[tokio::test(flavor = "multi_thread")]
async fn lines_are_sent_to_the_platforms_api_if_executors_cannot_reach_redis() {
    // The platform has a Redis, and what it runs does not know of it.
    let redis = test_peers::redis::RedisServer::start().unwrap();
    let platform = Platform::builder().redis(&format!("redis://{}", redis.address()));
    let stage = Stage::of(RunTarget::Machine(machine()), platform, None).await;
    let gate = stage.machine().gate();
    let _launcher = stage.serve_with(&[(env::LOG_VIA_API, "true")]);
    let job = stage.start(gate.repository(), Flow::plan_apply());
    stage.platform.until_streamed(job, "at-the-gate").await;
    gate.open().await;
    let job = stage.platform.until_job(job, Status::Completed).await;

    let lines = stage.platform.streamed(job.id).await;
    let apply = &job.step_of("terraformApply").id;
    let of_apply: Vec<_> = lines.iter().filter(|line| line.step_id == *apply).collect();
    // Up to the last line, which came before the status: the platform would have noted a later one.
    let last = stage.output(job.id, "terraformApply");
    let last = last.trim_end().lines().last().unwrap();
    assert!(
        of_apply.last().unwrap().output.ends_with(last),
        "{last:?} is not the end of {of_apply:#?}"
    );
    assert!(
        of_apply
            .iter()
            .map(|line| line.line_number)
            .eq(1..=of_apply.len() as u64)
    );
    let ledger = stage.platform.ledger();
    assert!(
        !ledger
            .of("POST", &format!("/logs/{}/setup-consumer-groups", job.id))
            .is_empty()
    );
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_watched_live_as_text_and_as_a_picture() {
    let stage = Stage::on_this_machine().await;
    let gate = stage.machine().gate();
    let _launcher = stage.serve();
    let job = stage.start(gate.repository(), Flow::only("terraformApply"));
    stage.platform.until_streamed(job, "at-the-gate").await;
    assert_eq!(stage.platform.job(job).status, Status::Running);
    assert!(stage.platform.heartbeat(job).await.is_some());
    let step = stage.platform.job(job).step_of("terraformApply").id.clone();
    let of_apply = |picture: &serde_json::Value| {
        picture["phase"] == "apply" && picture["changes"].get(&step).is_some()
    };
    let has_picture = async || stage.platform.structured(job).await.iter().any(of_apply);
    wait::until("a picture of the apply", has_picture).await;
    gate.open().await;
    stage.platform.until_job(job, Status::Completed).await;
    stage.platform.assert_kept().await;
}

/// Newer releases delete the stream after the status that an executor waits for. Nothing tells it when.
#[tokio::test(flavor = "multi_thread")]
async fn first_lines_that_the_platform_deletes_are_written_again() {
    let stage = Stage::on_this_machine().await;
    let gate = stage.machine().gate();
    let _launcher = stage.serve();
    let held = stage.platform.hold_deletions().await;
    let job = stage.start(gate.repository(), Flow::only("terraformApply"));
    stage.platform.until_streamed(job, "at-the-gate").await;
    // The run is silent at the gate.
    drop(held);
    stage
        .platform
        .until("the stream is deleted", |records| {
            (!records.undeleted.contains(&job)).then_some(())
        })
        .await;
    stage.platform.until_streamed(job, "at-the-gate").await;
    gate.open().await;
    stage.platform.until_job(job, Status::Completed).await;
    let lines = stage.platform.streamed(job).await;
    let numbers = lines.iter().map(|line| line.line_number);
    assert!(numbers.eq(1..=lines.len() as u64), "{lines:#?}");
    stage.platform.assert_kept().await;
}

/// The executor that this launcher started.
fn executor_of(launcher: nix::unistd::Pid) -> String {
    let is_child = |pid: &String| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.contains(&format!("\nPPid:\t{launcher}\n"))
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    let mut names = all.filter_map(|entry| entry.file_name().into_string().ok());
    names.find(is_child).expect("the launcher runs an executor")
}

/// In kibibytes.
fn peak_memory(pid: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.unwrap().trim().trim_end_matches(" kB");
    peak.parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_100_megabytes_is_watched_and_stored_whole_in_little_memory() {
    const LINES: usize = 10_000;
    // Each is waited for by itself, since a slow machine takes its time for all of it.
    const PARTS: [usize; 3] = [3_333, 6_666, LINES];
    let stage = Stage::on_this_machine().await;
    let gate = stage.machine().gate();
    // The live log would end long before.
    let launcher = stage.serve_with(&[(env::LIVE_LOG_MAX_BYTES, "1000000000")]);
    let script = format!(
        "echo at-the-gate; cat {0} > /dev/null\nfrom=1; for to in {1}; do\n\
         seq -f \"%.0f $(head -c 10000 /dev/zero | tr '\\0' x)\" $from $to\n\
         echo all-is-said-to-$to.; from=$((to + 1)); done; cat {0} > /dev/null",
        gate.path().display(),
        PARTS.map(|to| to.to_string()).join(" "),
    );
    let repository = Repository::fixture();
    let workspace = Workspace::new(&repository.url());
    let workspace = stage.platform.workspace(workspace);
    let template = vec![Flow::new("customScripts", 100).with_script(&script)];
    let job = stage.platform.start_job(NewJob::new(&workspace, template));
    stage.platform.until_streamed(job, "at-the-gate").await;
    let executor = executor_of(launcher.running.pid());
    let before = peak_memory(&executor);
    gate.open().await;
    // Once it is here, everything before it has gone all the way.
    for to in PARTS {
        let said = format!("all-is-said-to-{to}.");
        stage.platform.until_streamed(job, &said).await;
    }
    let growth = peak_memory(&executor) - before;
    gate.open().await;
    stage.platform.until_job(job, Status::Completed).await;
    // Beside the few batches and buffers there are: no more than a tenth of the burst.
    assert!(growth < 10_000, "{growth} KiB");

    let number = |line: &str| {
        let (number, rest) = line.split_once(' ')?;
        (rest.len() == 10_000).then(|| number.parse::<usize>().ok())?
    };
    let streamed = stage.platform.streamed(job).await;
    let watched = streamed.iter().filter_map(|line| number(&line.output));
    assert!(watched.eq(1..=LINES));
    let stored = stage.output(job, "customScripts");
    assert!(stored.lines().filter_map(number).eq(1..=LINES));
    stage.platform.assert_kept().await;
}
