//! The platform or its Redis goes away in the middle of a run.

use std::time::Duration;

use integration_tests::{Gate, Repository};
use job_contract::env;
use platform::terrakube::TerrakubeArgs;
use test_peers::redis::{Options, RedisServer};
use test_peers::terraform;
use test_platform::{Actor, Effect, Fault, Flow, Ledger, Platform, Records, Status};

use super::{RunTarget, Stage};
use crate::machine;

impl Stage {
    /// Waits until the last resource of the gate's module is made.
    async fn until_applied(&self, job: u32) {
        let made = || {
            let resources = self.resources(job);
            resources.contains(&"third".to_owned()).then_some(())
        };
        self.until("the apply is through", made).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_apply_that_ends_while_the_platform_is_away_is_delivered_once_it_is_back() {
    let stage = Stage::on_this_machine().await;
    let gate = stage.machine().gate();
    let _launcher = stage.serve();
    let platform = &stage.platform;
    let job = stage.start(gate.repository(), Flow::only("terraformApply"));
    platform.until_streamed(job, "at-the-gate").await;
    platform.end_grace(job).await;
    platform.go_down().await;
    gate.open().await;
    // The apply is done while the platform is away.
    stage.until_applied(job).await;
    assert_eq!(platform.job(job).step_statuses(), [Status::Running]);

    // It answers again, badly.
    for method in ["GET", "PATCH", "POST"] {
        platform.fault(Fault::always(method, "", Effect::Status(503)));
    }
    platform.come_up().await;
    let attempts = |ledger: &Ledger| {
        let failed = ledger
            .requests
            .iter()
            .filter(|request| request.status == 503);
        (failed.count() >= 4).then_some(())
    };
    platform.until_asked("it is tried again", attempts).await;
    let alive = |records: &Records| (records.job(job).spared >= 2).then_some(());
    platform.until("the sweep finds it alive", alive).await;
    platform.clear_faults();
    platform.until_job(job, Status::Completed).await;
    assert_eq!(platform.records().histories.len(), 1);
    assert!(
        stage
            .history(job)
            .iter()
            .all(|(_, _, by)| *by != Actor::Sweep)
    );
    platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_lost_is_no_reason_to_report_twice() {
    let stage = Stage::on_this_machine().await;
    let _launcher = stage.serve();
    let platform = &stage.platform;
    let gate = stage.machine().gate();
    let lose_two = |path: &str| {
        for _ in 0..2 {
            platform.fault(Fault::once("PATCH", path, Effect::DropAfter));
        }
    };
    // Of the job, without its steps; the first has this number.
    lose_two("/job/412$");
    platform.fault(Fault::once("PATCH", "/step/", Effect::DropAfter));
    // Of the state's record the request is lost, then the answer, and then the first about what is on record.
    platform.fault(Fault::once("POST", "/history", Effect::DropBefore));
    platform.fault(Fault::once("POST", "/history", Effect::DropAfter));
    platform.fault(Fault::once("GET", "/history", Effect::DropBefore));
    let job = stage.start(gate.repository(), Flow::plan_apply());
    platform.until_streamed(job, "at-the-gate").await;
    lose_two(&format!("/job/{job}$"));
    lose_two("/step/");
    gate.open().await;
    platform.until_job(job, Status::Completed).await;
    assert_eq!(platform.records().histories.len(), 1);
    assert_eq!(platform.job(job).posts, 2, "{}", platform.report());
    platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_patience_for_a_report_is_minutes_and_can_be_set() {
    let usual = TerrakubeArgs {
        api_url: Some("http://api.example.test".into()),
        public_api_url: Some("https://terrakube.example.test".into()),
        enable_security: Some("false".into()),
        ..TerrakubeArgs::default()
    };
    let usual = usual.resolve().unwrap().unwrap();
    assert!(usual.report_patience >= Duration::from_mins(5), "{usual:?}");

    // Set to little, the executor gives up, and its launcher tells what it left in its report.
    let stage = Stage::on_this_machine().await;
    let gate = stage.machine().gate();
    let _launcher = stage.serve_with(&[(env::REPORT_PATIENCE_SECONDS, "5")]);
    let platform = &stage.platform;
    let job = stage.start(gate.repository(), Flow::only("terraformApply"));
    platform.until_streamed(job, "at-the-gate").await;
    platform.end_grace(job).await;
    platform.fault(Fault::always("PATCH", "", Effect::Status(503)));
    gate.open().await;
    // In its seconds the executor asks three or four times.
    let told = |ledger: &Ledger| {
        let reports = ledger.of("PATCH", "/step/").into_iter();
        let statuses = reports.map(|report| &report.body["data"]["attributes"]["status"]);
        let completed = statuses.filter(|status| *status == "completed");
        (completed.count() >= 6).then_some(())
    };
    platform
        .until_asked("the launcher speaks for it", told)
        .await;
    platform.clear_faults();
    let job = platform.until_job(job, Status::Completed).await;
    assert_eq!(stage.resources(job.id), ["first", "second", "third"]);
    let output = stage.output(job.id, "terraformApply");
    assert!(output.contains("Apply complete!"), "{output}");
    platform.assert_kept().await;
}

/// It is only looked at: no plan and no apply depends on it.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_planned_and_applied_although_its_context_is_out_of_order() {
    let stage = Stage::on_this_machine().await;
    let _launcher = stage.serve();
    for method in ["GET", "POST"] {
        let fault = Fault::always(method, "/context/", Effect::Status(503));
        stage.platform.fault(fault);
    }
    let job = stage.start(Repository::fixture(), Flow::plan_apply());
    // Each of them tries for most of a minute to put something there.
    let plan = stage
        .platform
        .until_step(job, "terraformPlan", Status::Completed);
    plan.await;
    let job = stage.platform.until_job(job, Status::Completed).await;
    assert_eq!(stage.resources(job.id), ["greeting"]);
    let ledger = stage.platform.ledger();
    let refused = ledger.requests.iter().filter(|one| one.status == 503);
    assert!(refused.count() > 0, "the context was never asked for");
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_survives_a_restart_of_redis_without_losing_a_line() {
    let keeping = RedisServer::with(Options::default().keeps()).unwrap();
    let platform = Platform::builder().redis(&format!("redis://{}", keeping.address()));
    let mut stage = Stage::of(RunTarget::Machine(machine()), platform, Some(keeping)).await;
    let gate = stage.machine().gate();
    let _launcher = stage.serve();
    let job = stage.start(gate.repository(), Flow::only("terraformApply"));
    stage.platform.until_streamed(job, "at-the-gate").await;
    stage.redis.as_mut().unwrap().kill();
    gate.open().await;
    stage.until_applied(job).await;
    stage.redis.as_mut().unwrap().restart().unwrap();
    stage.platform.until_job(job, Status::Completed).await;
    let lines = stage.platform.streamed(job).await;
    let count = lines.len() as u64;
    assert!(
        lines.iter().map(|line| line.line_number).eq(1..=count),
        "{lines:#?}"
    );
    let texts: Vec<&str> = lines.iter().map(|line| line.output.as_str()).collect();
    let streamed = terraform::whole(&texts.join("\n"), Gate::says);
    for words in ["at-the-gate", "past-the-gate", "Apply complete!"] {
        let with = |text: &str| text.contains(words);
        assert!(with(&streamed), "{words}: {lines:#?}");
        assert!(with(&stage.output(job, "terraformApply")), "{words}");
    }
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_ends_well_although_redis_stays_away() {
    let mut stage = Stage::on_this_machine().await;
    let gate = stage.machine().gate();
    let _launcher = stage.serve();
    let job = stage.start(gate.repository(), Flow::plan_apply());
    stage.platform.until_streamed(job, "at-the-gate").await;
    stage.redis.as_mut().unwrap().kill();
    gate.open().await;
    stage.until_applied(job).await;
    // What is left is how long its end waits for Redis.
    stage.platform.until_job(job, Status::Completed).await;
    let output = stage.output(job, "terraformApply");
    assert!(output.contains("Apply complete!"), "{output}");
}
