//! The command line of `api-launcher agent`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use cluster::settings::KubernetesArgs;
use http_service::diagnostics::TelemetryArgs;
use job_contract::env;
use runtime::handover;
use runtime::setting::SettingError;

use super::config::args::SettingsArgs;
use super::config::{Settings, file};
use super::configure::ConfigureArgs;

/// Take tasks of a pool from a hub, and run them here.
///
/// The agent needs outgoing connections to the hub only, and no secret of the platform. Its settings come from options, over
/// the environment, over `mayfly-agent.yaml`. The file is looked for in the current folder, `$HOME`, `/etc` and beside this
/// program; the keys are the names of the options, with `_` for `-`.
#[derive(Args, Clone, Debug, Default)]
#[command(after_help = NOTES)]
pub struct AgentArgs {
    #[command(subcommand)]
    command: Option<AgentCommand>,

    /// The configuration file, instead of the first one that is found
    #[arg(long, value_name = "FILE", env = env::AGENT_CONFIG, value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,

    #[command(flatten)]
    settings: SettingsArgs,

    #[command(flatten)]
    pub(crate) telemetry: TelemetryArgs,

    #[command(flatten)]
    kubernetes: KubernetesArgs,
}

#[derive(Clone, Debug, Subcommand)]
enum AgentCommand {
    /// Write a configuration file
    Configure(ConfigureArgs),
    /// Check whether the hub takes the agent, and whether runs would start
    Check,
}

const NOTES: &str = "\
Examples:
  api-launcher agent configure --service-url https://hub.example.com --token-file /etc/mayfly/token
  MAYFLY_AGENT_TOKEN=mfp_… MAYFLY_AGENT_SERVICE_URL=https://hub.example.com api-launcher agent --deploy-target process

The token of the pool is given by MAYFLY_AGENT_TOKEN, by `token` in the file, or by a file of its own, and is no option,
because every user of a machine can read command lines. With --oidc-token-file, the agent needs none: it exchanges that
token at the hub for access tokens of the pool.

SIGTERM stops the agent as --on-stop says. A second signal leads from `drain` to `grace`, and from `grace` to `force`.";

impl AgentArgs {
    pub(crate) const fn configure(&self) -> Option<&ConfigureArgs> {
        match &self.command {
            Some(AgentCommand::Configure(args)) => Some(args),
            Some(AgentCommand::Check) | None => None,
        }
    }

    pub(crate) const fn is_check(&self) -> bool {
        matches!(self.command, Some(AgentCommand::Check))
    }

    /// Returns the settings, or all errors.
    pub(crate) fn resolve(&self) -> Result<Settings, Vec<SettingError>> {
        let file = file::find(self.config.as_deref(), &file::places());
        let file = file.map_err(|error| vec![error])?;
        let token = handover::var(env::AGENT_TOKEN);
        self.settings
            .clone()
            .resolve(file, token.as_deref(), &self.kubernetes)
    }
}
