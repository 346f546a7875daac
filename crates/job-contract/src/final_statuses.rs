//! Computes the final statuses of step and job, and the scripts that follow an operation: the table of contract 4.6.
//! Unlike there, every exit code other than 0 and 2 is a failure.

use serde::{Deserialize, Serialize};

use crate::job::StepType;
use crate::status::{JobStatus, StepStatus};

/// How the operation of a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Ending {
    /// The operation never started: a script before it, or init, failed.
    NotReached,
    /// The operation succeeded. A plan found no changes.
    Success,
    /// A plan succeeded and found changes.
    Changes,
    /// The operation failed, was killed, or was interrupted.
    Failure,
}

/// The scripts that run after the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FollowingScripts {
    pub on_failure: bool,
    pub after: bool,
}

/// The statuses that are reported for a step and its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinalStatuses {
    pub step: StepStatus,
    pub job: JobStatus,
    /// `planChanges` of the job; always true when the job is pending (contract 5.4).
    pub plan_changes: bool,
}

impl FollowingScripts {
    /// The scripts that follow an operation with this ending.
    pub const fn of(step: StepType, ending: Ending, ignore_error: bool) -> Self {
        let (on_failure, after) = match (step, ending) {
            (StepType::CustomScripts | StepType::Approval | StepType::PolicyEvaluation, _) => {
                (false, false)
            }
            (_, Ending::NotReached) => (true, false),
            (_, Ending::Success | Ending::Changes) => (false, true),
            (StepType::Plan | StepType::PlanDestroy, Ending::Failure) => {
                (!ignore_error, ignore_error)
            }
            (StepType::Apply, Ending::Failure) => (true, ignore_error),
            (StepType::Destroy, Ending::Failure) => (true, false),
        };
        Self { on_failure, after }
    }
}

impl FinalStatuses {
    /// The statuses to report. `after_ok` is whether the `after` scripts succeeded; it is true if there were none.
    /// `template_steps` is the number of steps in the job's template.
    pub fn of(
        step: StepType,
        ending: Ending,
        after_ok: bool,
        ignore_error: bool,
        template_steps: usize,
    ) -> Self {
        let failed = Self {
            step: StepStatus::Failed,
            job: JobStatus::Failed,
            plan_changes: true,
        };
        let completed = |job, plan_changes| Self {
            step: StepStatus::Completed,
            job,
            plan_changes,
        };
        if !after_ok {
            return failed;
        }
        match (step, ending) {
            (_, Ending::NotReached) => failed,
            (StepType::Plan | StepType::PlanDestroy, Ending::Success) => {
                completed(JobStatus::Completed, false)
            }
            (StepType::Plan | StepType::PlanDestroy, Ending::Changes) if template_steps > 1 => {
                completed(JobStatus::Pending, true)
            }
            (StepType::Plan | StepType::PlanDestroy, Ending::Changes) => {
                completed(JobStatus::Completed, true)
            }
            (StepType::Plan | StepType::PlanDestroy, Ending::Failure) if ignore_error => {
                completed(JobStatus::Failed, false)
            }
            (StepType::Apply, Ending::Failure) if ignore_error => {
                completed(JobStatus::Pending, true)
            }
            (_, Ending::Failure) => failed,
            (_, Ending::Success | Ending::Changes) => completed(JobStatus::Pending, true),
        }
    }
}

#[cfg(test)]
#[expect(
    clippy::too_many_arguments,
    reason = "one argument for each column of the table"
)]
mod tests {
    use super::*;
    use Ending::{Changes, Failure, NotReached, Success};
    use StepType::{Apply, Approval, CustomScripts, Destroy, Plan};
    use rstest::rstest;

    /// One row of contract 4.6: operation, ending, after scripts ok, ignoreError, template steps;
    /// onFailure, after, step, job, planChanges.
    #[rstest]
    #[case(
        Plan,
        Success,
        true,
        false,
        2,
        false,
        true,
        "completed",
        "completed",
        false
    )]
    #[case(
        Plan,
        Changes,
        true,
        false,
        3,
        false,
        true,
        "completed",
        "pending",
        true
    )]
    #[case(
        Plan,
        Changes,
        true,
        false,
        1,
        false,
        true,
        "completed",
        "completed",
        true
    )]
    #[case(Plan, Failure, true, false, 2, true, false, "failed", "failed", true)]
    #[case(
        Plan,
        Failure,
        true,
        true,
        2,
        false,
        true,
        "completed",
        "failed",
        false
    )]
    #[case(Plan, Changes, false, false, 2, false, true, "failed", "failed", true)]
    #[case(
        Plan, NotReached, true, false, 2, true, false, "failed", "failed", true
    )]
    #[case(Plan, NotReached, true, true, 2, true, false, "failed", "failed", true)]
    #[case(
        Apply,
        Success,
        true,
        false,
        2,
        false,
        true,
        "completed",
        "pending",
        true
    )]
    #[case(Apply, Success, false, false, 2, false, true, "failed", "failed", true)]
    #[case(Apply, Failure, true, false, 2, true, false, "failed", "failed", true)]
    #[case(
        Apply,
        Failure,
        true,
        true,
        2,
        true,
        true,
        "completed",
        "pending",
        true
    )]
    #[case(Apply, Failure, false, true, 2, true, true, "failed", "failed", true)]
    #[case(
        Destroy,
        Success,
        true,
        false,
        2,
        false,
        true,
        "completed",
        "pending",
        true
    )]
    #[case(Destroy, Failure, true, true, 2, true, false, "failed", "failed", true)]
    #[case(
        CustomScripts,
        Success,
        true,
        false,
        2,
        false,
        false,
        "completed",
        "pending",
        true
    )]
    #[case(
        Approval,
        Success,
        true,
        false,
        2,
        false,
        false,
        "completed",
        "pending",
        true
    )]
    #[case(
        CustomScripts,
        Failure,
        true,
        true,
        2,
        false,
        false,
        "failed",
        "failed",
        true
    )]
    fn outcomes_follow_the_table(
        #[case] step: StepType,
        #[case] ending: Ending,
        #[case] after_ok: bool,
        #[case] ignore_error: bool,
        #[case] template_steps: usize,
        #[case] on_failure: bool,
        #[case] after: bool,
        #[case] step_status: &str,
        #[case] job_status: &str,
        #[case] plan_changes: bool,
    ) {
        assert_eq!(
            FollowingScripts::of(step, ending, ignore_error),
            FollowingScripts { on_failure, after }
        );
        let statuses = FinalStatuses::of(step, ending, after_ok, ignore_error, template_steps);
        assert_eq!(serde_json::to_value(statuses.step).unwrap(), step_status);
        assert_eq!(statuses.job.to_string(), job_status);
        assert_eq!(statuses.plan_changes, plan_changes);
    }

    #[test]
    fn pending_is_never_reported_without_changes() {
        for step in [
            Plan,
            StepType::PlanDestroy,
            Apply,
            Destroy,
            CustomScripts,
            Approval,
        ] {
            for ending in [NotReached, Success, Changes, Failure] {
                for bits in 0..4 {
                    let statuses = FinalStatuses::of(step, ending, bits & 1 == 0, bits & 2 == 0, 2);
                    assert!(
                        statuses.job != JobStatus::Pending || statuses.plan_changes,
                        "{step} {ending:?}"
                    );
                }
            }
        }
    }
}
