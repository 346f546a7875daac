//! The result of a step, before it is reported.
//!
//! This module knows neither the phases that led to the result nor the platform.

use job_contract::Exit;
use job_contract::final_statuses::Ending;
use job_contract::report::{
    ApplyProgress, ChangeCounts, LockStatus, StateLock, StateStatus, StopReason, ToolRecord,
    UnreportedStep,
};
use platform::{History, PlanReference, StepRef};
use run_log::Redactor;
use tracing::warn;

use crate::error::StepError;
use crate::stop::Stop;

/// The result of a step: all content of its report.
#[derive(Debug)]
pub(crate) struct StepResult {
    pub(crate) exit: Exit,
    pub(crate) ending: Ending,
    pub(crate) after_ok: bool,
    pub(crate) changes: Option<ChangeCounts>,
    pub(crate) plan: PlanReference,
    pub(crate) history: Option<History>,
    pub(crate) commit_id: String,
    pub(crate) tool: Option<ToolRecord>,
    pub(crate) error: Option<String>,
    pub(crate) hint: Option<String>,
    pub(crate) stopped: Option<StopReason>,
    pub(crate) details: OperationDetails,
    /// Whether this executor reports the step. It does not if another executor holds the step, if the step is over, or
    /// if the step is to be repeated.
    pub(crate) must_report: bool,
}

/// The report's details about an operation: its changes, and where the state is.
#[derive(Debug, Default)]
pub(crate) struct OperationDetails {
    pub(crate) progress: Option<ApplyProgress>,
    pub(crate) state: Option<StateStatus>,
    pub(crate) lock: Option<StateLock>,
    /// How the tool ended, as a sentence.
    pub(crate) tool_end: Option<String>,
    /// Progress, state and lock as a sentence, for an operation that failed.
    pub(crate) sentence: Option<String>,
    pub(crate) hint: Option<String>,
}

impl StepResult {
    /// The result of a step that ended this way, without further details.
    pub(crate) fn new(exit: Exit, ending: Ending) -> Self {
        Self {
            exit,
            ending,
            after_ok: true,
            changes: None,
            plan: PlanReference::Keep,
            history: None,
            commit_id: String::new(),
            tool: None,
            error: None,
            hint: None,
            stopped: None,
            details: OperationDetails::default(),
            must_report: true,
        }
    }

    /// A step that failed before its operation or its scripts.
    pub(crate) fn failed(error: &StepError) -> Self {
        Self {
            error: Some(error.to_string()),
            hint: error.hint(),
            ..Self::new(error.exit(), Ending::NotReached)
        }
    }

    /// A step that this executor neither runs nor reports.
    pub(crate) fn not_run(exit: Exit, reason: String) -> Self {
        Self {
            error: Some(reason),
            must_report: false,
            ..Self::new(exit, Ending::NotReached)
        }
    }

    /// A step whose outcome is known already. Its log belongs to the executor that ran it, so nothing is written there.
    pub(crate) fn already_ended(step: &StepRef) -> Self {
        let text = format!(
            "step {} has already ended: it is not run again",
            step.step_id
        );
        warn!("{text}");
        Self::not_run(Exit::Done, text)
    }

    /// If a step failed under a stop order, the order is the cause. A step that succeeded anyway stays a success.
    pub(crate) fn or_stopped(self, stop: &Stop) -> Self {
        match stop.given() {
            Some(order) if self.exit == Exit::StepFailed => Self {
                exit: order.cause.exit(),
                error: Some(order.cause.to_string()),
                hint: order.cause.hint().map(str::to_owned),
                stopped: Some(order.cause.reason()),
                ..self
            },
            _ => self,
        }
    }

    /// Adds to the error of a failed operation how the tool ended, its changes, and where the state is.
    pub(crate) fn with_details(mut self, redactor: &Redactor) -> Self {
        if self.exit == Exit::Done {
            return self;
        }
        let details = &self.details;
        let is_locked = matches!(&details.lock, Some(lock) if lock.status == LockStatus::InTheWay);
        // If a lock blocked the tool, its end adds no information.
        let tool_end = details
            .tool_end
            .clone()
            .filter(|_| !is_locked || details.progress.is_some());
        let error = join_present(
            [self.error.clone().or(tool_end), details.sentence.clone()],
            ": ",
        );
        let hint = join_present([details.hint.clone(), self.hint.clone()], "; ");
        // An address may hold a key that is a secret somewhere else.
        if let Some(progress) = &mut self.details.progress {
            for address in progress.failed.iter_mut().chain(&mut progress.unfinished) {
                *address = redactor.redact(address).into_owned();
            }
        }
        Self {
            error: error.map(|error| redactor.redact(&error).into_owned()),
            hint,
            ..self
        }
    }

    /// The data that another program needs to report the outcome instead of this executor. `None` unless the step ended
    /// with `Exit::Done`, because other exit codes contain everything.
    pub(crate) fn outcome_for_others(&self, ignore_error: bool) -> Option<UnreportedStep> {
        (self.exit == Exit::Done).then(|| UnreportedStep {
            ending: self.ending,
            after_ok: self.after_ok,
            ignore_error,
            plan: match &self.plan {
                PlanReference::Set(reference) => Some(reference.clone()),
                PlanReference::Keep | PlanReference::Clear => None,
            },
        })
    }
}

/// Joins the texts that are present.
pub(crate) fn join_present(texts: [Option<String>; 2], by: &str) -> Option<String> {
    texts
        .into_iter()
        .flatten()
        .reduce(|one, other| format!("{one}{by}{other}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_is_available_to_others_if_the_step_is_done() {
        let reference = "https://store/plan".to_owned();
        let failed = StepResult::new(Exit::StepFailed, Ending::Failure);
        assert_eq!(failed.outcome_for_others(true), None);
        let done = |ending, plan| StepResult {
            plan,
            ..StepResult::new(Exit::Done, ending)
        };
        for (result, ending, plan) in [
            (
                done(Ending::Changes, PlanReference::Set(reference.clone())),
                Ending::Changes,
                Some(reference),
            ),
            (
                done(Ending::Failure, PlanReference::Clear),
                Ending::Failure,
                None,
            ),
            (
                done(Ending::Success, PlanReference::Keep),
                Ending::Success,
                None,
            ),
        ] {
            let expected = UnreportedStep {
                ending,
                after_ok: true,
                ignore_error: true,
                plan,
            };
            assert_eq!(result.outcome_for_others(true), Some(expected));
        }
    }
}
