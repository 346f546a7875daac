//! The Terrakube reporter against the test platform, which has one job of three steps.

use std::fs;
use std::path::PathBuf;

use artifact_store::Store;
use job_contract::final_statuses::Ending;
use job_contract::report::{FinalReport, UnreportedStep};
use platform::terrakube::{Terrakube, TerrakubeConfig, TokenSource};
use rstest::rstest;
use serde_json::{Value, json};
use test_platform::{Flow, NewJob, Platform, Status, Workspace};
use url::Url;

use super::*;

/// The job as the platform has it.
#[derive(Debug)]
struct Known {
    job: &'static str,
    output: Option<&'static str>,
    plan: Option<&'static str>,
    steps: [&'static str; 3],
}

fn status(name: &str) -> Status {
    serde_json::from_value(name.into()).unwrap()
}

/// A platform, and a reporter that speaks to it.
async fn reporter(known: Known) -> (TerrakubeReporter, Platform) {
    let api = Platform::builder().start().await.unwrap();
    api.edit(|records| "org".clone_into(&mut records.organization));
    let workspace = api.workspace(Workspace::new("https://git.example.test/a.git"));
    let new = NewJob::new(&workspace, Flow::plan_approve_apply());
    api.store_job(new, |job| {
        job.status = status(known.job);
        job.output = known.output.map(str::to_owned);
        job.terraform_plan = known.plan.map(str::to_owned);
        job.commit_id = Some("abc".to_owned());
        let states = ["plan", "approval", "apply"].into_iter().zip(known.steps);
        for (step, (id, state)) in job.steps.iter_mut().zip(states) {
            id.clone_into(&mut step.id);
            step.status = status(state);
            step.output = Some("https://api/log".to_owned());
        }
    });
    let url = Url::parse(&format!("{}/", api.url())).unwrap();
    let config = TerrakubeConfig {
        api_url: url.clone(),
        public_url: url,
        registry_domain: None,
        tokens: TokenSource::parse(&api.secret()).unwrap(),
        dispatch_wait: Duration::from_millis(50),
        status_poll: Duration::from_millis(50),
        report_patience: Duration::from_secs(5),
        lease: None,
    };
    let terrakube = Terrakube::new(config, None).unwrap();
    (TerrakubeReporter::new(terrakube, None, None).unwrap(), api)
}

fn as_dyn(reporter: &TerrakubeReporter) -> &dyn PlatformReporter {
    reporter
}

fn told(api: &Platform) -> Vec<(String, Value)> {
    api.ledger().changes()
}

fn step(id: &str, step_type: &str) -> StepRef {
    StepRef {
        organization_id: "org".into(),
        workspace_id: "ws".into(),
        job_id: "412".into(),
        step_id: id.into(),
        step_type: step_type.into(),
    }
}

fn approval() -> JobData {
    serde_json::from_value(json!({
        "type": "approval", "organizationId": "org", "workspaceId": "ws", "jobId": "412", "stepId": "approval",
    }))
    .unwrap()
}

#[tokio::test]
async fn an_approval_delivered_again_after_its_end_does_not_disturb_the_step_that_follows() {
    for (job, apply) in [("queue", "pending"), ("running", "running")] {
        let (reporter, api) = reporter(Known {
            job,
            output: Some(" Step approval completed\n"),
            plan: Some("https://store/plan"),
            steps: ["completed", "completed", apply],
        })
        .await;
        as_dyn(&reporter)
            .complete_empty_step(&approval())
            .await
            .unwrap();
        assert_eq!(told(&api), [], "{job}");
    }
}

#[tokio::test]
async fn after_a_crash_between_the_reports_of_step_and_job_the_job_alone_is_reported() {
    let (reporter, api) = reporter(Known {
        job: "running",
        output: Some(""),
        plan: Some("https://store/plan"),
        steps: ["completed", "completed", "pending"],
    })
    .await;
    as_dyn(&reporter)
        .complete_empty_step(&approval())
        .await
        .unwrap();
    let told = told(&api);
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0].0, "412");
    assert_eq!(told[0].1["status"], "pending");
    assert_eq!(told[0].1["planChanges"], true);
}

#[rstest]
#[case::an_apply_goes_on("apply", "terraformApply", "completed", "pending")]
#[case::a_failure_fails_its_job("apply", "terraformApply", "failed", "failed")]
// The path of the plan is lost. The next step would apply nothing, or a plan that was not reviewed.
#[case::a_plan_is_lost("plan", "terraformPlan", "completed", "failed")]
#[tokio::test]
async fn the_job_of_a_step_that_was_reported_alone_is_reported_too(
    #[case] id: &str,
    #[case] step_type: &str,
    #[case] status: &'static str,
    #[case] expected: &str,
) {
    let steps = match id {
        "plan" => [status, "pending", "pending"],
        _ => ["completed", "completed", status],
    };
    let (reporter, api) = reporter(Known {
        job: "running",
        output: (id != "plan").then_some(" Step approval completed\n"),
        plan: (id != "plan").then_some("https://store/plan"),
        steps,
    })
    .await;
    as_dyn(&reporter)
        .report_failure(&step(id, step_type), "The pod is gone.", None)
        .await
        .unwrap();
    let told = told(&api);
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0].0, "412");
    assert_eq!(told[0].1["status"], expected);
    assert_eq!(told[0].1["planChanges"], true);
}

#[rstest]
#[case::the_next_step_runs("running", Some(""), ["completed", "running", "pending"])]
#[case::the_next_step_is_queued("queue", Some(""), ["completed", "pending", "pending"])]
#[case::the_next_step_is_about_to_say_that_it_runs("running", Some(""), ["completed", "pending", "pending"])]
#[case::the_job_was_cancelled("cancelled", None, ["completed", "cancelled", "cancelled"])]
#[tokio::test]
async fn a_job_that_was_reported_is_not_reported_again(
    #[case] job: &'static str,
    #[case] output: Option<&'static str>,
    #[case] steps: [&'static str; 3],
) {
    let (reporter, api) = reporter(Known {
        job,
        output,
        plan: Some("https://store/plan"),
        steps,
    })
    .await;
    as_dyn(&reporter)
        .report_failure(&step("plan", "terraformPlan"), "The pod is gone.", None)
        .await
        .unwrap();
    assert_eq!(told(&api), []);
}

#[tokio::test]
async fn a_failure_reported_for_an_executor_keeps_the_recorded_commit() {
    let (reporter, api) = reporter(Known {
        job: "running",
        output: None,
        plan: None,
        steps: ["running", "pending", "pending"],
    })
    .await;
    as_dyn(&reporter)
        .report_failure(&step("plan", "terraformPlan"), "The pod is gone.", None)
        .await
        .unwrap();
    let told = told(&api);
    assert_eq!(told.len(), 2, "{told:?}");
    assert_eq!(told[1].1["status"], "failed");
    assert_eq!(told[1].1.get("commitId"), None);
}

/// The report of a step that was done, as its executor leaves it when the platform does not take it.
fn unreported(ending: Ending, ignore_error: bool, plan: Option<&str>) -> FinalReport {
    FinalReport {
        unreported: true,
        commit_id: Some("abc".to_owned()),
        unreported_step: Some(UnreportedStep {
            ending,
            after_ok: true,
            ignore_error,
            plan: plan.map(str::to_owned),
        }),
        ..FinalReport::default()
    }
}

#[rstest]
#[case::by_its_report(unreported(Ending::Success, false, None))]
#[case::without_a_word_how(FinalReport { unreported: true, ..FinalReport::default() })]
#[tokio::test]
async fn a_step_that_was_done_is_reported_as_done_though_its_executor_could_not(
    #[case] report: FinalReport,
) {
    let (reporter, api) = reporter(Known {
        job: "running",
        output: Some(" Step approval completed\n"),
        plan: Some("https://store/plan"),
        steps: ["completed", "completed", "running"],
    })
    .await;
    let apply = step("apply", "terraformApply");
    as_dyn(&reporter)
        .report_success(&apply, &report, "The step was done.", None)
        .await
        .unwrap();
    let told = told(&api);
    let statuses: Vec<_> = told
        .iter()
        .map(|(at, change)| (at, &change["status"]))
        .collect();
    assert_eq!(
        statuses,
        [
            (&"apply".to_owned(), &json!("completed")),
            (&"412".to_owned(), &json!("pending"))
        ]
    );
    assert_eq!(told[1].1.get("terraformPlan"), None, "the plan stays");
}

const PLAN: &str = "https://store/tfstate/org/ws/412/plan";

#[rstest]
#[case::with_changes(unreported(Ending::Changes, false, Some(PLAN)), "completed", "pending", json!(PLAN))]
#[case::without_changes(unreported(Ending::Success, false, Some(PLAN)), "completed", "completed", json!(PLAN))]
#[case::an_ignored_error(unreported(Ending::Failure, true, None), "completed", "failed", json!(""))]
#[case::changes_and_no_plan(
    unreported(Ending::Changes, false, None),
    "failed",
    "failed",
    Value::Null
)]
#[case::without_a_word_how(FinalReport { unreported: true, ..FinalReport::default() }, "failed", "failed", Value::Null)]
#[tokio::test]
async fn the_launcher_reports_a_plan_whose_executor_could_not(
    #[case] report: FinalReport,
    #[case] step_status: &str,
    #[case] job_status: &str,
    #[case] place: Value,
) {
    let (mut reporter, api) = reporter(Known {
        job: "running",
        output: None,
        plan: None,
        steps: ["running", "pending", "pending"],
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    reporter.outputs = Some(OutputStore::new(Store::local(folder.path())));
    let plan = step("plan", "terraformPlan");
    as_dyn(&reporter)
        .report_success(&plan, &report, "The step was done.", None)
        .await
        .unwrap();
    let told = told(&api);
    let [(_, of_step), (job, of_job)] = told.as_slice() else {
        panic!("{told:?}");
    };
    assert_eq!(
        (job.as_str(), &of_step["status"]),
        ("412", &json!(step_status))
    );
    assert_eq!(of_job["status"], job_status);
    assert_eq!(of_job["terraformPlan"], place);
    if job_status == "pending" {
        assert_eq!(of_job["planChanges"], true);
    }
    let output = folder.path().join("local/output/org/412/plan.tfoutput");
    let output = fs::read_to_string(output).unwrap();
    let kept = if step_status == "failed" {
        "Plan again."
    } else {
        "The step was done."
    };
    assert!(output.contains(kept), "{output}");
}

#[tokio::test]
async fn a_plan_whose_step_alone_was_reported_keeps_its_address() {
    let (reporter, api) = reporter(Known {
        job: "running",
        output: None,
        plan: None,
        steps: ["completed", "pending", "pending"],
    })
    .await;
    let report = unreported(Ending::Changes, false, Some(PLAN));
    as_dyn(&reporter)
        .report_success(
            &step("plan", "terraformPlan"),
            &report,
            "The step was done.",
            None,
        )
        .await
        .unwrap();
    let told = told(&api);
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0].0, "412");
    assert_eq!(told[0].1["status"], "pending");
    assert_eq!(told[0].1["terraformPlan"], PLAN);
}

/// Gives the reporter a store. Returns its folder, and the place of the plan's output.
fn stores_plan(reporter: &mut TerrakubeReporter) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    reporter.outputs = Some(OutputStore::new(Store::local(folder.path())));
    let output = folder.path().join("local/output/org/412/plan.tfoutput");
    fs::create_dir_all(output.parent().unwrap()).unwrap();
    (folder, output)
}

/// The job's half failed after a verdict was given without what the container had.
#[tokio::test]
async fn a_log_that_arrives_after_the_verdict_is_stored_before_it() {
    let (mut reporter, api) = reporter(Known {
        job: "failed",
        output: None,
        plan: None,
        steps: ["failed", "pending", "pending"],
    })
    .await;
    let plan = step("plan", "terraformPlan");
    let (folder, output) = stores_plan(&mut reporter);
    fs::write(&output, "a\nThe pod is gone.\n").unwrap();
    let container = folder.path().join("container");
    fs::write(&container, "a\nb\nc, d, e and what else there was\n").unwrap();
    for _ in 0..2 {
        as_dyn(&reporter)
            .report_failure(&plan, "The pod is gone.", Some(&container))
            .await
            .unwrap();
        let expected = "a\nb\nc, d, e and what else there was\nThe pod is gone.\n";
        assert_eq!(fs::read_to_string(&output).unwrap(), expected);
    }
    assert_eq!(told(&api), []);
}

#[tokio::test]
async fn an_output_that_is_too_large_stays_as_it_is_and_the_outcome_is_reported() {
    let (mut reporter, api) = reporter(Known {
        job: "running",
        output: None,
        plan: None,
        steps: ["running", "pending", "pending"],
    })
    .await;
    let (_folder, output) = stores_plan(&mut reporter);
    // Takes no space.
    let size = (64 << 20) + 1;
    File::create(&output).unwrap().set_len(size).unwrap();
    let plan = step("plan", "terraformPlan");
    as_dyn(&reporter)
        .report_failure(&plan, "The pod is gone.", None)
        .await
        .unwrap();
    assert_eq!(output.metadata().unwrap().len(), size);
    let told = told(&api);
    let failed = |(_, change): &(String, Value)| change["status"] == "failed";
    assert!(told.iter().any(failed), "{told:?}");
}
