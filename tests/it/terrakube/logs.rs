//! Logs on their way to who watches.

use job_contract::env;
use test_platform::{Flow, Platform, Status};

use super::{Gate, Ground, Stage};
use crate::site;

#[tokio::test(flavor = "multi_thread")]
async fn lines_go_through_the_platform_where_executors_reach_no_redis() {
    // The platform has a Redis, and what it runs does not know of it.
    let redis = test_peers::redis::RedisServer::start().unwrap();
    let platform = Platform::builder().redis(&format!("redis://{}", redis.address()));
    let stage = Stage::of(Ground::Machine(site()), platform, None).await;
    let gate = Gate::new(stage.site());
    let _launcher = stage.serve_with(&[(env::LOG_VIA_API, "true")]);
    let job = stage.start(gate.module(), Flow::plan_apply());
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
    let gate = Gate::new(stage.site());
    let _launcher = stage.serve();
    let job = stage.start(gate.module(), Flow::only("terraformApply"));
    stage.platform.until_streamed(job, "at-the-gate").await;
    assert_eq!(stage.platform.job(job).status, Status::Running);
    assert!(stage.platform.heartbeat(job).await.is_some());
    let step = stage.platform.job(job).step_of("terraformApply").id.clone();
    let mut pictures = stage.platform.structured(job).await;
    let of_apply = |picture: &serde_json::Value| {
        picture["phase"] == "apply" && picture["changes"].get(&step).is_some()
    };
    while !pictures.iter().any(of_apply) {
        tokio::time::sleep(super::POLL).await;
        pictures = stage.platform.structured(job).await;
    }
    gate.open().await;
    stage.platform.until_job(job, Status::Completed).await;
    stage.platform.assert_kept().await;
}
