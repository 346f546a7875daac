//! The last phase of every run: delivers and stores the log, reports the outcome, and removes the workspace.
//!
//! This module knows how a step ended, but not why.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::Duration;

use artifact_store::{Store, StoreError};
use job_contract::final_statuses::FinalStatuses;
use job_contract::progress::Phase;
use job_contract::report::FinalReport;
use job_contract::{Exit, JobData, chain};
use platform::{Outcome, Platform, StepRef};
use runtime::Deadline;
use tracing::error;

use crate::config::Config;
use crate::connections::Connections;
use crate::context::{RunContext, output_key};
use crate::error::{StepError, catch_panic};
use crate::final_report::{FinishedRun, identify};
use crate::running_report::LAST_ATTEMPT_TIMEOUT;
use crate::step_result::StepResult;
use crate::stop::{Budget, Stop};
use crate::store_watch::StoreWatch;

/// Timeout of the sinks for the rest of the log.
const LOG_FLUSH_TIMEOUT: Duration = Duration::from_mins(1);
/// Timeout of the store for the log. It is longer than the retries of the store's client, so that the client can report
/// why it gave up.
const LOG_STORE_TIMEOUT: Duration = Duration::from_mins(6);
/// The time that readers have for the last lines of a log before the platform deletes it.
const READING_TIME: Duration = Duration::from_secs(3);

/// Ends a run: delivers and stores its log, reports the outcome, and removes its folders.
pub(crate) async fn conclude(mut run: RunContext<'_>, mut result: StepResult) -> FinishedRun {
    let start_report_retry = run.start_report_retry.take();
    let store_watch = run.store_watch.take();
    let RunContext {
        log,
        layout,
        timer,
        stop,
        budget,
        ..
    } = run;
    // Whatever has failed may have named what the run was given.
    let redactor = log.redactor();
    for text in [&mut result.error, &mut result.hint].into_iter().flatten() {
        *text = redactor.redact(text).into_owned();
    }
    let flush = stop.deadline(LOG_FLUSH_TIMEOUT, budget.flush);
    let last_attempt = stop.deadline(LAST_ATTEMPT_TIMEOUT, budget.flush);
    let end_repetition = async {
        if let Some(start_report_retry) = start_report_retry {
            start_report_retry.end(&last_attempt).await;
        }
    };
    if let Some(store_watch) = store_watch {
        tokio::select! {
            () = store_watch.end() => {}
            () = flush.over() => {}
        }
    }
    // The log ends now, so that later failures are only in the diagnostics.
    let _store_watch = StoreWatch::start(&run.store, log.writer());
    let (summary, ()) = tokio::join!(log.finish_within(&flush), end_repetition);
    let reporter = Reporter {
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
    let delivered = timer
        .time(
            Phase::Report,
            catch_panic(reporter.report(&result, &summary.spool.path)),
            Result::is_ok,
        )
        .await;
    if let Err(failure) = &delivered {
        error!(error = %failure, "the outcome could not be reported");
        result.error.get_or_insert_with(|| failure.to_string());
    }
    if let Err(failure) = layout.remove() {
        error!(error = %failure, "the workspace could not be removed");
    }
    // Only the holder of a claim must report the outcome. The platform already has the outcome of a job that is over.
    let is_reported = delivered.is_ok() && (result.must_report || result.exit == Exit::Done);
    let lost = summary.sinks.iter().map(|sink| sink.lost).max();
    FinishedRun {
        report: FinalReport {
            phases: timer.timings(),
            wanted: run.wanted.names(),
            lost_log_lines: lost.unwrap_or_default(),
            ..final_report(&run.job, result, is_reported)
        },
        reported: is_reported,
    }
}

fn final_report(job: &JobData, result: StepResult, reported: bool) -> FinalReport {
    let outcome_for_others = if reported {
        None
    } else {
        result.outcome_for_others(job.ignore_error)
    };
    FinalReport {
        outcome: result.exit.code(),
        unreported: !reported,
        unreported_step: outcome_for_others,
        error: result.error,
        hint: result.hint,
        stopped: result.stopped,
        tool: result.tool,
        commit_id: Some(result.commit_id).filter(|commit| !commit.is_empty()),
        changes: result.changes,
        progress: result.details.progress,
        state: result.details.state,
        lock: result.details.lock,
        ..identify(job)
    }
}

/// The remote client of CLI-driven runs reads only the live log. The platform deletes the live log soon after the final
/// status (contract 7.5). Content on this machine comes from no such client.
fn reading_time(connections: &Connections, job: &JobData, stop: &Stop) -> Duration {
    let source = job.source.as_deref().unwrap_or_default();
    let is_of_this_machine = source.starts_with('/') || source.starts_with("file:");
    let is_from_a_client = job.is_remote_content() && !is_of_this_machine;
    let is_read = is_from_a_client && connections.live_log(job, stop).is_some();
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
    /// From the step view at the start of the run, if there is one.
    template_steps: Option<usize>,
    reading_time: Duration,
}

impl Reporter<'_> {
    async fn report(&self, result: &StepResult, log: &Path) -> Result<(), StepError> {
        // If another pod holds the step, that pod stores the log.
        if !result.must_report && result.exit != Exit::Infrastructure {
            return Ok(());
        }
        // The outcome matters more than the log. So the outcome is reported even if the log could not be stored.
        let (output, ()) = tokio::join!(
            self.store_log_in_time(log),
            tokio::time::sleep(self.reading_time)
        );
        if !result.must_report {
            return output.map(drop);
        }
        self.record_history(result).await;
        if !self.config.run.disable_acknowledge {
            // The deadline starts now, so that the steps before do not use up its time.
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

    async fn store_log_in_time(&self, log: &Path) -> Result<String, StepError> {
        let deadline = self.stop.deadline(LOG_STORE_TIMEOUT, self.budget.log);
        tokio::select! {
            biased;
            stored = self.store_log(log) => stored,
            () = deadline.over() => Err(StepError::infrastructure("the log could not be stored in time")),
        }
    }

    /// Appends the log to the one that is already stored: why the step waited, and the log of earlier attempts. If the
    /// stored log cannot be read, it is replaced, because this log is worth more. While the store does not answer, nobody
    /// knows what is stored, so nothing is replaced.
    async fn store_log(&self, log: &Path) -> Result<String, StepError> {
        let key = output_key(self.job);
        let whole = log.with_extension("whole");
        let before = self.store.reference(&key).await?;
        match self.store.fetch(&before, &whole).await {
            Ok(_) => {}
            Err(StoreError::Missing { .. }) => return Ok(self.store.put_file(&key, log).await?),
            Err(error @ StoreError::Unavailable { .. }) => return Err(error.into()),
            Err(error) => {
                error!(
                    error = chain(&error),
                    "the earlier log cannot be read, and is replaced"
                );
                return Ok(self.store.put_file(&key, log).await?);
            }
        }
        append(log, &whole).map_err(|source| {
            StepError::work_folder("could not add the log to", &whole, &source)
        })?;
        Ok(self.store.put_file(&key, &whole).await?)
    }

    /// An error is only logged: the state is stored, and a missing record does not change the outcome of the step.
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
        let statuses_with = |template_steps| {
            let (ending, after_ok) = (result.ending, result.after_ok);
            FinalStatuses::of(
                step_type,
                ending,
                after_ok,
                self.job.ignore_error,
                template_steps,
            )
        };
        let statuses = match self.template_steps {
            Some(steps) => statuses_with(steps),
            // Most endings do not depend on the template.
            None if statuses_with(1) == statuses_with(2) => statuses_with(1),
            None => {
                let view = self.platform.step_view(self.step, deadline).await?;
                statuses_with(view.template_steps)
            }
        };
        Ok(Outcome {
            statuses,
            output: output.map(|stored| self.platform.step_output(self.step, stored.clone())),
            note: result.error.clone(),
            plan: result.plan.clone(),
            commit_id: Some(result.commit_id.clone()),
        })
    }
}

/// Appends `log` to `whole`, which may lack a final line break.
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_earlier_log_stays_and_its_last_line_is_ended() {
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
