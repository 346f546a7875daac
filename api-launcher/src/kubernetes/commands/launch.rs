//! `launch`: starts a run from a job document, and can follow it to its end.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use cluster::job_settings::DeploymentArgs;
use cluster::{Cluster, ClusterError, LogLine, RunRef, Submitted};
use futures_util::{StreamExt as _, stream};
use job_contract::{Exit, env};
use serde_json::json;
use verdict::{Verdict, VerdictKind, Wait};

use super::output::Output;
use super::{AccessArgs, ShowArgs, build, logs, not_started};
use crate::failure::Failure;

/// The pause between two looks at a run.
const LOOK: Duration = Duration::from_secs(1);
/// SIGINT.
const INTERRUPT: u8 = 2;

/// What is launched, and how long it is stayed with.
#[derive(Args, Debug)]
pub struct LaunchArgs {
    /// Job document to launch, JSON or encoded; `-` reads standard input
    #[arg(short, long, value_name = "JOB")]
    pub file: PathBuf,
    /// Show the run's log until it is over, and end with its outcome
    #[arg(long)]
    pub follow: bool,
    /// Wait until the run is over, and end with its outcome
    #[arg(long)]
    pub wait: bool,
    #[command(flatten)]
    pub access: AccessArgs,
    #[command(flatten)]
    pub show: ShowArgs,
    /// Base URL of the platform's API, as the launcher that serves has it
    #[arg(long, value_name = "URL", env = env::API_URL)]
    pub api_url: Option<String>,
    #[command(flatten)]
    pub deployment: DeploymentArgs,
}

pub(super) async fn launch(args: &LaunchArgs, out: &mut Output) -> Result<Exit, Failure> {
    let api_url = args.api_url.as_deref();
    let (deployment, manifest) = build(&args.file, &args.deployment, api_url, out)?;
    let key = RunRef::of(&manifest.job.metadata).ok_or(ClusterError::Incomplete("labels"))?;
    let cluster = args.access.connect(&deployment.namespace).await?;
    let submitted = cluster.submit(&manifest).await?;
    announce(&key, submitted, out)?;
    if !args.follow && !args.wait {
        return Ok(Exit::Done);
    }
    tokio::select! {
        end = stay(&cluster, &key, args.follow, out) => return end,
        interrupted = tokio::signal::ctrl_c() => interrupted.map_err(not_started)?,
    }
    out.note(&left_behind(&key));
    Ok(Exit::Signal(INTERRUPT))
}

fn announce(key: &RunRef, submitted: Submitted, out: &mut Output) -> Result<(), Failure> {
    let (word, sentence) = match submitted {
        Submitted::Created => ("created", "launched"),
        Submitted::AlreadyThere => ("already_there", "was launched before"),
    };
    if out.json {
        return out.print_json_line(&json!({
            "type": "submitted", "jobId": key.job_id, "stepId": key.step_id, "name": key.name,
            "result": word,
        }));
    }
    out.note(&format!("{key}: {sentence} as {}", key.name));
    Ok(())
}

fn left_behind(key: &RunRef) -> String {
    let name = &key.name;
    format!(
        "The run goes on. `api-launcher logs {name} -f` follows it again, `api-launcher cancel {name}` ends it."
    )
}

/// Follows the run until it is over.
pub(super) async fn stay(
    cluster: &Cluster,
    key: &RunRef,
    follow: bool,
    out: &mut Output,
) -> Result<Exit, Failure> {
    let log = follow.then(|| cluster.logs(&key.name, true));
    let mut lines = stream::iter(log).flatten().boxed().fuse();
    let mut told: Option<String> = None;
    let mut ticks = tokio::time::interval(LOOK);
    let sighting = loop {
        tokio::select! {
            Some(line) = lines.next() => show(line, out)?,
            _ = ticks.tick() => match look(cluster, key).await? {
                Sighting::Waiting(wait) => tell(wait, &mut told, out)?,
                Sighting::Running => {}
                end => break end,
            },
        }
    };
    let Sighting::Ended(verdict) = sighting else {
        return gone(out);
    };
    // Lines from before the end are shown before the verdict. A run that was given up may still print lines.
    while verdict.job_over
        && let Some(line) = lines.next().await
    {
        show(line, out)?;
    }
    conclude(&verdict, out)
}

enum Sighting {
    Waiting(Wait),
    Running,
    Ended(Box<Verdict>),
    Gone,
}

async fn look(cluster: &Cluster, key: &RunRef) -> Result<Sighting, Failure> {
    let explanation = match cluster.explain(&key.name).await {
        Ok(explanation) => explanation,
        // The run continues without this command. The next look starts here.
        Err(error) if error.is_transient() => return Ok(Sighting::Running),
        Err(ClusterError::NoSuchRun(_)) => return Ok(Sighting::Gone),
        Err(error) => return Err(error.into()),
    };
    Ok(match (explanation.verdict, explanation.wait) {
        (Some(verdict), _) => Sighting::Ended(Box::new(verdict)),
        (None, Some(wait)) => Sighting::Waiting(wait),
        (None, None) => Sighting::Running,
    })
}

fn tell(wait: Wait, told: &mut Option<String>, out: &mut Output) -> Result<(), Failure> {
    if !wait.reason.is_news() || told.as_ref() == Some(&wait.sentence) {
        return Ok(());
    }
    if out.json {
        out.print_json_line(&json!({"type": "waiting", "wait": wait}))?;
    } else {
        out.note(&wait.sentence);
    }
    *told = Some(wait.sentence);
    Ok(())
}

/// An unreadable log ends neither the run nor the wait for it.
fn show(line: Result<LogLine, ClusterError>, out: &mut Output) -> Result<(), Failure> {
    let line = match line {
        Ok(line) => line,
        Err(error) => {
            out.warn(&error.to_string());
            return Ok(());
        }
    };
    if out.json {
        return out.print_json_line(&json!({"type": "log", "at": line.at, "text": line.text}));
    }
    if let Some(text) = logs::shown(&line.text, false, out.paint) {
        out.print(&(text + "\n"));
    }
    Ok(())
}

/// The Job was deleted, so the end of the run is unknown.
fn gone(out: &mut Output) -> Result<Exit, Failure> {
    if out.json {
        out.print_json_line(&json!({"type": "gone"}))?;
    } else {
        out.note("The run's Job is gone: it was cancelled, or deleted by somebody else.");
    }
    Ok(VerdictKind::Deleted.outcome())
}

fn conclude(verdict: &Verdict, out: &mut Output) -> Result<Exit, Failure> {
    if out.json {
        out.print_json_line(&json!({"type": "ended", "verdict": verdict}))?;
    } else {
        out.note(&verdict.sentence);
        if let Some(advice) = &verdict.advice {
            out.note(advice);
        }
    }
    Ok(verdict.outcome)
}
