//! The options of Redis.

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use job_contract::env;
use secrecy::SecretString;

use runtime::setting::{Milliseconds, ReadSetting as _, Setting, SettingValue};

pub(super) const PORT: u16 = 6379;

/// The options of Redis. If none is set, there is no Redis: runs then have no heartbeat and no live log.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Redis")]
pub struct RedisArgs {
    /// Host of Redis [default: no Redis].
    #[arg(long, value_name = "HOST", env = env::REDIS_HOSTNAME)]
    pub redis_hostname: Option<Setting<String>>,
    /// Port of Redis [default: 6379].
    #[arg(long, value_name = "PORT", env = env::REDIS_PORT)]
    pub redis_port: Option<Setting<u16>>,
    /// User of Redis.
    #[arg(long, value_name = "NAME", env = env::REDIS_USERNAME)]
    pub redis_username: Option<Setting<String>>,
    /// Password of Redis.
    #[arg(long, value_name = "PASSWORD", env = env::REDIS_PASSWORD, hide_env_values = true, hide = true)]
    pub redis_password: Option<Setting<SecretString>>,
    /// `true` uses TLS for Redis [default: false].
    #[arg(long, value_name = "BOOL", env = env::REDIS_SSL)]
    pub redis_ssl: Option<Setting<bool>>,
    /// PEM file with the certificate authorities for Redis [default: the system's].
    #[arg(long, value_name = "FILE", env = env::REDIS_CA_FILE)]
    pub redis_ca_file: Option<Setting<PathBuf>>,
    /// Trust store in the setting of the stock executor. Only a PEM file can be read; for a Java keystore, set
    /// `--redis-ca-file` to a PEM file instead.
    #[arg(long, value_name = "FILE", env = env::REDIS_TRUSTSTORE_PATH)]
    pub redis_truststore_path: Option<Setting<PathBuf>>,
    /// Password of the trust store; accepted and not needed.
    #[arg(long, value_name = "PASSWORD", env = env::REDIS_TRUSTSTORE_PASSWORD, hide_env_values = true, hide = true)]
    pub redis_truststore_password: Option<Setting<SecretString>>,
    /// Timeout of one command with its connection, in milliseconds [default: 10000, at most 15000].
    #[arg(long, value_name = "MILLISECONDS", env = env::REDIS_TIMEOUT)]
    pub redis_timeout: Option<Setting<Milliseconds>>,
    /// Nodes of a cluster, `host:port`, comma-separated; wins over sentinels and over one host.
    #[arg(long, value_name = "NODES", env = env::REDIS_CLUSTER_NODES)]
    pub redis_cluster_nodes: Option<Setting<Nodes>>,
    /// How many redirections between nodes of a cluster a command may take [default: 5].
    #[arg(long, value_name = "N", env = env::REDIS_CLUSTER_MAX_REDIRECTS)]
    pub redis_cluster_max_redirects: Option<Setting<u32>>,
    /// Name of the Redis server in the settings of the sentinels.
    #[arg(long, value_name = "NAME", env = env::REDIS_SENTINEL_MASTER)]
    pub redis_sentinel_master: Option<Setting<String>>,
    /// Sentinels, `host:port`, comma-separated; wins over one host.
    #[arg(long, value_name = "NODES", env = env::REDIS_SENTINEL_NODES)]
    pub redis_sentinel_nodes: Option<Setting<Nodes>>,
    /// User for sentinels, and for Redis when it has none of its own.
    #[arg(long, value_name = "NAME", env = env::REDIS_SENTINEL_USERNAME)]
    pub redis_sentinel_username: Option<Setting<String>>,
    /// Password for sentinels, and for Redis when it has none of its own.
    #[arg(long, value_name = "PASSWORD", env = env::REDIS_SENTINEL_PASSWORD, hide_env_values = true, hide = true)]
    pub redis_sentinel_password: Option<Setting<SecretString>>,
}

/// Host and port of one server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Node {
    pub(super) host: String,
    pub(super) port: u16,
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Node {
    /// Reads `host:port`, `[v6]:port`, or a host alone.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']')?;
                (host, port.strip_prefix(':'))
            }
            None => match text.rsplit_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let port = match port {
            Some(port) => port.parse().ok()?,
            None => PORT,
        };
        (!host.is_empty()).then(|| Self {
            host: host.to_owned(),
            port,
        })
    }
}

/// Several nodes, comma-separated.
#[derive(Clone, Debug)]
pub struct Nodes(pub(super) Vec<Node>);

impl SettingValue for Nodes {
    fn parse(text: &str) -> Result<Self, String> {
        let words = text.split(',').map(str::trim);
        let words = words.filter(|word| !word.is_empty());
        let node =
            |word| Node::parse(word).ok_or_else(|| format!("has `{word}`, expected `host:port`"));
        let nodes: Vec<Node> = words.map(node).collect::<Result<_, _>>()?;
        if nodes.is_empty() {
            return Err("names no node, expected `host:port`, comma-separated".to_owned());
        }
        Ok(Self(nodes))
    }
}

impl RedisArgs {
    /// The values that must never be shown.
    pub fn secrets(&self) -> impl Iterator<Item = SecretString> {
        let passwords = [&self.redis_password, &self.redis_sentinel_password];
        passwords
            .into_iter()
            .filter_map(|password| password.get().cloned())
    }
}
