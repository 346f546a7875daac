//! The settings of the agent. Options override the environment, which overrides a file, which overrides the defaults.

pub(crate) mod args;
pub(crate) mod file;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use pool_protocol::id::AgentName;
use url::Url;

use super::client::AgentToken;
use super::kubernetes::KubernetesSettings;
use super::process::ProcessSettings;
use super::stop::StopMode;

/// All settings of the agent.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) agent: AgentSettings,
    pub(crate) token: AgentToken,
    pub(crate) target: TargetSettings,
    /// The configuration file that was read.
    pub(crate) file: Option<PathBuf>,
    /// Problems that do not stop the agent.
    pub(crate) warnings: Vec<String>,
}

/// The settings of the agent itself.
#[derive(Debug)]
pub(crate) struct AgentSettings {
    pub(crate) service_url: Url,
    pub(crate) name: AgentName,
    /// How many tasks run at once.
    pub(crate) slots: u32,
    /// Folder with the private keys of the pool.
    pub(crate) private_key_dir: Option<PathBuf>,
    pub(crate) single_run: bool,
    pub(crate) idle_timeout: Option<Duration>,
    pub(crate) on_stop: StopMode,
    pub(crate) drain_timeout: Duration,
    pub(crate) grace_timeout: Duration,
    pub(crate) disconnect_on_stop: bool,
    /// The address for health checks.
    pub(crate) listen: Option<SocketAddr>,
}

/// The target, with its settings.
#[derive(Debug)]
pub(crate) enum TargetSettings {
    Process(ProcessSettings),
    Kubernetes(Box<KubernetesSettings>),
}
