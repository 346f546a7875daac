//! The tail of every run: the log delivered and stored, the outcome reported, nothing left behind.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::Duration;

use artifact_store::{Store, StoreError};
use job_contract::keys::ObjectKey;
use job_contract::progress::Phase;
use job_contract::report::{ChangeCounts, FinalReport, StopReason, ToolRecord, Untold};
use job_contract::settlement::{self, Ending};
use job_contract::{Exit, JobData, StepType, chain};
use platform::{History, Outcome, PlanReference, StartPermission};
use platform::{Platform, PlatformError, StepRef};
use runtime::Deadline;
use tracing::error;

use crate::Ended;
use crate::config::Config;
use crate::connections::Connections;
use crate::context::RunContext;
use crate::error::StepError;
use crate::operation::Account;
use crate::preparation;
use crate::running_report::FAREWELL;
use crate::stop::{Budget, Stop};

/// What became of a step: everything its report says.
#[derive(Debug)]
pub(crate) struct StepResult {
    pub(crate) exit: Exit,
    pub(crate) ending: Ending,
    pub(crate) after_ok: bool,
    pub(crate) changes: Option<ChangeCounts>,
    pub(crate) plan: PlanReference,
    /// What the platform is to record of the state that was published.
    pub(crate) history: Option<History>,
    pub(crate) commit_id: String,
    pub(crate) tool: Option<ToolRecord>,
    pub(crate) error: Option<String>,
    pub(crate) hint: Option<String>,
    /// Why it was stopped before it was done.
    pub(crate) stopped: Option<StopReason>,
    pub(crate) account: Account,
    /// Whether the platform is told. A step that is somebody else's, over, or to be tried again is not reported.
    pub(crate) reported: bool,
}

impl StepResult {
    /// A step that ended so, and of which there is nothing else to say.
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
            account: Account::default(),
            reported: true,
        }
    }

    pub(crate) fn failed(error: &StepError) -> Self {
        Self {
            error: Some(error.to_string()),
            hint: error.hint(),
            ..Self::new(error.exit(), Ending::NotReached)
        }
    }

    /// What whoever tells the platform in this executor's place has to know; nothing of a step that was not done, of which
    /// there is nothing more to say.
    fn untold(&self, ignore_error: bool) -> Option<Untold> {
        (self.exit == Exit::Done).then(|| Untold {
            ending: self.ending,
            after_ok: self.after_ok,
            ignore_error,
            plan: match &self.plan {
                PlanReference::Set(reference) => Some(reference.clone()),
                PlanReference::Keep | PlanReference::Clear => None,
            },
        })
    }

    pub(crate) fn not_ours(exit: Exit, error: String) -> Self {
        Self {
            error: Some(error),
            reported: false,
            ..Self::new(exit, Ending::NotReached)
        }
    }
}

/// How long sinks may take to receive the rest of the log.
const LOG_FLUSH: Duration = Duration::from_mins(1);
/// How long the store may take for the log: longer than its client repeats a request, so that the client can say why it
/// gave up.
const LOG_STORE: Duration = Duration::from_mins(6);
/// How long the last lines of a log can be read before the platform deletes it.
const READING_TIME: Duration = Duration::from_secs(3);

/// A report that so far says only whose it is.
pub(crate) fn identity(job: &JobData) -> FinalReport {
    FinalReport {
        job_id: job.job_id.clone(),
        step_id: job.step_id.clone(),
        step_type: job.step_type.clone(),
        ..FinalReport::default()
    }
}

/// A run of which nobody can be told.
pub(crate) fn unreported(job: &JobData, failure: &StepError) -> Ended {
    let result = StepResult::failed(failure);
    error!(
        error = result.error,
        hint = result.hint,
        "the step cannot run"
    );
    refused(job, result, false)
}

/// A run that could not even be opened: told to the platform if the document says where it belongs.
pub(crate) async fn refuse(
    config: &Config,
    connections: &Connections,
    job: &JobData,
    failure: &StepError,
    stop: &Stop,
) -> Ended {
    let result = StepResult::failed(failure);
    let again = result.exit == Exit::Infrastructure && config.run.outcome_exit_code;
    if !is_addressable(job) || config.run.disable_acknowledge || again {
        return unreported(job, failure);
    }
    error!(
        error = result.error,
        hint = result.hint,
        "the step cannot run"
    );
    match report_refusal(config, connections, job, result.error.clone(), stop).await {
        Ok(None) => refused(job, result, true),
        Ok(Some(not_ours)) => refused(job, not_ours, false),
        Err(error) => {
            error!(error = chain(&error), "the failure could not be reported");
            refused(job, result, false)
        }
    }
}

/// The platform takes reports once it has recorded the dispatch, and none of a job that is over. `Some` when the step is
/// somebody else's to report.
async fn report_refusal(
    config: &Config,
    connections: &Connections,
    job: &JobData,
    note: Option<String>,
    stop: &Stop,
) -> Result<Option<StepResult>, PlatformError> {
    let refused = &StepRef::of(job);
    let admission = tokio::select! {
        admission = connections.platform.start_permission(refused) => admission?,
        _ = stop.ordered() => return Ok(None),
    };
    if !matches!(admission, StartPermission::Granted(_)) {
        return Ok(None);
    }
    if let Some(not_ours) = preparation::claim_to_report(&connections.platform, config, job).await?
    {
        return Ok(Some(not_ours));
    }
    let outcome = Outcome {
        settlement: settlement::settle(StepType::Approval, Ending::NotReached, true, false, 1),
        output: None,
        note,
        plan: PlanReference::Keep,
        commit_id: Some(String::new()),
    };
    let budget = Budget::of(Budget::default_grace(StepType::Approval));
    let deadline = connections.deadline(stop, budget.report);
    connections
        .platform
        .report_outcome(refused, &outcome, &deadline)
        .await?;
    Ok(None)
}

fn refused(job: &JobData, result: StepResult, reported: bool) -> Ended {
    let report = FinalReport {
        outcome: result.exit.code(),
        unreported: !reported,
        error: result.error,
        hint: result.hint,
        ..identity(job)
    };
    Ended { report, reported }
}

/// Whether a document that is not usable at least says which step it is.
fn is_addressable(job: &JobData) -> bool {
    let plain = JobData {
        step_type: Some(StepType::Approval.name().to_owned()),
        ..job.clone()
    };
    plain.validate().is_ok()
}

/// The tail of every run: the log delivered and stored, the outcome reported, nothing left behind.
pub(crate) async fn conclude(mut run: RunContext<'_>, mut result: StepResult) -> Ended {
    let announcement = run.announcement.take();
    let RunContext {
        log,
        layout,
        timer,
        stop,
        budget,
        ..
    } = run;
    let flush = stop.deadline(LOG_FLUSH, budget.flush);
    let farewell = stop.deadline(FAREWELL, budget.flush);
    let silence = async {
        if let Some(announcement) = announcement {
            announcement.end(&farewell).await;
        }
    };
    let (summary, ()) = tokio::join!(log.finish_within(&flush), silence);
    let teller = Reporter {
        config: run.config,
        job: &run.job,
        step: &run.step,
        connections: &run.connections,
        platform: &run.connections.platform,
        store: &run.store,
        stop: &stop,
        budget,
        template_steps: run.view.get().map(|view| view.template_steps),
        reading_time: reading_time(&run.connections, &run.job, &stop),
    };
    let told = timer
        .time(
            Phase::Report,
            teller.report(&result, &summary.spool.path),
            Result::is_ok,
        )
        .await;
    if let Err(failure) = &told {
        error!(error = %failure, "the outcome could not be reported");
        result.error.get_or_insert_with(|| failure.to_string());
    }
    if let Err(failure) = layout.remove() {
        error!(
            error = chain(&failure),
            "the workspace could not be removed"
        );
    }
    // A claimed step is told to nobody: its holder reports it. A job that is over has been told.
    let known = told.is_ok() && (result.reported || result.exit == Exit::Done);
    let untold = if known {
        None
    } else {
        result.untold(run.job.ignore_error)
    };
    let report = FinalReport {
        outcome: result.exit.code(),
        unreported: !known,
        untold,
        error: result.error,
        hint: result.hint,
        stopped: result.stopped,
        tool: result.tool,
        commit_id: Some(result.commit_id).filter(|commit| !commit.is_empty()),
        changes: result.changes,
        progress: result.account.progress,
        state: result.account.state,
        lock: result.account.lock,
        phases: timer.timings(),
        lost_log_lines: summary
            .sinks
            .iter()
            .map(|sink| sink.lost)
            .max()
            .unwrap_or_default(),
        ..identity(&run.job)
    };
    Ended {
        report,
        reported: known,
    }
}

/// The remote client of CLI-driven runs reads the live log alone, which the platform deletes soon after the final
/// status (contract 7.5).
fn reading_time(connections: &Connections, job: &JobData, stop: &Stop) -> Duration {
    let is_read = job.is_remote_content() && connections.live_log(job).is_some();
    if is_read && stop.given().is_none() {
        READING_TIME
    } else {
        Duration::ZERO
    }
}

struct Reporter<'r> {
    config: &'r Config,
    job: &'r JobData,
    step: &'r StepRef,
    connections: &'r Connections,
    platform: &'r Platform,
    store: &'r Store,
    stop: &'r Stop,
    budget: Budget,
    /// As the platform said at the beginning, if it came to that.
    template_steps: Option<usize>,
    reading_time: Duration,
}

impl Reporter<'_> {
    async fn report(&self, result: &StepResult, log: &Path) -> Result<(), StepError> {
        // The log of a step another pod holds is that pod's to store.
        if !result.reported && result.exit != Exit::Infrastructure {
            return Ok(());
        }
        // The outcome matters more than the log: it is reported even when the log could not be stored.
        let (output, ()) =
            tokio::join!(self.log_in_time(log), tokio::time::sleep(self.reading_time));
        if !result.reported {
            return output.map(drop);
        }
        self.record_history(result).await;
        if !self.config.run.disable_acknowledge {
            // Only now, so that nothing before it is taken from it.
            let deadline = self.connections.deadline(self.stop, self.budget.report);
            let outcome = self
                .outcome(result, output.as_ref().ok(), &deadline)
                .await?;
            self.platform
                .report_outcome(self.step, &outcome, &deadline)
                .await?;
        }
        output?;
        Ok(())
    }

    async fn log_in_time(&self, log: &Path) -> Result<String, StepError> {
        let deadline = self.stop.deadline(LOG_STORE, self.budget.log);
        tokio::select! {
            biased;
            stored = self.store_log(log) => stored,
            () = deadline.over() => Err(StepError::infrastructure("the log could not be stored in time")),
        }
    }

    /// Stores the log behind what stands there already: why the step waited, and what an attempt before this one
    /// said. Where that cannot be read, this log is worth more.
    async fn store_log(&self, log: &Path) -> Result<String, StepError> {
        let key = output_key(self.job);
        let whole = log.with_extension("whole");
        let before = self.store.reference(&key);
        match self.store.fetch(&before, &whole).await {
            Ok(_) => {}
            Err(StoreError::Missing { .. }) => return Ok(self.store.put_file(&key, log).await?),
            Err(error) => {
                error!(
                    error = chain(&error),
                    "what the stored log began with is lost"
                );
                return Ok(self.store.put_file(&key, log).await?);
            }
        }
        append(log, &whole).map_err(|source| StepError::work_folder(&whole, source))?;
        Ok(self.store.put_file(&key, &whole).await?)
    }

    /// The state is where it belongs; a record that is missing takes nothing from how the step ended.
    async fn record_history(&self, result: &StepResult) {
        let Some(history) = &result.history else {
            return;
        };
        let deadline = self.connections.deadline(self.stop, self.budget.history);
        let recorded = self
            .platform
            .record_history(self.step, history, &deadline)
            .await;
        if let Err(error) = recorded {
            error!(
                error = chain(&error),
                "the published state could not be recorded"
            );
        }
    }

    async fn outcome(
        &self,
        result: &StepResult,
        output: Option<&String>,
        deadline: &Deadline,
    ) -> Result<Outcome, StepError> {
        let step_type = self.job.step_type()?;
        let settle = |template_steps| {
            let (ending, after_ok) = (result.ending, result.after_ok);
            settlement::settle(
                step_type,
                ending,
                after_ok,
                self.job.ignore_error,
                template_steps,
            )
        };
        let settlement = match self.template_steps {
            Some(steps) => settle(steps),
            // Most endings do not depend on the template.
            None if settle(1) == settle(2) => settle(1),
            None => {
                let view = self.platform.step_view(self.step, deadline).await?;
                settle(view.template_steps)
            }
        };
        Ok(Outcome {
            settlement,
            output: output.map(|stored| self.platform.step_output(self.step, stored.clone())),
            note: result.error.clone(),
            plan: result.plan.clone(),
            commit_id: Some(result.commit_id.clone()),
        })
    }
}

/// Adds `log` to what `whole` holds, which need not end with a line break.
fn append(log: &Path, whole: &Path) -> io::Result<()> {
    let mut file = File::options().read(true).append(true).open(whole)?;
    if file.metadata()?.len() > 0 {
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            file.write_all(b"\n")?;
        }
    }
    io::copy(&mut File::open(log)?, &mut file).map(drop)
}

pub(crate) fn output_key(job: &JobData) -> ObjectKey {
    ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_a_step_came_to_is_left_for_others_to_tell_if_it_was_done() {
        let place = "https://store/plan".to_owned();
        let failed = StepResult::failed(&StepError::panicked());
        assert_eq!(failed.untold(true), None);
        let done = |ending, plan| StepResult {
            plan,
            ..StepResult::new(Exit::Done, ending)
        };
        for (result, ending, plan) in [
            (
                done(Ending::Changes, PlanReference::Set(place.clone())),
                Ending::Changes,
                Some(place),
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
            let expected = Untold {
                ending,
                after_ok: true,
                ignore_error: true,
                plan,
            };
            assert_eq!(result.untold(true), Some(expected));
        }
    }

    #[test]
    fn what_was_there_before_stays_and_ends_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        fs::write(&log, "planned\n").unwrap();
        for (before, expected) in [
            ("it waits", "it waits\nplanned\n"),
            ("it waits\n", "it waits\nplanned\n"),
            ("", "planned\n"),
        ] {
            let whole = folder.path().join("whole");
            fs::write(&whole, before).unwrap();
            append(&log, &whole).unwrap();
            assert_eq!(fs::read_to_string(&whole).unwrap(), expected);
        }
    }
}
