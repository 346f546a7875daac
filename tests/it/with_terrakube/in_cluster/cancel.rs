//! Cancellation at every stage of a run.

use integration_tests::{FakeTool, Repository};
use test_platform::{Actor, Flow, Platform, Status};

use crate::in_cluster::Fixture;
use crate::with_terrakube::{RunTarget, Stage, quick};

impl Stage {
    /// Cancels, waits until the run has ended, and checks that it changed no status.
    async fn cancel(&self, job: u32, steps: &[Status]) {
        self.platform.cancel(job).await;
        self.until_nothing_runs().await;
        let job = self.platform.job(job);
        assert_eq!(job.status, Status::Cancelled, "{}", self.platform.report());
        assert_eq!(job.step_statuses(), steps, "{}", self.platform.report());
        let later = self.history(job.id).into_iter();
        let later = later.skip_while(|(step, to, _)| (*step, *to) != (0, Status::Cancelled));
        assert!(
            later.skip(1).all(|(_, _, by)| by != Actor::Client),
            "{}",
            self.platform.report()
        );
        self.platform.assert_kept().await;
    }

    /// Waits until every Job has ended.
    async fn until_nothing_runs(&self) {
        let over = |state: &test_cluster::State| {
            let is_over = |job: &k8s_openapi::api::batch::v1::Job| {
                let name = job.metadata.name.as_deref().unwrap_or_default();
                ["Complete", "Failed"]
                    .iter()
                    .any(|condition| state.has_condition(name, condition))
            };
            state.jobs.iter().all(is_over).then_some(())
        };
        self.fixture()
            .until("every Job is over or gone", over)
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_pod_never_started_is_taken_away() {
    let run_target = RunTarget::Cluster(Box::new(or_skip!(Fixture::without_pods().await)));
    let stage = Stage::on(run_target, Platform::builder()).await;
    let _launcher = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::plan_apply());
    stage.platform.until_job(job, Status::Queue).await;
    stage
        .fixture()
        .until("the pod waits", |state| {
            (!state.pods.is_empty()).then_some(())
        })
        .await;
    stage.platform.cancel(job).await;
    let none = |state: &test_cluster::State| state.jobs.is_empty().then_some(());
    stage.fixture().until("the Job is deleted", none).await;
    let job = stage.platform.job(job);
    assert_eq!(job.step_statuses(), [Status::Cancelled; 2]);
    // Only the launcher sends requests here. It sends none while the dispatch is open, and no change after the end.
    let ledger = stage.platform.ledger();
    let of_job = ledger
        .requests
        .iter()
        .filter(|request| request.job == Some(job.id));
    assert_eq!(
        of_job
            .clone()
            .filter(|request| request.during_dispatch)
            .count(),
        0,
        "{ledger}"
    );
    assert_eq!(
        of_job.filter(|request| request.method != "GET").count(),
        0,
        "{ledger}"
    );
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_is_interrupted() {
    let tool = FakeTool::new();
    let at_work = "trap 'echo interrupted; kill $!; exit 1' INT; echo planning; sleep 600 & wait";
    let tool = tool.on("plan", at_work);
    let stage = or_skip!(Stage::in_cluster().await);
    let path = format!("export PATH='{}'\n{}", tool.path().display(), quick());
    stage.fixture().image_that_first(&path);
    let _launcher = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::plan_apply());
    stage.platform.until_streamed(job, "planning").await;
    stage.cancel(job, &[Status::Cancelled; 2]).await;
    assert!(stage.output(job, "terraformPlan").contains("interrupted"));
    assert!(!tool.was_called("apply"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_apply_is_interrupted_and_what_it_made_is_published() {
    let stage = or_skip!(Stage::in_cluster().await);
    let gate = stage.machine().gate();
    let _launcher = stage.serve();
    let job = stage.start(gate.repository(), Flow::plan_apply());
    stage.platform.until_streamed(job, "at-the-gate").await;
    stage
        .cancel(job, &[Status::Completed, Status::Cancelled])
        .await;
    let resources = stage.resources(job);
    assert!(resources.contains(&"first".to_owned()), "{resources:?}");
    assert!(!resources.contains(&"third".to_owned()), "{resources:?}");
    assert_eq!(
        stage.platform.records().histories.len(),
        1,
        "{}",
        stage.platform.report()
    );
    let output = stage.output(job, "terraformApply");
    assert!(output.contains("Interrupt received"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_waits_for_approval_is_over_at_once() {
    let stage = or_skip!(Stage::in_cluster().await);
    let _launcher = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::plan_approve_apply());
    stage.platform.until_job(job, Status::WaitingApproval).await;
    let left = [Status::Completed, Status::Cancelled, Status::Cancelled];
    stage.cancel(job, &left).await;
    assert_eq!(stage.fixture().state().await.jobs.len(), 1);
}
