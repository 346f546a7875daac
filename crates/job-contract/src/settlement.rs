//! What an operation's end means for its scripts, its step and its job: the table of contract 4.6, with its
//! defects mended (every exit code other than 0 and 2 is a failure).

use serde::{Deserialize, Serialize};

use crate::job::StepType;
use crate::status::{JobStatus, StepStatus};

/// How the operation of a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Ending {
    /// It was never started: a script before it, or init, failed.
    NotReached,
    /// It succeeded. For a plan: without changes.
    Success,
    /// A plan succeeded and found changes.
    Changes,
    /// It failed, was killed, or was interrupted.
    Failure,
}

/// Which scripts run once the operation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aftermath {
    /// Run `onFailureList`.
    pub on_failure: bool,
    /// Run the commands marked `after`.
    pub after: bool,
}

/// What is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settlement {
    /// Status of the step.
    pub step: StepStatus,
    /// Status of the job.
    pub job: JobStatus,
    /// `planChanges` of the job; always true when the job is pending (contract 5.4).
    pub plan_changes: bool,
}

/// Which scripts follow an operation that ended this way.
pub const fn aftermath(step: StepType, ending: Ending, ignore_error: bool) -> Aftermath {
    let (on_failure, after) = match (step, ending) {
        (StepType::CustomScripts | StepType::Approval | StepType::PolicyEvaluation, _) => {
            (false, false)
        }
        (_, Ending::NotReached) => (true, false),
        (_, Ending::Success | Ending::Changes) => (false, true),
        (StepType::Plan | StepType::PlanDestroy, Ending::Failure) => (!ignore_error, ignore_error),
        (StepType::Apply, Ending::Failure) => (true, ignore_error),
        (StepType::Destroy, Ending::Failure) => (true, false),
    };
    Aftermath { on_failure, after }
}

/// What to report. `after_ok` tells whether the `after` scripts succeeded (true when there were none),
/// `template_steps` how many steps the job's template has.
pub fn settle(
    step: StepType,
    ending: Ending,
    after_ok: bool,
    ignore_error: bool,
    template_steps: usize,
) -> Settlement {
    let failed = Settlement {
        step: StepStatus::Failed,
        job: JobStatus::Failed,
        plan_changes: true,
    };
    let completed = |job, plan_changes| Settlement {
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
        (StepType::Apply, Ending::Failure) if ignore_error => completed(JobStatus::Pending, true),
        (_, Ending::Failure) => failed,
        (_, Ending::Success | Ending::Changes) => completed(JobStatus::Pending, true),
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
            aftermath(step, ending, ignore_error),
            Aftermath { on_failure, after }
        );
        let settlement = settle(step, ending, after_ok, ignore_error, template_steps);
        assert_eq!(serde_json::to_value(settlement.step).unwrap(), step_status);
        assert_eq!(settlement.job.to_string(), job_status);
        assert_eq!(settlement.plan_changes, plan_changes);
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
                    let settlement = settle(step, ending, bits & 1 == 0, bits & 2 == 0, 2);
                    assert!(
                        settlement.job != JobStatus::Pending || settlement.plan_changes,
                        "{step} {ending:?}"
                    );
                }
            }
        }
    }
}
