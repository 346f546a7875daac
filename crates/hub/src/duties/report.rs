//! Reports outcomes of tasks to the platform if their executors have not. The hub first reads the step, because an
//! outcome that the platform already has counts.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use job_contract::chain;
use job_contract::report::FinalReport;
use platform::{Platform, StepRef};
use pool_protocol::task::TaskState;
use pool_store::TaskView;
use pool_store::state::{EndReason, TaskEnd};
use reporter::ReportError;
use tempfile::NamedTempFile;
use tracing::{debug, info, warn};

use super::StoreLog;
use crate::addresses::may_be_plan;
use crate::task_work::TaskWork;
use crate::{Hub, step_of};

const PAUSE: Duration = Duration::from_secs(1);
/// The largest number of reports at the same time.
const AT_ONCE: usize = 16;
/// The largest number of tasks that are read from the store at once.
const BATCH: u32 = 32;

pub(super) async fn perform(hub: &Arc<Hub>) {
    let (task_work, mut log) = (TaskWork::new(AT_ONCE), StoreLog::default());
    loop {
        tokio::select! {
            running = hub.pause(PAUSE) => if !running { break },
            () = hub.ended.notified() => {}
        }
        let due = hub.store.to_report(BATCH).await;
        for task in log.log_result("report", due).unwrap_or_default() {
            let hub = Arc::clone(hub);
            let pool = task.pool.clone();
            task_work.start(&pool, task.task, async move { report(&hub, &task).await });
        }
    }
    task_work.finish().await;
}

async fn report(hub: &Hub, task: &TaskView) {
    let Some(end) = &task.end else {
        return;
    };
    let timeout = hub.reporter.report_patience();
    if task.ended < Some(timeout) {
        hub.heartbeats
            .start(&task.task, || hub.reporter.start_heartbeat(&task.job));
    }
    let result = send(hub, task, end).await;
    match result {
        Ok(()) => {
            info!(task = %task.task, job_id = task.job, step_id = task.step, "the platform has the outcome of a task");
        }
        Err(error @ ReportError::NotDispatched(_)) => {
            debug!(
                task = %task.task,
                job_id = task.job,
                step_id = task.step,
                error = chain(&error),
                "the platform does not take the outcome of a task yet"
            );
            return;
        }
        Err(error) => {
            let is_given_up = error.is_final() && task.ended > Some(timeout);
            warn!(
                task = %task.task,
                job_id = task.job,
                step_id = task.step,
                error = chain(&error),
                again = !is_given_up,
                "the outcome of a task could not be reported"
            );
            if !is_given_up {
                return;
            }
        }
    }
    match hub.store.reported(task.task).await {
        Ok(()) => {
            hub.heartbeats.release(&task.task);
            if let Some((logs, lease)) = hub.run_logs.as_ref().zip(task.lease) {
                logs.forget(lease);
            }
        }
        Err(error) => {
            warn!(task = %task.task, %error, "the store could not record a report, which is repeated");
        }
    }
}

async fn send(hub: &Hub, task: &TaskView, end: &TaskEnd) -> Result<(), ReportError> {
    let (reporter, step) = (&*hub.reporter, step_of(task));
    let text = log_text(task, end);
    let kept = hub.run_logs.as_ref().and_then(|logs| logs.find(task));
    let passed = match &kept {
        Some(_) => None,
        None => log_of(hub, task, &step).await?,
    };
    let log = kept.as_deref().or(passed.as_ref().map(NamedTempFile::path));
    if task.state != TaskState::Completed {
        return reporter.report_failure(&step, &text, log).await;
    }
    let report = report_of(task, end);
    reporter.report_success(&step, &report, &text, log).await
}

/// Returns the end of the log that passed the relay, in a file. The records of a machine have no other log of a step whose
/// executor did not store it.
async fn log_of(
    hub: &Hub,
    task: &TaskView,
    step: &StepRef,
) -> Result<Option<NamedTempFile>, ReportError> {
    let is_needed = matches!(hub.reporter.platform(), Platform::Local(_))
        && !hub.reporter.step_state(step).await?.has_outcome();
    let Some(log) = hub.tails.since(task.task, 0).filter(|_| is_needed) else {
        return Ok(None);
    };
    let mut file = NamedTempFile::new().map_err(ReportError::Draft)?;
    file.write_all(log.text.as_bytes())
        .map_err(ReportError::Draft)?;
    Ok(Some(file))
}

/// Returns the final report that came with the end. Without one, the hub does not know whether a plan found changes.
fn report_of(task: &TaskView, end: &TaskEnd) -> FinalReport {
    let Some(text) = &end.report else {
        return FinalReport::default();
    };
    match serde_json::from_str::<FinalReport>(text) {
        Ok(mut report) if report.job_id == task.job && report.step_id == task.step => {
            if let Some(unreported) = &mut report.unreported_step {
                unreported.plan.take_if(|plan| !may_be_plan(plan));
            }
            return report;
        }
        Ok(_) => {
            warn!(task = %task.task, "the final report of an executor is about another step");
        }
        Err(error) => {
            warn!(task = %task.task, %error, "the final report of an executor cannot be read");
        }
    }
    FinalReport::default()
}

fn log_text(task: &TaskView, end: &TaskEnd) -> String {
    let diagnostic = end.diagnostic.trim();
    let begin = match end.reason {
        EndReason::Refused => "The run was refused",
        EndReason::Cancelled => "The run was cancelled",
        _ if task.state == TaskState::Cancelled => "The run was cancelled",
        _ if task.state == TaskState::Completed => {
            "The run has ended, and its executor did not report it"
        }
        EndReason::Finished => "The run failed",
        _ => "The run was given up",
    };
    if diagnostic.is_empty() {
        format!("{begin}.")
    } else {
        format!("{begin}: {diagnostic}")
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::sample_views;

    #[rstest]
    #[case("https://api.example.test/plan", true)]
    #[case("s3://bucket/plan", true)]
    #[case("javascript:alert(1)", false)]
    #[case("//evil.example.test/plan", false)]
    fn a_report_names_no_plan_that_runs_something(#[case] plan: &str, #[case] is_kept: bool) {
        let task = sample_views::task(TaskState::Completed);
        let report = json!({
            "jobId": task.job, "stepId": task.step,
            "unreportedStep": {"ending": "changes", "afterOk": true, "ignoreError": false, "plan": plan},
        });
        let end = TaskEnd {
            report: Some(report.to_string()),
            ..TaskEnd::new(EndReason::Finished, String::new(), 0)
        };
        let unreported = report_of(&task, &end).unreported_step.unwrap();
        assert_eq!(unreported.plan.is_some(), is_kept);
    }
}
