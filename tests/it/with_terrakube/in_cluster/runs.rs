//! Runs as Jobs of a cluster that nothing happens to.

use integration_tests::Repository;
use test_platform::{Flow, Status};

use crate::with_terrakube::{Stage, default_template};

#[tokio::test(flavor = "multi_thread")]
async fn the_default_template_runs_as_jobs_of_a_cluster() {
    let stage = or_skip!(Stage::in_cluster().await);
    let _launcher = stage.serve();
    let job = default_template(&stage).await;

    // An approval without scripts is no reason for a pod.
    let fixture = stage.fixture();
    let pods = fixture.until("the approval's Job is gone", |cluster| {
        (cluster.jobs.len() == 2).then_some(cluster.pods.len())
    });
    assert_eq!(pods.await, 2);

    // The console shows both steps, each with its lines in order.
    let lines = stage.platform.streamed(job.id).await;
    for (kind, words) in [
        ("terraformPlan", "Running Terraform PLAN"),
        (
            "terraformPlan",
            "Plan: 1 to add, 0 to change, 0 to destroy.",
        ),
        ("terraformApply", "Running Terraform APPLY"),
        ("terraformApply", "Apply complete! Resources: 1 added"),
    ] {
        let step = &job.step_of(kind).id;
        let of_step = lines
            .iter()
            .filter(|line| line.step_id == *step && line.line_number > 0);
        let of_step: Vec<_> = of_step.collect();
        assert!(
            of_step.iter().any(|line| line.output.contains(words)),
            "{words}: {of_step:#?}"
        );
        assert!(
            of_step
                .iter()
                .map(|line| line.line_number)
                .eq(1..=of_step.len() as u64),
            "{of_step:#?}"
        );
    }

    // The console has its structured view.
    let context = &stage.platform.records().contexts[&job.id];
    let plan = &job.step_of("terraformPlan").id;
    let apply = &job.step_of("terraformApply").id;
    let change = &context["planStructuredOutput"][plan][0];
    assert_eq!(
        change["address"], "terraform_data.greeting[0]",
        "{context:#?}"
    );
    assert_eq!(change["action"], "create", "{context:#?}");
    let change = &context["applyStructuredOutput"][apply][0];
    assert_eq!(change["status"], "applied", "{context:#?}");
    assert_eq!(
        context["terraformOutputs"][apply][0]["name"], "greeting",
        "{context:#?}"
    );
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_many_workspaces_run_at_once_and_in_their_order() {
    let stage = or_skip!(Stage::in_cluster().await);
    let _launcher = stage.serve();
    let start = |_| stage.start(Repository::fixture(), Flow::plan_apply());
    let jobs: Vec<u32> = (0..4).map(start).collect();
    for job in &jobs {
        stage.platform.until_job(*job, Status::Completed).await;
    }
    let records = stage.platform.records();
    let first_queue = |job: &u32| {
        let mut changes = records.transitions.iter();
        changes.position(|change| change.job == *job && change.to == Status::Queue)
    };
    let order: Vec<_> = jobs.iter().map(first_queue).collect();
    assert!(order.is_sorted(), "{order:?}");
    stage.platform.assert_kept().await;
}
