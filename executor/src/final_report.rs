//! Writes the final report and determines the exit code. Programs of the run can write to the same file. So the report
//! names its author and has a seal.
//!
//! This module does not know the phases that led to the outcome.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use job_contract::report::{Author, FinalReport, ReportKey};
use job_contract::{Exit, JobData, env};
use nix::fcntl::OFlag;
use platform::report_key;
use runtime::handover;
use runtime::setting::SettingError;
use tracing::debug;

use crate::config::{Config, TERMINATION_LOG_PATH};
use crate::error::StepError;

/// A run that has ended: its final report, and whether the platform knows the outcome.
#[derive(Debug)]
pub(crate) struct FinishedRun {
    pub(crate) report: FinalReport,
    pub(crate) reported: bool,
}

impl FinishedRun {
    /// A run whose conclusion panicked. `identity` is the report with the identity of the step.
    pub(crate) fn panicked(identity: FinalReport) -> Self {
        let error = StepError::panicked();
        let report = FinalReport {
            outcome: error.exit().code(),
            unreported: true,
            error: Some(error.to_string()),
            ..identity
        };
        Self {
            report,
            reported: false,
        }
    }

    /// The exit code of the process. Some launchers repeat failed pods, so a reported outcome must not look like a
    /// failed pod (contract 11.1). An unreported outcome must not look like success, nor like `Infrastructure`, which
    /// would mean that a new start is safe.
    pub(crate) fn exit_code(&self, config: &Config) -> u8 {
        if self.reported && !config.run.outcome_exit_code {
            Exit::Done.code()
        } else if !self.reported && self.report.outcome == Exit::Done.code() {
            Exit::StepFailed.code()
        } else {
            self.report.outcome
        }
    }
}

/// A report that contains only the identity of the step.
pub(crate) fn identify(job: &JobData) -> FinalReport {
    FinalReport {
        job_id: job.job_id.clone(),
        step_id: job.step_id.clone(),
        step_type: job.step_type.clone(),
        ..FinalReport::default()
    }
}

/// The author of the process's final report.
#[derive(Debug)]
pub(crate) struct ReportWriter {
    key: Option<ReportKey>,
    run: String,
}

impl ReportWriter {
    /// Reads the key and the identity of the run from the environment.
    pub(crate) fn from_environment() -> Result<Self, SettingError> {
        let key = report_key::from_lookup(handover::var)?;
        Ok(Self {
            key,
            ..Self::unsigned()
        })
    }

    /// A writer without a key, for the case that no key can be used.
    pub(crate) fn unsigned() -> Self {
        // A pod sets the first variable, a launcher on one machine the second.
        let run = [env::POD_UID, env::RUN_MARK]
            .into_iter()
            .filter_map(|name| std::env::var(name).ok())
            .find(|text| !text.is_empty());
        Self {
            key: None,
            run: run.unwrap_or_default(),
        }
    }

    /// Writes the report of a process that ends with `exit_code`. Kubernetes provides the default path in every
    /// container. Elsewhere it does not exist, which is no error.
    pub(crate) fn write(&self, path: &Path, report: FinalReport, exit_code: u8) {
        let report = FinalReport {
            author: Some(Author {
                run: self.run.clone(),
                exit_code,
            }),
            ..report
        };
        let message = report.to_termination_message(self.key.as_ref());
        if let Err(error) = write_file(path, &message) {
            debug!(%error, path = %path.display(), "the termination message could not be written");
        }
    }
}

/// Writes the termination message. This does not block: code of the run may have put a FIFO there that no process reads.
pub(crate) fn write_file(path: &Path, message: &str) -> io::Result<()> {
    File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)?
        .write_all(message.as_bytes())
}

/// Where the report is written if the settings could not be read.
pub(crate) fn default_path() -> PathBuf {
    std::env::var_os(env::TERMINATION_LOG)
        .filter(|path| !path.is_empty())
        .map_or_else(|| TERMINATION_LOG_PATH.into(), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn a_run_that_panicked_leaves_its_report_to_others() {
        let job = JobData {
            job_id: "7".into(),
            ..JobData::default()
        };
        let finished = FinishedRun::panicked(identify(&job));
        assert!(!finished.reported && finished.report.unreported);
        assert_eq!(finished.report.outcome, Exit::Defect.code());
        assert_eq!(finished.report.job_id, "7");
    }

    #[test]
    fn a_pipe_without_a_reader_does_not_block_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report");
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        assert!(write_file(&path, "{}").is_err());
        let path = folder.path().join("file");
        write_file(&path, "a longer report").unwrap();
        write_file(&path, "{}").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "{}");
    }
}
