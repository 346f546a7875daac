//! Checks at the platform whether tasks are still wanted. Before the first lease, because the platform stores a
//! dispatch only after the hub's response, and because the store may be a restored backup. Then until an executor
//! accepts the task, because jobs are cancelled.

use std::sync::Arc;
use std::time::Duration;

use job_contract::status::{JobStatus, StepStatus};
use job_contract::{StepType, chain};
use pool_protocol::id::TaskId;
use pool_store::{PlatformState, TaskView, Wait};
use reporter::StepState;
use tracing::{debug, info, warn};

use super::StoreLog;
use crate::task_work::TaskWork;
use crate::{Hub, step_of};

const PAUSE: Duration = Duration::from_millis(100);
/// The largest number of requests to the platform at the same time.
const AT_ONCE: usize = 32;
/// The largest number of tasks that are read from the store at once.
const BATCH: u32 = 64;
/// A dispatch that the platform has not recorded for so long was withdrawn.
const WITHDRAWN_AFTER: Duration = Duration::from_mins(10);

/// What follows from the state of the step on the platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conclusion {
    /// Check again later.
    Nothing,
    Platform(PlatformState),
    Cancel,
}

pub(super) async fn perform(hub: &Arc<Hub>) {
    let (task_work, mut log) = (TaskWork::new(AT_ONCE), StoreLog::default());
    while hub.pause(PAUSE).await {
        let due = hub.store.to_check(BATCH).await;
        for task in log.log_result("confirm", due).unwrap_or_default() {
            let hub = Arc::clone(hub);
            let pool = task.pool.clone();
            task_work.start(&pool, task.task, async move { check(&hub, &task).await });
        }
    }
    task_work.finish().await;
}

async fn check(hub: &Hub, task: &TaskView) {
    let step = step_of(task);
    let conclusion = match hub.reporter.step_state(&step).await {
        Ok(state) => conclude(&state, task),
        // A single response like this may come from a proxy.
        Err(error) if task.age > WITHDRAWN_AFTER && error.is_final() => {
            if !task.cancel_requested {
                warn!(task = %task.task, error = chain(&error), "the platform does not know a task");
            }
            conclude_unknown(task)
        }
        Err(error) => {
            debug!(task = %task.task, error = chain(&error), "the platform did not return the state of a task");
            Conclusion::Nothing
        }
    };
    if let Err(error) = apply(hub, task.task, conclusion).await {
        debug!(task = %task.task, %error, "the state of a task on the platform could not be stored");
    }
}

async fn apply(hub: &Hub, task: TaskId, conclusion: Conclusion) -> Result<(), pool_store::Error> {
    let state = match conclusion {
        Conclusion::Nothing => return Ok(()),
        Conclusion::Platform(state) => {
            if matches!(state, PlatformState::Over) {
                info!(%task, "the platform says that the step or its job is over: the run is not started");
            }
            hub.store.apply_platform_state(task, state).await?
        }
        Conclusion::Cancel => hub.store.request_cancel(task).await?,
    };
    debug!(%task, ?conclusion, ?state, "checked a task at the platform");
    Ok(())
}

/// What follows if the platform does not know the job.
fn conclude_unknown(task: &TaskView) -> Conclusion {
    if !is_confirmed(task) {
        Conclusion::Platform(PlatformState::Over)
    } else if task.cancel_requested {
        Conclusion::Nothing
    } else {
        Conclusion::Cancel
    }
}

/// A task in its pause may be confirmed or not. The store applies the state only if it is not.
const fn is_confirmed(task: &TaskView) -> bool {
    !matches!(task.wait, Some(Wait::Unconfirmed | Wait::Pause(_)))
}

fn conclude(state: &StepState, task: &TaskView) -> Conclusion {
    if is_confirmed(task) {
        let is_gone = state.job.is_over() || state.has_outcome() && !is_rejection(state, task);
        return if is_gone && !task.cancel_requested {
            Conclusion::Cancel
        } else {
            Conclusion::Nothing
        };
    }
    let late = task.age > WITHDRAWN_AFTER;
    match (&state.job, state.step) {
        (JobStatus::Cancelled, _) => Conclusion::Cancel,
        (job, _) if job.is_over() => Conclusion::Platform(PlatformState::Over),
        // The scripts of a rejection arrive as the rejected approval step, which already has its outcome.
        _ if is_rejection(state, task) && !late => Conclusion::Platform(PlatformState::Waiting),
        (JobStatus::Rejected, _) => Conclusion::Platform(PlatformState::Over),
        (_, StepStatus::Running) => Conclusion::Platform(PlatformState::Running),
        _ if state.has_outcome() => Conclusion::Platform(PlatformState::Over),
        (JobStatus::Queue, _) => Conclusion::Platform(PlatformState::Waiting),
        _ if late => Conclusion::Platform(PlatformState::Over),
        _ => Conclusion::Nothing,
    }
}

fn is_rejection(state: &StepState, task: &TaskView) -> bool {
    state.job == JobStatus::Rejected && task.kind == StepType::Approval.name()
}

#[cfg(test)]
mod tests {
    use pool_protocol::task::TaskState;
    use rstest::rstest;

    use super::*;
    use crate::sample_views::task;

    const NEW: Duration = Duration::from_secs(1);
    const OLD: Duration = Duration::from_secs(601);

    fn conclusion_for(
        job: &str,
        step: &str,
        kind: &str,
        age: Duration,
        wait: Option<Wait>,
    ) -> Conclusion {
        let state = StepState {
            job: serde_json::from_value(job.into()).unwrap(),
            step: serde_json::from_value(step.into()).unwrap(),
        };
        let task = TaskView {
            kind: kind.to_owned(),
            age,
            wait,
            ..task(TaskState::Available)
        };
        conclude(&state, &task)
    }

    #[rstest]
    #[case::recorded("queue", "pending", NEW, Conclusion::Platform(PlatformState::Waiting))]
    #[case::not_recorded("pending", "pending", NEW, Conclusion::Nothing)]
    #[case::taken_back("pending", "pending", OLD, Conclusion::Platform(PlatformState::Over))]
    #[case::approved("approved", "pending", NEW, Conclusion::Nothing)]
    #[case::cancelled("cancelled", "cancelled", NEW, Conclusion::Cancel)]
    #[case::failed("failed", "failed", NEW, Conclusion::Platform(PlatformState::Over))]
    #[case::step_done("queue", "completed", NEW, Conclusion::Platform(PlatformState::Over))]
    #[case::another_executor(
        "running",
        "running",
        NEW,
        Conclusion::Platform(PlatformState::Running)
    )]
    #[case::an_executor_begins("running", "pending", NEW, Conclusion::Nothing)]
    #[case::rejected("rejected", "pending", NEW, Conclusion::Platform(PlatformState::Over))]
    fn a_task_is_confirmed_when_the_platform_waits_for_it(
        #[case] job: &str,
        #[case] step: &str,
        #[case] age: Duration,
        #[case] expected: Conclusion,
    ) {
        let wait = Some(Wait::Unconfirmed);
        assert_eq!(
            conclusion_for(job, step, "terraformPlan", age, wait),
            expected
        );
    }

    #[rstest]
    #[case("rejected", NEW, Conclusion::Platform(PlatformState::Waiting))]
    #[case("rejected", OLD, Conclusion::Platform(PlatformState::Over))]
    #[case("queue", NEW, Conclusion::Platform(PlatformState::Over))]
    fn the_scripts_of_a_rejection_run_for_a_step_that_is_over(
        #[case] job: &str,
        #[case] age: Duration,
        #[case] expected: Conclusion,
    ) {
        let wait = Some(Wait::Unconfirmed);
        assert_eq!(
            conclusion_for(job, "failed", "approval", age, wait),
            expected
        );
        if expected == Conclusion::Platform(PlatformState::Waiting) {
            assert_eq!(
                conclusion_for(job, "failed", "approval", age, None),
                Conclusion::Nothing
            );
        }
    }

    #[rstest]
    #[case("queue", "pending", Conclusion::Nothing)]
    #[case("running", "running", Conclusion::Nothing)]
    #[case("cancelled", "cancelled", Conclusion::Cancel)]
    #[case("failed", "pending", Conclusion::Cancel)]
    #[case("queue", "completed", Conclusion::Cancel)]
    fn a_confirmed_task_is_only_checked_for_a_cancellation(
        #[case] job: &str,
        #[case] step: &str,
        #[case] expected: Conclusion,
    ) {
        let found = conclusion_for(job, step, "terraformPlan", OLD, Some(Wait::NoCapacity));
        assert_eq!(found, expected);
    }

    #[rstest]
    #[case::unconfirmed(
        Some(Wait::Unconfirmed),
        false,
        Conclusion::Platform(PlatformState::Over)
    )]
    #[case::available(Some(Wait::NoCapacity), false, Conclusion::Cancel)]
    #[case::leased(None, false, Conclusion::Cancel)]
    #[case::cancelled(None, true, Conclusion::Nothing)]
    fn a_task_that_the_platform_does_not_know_is_withdrawn(
        #[case] wait: Option<Wait>,
        #[case] cancel_requested: bool,
        #[case] expected: Conclusion,
    ) {
        let task = TaskView {
            wait,
            cancel_requested,
            ..task(TaskState::Available)
        };
        assert_eq!(conclude_unknown(&task), expected);
    }
}
