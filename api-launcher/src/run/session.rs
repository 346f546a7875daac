//! What the steps of one run share, and how one of them is carried out: record, executor, outcome.

use std::path::PathBuf;
use std::time::Instant;

use data_dir::{DataDir, WorkFolder, WorkspaceLock};
use job_contract::status::{JobStatus, StepStatus};
use job_contract::{Document, Exit, JobData, chain};
use nix::sys::signal::Signal;
use platform::StepRef;
use platform::local::{JobRecord, LocalPlatform, StepRecord};
use processes::environment::{self, Platform, Setup};
use processes::executor::{self, Program, tree};
use runtime::tree_removal;

use super::artifacts;
use super::event::{Event, StepSummary};
use super::follow::Running;
use super::signals::Signals;
use super::view::View;
use crate::failure::Failure;

/// A run that has its job and its place on this machine.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    pub(crate) view: &'a mut View,
    pub(crate) signals: &'a mut Signals,
    pub(crate) program: Program,
    pub(crate) data: DataDir,
    pub(crate) platform: LocalPlatform,
    pub(crate) work: WorkFolder,
    pub(crate) color: bool,
    /// The names of the variables that the executor, its tool and its scripts get too.
    forwarded: Vec<String>,
    /// Kept until the run is over.
    _lock: WorkspaceLock,
    steps_run: usize,
}

#[derive(Debug)]
pub(crate) struct StepOutcome {
    pub(crate) exit: Exit,
    pub(crate) record: JobRecord,
    pub(crate) error: Option<String>,
    pub(crate) hint: Option<String>,
    /// The signal that stopped it, if one did.
    pub(crate) stopped_by: Option<Signal>,
}

impl<'a> Session<'a> {
    /// Takes hold of a workspace and a place to work. `data` exists.
    pub(crate) fn open(
        view: &'a mut View,
        signals: &'a mut Signals,
        program: Program,
        data: DataDir,
        ids: JobIds<'_>,
        color: bool,
    ) -> Result<Self, Failure> {
        let forwarded =
            environment::forwarded(|name| std::env::var_os(name)).map_err(|error| vec![error])?;
        let lock = data.lock_workspace(ids.organization, ids.workspace)?;
        let work = data.work_folder(ids.job)?;
        view.enter_job(ids.job);
        Ok(Self {
            platform: LocalPlatform::new(data.path()),
            view,
            signals,
            program,
            data,
            work,
            color,
            forwarded,
            _lock: lock,
            steps_run: 0,
        })
    }

    /// Queues a step in the job's record, as the platform does before it dispatches one. The record is made
    /// when the job has none.
    pub(crate) fn queue(&self, job: &JobData) -> Result<(), Failure> {
        self.platform.update_progress(&StepRef::of(job), |record| {
            record.status = JobStatus::Queue;
            if record.step(&job.step_id).is_none() {
                record.steps.push(pending(job));
            }
        })?;
        Ok(())
    }

    /// Runs the step, shows what happens, and tells how it ended.
    pub(crate) async fn run_step(&mut self, job: &Document) -> Result<StepOutcome, Failure> {
        let started = Instant::now();
        self.steps_run += 1;
        self.view.enter_step(Some(&job.step_id));
        self.view.show(Event::StepStarted {
            step_type: job.step_type.clone().unwrap_or_default(),
        });
        let path = self.work.join(format!("report-{}", self.steps_run));
        let ended = self.run_executor(job, path.clone()).await?;
        let report = artifacts::final_report(&path).unwrap_or_default();
        let (exit, complaint) = executor::judge(ended);
        let record = self.record_outcome(job, exit)?;
        let error = explain(exit, ended.stopped_by, report.error.clone().or(complaint));
        self.view.show(Event::StepFinished(StepSummary {
            status: artifacts::step_status(&record, &job.step_id),
            exit_code: exit.code(),
            duration_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
            changes: report.changes,
            tool: report.tool,
            plan_path: artifacts::plan_path(self.data.path(), job),
            log_path: artifacts::log_path(self.data.path(), job),
            state_path: artifacts::state_path(self.data.path(), job),
            error: error.clone(),
            hint: report.hint.clone(),
        }));
        let outputs = artifacts::outputs(&self.platform, job)?;
        if !outputs.is_empty() {
            self.view.show(Event::Outputs { outputs });
        }
        self.view.enter_step(None);
        Ok(StepOutcome {
            exit,
            record,
            error,
            hint: report.hint,
            stopped_by: ended.stopped_by,
        })
    }

    async fn run_executor(
        &mut self,
        job: &Document,
        report: PathBuf,
    ) -> Result<executor::Ended, Failure> {
        let name = format!("step-{}", self.steps_run);
        let work_dir = self.work.subfolder(&name)?;
        let setup = Setup {
            data_dir: self.data.path(),
            work_dir: &work_dir,
            report: &report,
            color: self.color,
            report_key: None,
            platform: Platform::Machine(&self.forwarded),
            structured_output: false,
        };
        let environment = environment::build(&setup, job, |name| std::env::var_os(name));
        let running = Running::start(&self.program, environment)?;
        if let Err(error) = self.work.note_executor(running.group()) {
            // The executor runs already, and only a later run would read the note.
            self.view.show(Event::warning(chain(&error)));
        }
        let copies = artifacts::errored_paths(self.data.path(), job);
        let ended = running.follow(self.view, self.signals, &copies).await;
        tree::kill_leftovers(&work_dir).await;
        // The executor removes it itself unless it was killed; what is left goes with the whole folder.
        let _ = tree_removal::remove(&work_dir);
        Ok(ended?)
    }

    /// The record after the step. An executor that failed to speak for itself is spoken for, so that no job
    /// is left running for ever.
    fn record_outcome(&self, job: &JobData, exit: Exit) -> Result<JobRecord, Failure> {
        let has_ended = |record: &JobRecord| {
            record.step(&job.step_id).is_some_and(|step| {
                !matches!(step.status, StepStatus::Pending | StepStatus::Running)
            })
        };
        let text = "the executor ended without a report of the step's outcome";
        let no_outcome = || Failure::new(Exit::Defect, text);
        let read = || self.platform.job(&job.job_id)?.ok_or_else(no_outcome);
        let record = read()?;
        if has_ended(&record) || exit == Exit::Claimed {
            return Ok(record);
        }
        if exit == Exit::Done {
            return Err(no_outcome());
        }
        self.platform.update_job(&StepRef::of(job), |record| {
            let step = record.steps.iter_mut().find(|step| step.id == job.step_id);
            if let Some(step) = step
                && matches!(step.status, StepStatus::Pending | StepStatus::Running)
            {
                step.status = StepStatus::Failed;
                if !record.status.is_over() {
                    record.status = JobStatus::Failed;
                }
            }
        })?;
        read()
    }

    /// Ends a job whose remaining steps are not going to run.
    pub(crate) fn close(&self, job: &JobData, status: JobStatus) -> Result<(), Failure> {
        self.platform.update_job(&StepRef::of(job), |record| {
            record.status = status;
            for step in &mut record.steps {
                if step.status == StepStatus::Pending {
                    step.status = StepStatus::NotExecuted;
                }
            }
        })?;
        Ok(())
    }
}

/// Why a step is not done. Whoever stopped the run is told by the signal they sent, not by the one the executor
/// was sent for it.
fn explain(exit: Exit, stopped_by: Option<Signal>, said: Option<String>) -> Option<String> {
    match (exit, stopped_by) {
        (Exit::Done, _) => None,
        (_, Some(signal)) => Some(format!(
            "stopped by {} before the step was done",
            signal.as_str()
        )),
        (_, None) => Some(said.unwrap_or_else(|| exit.to_string())),
    }
}

/// Whom a run belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobIds<'a> {
    pub(crate) organization: &'a str,
    pub(crate) workspace: &'a str,
    pub(crate) job: &'a str,
}

/// A step that has not run, as the record holds it.
pub(crate) fn pending(job: &JobData) -> StepRecord {
    StepRecord::pending(&job.step_id, job.step_type.as_deref().unwrap_or_default())
}
