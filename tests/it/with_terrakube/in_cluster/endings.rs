//! Runs that cannot speak for themselves: the launcher tells the platform what became of them.

use std::time::Duration;

use integration_tests::Repository;
use job_contract::env;
use k8s_openapi::api::core::v1::Pod;
use test_platform::{
    Actor, Effect, Fault, Flow, NewJob, Platform, Release, Status, Variable, Workspace,
};

use crate::in_cluster::{Fixture, LAUNCHER};
use crate::with_terrakube::{RunTarget, Stage, quick};

impl Stage {
    /// Waits for the failure of the job, and fails unless its step's output holds these words.
    async fn until_told(&self, job: u32, words: &str) {
        let job = self.platform.until_job(job, Status::Failed).await;
        let kind = &job.dispatched_step().unwrap().flow.kind;
        let output = self.output(job.id, kind);
        assert!(
            output.contains(words),
            "{words:?} is not in {output:?}\n{}",
            self.platform.report()
        );
        let lines = self.platform.streamed(job.id).await;
        assert!(
            lines.iter().any(|line| line.output.contains(words)),
            "{words:?} is not in {lines:#?}"
        );
        self.platform.assert_kept().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_does_not_exist_fails_the_step_with_its_name() {
    let stage = or_skip!(Stage::in_cluster().await);
    let image = "registry.example.test/missing:1";
    let _launcher = stage.serve_with(&[(env::CONTAINER_ERROR_SECONDS, "2"), (env::IMAGE, image)]);
    let job = stage.start(Repository::fixture(), Flow::plan_apply());
    stage.until_told(job, image).await;
}

/// Put off for ever it would keep all newer ones from their turn.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_the_launcher_has_no_right_to_start_is_accepted_and_fails_with_the_reason() {
    let fixture = or_skip!(Fixture::new().await).where_it_is_refused();
    let platform = Platform::builder().retry(Duration::from_secs(1));
    let stage = Stage::on(RunTarget::Cluster(Box::new(fixture)), platform).await;
    stage.fixture().cluster.revoke(LAUNCHER).await.unwrap();
    let _launcher = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::plan_apply());
    stage.until_told(job, "cannot create resource").await;
    // An answer that refuses it would have made the platform fail it, with the number of the answer for a reason.
    let history = stage.history(job);
    let failed: Vec<_> = history
        .iter()
        .filter(|(step, status, _)| (*step, *status) == (0, Status::Failed))
        .collect();
    assert_eq!(failed, [&(0, Status::Failed, Actor::Client)], "{history:?}");
    assert!(stage.fixture().state().await.jobs.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unschedulable_pod_fails_the_step_with_the_schedulers_message() {
    let stage = or_skip!(Stage::in_cluster().await);
    let _launcher = stage.serve_with(&[(env::UNSCHEDULABLE_SECONDS, "2")]);
    let repository = Repository::fixture();
    let workspace = Workspace::new(&repository.url()).with(Variable::env(
        "EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS",
        "disk=ssd",
    ));
    let workspace = stage.platform.workspace(workspace);
    let job = stage
        .platform
        .start_job(NewJob::new(&workspace, Flow::plan_apply()));
    stage.until_told(job, "node").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_killed_for_its_memory_fails_the_step_and_is_not_replaced() {
    let stage = or_skip!(Stage::in_cluster().await);
    let gate = stage.machine().gate();
    let _launcher = stage.serve();
    let job = stage.start(gate.repository(), Flow::only("terraformApply"));
    stage.platform.until_streamed(job, "at-the-gate").await;
    let pod = stage.only_pod().await;
    assert!(stage.fixture().cluster.oom_kill(&pod));
    stage.until_told(job, "more memory than").await;
    assert_eq!(stage.fixture().state().await.pods.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_a_report_at_its_deadline_fails_the_step_with_the_deadlines_length() {
    let stage = or_skip!(Stage::in_cluster().await);
    stage.fixture().image_that_first("exec sleep 600");
    let _launcher = stage.serve_with(&[
        // The shortest there may be.
        (env::ACTIVE_DEADLINE_SECONDS, "31"),
        (env::TERMINATION_GRACE_PERIOD_SECONDS, "30"),
        (env::APPLY_GRACE_PERIOD_SECONDS, "30"),
    ]);
    let job = stage.start(Repository::fixture(), Flow::plan_apply());
    stage.until_told(job, "deadline").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setting_of_the_workspace_that_cannot_be_used_fails_the_step_with_its_name() {
    let stage = or_skip!(Stage::in_cluster().await);
    let _launcher = stage.serve();
    let repository = Repository::fixture();
    for (name, value) in [
        ("EPHEMERAL_CONFIG_TOLERATIONS", "dedicated:Sometimes"),
        (
            "EPHEMERAL_CONFIG_POD_SECURITY_CONTEXT",
            "runAsUser=somebody",
        ),
        ("EPHEMERAL_CPU_REQUEST", "much"),
    ] {
        let workspace = Workspace::new(&repository.url()).with(Variable::env(name, value));
        let workspace = stage.platform.workspace(workspace);
        let job = stage
            .platform
            .start_job(NewJob::new(&workspace, Flow::plan_apply()));
        let job = stage.platform.until_job(job, Status::Failed).await;
        let output = stage
            .platform
            .step_output(job.id, &job.steps[0].id)
            .unwrap_or_default();
        let said = format!("{output}{}", job.steps[0].name);
        assert!(
            said.contains(name),
            "{name} is not in {said:?}\n{}",
            stage.platform.report()
        );
    }
    stage.platform.assert_kept().await;
}

impl Stage {
    async fn only_pod(&self) -> Pod {
        let state = self.fixture().state().await;
        let [pod] = state.pods.as_slice() else {
            panic!("{:#?}", state.pods);
        };
        pod.clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_launcher_reports_an_apply_whose_executor_could_not() {
    for release in Release::ALL {
        let run_target = RunTarget::Cluster(Box::new(or_skip!(Fixture::new().await)));
        let stage = Stage::on(run_target, Platform::builder().release(release)).await;
        let patience = format!("export {}=5\n", env::REPORT_PATIENCE_SECONDS);
        let words = quick() + &patience;
        stage.fixture().image_that_first(&words);
        let gate = stage.machine().gate();
        let _launcher = stage.serve_with(&[]);
        let platform = &stage.platform;
        let job = stage.start(gate.repository(), Flow::only("terraformApply"));
        platform.until_streamed(job, "at-the-gate").await;
        platform.fault(Fault::always("PATCH", "", Effect::Status(503)));
        gate.open().await;
        let given_up = |state: &test_cluster::State| {
            let name = state.jobs.first()?.metadata.name.clone()?;
            state.has_condition(&name, "Failed").then_some(())
        };
        stage
            .fixture()
            .until("the executor gives up", given_up)
            .await;
        platform.clear_faults();
        let job = platform.until_job(job, Status::Completed).await;
        assert_eq!(job.step_statuses(), [Status::Completed]);
        let output = stage.output(job.id, "terraformApply");
        assert_eq!(output.matches("): past-the-gate").count(), 1, "{output}");
        platform.assert_kept().await;
    }
}
