//! `logs`: prints the log of a run. A pod has one log for the executor's two streams. The executor's own messages are
//! separated from the lines of the run, and only the important ones are shown.

use clap::Args;
use cluster::{Cluster, LogLine};
use futures_util::StreamExt as _;
use job_contract::Exit;
use job_contract::progress::Diagnostic;

use super::output::Output;
use super::{ClusterArgs, ShowArgs, select};
use crate::failure::Failure;
use crate::terminal::paint::Paint;
use crate::terminal::text::{self, plain};

/// Which run, and how much of it.
#[derive(Args, Debug)]
pub struct LogsArgs {
    /// Job id, `job/step`, or the name of the run's Job
    pub run: String,
    /// Follow the log until the run is over
    #[arg(short, long)]
    pub follow: bool,
    /// Show the executor's own messages too, as they are
    #[arg(long)]
    pub raw: bool,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(flatten)]
    pub show: ShowArgs,
}

pub(super) async fn logs(
    args: &LogsArgs,
    cluster: &Cluster,
    out: &mut Output,
) -> Result<Exit, Failure> {
    let run = select::find(cluster, &args.run).await?;
    let mut lines = std::pin::pin!(cluster.logs(&run.key.name, args.follow));
    let mut any = false;
    while let Some(line) = lines.next().await {
        any = true;
        show(&line?, args.raw, out)?;
        if !out.is_open() {
            return Ok(Exit::Done);
        }
    }
    if !any {
        let why = run.sentence.unwrap_or_default();
        out.note(format!("{} has no log. {why}", run.key.name).trim_end());
    }
    Ok(Exit::Done)
}

fn show(line: &LogLine, raw: bool, out: &mut Output) -> Result<(), Failure> {
    if out.json {
        return out.print_json_line(line);
    }
    if let Some(text) = shown(&line.text, raw, out.paint) {
        out.print(&(text + "\n"));
    }
    Ok(())
}

/// Returns the line for people. `None`: it is not shown.
pub(super) fn shown(line: &str, raw: bool, paint: Paint) -> Option<String> {
    // The tool's own JSON has no target.
    let own = Diagnostic::parse(line).filter(|own| !own.target.is_empty());
    if let Some(own) = own.filter(|_| !raw) {
        return match own.level.as_str() {
            "ERROR" => Some(format!("{} {}", paint.red("error:"), plain(&own.message))),
            "WARN" => Some(format!(
                "{} {}",
                paint.yellow("warning:"),
                plain(&own.message)
            )),
            _ => None,
        };
    }
    Some(text::shown(line, paint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("\u{1b}[32mApply complete\u{1b}[0m", Some("Apply complete"))]
    #[case(
        r#"{"level":"INFO","target":"mayfly::progress","event":"phase_started"}"#,
        None
    )]
    #[case(
        r#"{"level":"WARN","target":"executor","message":"slow"}"#,
        Some("warning: slow")
    )]
    #[case(
        r#"{"level":"info","msg":"a script"}"#,
        Some(r#"{"level":"info","msg":"a script"}"#)
    )]
    fn lines_of_the_run_differ_from_the_executors_diagnostics(
        #[case] line: &str,
        #[case] expected: Option<&str>,
    ) {
        assert_eq!(shown(line, false, Paint { on: false }).as_deref(), expected);
        assert!(shown(line, true, Paint { on: false }).is_some());
    }
}
