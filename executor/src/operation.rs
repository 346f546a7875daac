//! The operation of a step: plan, apply or destroy. The module holds the inputs of its phases, and its result.
//!
//! It knows neither the phases nor their order.

use std::path::PathBuf;

use job_contract::StepType;
use job_contract::final_statuses::Ending;
use job_contract::progress::Phase;
use job_contract::report::ChangeCounts;
use nix::sys::signal::Signal;
use platform::History;

use crate::cgroup::OomKills;
use crate::context::RunContext;
use crate::error::StepError;
use crate::process::{Completion, Ended};
use crate::step_result::{OperationDetails, join_present};
use crate::stop::MEMORY_HINT;
use crate::stored_plan::{PlanRecord, ReviewedPlan};
use crate::terraform::Terraform;
use crate::terraform::event_state::EventState;
use crate::terraform::variables::Definitions;
use crate::tool::ResolvedTool;
use crate::workspace::Workspace;

/// The tool's task in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// With `destroy`, it plans to remove everything.
    Plan {
        destroy: bool,
    },
    Apply,
    Destroy,
}

impl Operation {
    /// The operation of a step of this type; `None` for steps of scripts.
    pub(crate) const fn of(step_type: StepType) -> Option<Self> {
        match step_type {
            StepType::Plan => Some(Self::Plan { destroy: false }),
            StepType::PlanDestroy => Some(Self::Plan { destroy: true }),
            StepType::Apply => Some(Self::Apply),
            StepType::Destroy => Some(Self::Destroy),
            StepType::CustomScripts | StepType::Approval | StepType::PolicyEvaluation => None,
        }
    }

    /// The phase in which the tool runs the operation.
    pub(crate) const fn phase(self) -> Phase {
        match self {
            Self::Plan { .. } => Phase::Plan,
            Self::Apply => Phase::Apply,
            Self::Destroy => Phase::Destroy,
        }
    }

    /// Whether it removes everything, or plans to.
    pub(crate) const fn destroys(self) -> bool {
        matches!(self, Self::Destroy | Self::Plan { destroy: true })
    }

    /// The name in banners.
    pub(crate) const fn banner_name(self) -> &'static str {
        match self {
            Self::Plan { .. } => "PLAN",
            Self::Apply => "APPLY",
            Self::Destroy => "DESTROY",
        }
    }
}

/// Everything that an operation needs before its first phase.
#[derive(Debug)]
pub(crate) struct PreparedOperation {
    pub(crate) operation: Operation,
    pub(crate) workspace: Workspace,
    pub(crate) working_dir: PathBuf,
    pub(crate) tool: ResolvedTool,
    pub(crate) plan: Option<ReviewedPlan>,
}

/// The context of the phases of an operation.
#[derive(Debug)]
pub(crate) struct OperationContext<'r, 'c> {
    pub(crate) run: &'r RunContext<'c>,
    pub(crate) prepared: &'r PreparedOperation,
    pub(crate) terraform: Terraform<'r>,
}

impl<'r, 'c> OperationContext<'r, 'c> {
    pub(crate) fn new(run: &'r RunContext<'c>, prepared: &'r PreparedOperation) -> Self {
        Self {
            run,
            prepared,
            terraform: Terraform {
                tool: &prepared.tool,
                working_dir: &prepared.working_dir,
                stop: &run.stop,
                budget: run.budget,
                color: run.config.run.color_output,
                structured_output: run.config.run.structured_output,
                variables: Definitions::default(),
                refresh: run.job.refresh,
                refresh_only: run.job.refresh_only,
                events: EventState::default(),
            },
        }
    }

    /// Reports in the run's log how the tool ended, if the tool could not report it. Adds the cause to the details if it was
    /// memory.
    pub(crate) async fn log_unusual_end(&self, done: Completion, details: &mut OperationDetails) {
        if let Some(text) = memory_exceeded(done, &self.run.oom_kills) {
            details.tool_end = Some(text);
            let hints = [details.hint.take(), Some(MEMORY_HINT.to_owned())];
            details.hint = join_present(hints, "; ");
        }
        let text = match done {
            Completion {
                stopped: true,
                ended,
            } => format!("The tool was interrupted and ended with {ended}."),
            Completion {
                ended: ended @ Ended::Signal(_),
                ..
            } => format!("The tool was killed: {ended}."),
            Completion {
                ended: ended @ Ended::Code(3..),
                ..
            } => format!("The tool ended with {ended}."),
            Completion { .. } => return,
        };
        self.run.log_failure(&text).await;
    }
}

/// Why the kernel killed the tool, if it did because the step exceeded its memory limit.
pub(crate) fn memory_exceeded(done: Completion, kills: &OomKills) -> Option<String> {
    let is_killed = !done.stopped && done.ended == Ended::Signal(Signal::SIGKILL as i32);
    let limit = kills.exceeded_limit().filter(|_| is_killed)?;
    Some(format!(
        "the tool was killed because the step used more memory than its limit of {} MiB",
        limit >> 20
    ))
}

/// The result of an operation.
#[derive(Debug)]
pub(crate) struct OperationResult {
    pub(crate) ending: Ending,
    pub(crate) after_ok: bool,
    pub(crate) changes: Option<ChangeCounts>,
    /// The stored plan.
    pub(crate) plan: Option<PlanRecord>,
    pub(crate) history: Option<History>,
    /// JSON of the outputs, for the scripts after the operation.
    pub(crate) terraform_output: String,
    /// The error, unless the tool's own output explains it.
    pub(crate) error: Option<StepError>,
    pub(crate) details: OperationDetails,
    /// Whether another executor has reported the step meanwhile. Then only that executor's outcome counts.
    pub(crate) step_has_ended: bool,
}

impl OperationResult {
    pub(crate) fn new(ending: Ending) -> Self {
        Self {
            ending,
            after_ok: true,
            changes: None,
            plan: None,
            history: None,
            terraform_output: String::new(),
            error: None,
            details: OperationDetails::default(),
            step_has_ended: false,
        }
    }

    pub(crate) fn failed(ending: Ending, error: StepError) -> Self {
        Self {
            error: Some(error),
            ..Self::new(ending)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cgroup::MemoryGroup;

    #[test]
    fn memory_is_the_cause_if_the_kernel_killed_the_tool_during_the_step() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
        write("memory.max", "268435456\n");
        write("memory.events", "max 7\noom 1\noom_kill 1\n");
        let kills = OomKills::from_now(MemoryGroup::find(group.path(), "0::/\n"));
        let killed = Completion {
            ended: Ended::Signal(9),
            stopped: false,
        };
        assert_eq!(memory_exceeded(killed, &kills), None);
        write("memory.events", "max 9\noom 2\noom_kill 2\n");
        let text =
            "the tool was killed because the step used more memory than its limit of 256 MiB";
        assert_eq!(memory_exceeded(killed, &kills).as_deref(), Some(text));
        // Killed at the end of its grace period, or ended by itself.
        for (ended, stopped) in [
            (killed.ended, true),
            (Ended::Signal(15), false),
            (Ended::Code(1), false),
        ] {
            assert_eq!(memory_exceeded(Completion { ended, stopped }, &kills), None);
        }
    }
}
