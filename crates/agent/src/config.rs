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
pub struct AgentSettings {
    pub service_url: Url,
    /// The hub is in this process, so no proxy is between the two.
    pub hub_is_here: bool,
    pub name: AgentName,
    /// How many tasks run at once.
    pub slots: u32,
    pub single_run: bool,
    pub idle_timeout: Option<Duration>,
    pub on_stop: StopMode,
    pub drain_timeout: Duration,
    pub grace_timeout: Duration,
    pub disconnect_on_stop: bool,
    /// The address for health checks.
    pub listen: Option<SocketAddr>,
}

/// The target, with its settings.
#[derive(Debug)]
pub(crate) enum TargetSettings {
    Process(ProcessSettings),
    Kubernetes(Box<KubernetesSettings>),
}
