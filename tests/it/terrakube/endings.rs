//! Runs that cannot speak for themselves: the launcher tells the platform what became of them.

use integration_tests::Repository;
use job_contract::env;
use k8s_openapi::api::core::v1::Pod;
use test_platform::{Flow, NewJob, Status, Variable, Workspace};

use super::{Gate, Stage};

/// Short where a cluster would give nodes and images minutes to come.
const IMPATIENT: [(&str, &str); 2] = [
    (env::UNSCHEDULABLE_SECONDS, "2"),
    (env::CONTAINER_ERROR_SECONDS, "2"),
];

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
    let stage = Stage::in_cluster().await;
    let image = "registry.example.test/missing:1";
    let _launcher = stage.serve_with(&[IMPATIENT[0], IMPATIENT[1], (env::IMAGE, image)]);
    let job = stage.start(Repository::fixture(), Flow::plan_apply());
    stage.until_told(job, image).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_no_node_takes_fails_the_step_with_the_words_of_the_scheduler() {
    let stage = Stage::in_cluster().await;
    let _launcher = stage.serve_with(&IMPATIENT);
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
    let stage = Stage::in_cluster().await;
    let gate = Gate::new(stage.site());
    let _launcher = stage.serve();
    let job = stage.start(gate.module(), Flow::only("terraformApply"));
    stage.platform.until_streamed(job, "at-the-gate").await;
    let pod = stage.only_pod().await;
    assert!(stage.place().cluster.oom_kill(&pod));
    stage.until_told(job, "memory").await;
    assert_eq!(stage.place().state().await.pods.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setting_of_the_workspace_that_cannot_be_used_fails_the_step_with_its_name() {
    let stage = Stage::in_cluster().await;
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
        let state = self.place().state().await;
        let [pod] = state.pods.as_slice() else {
            panic!("{:#?}", state.pods);
        };
        pod.clone()
    }
}
