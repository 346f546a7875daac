//! Asks the platform whether it still wants tasks: before the first lease, because the platform records a dispatch only
//! after its answer, and a store may be an old copy; and until an executor accepts them, because jobs are cancelled.

use std::sync::Arc;
use std::time::Duration;

use job_contract::status::{JobStatus, StepStatus};
use job_contract::{StepType, chain};
use pool_protocol::id::TaskId;
use pool_store::{Found, TaskView, Wait};
use tracing::{debug, warn};

use super::StoreLog;
use crate::hub::chains::Chains;
use crate::hub::{Hub, step_of};
use crate::reporter::StepState;

const PAUSE: Duration = Duration::from_millis(100);
/// Questions to the platform at a time.
const AT_ONCE: usize = 32;
/// Tasks that are taken up at a time.
const BATCH: u32 = 64;
/// After this time a dispatch that the platform has not recorded is one that it has taken back.
const TAKEN_BACK: Duration = Duration::from_mins(10);

/// What follows from an answer of the platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conclusion {
    /// Ask again later.
    Nothing,
    Found(Found),
    Cancel,
}

pub(super) async fn perform(hub: &Arc<Hub>) {
    let (chains, mut log) = (Chains::new(AT_ONCE), StoreLog::default());
    while hub.pause(PAUSE).await {
        let due = hub.store.to_check(BATCH).await;
        for task in log.note("confirm", due).unwrap_or_default() {
            let hub = Arc::clone(hub);
            chains.start(task.task, async move { check(&hub, &task).await });
        }
    }
    chains.finish().await;
}

async fn check(hub: &Hub, task: &TaskView) {
    let step = step_of(task);
    let conclusion = match hub.reporter.step_state(&step).await {
        Ok(state) => conclude(&state, task),
        // One such answer may come from a proxy.
        Err(error) if task.age > TAKEN_BACK && error.is_final() => {
            warn!(task = %task.task, error = chain(&error), "the platform does not know a task");
            Conclusion::Found(Found::Over)
        }
        Err(error) => {
            debug!(task = %task.task, error = chain(&error), "the platform did not answer about a task");
            Conclusion::Nothing
        }
    };
    if let Err(error) = apply(hub, task.task, conclusion).await {
        debug!(task = %task.task, %error, "the answer of the platform could not be stored");
    }
}

async fn apply(hub: &Hub, task: TaskId, conclusion: Conclusion) -> Result<(), pool_store::Error> {
    let state = match conclusion {
        Conclusion::Nothing => return Ok(()),
        Conclusion::Found(found) => hub.store.found(task, found).await?,
        Conclusion::Cancel => hub.store.request_cancel(task).await?,
    };
    debug!(%task, ?conclusion, ?state, "the platform has answered about a task");
    Ok(())
}

fn conclude(state: &StepState, task: &TaskView) -> Conclusion {
    // A pause says nothing of the confirmation, and the store knows.
    if !matches!(task.wait, Some(Wait::Unconfirmed | Wait::Pause(_))) {
        let is_gone = state.job.is_over() || state.has_outcome() && !is_rejection(state, task);
        return if is_gone && !task.cancel_requested {
            Conclusion::Cancel
        } else {
            Conclusion::Nothing
        };
    }
    let late = task.age > TAKEN_BACK;
    match (&state.job, state.step) {
        (JobStatus::Cancelled, _) => Conclusion::Cancel,
        (job, _) if job.is_over() => Conclusion::Found(Found::Over),
        // The scripts of a rejection arrive as the approval step that was rejected, which has its outcome.
        _ if is_rejection(state, task) && !late => Conclusion::Found(Found::Waiting),
        (JobStatus::Rejected, _) => Conclusion::Found(Found::Over),
        (_, StepStatus::Running) => Conclusion::Found(Found::Running),
        _ if state.has_outcome() => Conclusion::Found(Found::Over),
        (JobStatus::Queue, _) => Conclusion::Found(Found::Waiting),
        _ if late => Conclusion::Found(Found::Over),
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
    use crate::hub::wire::tests::task;

    const NEW: Duration = Duration::from_secs(1);
    const OLD: Duration = Duration::from_secs(601);

    fn answer(job: &str, step: &str, kind: &str, age: Duration, wait: Option<Wait>) -> Conclusion {
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
    #[case::recorded("queue", "pending", NEW, Conclusion::Found(Found::Waiting))]
    #[case::not_recorded("pending", "pending", NEW, Conclusion::Nothing)]
    #[case::taken_back("pending", "pending", OLD, Conclusion::Found(Found::Over))]
    #[case::approved("approved", "pending", NEW, Conclusion::Nothing)]
    #[case::cancelled("cancelled", "cancelled", NEW, Conclusion::Cancel)]
    #[case::failed("failed", "failed", NEW, Conclusion::Found(Found::Over))]
    #[case::step_done("queue", "completed", NEW, Conclusion::Found(Found::Over))]
    #[case::another_executor("running", "running", NEW, Conclusion::Found(Found::Running))]
    #[case::an_executor_begins("running", "pending", NEW, Conclusion::Nothing)]
    #[case::rejected("rejected", "pending", NEW, Conclusion::Found(Found::Over))]
    fn a_task_is_given_out_when_the_platform_waits_for_it(
        #[case] job: &str,
        #[case] step: &str,
        #[case] age: Duration,
        #[case] expected: Conclusion,
    ) {
        let wait = Some(Wait::Unconfirmed);
        assert_eq!(answer(job, step, "terraformPlan", age, wait), expected);
    }

    #[rstest]
    #[case("rejected", NEW, Conclusion::Found(Found::Waiting))]
    #[case("rejected", OLD, Conclusion::Found(Found::Over))]
    #[case("queue", NEW, Conclusion::Found(Found::Over))]
    fn the_scripts_of_a_rejection_run_although_their_step_is_over(
        #[case] job: &str,
        #[case] age: Duration,
        #[case] expected: Conclusion,
    ) {
        let wait = Some(Wait::Unconfirmed);
        assert_eq!(answer(job, "failed", "approval", age, wait), expected);
        if expected == Conclusion::Found(Found::Waiting) {
            assert_eq!(
                answer(job, "failed", "approval", age, None),
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
    fn a_confirmed_task_is_watched_for_its_end_alone(
        #[case] job: &str,
        #[case] step: &str,
        #[case] expected: Conclusion,
    ) {
        let found = answer(job, step, "terraformPlan", OLD, Some(Wait::NoCapacity));
        assert_eq!(found, expected);
    }
}
