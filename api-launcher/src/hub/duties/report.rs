//! Reports outcomes of tasks to the platform if their executors have not. The hub first reads the step, because an
//! outcome that the platform already has counts.

use std::sync::Arc;
use std::time::Duration;

use job_contract::chain;
use job_contract::report::FinalReport;
use pool_protocol::task::TaskState;
use pool_store::state::EndReason;
use pool_store::{EndView, TaskView};
use tracing::{debug, info, warn};

use super::StoreLog;
use crate::hub::task_work::TaskWork;
use crate::hub::{Hub, step_of};
use crate::reporter::{PlatformReporter, ReportError};

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
            task_work.start(task.task, async move { report(&hub, &task).await });
        }
    }
    task_work.finish().await;
}

async fn report(hub: &Hub, task: &TaskView) {
    let Some(end) = &task.end else {
        return;
    };
    let timeout = hub.reporter.report_patience();
    if end.ago < timeout {
        hub.heartbeats.start(&*hub.reporter, task.task, &task.job);
    }
    let result = send(&*hub.reporter, task, end).await;
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
            let is_given_up = error.is_final() && end.ago > timeout;
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
        Ok(()) => hub.heartbeats.release(task.task),
        Err(error) => {
            warn!(task = %task.task, %error, "the store could not record a report, which is repeated");
        }
    }
}

async fn send(
    reporter: &dyn PlatformReporter,
    task: &TaskView,
    end: &EndView,
) -> Result<(), ReportError> {
    let step = step_of(task);
    let text = log_text(task, end);
    if task.state != TaskState::Completed {
        return reporter.report_failure(&step, &text, None).await;
    }
    let report = report_of(task, end);
    reporter.report_success(&step, &report, &text, None).await
}

/// Returns the final report that came with the end. Without one, the hub does not know whether a plan found changes.
fn report_of(task: &TaskView, end: &EndView) -> FinalReport {
    let Some(text) = &end.report else {
        return FinalReport::default();
    };
    match serde_json::from_str::<FinalReport>(text) {
        Ok(report) if report.job_id == task.job && report.step_id == task.step => return report,
        Ok(_) => {
            warn!(task = %task.task, "the final report of an executor is about another step");
        }
        Err(error) => {
            warn!(task = %task.task, %error, "the final report of an executor cannot be read");
        }
    }
    FinalReport::default()
}

/// Returns the text for the run log.
fn log_text(task: &TaskView, end: &EndView) -> String {
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
