//! Which final reports count. The code that a run executes has the user of the executor. It can write the termination message
//! before the executor and after it. So a report counts only if it was sealed with the key that launcher and executor share,
//! and if it names this pod, this step and the code the container ended with. Every pod from the API server passes here, so
//! verdicts see no other reports.

use job_contract::labels;
use job_contract::report::{Author, FinalReport, ReportKey};
use k8s_openapi::api::core::v1::{ContainerStateTerminated, Pod};
use verdict::UNPROVEN;

use super::label;

/// Marks the reports of a pod that do not count, so that they are not read as reports.
pub(super) fn mark_unproven(pod: &mut Pod, key: Option<&ReportKey>) {
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    let id = |name| label(&pod.metadata, name).unwrap_or_default().to_owned();
    let step = (id(labels::JOB_ID), id(labels::STEP_ID));
    let statuses = pod
        .status
        .iter_mut()
        .flat_map(|status| status.container_statuses.iter_mut().flatten());
    let ends = statuses
        .flat_map(|status| [&mut status.state, &mut status.last_state])
        .filter_map(|state| state.as_mut()?.terminated.as_mut());
    for end in ends {
        let is_proven =
            |message: &str| key.is_some_and(|key| proves(key, message, &uid, &step, end));
        let is_unproven = |message: &&str| looks_like_a_report(message) && !is_proven(message);
        if let Some(message) = end.message.as_deref().filter(is_unproven) {
            end.message = Some(format!("{UNPROVEN}{message}"));
        }
    }
}

/// Words of another kind are never taken for a report: the last lines of a log, or what the runtime says.
fn looks_like_a_report(message: &str) -> bool {
    message.trim_start().starts_with('{')
}

fn proves(
    key: &ReportKey,
    message: &str,
    uid: &str,
    step: &(String, String),
    end: &ContainerStateTerminated,
) -> bool {
    let Some(report) = key.open(message) else {
        return false;
    };
    let is_author = |author: &Author| {
        !uid.is_empty() && author.run == uid && i32::from(author.exit_code) == end.exit_code
    };
    report.author.as_ref().is_some_and(is_author) && is_about(&report, step)
}

/// An executor that could not read its job data does not know whose they are.
fn is_about(report: &FinalReport, (job_id, step_id): &(String, String)) -> bool {
    let is_nobodys = report.job_id.is_empty() && report.step_id.is_empty();
    is_nobodys || report.job_id == *job_id && report.step_id == *step_id
}

#[cfg(test)]
mod tests {
    use job_contract::final_statuses::Ending;
    use job_contract::report::UnreportedStep;
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use verdict::final_report;

    fn key() -> ReportKey {
        ReportKey::parse(&"MDEy".repeat(12)).unwrap()
    }

    fn pod(message: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "name": "job-412-step-x",
                "uid": "u-1",
                "labels": {"mayfly.dev/job-id": "412", "mayfly.dev/step-id": "step"},
            },
            "status": {"containerStatuses": [{
                "name": "executor",
                "ready": false,
                "restartCount": 0,
                "image": "i",
                "imageID": "i",
                "state": {"terminated": {"exitCode": 1, "message": message}},
            }]},
        }))
        .unwrap()
    }

    /// As the executor of that pod leaves it when the platform does not take the outcome.
    fn report() -> FinalReport {
        FinalReport {
            job_id: "412".into(),
            step_id: "step".into(),
            unreported: true,
            unreported_step: Some(UnreportedStep {
                ending: Ending::Changes,
                after_ok: true,
                ignore_error: false,
                plan: Some("s3://plans/412".into()),
            }),
            author: Some(Author {
                run: "u-1".into(),
                exit_code: 1,
            }),
            ..FinalReport::default()
        }
    }

    fn believed(message: &str, key: Option<&ReportKey>) -> Option<FinalReport> {
        let mut pod = pod(message);
        mark_unproven(&mut pod, key);
        final_report(&pod)
    }

    #[test]
    fn the_executors_own_report_is_trusted() {
        let message = report().to_termination_message(Some(&key()));
        assert_eq!(believed(&message, Some(&key())), Some(report()));
        let of_nobody = FinalReport {
            job_id: String::new(),
            step_id: String::new(),
            unreported_step: None,
            ..report()
        };
        let message = of_nobody.to_termination_message(Some(&key()));
        assert_eq!(believed(&message, Some(&key())), Some(of_nobody));
    }

    #[rstest]
    #[case::another_pod(|report: &mut FinalReport| report.author.as_mut().unwrap().run = "u-2".into())]
    #[case::no_pod(|report: &mut FinalReport| report.author.as_mut().unwrap().run = String::new())]
    #[case::no_author(|report: &mut FinalReport| report.author = None)]
    #[case::another_end(|report: &mut FinalReport| report.author.as_mut().unwrap().exit_code = 0)]
    #[case::another_job(|report: &mut FinalReport| report.job_id = "413".into())]
    #[case::another_step(|report: &mut FinalReport| report.step_id = "other".into())]
    fn a_report_that_another_run_sealed_is_not_trusted(#[case] change: fn(&mut FinalReport)) {
        let mut report = report();
        change(&mut report);
        let message = report.to_termination_message(Some(&key()));
        assert_eq!(believed(&message, Some(&key())), None);
    }

    #[test]
    fn an_unsealed_or_unverifiable_report_is_not_trusted() {
        let other = ReportKey::parse(&"+/+/".repeat(12)).unwrap();
        let sealed = report().to_termination_message(Some(&key()));
        assert_eq!(
            believed(&report().to_termination_message(None), Some(&key())),
            None
        );
        assert_eq!(believed(&sealed, Some(&other)), None);
        assert_eq!(believed(&sealed, None), None);
        let forged = sealed.replace("s3://plans/412", "s3://forged/412");
        assert_eq!(believed(&forged, Some(&key())), None);
        assert_eq!(believed(&format!("{UNPROVEN}{sealed}"), Some(&key())), None);
    }

    #[test]
    fn a_termination_message_that_is_no_report_is_kept() {
        for words in ["", "Error: no such image", "panicked at {"] {
            let mut marked = pod(words);
            mark_unproven(&mut marked, Some(&key()));
            assert_eq!(marked, pod(words));
        }
    }
}
