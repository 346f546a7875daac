//! The subcommands of operators, which the feature `kubernetes` brings. Most need the Kubernetes client.

use std::process::ExitCode;

use agent::AgentArgs;
use clap::Subcommand;
use runtime::hardening::Hardened;

use crate::cache_command::CacheArgs;
use crate::kubernetes::commands::{
    self, CancelArgs, CheckArgs, ExplainArgs, LaunchArgs, ListArgs, LogsArgs, RenderArgs,
};
use crate::pool_command::PoolArgs;
use crate::serve;
use crate::serve::config::ServeArgs;

/// What to do with dispatches, and with runs in a cluster.
#[derive(Debug, Subcommand)]
pub enum KubernetesCommand {
    Serve(Box<ServeArgs>),
    Agent(Box<AgentArgs>),
    /// Print the Kubernetes objects a job document would become
    #[command(after_help = RENDER_NOTES)]
    Render(Box<RenderArgs>),
    /// Launch a job document as a run in the cluster
    #[command(after_help = LAUNCH_NOTES)]
    Launch(Box<LaunchArgs>),
    /// List the runs in the cluster
    List(ListArgs),
    /// Show the log of a run
    Logs(LogsArgs),
    /// Show the state of a run or why it ended, and how long each part took
    Explain(ExplainArgs),
    /// End a run
    Cancel(CancelArgs),
    /// Check whether runs would start in the cluster, and say what is missing
    Check(Box<CheckArgs>),
    /// Work with the packages of providers that runs share
    Cache(Box<CacheArgs>),
    /// Make tokens for the agents of pools
    Pool(Box<PoolArgs>),
}

impl KubernetesCommand {
    /// Whether the command needs the platform's secret, if one is configured.
    pub(crate) const fn needs_secret(&self) -> bool {
        matches!(self, Self::Serve(_) | Self::Check(_))
    }

    /// Does what the subcommand asks, and says how it ended.
    pub(crate) fn run(&self, hardened: &Hardened) -> ExitCode {
        let code = match self {
            Self::Serve(args) => serve::serve(args, hardened),
            Self::Agent(args) => agent::run(args, hardened, commands::show_agent),
            Self::Render(args) => commands::render(args).code(),
            Self::Launch(args) => commands::launch(args).code(),
            Self::List(args) => commands::list(args).code(),
            Self::Logs(args) => commands::logs(args).code(),
            Self::Explain(args) => commands::explain(args).code(),
            Self::Cancel(args) => commands::cancel(args).code(),
            Self::Check(args) => commands::check(args).code(),
            Self::Cache(args) => args.run().code(),
            Self::Pool(args) => args.run().code(),
        };
        ExitCode::from(code)
    }
}

const RENDER_NOTES: &str = "\
The list holds what would be created, and needs no cluster. What is created differs in this:
- The name of the Secret ends with 16 random digits instead of zeros, and the Secret names the Job as its owner.
- `serve` sets the Job's time to live to one day until the end is reported. The annotation `mayfly.dev/keep-seconds`
  has the configured time.
- With a queue of the cluster, the Job has the label `kueue.x-k8s.io/queue-name=none.mayfly.dev` until its Secret is
  stored. The annotation `mayfly.dev/queue` has the queue.
- Without a Secret, the Job may be released by the request that creates it, and then is not suspended.
The job data in the list is encoded, not encrypted: treat the output as the secret it is.

Example:
  api-launcher render -f job.json | kubectl apply --dry-run=server -f -";

const LAUNCH_NOTES: &str = "\
With --follow or --wait the exit code is the run's outcome; otherwise 0 means that the run is safe in the cluster.
Ctrl-C stops following, not the run. Launching the same job and step again makes no second run.

Example:
  api-launcher launch -f job.json --follow";
