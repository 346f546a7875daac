//! Writes into the output of a step on behalf of its executor.

use std::fs;
use std::path::{Path, PathBuf};

use platform::StepRef;

use super::{PlatformReporter, ReportError, step_output};

/// Where the rest of a step's log is.
#[derive(Clone, Copy, Debug)]
pub(super) enum LogSource<'p> {
    /// In the output already.
    Stored,
    /// In a file.
    File(&'p Path),
    /// In the live log, and in the file of what the container printed.
    Live(Option<&'p Path>),
}

impl dyn PlatformReporter + '_ {
    /// Replaces the part of the output that lacks some of what the container printed, and adds the line behind it.
    pub(crate) async fn restore_log(
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
        outputs.change(step, change).await.map(drop)
    }

    /// Adds a line to the output of a step that has its outcome.
    pub(crate) async fn append_line(&self, step: &StepRef, line: &str) -> Result<(), ReportError> {
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
        let stored = match source {
            LogSource::Stored => {
                let change = move |output: &Path| add_live_log(output, &[], None, &line);
                outputs.change(step, change).await?
            }
            LogSource::File(log) => {
                let log = log.to_owned();
                let change = move |output: &Path| {
                    step_output::complete(output, &log, step_output::Scope::Start, &line)
                };
                outputs.change(step, change).await?
            }
            LogSource::Live(container) => {
                let container = container.map(Path::to_owned);
                let shown = self.live_log(step).await;
                let change = move |output: &Path| add_live_log(output, &shown, container, &line);
                outputs.change(step, change).await?
            }
        };
        Ok(Some(self.platform().step_output(step, stored)))
    }
}

/// Adds what the live log and the container have to the output.
fn add_live_log(
    output: &Path,
    shown: &[u8],
    container: Option<PathBuf>,
    line: &str,
) -> std::io::Result<()> {
    let latest = output.with_extension("live");
    fs::write(&latest, shown)?;
    if let Some(container) = container {
        step_output::restore(&latest, &container, None)?;
    }
    step_output::complete(output, &latest, step_output::Scope::Step, line)
}
