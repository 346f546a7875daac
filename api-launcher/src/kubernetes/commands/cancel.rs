//! `cancel`: ends a run, and prints the result.

use std::time::Duration;

use clap::Args;
use cluster::{Cancelled, Cluster};
use job_contract::Exit;
use serde_json::json;

use super::output::Output;
use super::{ClusterArgs, ShowArgs, select};
use crate::failure::Failure;

/// Which run, and how gently.
#[derive(Args, Debug)]
pub struct CancelArgs {
    /// Job id, `job/step`, or the name of the run's Job
    pub run: String,
    /// Wait so long for a started run to end by itself before its pod is stopped (30s, 2m)
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "0s")]
    pub grace: Duration,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(flatten)]
    pub show: ShowArgs,
}

pub(super) async fn cancel(
    args: &CancelArgs,
    cluster: &Cluster,
    out: &mut Output,
) -> Result<Exit, Failure> {
    let run = select::find(cluster, &args.run).await?;
    let done = cluster.cancel(&run.key.name, args.grace).await?;
    let (word, sentence) = match done {
        Cancelled::BeforeStart => (
            "cancelled_before_start",
            "cancelled before its executor started; nothing was changed.",
        ),
        Cancelled::Stopping => (
            "stopping",
            "its executor is being stopped. It has the grace period of its pod to end the tool and to store the state.",
        ),
        Cancelled::AlreadyOver => ("already_over", "was over already; nothing was done."),
    };
    let key = &run.key;
    if out.json {
        out.print_json(&json!({
            "jobId": key.job_id, "stepId": key.step_id, "name": key.name, "result": word,
        }))?;
    } else {
        out.print(&format!("{}: {sentence}\n", key.name));
    }
    Ok(Exit::Done)
}
