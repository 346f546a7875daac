//! Writes into the output of a step on behalf of its executor.

use std::path::Path;

use platform::StepRef;

use super::{PlatformReporter, ReportError, step_output};

/// Where the rest of a step's log is.
#[derive(Clone, Copy, Debug)]
pub(super) enum LogSource<'p> {
    /// In the output already.
    Stored,
    /// In the live log, and in the file of what the container printed.
    Live(Option<&'p Path>),
}

impl dyn PlatformReporter + '_ {
    /// Replaces the part of the output that lacks some of what the container printed, and adds the line behind it.
    pub async fn restore_log(
        &self,
        step: &StepRef,
        container: &Path,
        line: Option<&str>,
    ) -> Result<(), ReportError> {
        let Some(outputs) = self.outputs() else {
            return Ok(());
        };
        let (container, line) = (container.to_owned(), line.map(str::to_owned));
        let change = move |output: &Path| step_output::restore(output, &container, line.as_deref());
        outputs.edit(step).await?.store(change).await.map(drop)
    }

    /// Adds a line to the output of a step that has its outcome.
    pub async fn append_line(&self, step: &StepRef, line: &str) -> Result<(), ReportError> {
        self.write_output(step, line, LogSource::Stored)
            .await
            .map(drop)
    }

    /// Adds the rest of the log and a line to the output. Returns the platform's name of the output, or `None` without a
    /// store.
    pub(super) async fn write_output(
        &self,
        step: &StepRef,
        line: &str,
        source: LogSource<'_>,
    ) -> Result<Option<String>, ReportError> {
        let Some(outputs) = self.outputs() else {
            return Ok(None);
        };
        let line = line.to_owned();
        let edit = outputs.edit(step).await?;
        let stored = match source {
            LogSource::Stored => {
                let change = move |output: &Path| step_output::add_line(output, &line);
                edit.store(change).await?
            }
            LogSource::Live(container) => {
                let container = container.map(Path::to_owned);
                let latest = edit.beside("live");
                let copied = self.copy_live_log(step, &latest).await;
                copied.map_err(ReportError::Draft)?;
                let change = move |output: &Path| {
                    if let Some(container) = container {
                        step_output::restore(&latest, &container, None)?;
                    }
                    step_output::complete(output, &latest, &line)
                };
                edit.store(change).await?
            }
        };
        Ok(Some(self.platform().step_output(step, stored)))
    }
}
