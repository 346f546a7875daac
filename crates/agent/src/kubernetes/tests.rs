//! Tests of the ends of Jobs, and of the objects of leases.

use cluster::watch::{ReportOutcome, RunObserver as _};
use job_contract::final_statuses::Ending;
use job_contract::report::{FinalReport, UnreportedStep};
use job_contract::{Document, JobData, StepType};
use pool_protocol::id::{LeaseId, TaskId};
use rstest::rstest;
use verdict::Observation;

use super::*;

fn verdict(kind: VerdictKind, started: Started, report: Option<FinalReport>) -> Verdict {
    Verdict {
        kind,
        sentence: "The cause.".to_owned(),
        evidence: Vec::new(),
        advice: Some("do this".to_owned()),
        outcome: kind.outcome(),
        started,
        may_change: true,
        job_over: true,
        pod: None,
        report,
    }
}

fn report() -> FinalReport {
    FinalReport::default()
}

#[rstest]
#[case(VerdictKind::Completed, Started::Yes, Some(report()), "COMPLETE true")]
#[case(VerdictKind::Completed, Started::Yes, None, "COMPLETE false")]
#[case(VerdictKind::StepFailed, Started::Yes, Some(report()), "FAIL true")]
#[case(VerdictKind::Cancelled, Started::Yes, None, "CANCELLED false")]
#[case(VerdictKind::Claimed, Started::No, None, "ELSEWHERE")]
#[case(VerdictKind::Infrastructure, Started::No, None, "DECLINE Failed")]
#[case(VerdictKind::Infrastructure, Started::Yes, None, "FAIL false")]
#[case(VerdictKind::QuotaExceeded, Started::No, None, "DECLINE Quota")]
#[case(VerdictKind::NeverScheduled, Started::No, None, "FAIL false")]
#[case(VerdictKind::ImageNotPulled, Started::No, None, "FAIL false")]
#[case(VerdictKind::ConfigMissing, Started::No, None, "FAIL false")]
#[case(VerdictKind::OomKilled, Started::Yes, None, "FAIL false")]
#[case(VerdictKind::Signalled, Started::Yes, None, "LOST Failed signalled")]
#[case(VerdictKind::Signalled, Started::Yes, Some(report()), "FAIL true")]
#[case(VerdictKind::Lost, Started::Unknown, None, "LOST Failed lost")]
#[case(VerdictKind::Deleted, Started::Unknown, None, "LOST Failed deleted")]
#[case(VerdictKind::NodeLost, Started::Yes, None, "LOST Failed node_lost")]
#[case(VerdictKind::Evicted, Started::Yes, None, "LOST Failed evicted")]
#[case(VerdictKind::Preempted, Started::No, None, "LOST Failed preempted")]
fn ends_that_a_retry_may_fix_are_declined(
    #[case] kind: VerdictKind,
    #[case] started: Started,
    #[case] report: Option<FinalReport>,
    #[case] expected: &str,
) {
    let end = match judge(&verdict(kind, started, report)) {
        RunEnd::Decline(reason, text) => {
            assert!(text.contains("The cause."), "{text}");
            format!("DECLINE {reason:?}")
        }
        RunEnd::Lost(reason, end) => {
            assert!(end.diagnostic.contains("The cause."), "{end:?}");
            format!("LOST {reason:?} {}", end.verdict.unwrap_or_default())
        }
        RunEnd::Elsewhere => "ELSEWHERE".to_owned(),
        RunEnd::Over(call, end) => {
            assert_eq!(end.verdict.as_deref(), Some(kind.name()));
            assert_eq!(end.exit_code, Some(kind.outcome().code().into()));
            assert!(end.diagnostic.contains("What to do: do this"), "{end:?}");
            format!("{} {}", call.name().to_uppercase(), end.reported)
        }
    };
    assert_eq!(end, expected);
}

#[test]
fn the_hub_gets_the_report_that_the_executor_could_not_deliver() {
    let report = FinalReport {
        unreported: true,
        unreported_step: Some(UnreportedStep {
            ending: Ending::Changes,
            after_ok: true,
            ignore_error: false,
            plan: Some("the plan".to_owned()),
        }),
        ..FinalReport::default()
    };
    let verdict = verdict(VerdictKind::Infrastructure, Started::Yes, Some(report));
    let RunEnd::Over(LeaseCall::Complete, end) = judge(&verdict) else {
        panic!("it is completed");
    };
    assert!(end.report.is_some() && !end.reported, "{end:?}");
}

fn lease() -> LeaseRef {
    LeaseRef {
        task: TaskId::new(),
        lease: LeaseId::new(),
        fencing_token: 7,
    }
}

fn key(lease: LeaseRef) -> RunRef {
    RunRef {
        job_id: "1".into(),
        step_id: "s".into(),
        name: "job-1-s".into(),
        organization_id: "o".into(),
        workspace_id: "w".into(),
        step_type: "",
        lease: Some(lease),
    }
}

#[tokio::test]
async fn an_end_counts_as_reported_when_the_hub_has_it() {
    let runs = Arc::<Runs>::default();
    let (sender, mut unknown) = mpsc::unbounded_channel();
    let observer = AgentObserver::new(Arc::clone(&runs), sender);
    let run = key(lease());
    let verdict = verdict(VerdictKind::OomKilled, Started::Yes, None);
    let mut report = std::pin::pin!(observer.on_ended(&run, &verdict));
    assert!((&mut report).now_or_never().is_none());
    // The run was not followed.
    assert_eq!(unknown.recv().await, Some(run.clone()));
    let lease = run.lease.unwrap().lease;
    assert!(runs.follow(lease).borrow().end.is_some());
    runs.unfollow(lease);
    assert_eq!(report.await, ReportOutcome::Delivered);
    // Afterwards the watch observes a Job whose end was reported.
    observer.on_observation(&run, &Observation::Ended(Box::new(verdict.clone())));
    assert!(unknown.try_recv().is_err());
}

#[test]
fn the_token_is_in_the_secret_and_the_lease_on_the_job() {
    let lease = lease();
    let job = JobData {
        step_type: Some(StepType::Apply.name().to_owned()),
        organization_id: "o".to_owned(),
        workspace_id: "w".to_owned(),
        job_id: "1".to_owned(),
        step_id: "s".to_owned(),
        ..JobData::default()
    };
    let manifest = manifest::build(&Document::written(&job), &Deployment::default()).unwrap();
    let manifest = manifest
        .with_secret_environment(&[("MAYFLY_LEASE_TOKEN", "mfr_planted")])
        .labelled(
            &[
                (labels::TASK, &lease.task.to_string()),
                (labels::LEASE, &lease.lease.to_string()),
                (labels::AGENT, "eu-1"),
            ],
            &[(annotations::FENCING_TOKEN, "7")],
        );
    let attempt = manifest.of_attempt("attempt");
    let text = serde_json::to_string(&attempt.job).unwrap();
    assert!(!text.contains("planted"), "{text}");
    assert_eq!(
        RunRef::of(&attempt.job.metadata).unwrap().lease,
        Some(lease)
    );
    let secret = attempt.secret.unwrap();
    let value = &secret.data.unwrap()["MAYFLY_LEASE_TOKEN"];
    assert_eq!(value.0, b"mfr_planted");
    let template = attempt.job.spec.unwrap().template;
    assert_eq!(
        template.metadata.unwrap().labels.unwrap()[labels::AGENT],
        "eu-1"
    );
    let container = &template.spec.unwrap().containers[0];
    let variable = container.env.iter().flatten();
    let variable = variable
        .into_iter()
        .find(|v| v.name == "MAYFLY_LEASE_TOKEN");
    let source = variable.unwrap().value_from.clone().unwrap();
    let source = source.secret_key_ref.unwrap();
    assert_eq!(Some(source.name), secret.metadata.name);
}
