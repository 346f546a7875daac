//! The options that say where Redis is, and what they come to. All problems are found before any is reported, each
//! named by its variable; no value of a secret is ever shown.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use job_contract::{Exit, env};
use secrecy::SecretString;

use runtime::setting::SettingProblem;

const PORT: u16 = 6379;
/// What the platform's own programs are configured with.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A heartbeat lives for 45 s; a command that takes longer than this could let it die.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(15);
/// How often a command follows the nodes of a cluster unless something else is said; the platform's `0` means that
/// its library decides, which takes five.
const MAX_REDIRECTS: u32 = 5;
const PEM_MARK: &[u8] = b"-----BEGIN";

/// Where Redis is. Nothing set means that there is none: runs then have no heartbeat and no live log.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = "Redis")]
pub struct RedisArgs {
    /// Host of Redis [default: none, and no Redis].
    #[arg(long, value_name = "HOST", env = env::REDIS_HOSTNAME)]
    pub redis_hostname: Option<String>,
    /// Port of Redis [default: 6379].
    #[arg(long, value_name = "PORT", env = env::REDIS_PORT)]
    pub redis_port: Option<String>,
    /// User, where Redis has users.
    #[arg(long, value_name = "NAME", env = env::REDIS_USERNAME)]
    pub redis_username: Option<String>,
    /// Password of Redis.
    #[arg(long, value_name = "PASSWORD", env = env::REDIS_PASSWORD, hide_env_values = true, hide = true)]
    pub redis_password: Option<SecretString>,
    /// `true` speaks TLS to Redis [default: false].
    #[arg(long, value_name = "BOOL", env = env::REDIS_SSL)]
    pub redis_ssl: Option<String>,
    /// PEM file of the authorities Redis' certificate may come from [default: the system's].
    #[arg(long, value_name = "FILE", env = env::REDIS_CA_FILE)]
    pub redis_ca_file: Option<PathBuf>,
    /// Java's trust store. Only a PEM file can be read; for others name a PEM file as `--redis-ca-file`.
    #[arg(long, value_name = "FILE", env = env::REDIS_TRUSTSTORE_PATH)]
    pub redis_truststore_path: Option<PathBuf>,
    /// Password of Java's trust store; accepted and not needed.
    #[arg(long, value_name = "PASSWORD", env = env::REDIS_TRUSTSTORE_PASSWORD, hide_env_values = true, hide = true)]
    pub redis_truststore_password: Option<SecretString>,
    /// Milliseconds one command may take, connecting included [default: 10000, at most 15000].
    #[arg(long, value_name = "MILLISECONDS", env = env::REDIS_TIMEOUT)]
    pub redis_timeout: Option<String>,
    /// Nodes of a cluster, `host:port`, comma-separated; wins over sentinels and over one host.
    #[arg(long, value_name = "NODES", env = env::REDIS_CLUSTER_NODES)]
    pub redis_cluster_nodes: Option<String>,
    /// How often a command is sent on from one node of a cluster to another [default: 5].
    #[arg(long, value_name = "N", env = env::REDIS_CLUSTER_MAX_REDIRECTS)]
    pub redis_cluster_max_redirects: Option<String>,
    /// Name under which sentinels watch Redis.
    #[arg(long, value_name = "NAME", env = env::REDIS_SENTINEL_MASTER)]
    pub redis_sentinel_master: Option<String>,
    /// Sentinels, `host:port`, comma-separated; wins over one host.
    #[arg(long, value_name = "NODES", env = env::REDIS_SENTINEL_NODES)]
    pub redis_sentinel_nodes: Option<String>,
    /// User for sentinels, and for Redis when it has none of its own.
    #[arg(long, value_name = "NAME", env = env::REDIS_SENTINEL_USERNAME)]
    pub redis_sentinel_username: Option<String>,
    /// Password for sentinels, and for Redis when it has none of its own.
    #[arg(long, value_name = "PASSWORD", env = env::REDIS_SENTINEL_PASSWORD, hide_env_values = true, hide = true)]
    pub redis_sentinel_password: Option<SecretString>,
}

impl fmt::Debug for RedisArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisArgs")
            .field("redis_hostname", &self.redis_hostname)
            .field("redis_cluster_nodes", &self.redis_cluster_nodes)
            .field("redis_sentinel_nodes", &self.redis_sentinel_nodes)
            .field("redis_ssl", &self.redis_ssl)
            .finish_non_exhaustive()
    }
}

/// One problem of the settings.
#[derive(Debug, thiserror::Error)]
pub enum RedisProblem {
    /// A value that cannot be read.
    #[error("`{variable}`: {reason}")]
    Invalid {
        /// Its variable.
        variable: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// Two settings belong together.
    #[error("`{variable}` needs `{needed}`")]
    Incomplete {
        /// What is set.
        variable: &'static str,
        /// What is not.
        needed: &'static str,
    },
    /// A file that cannot be read.
    #[error("`{variable}`: could not read `{}`", path.display())]
    Unreadable {
        variable: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Java's own format.
    #[error(
        "`{}`: `{}` is not a PEM file; a Java keystore cannot be read: export its certificates \
         (`keytool -exportcert -rfc -keystore {} -alias ALIAS`) to a PEM file and name that in `{}`",
        env::REDIS_TRUSTSTORE_PATH, path.display(), path.display(), env::REDIS_CA_FILE
    )]
    Keystore {
        /// The keystore.
        path: PathBuf,
    },
}

impl From<&RedisProblem> for SettingProblem {
    fn from(problem: &RedisProblem) -> Self {
        let variable = match problem {
            RedisProblem::Invalid { variable, .. }
            | RedisProblem::Incomplete { variable, .. }
            | RedisProblem::Unreadable { variable, .. } => variable,
            RedisProblem::Keystore { .. } => env::REDIS_TRUSTSTORE_PATH,
        };
        let text = problem.to_string();
        let quoted = format!("`{variable}`");
        let text = text.strip_prefix(&quoted).unwrap_or(&text);
        let text = text.trim_start_matches(':').trim_start();
        match std::error::Error::source(problem) {
            Some(source) => Self::new(variable, format!("{text}: {source}")),
            None => Self::new(variable, text),
        }
    }
}

impl RedisProblem {
    /// Whose fault it is: the operator's.
    pub const fn exit(&self) -> Exit {
        Exit::BadConfiguration
    }
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

/// Who to present oneself as.
#[derive(Clone, Debug, Default)]
pub(super) struct Credentials {
    pub(super) username: Option<String>,
    pub(super) password: Option<SecretString>,
}

impl Credentials {
    fn new(username: Option<&str>, password: Option<&SecretString>) -> Self {
        use secrecy::ExposeSecret as _;
        Self {
            username: username.map(str::to_owned),
            password: password
                .filter(|password| !password.expose_secret().is_empty())
                .cloned(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.password.is_none()
    }
}

/// How Redis is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Topology {
    Standalone(Node),
    Sentinel {
        master: String,
        sentinels: Vec<Node>,
    },
    Cluster {
        seeds: Vec<Node>,
        redirects: u32,
    },
}

/// Where Redis is and how it is spoken to.
#[derive(Clone, Debug)]
pub struct RedisConfig {
    pub(super) topology: Topology,
    pub(super) credentials: Credentials,
    pub(super) sentinel_credentials: Credentials,
    pub(super) tls: Option<Tls>,
    pub(super) timeout: Duration,
}

/// What makes a certificate trusted.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Tls {
    /// PEM bundle; the system's authorities when there is none.
    pub(super) authorities: Option<Vec<u8>>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("authorities", &self.authorities.as_ref().map(Vec::len))
            .finish()
    }
}

impl RedisArgs {
    /// Makes sense of all options at once. `None` when there is no Redis.
    pub fn resolve(&self) -> Result<Option<RedisConfig>, Vec<RedisProblem>> {
        let mut problems = Vec::new();
        let topology = self.topology(&mut problems);
        let tls = self.tls(&mut problems);
        let timeout = self.timeout(&mut problems);
        if !problems.is_empty() {
            return Err(problems);
        }
        let sentinel_credentials = Credentials::new(
            given(self.redis_sentinel_username.as_deref()),
            self.redis_sentinel_password.as_ref(),
        );
        let own = Credentials::new(
            given(self.redis_username.as_deref()),
            self.redis_password.as_ref(),
        );
        Ok(topology.map(|topology| RedisConfig {
            // The platform's own programs present the sentinels' credentials to Redis itself.
            credentials: match topology {
                Topology::Sentinel { .. } if own.is_empty() => sentinel_credentials.clone(),
                _ => own,
            },
            topology,
            sentinel_credentials,
            tls,
            timeout,
        }))
    }

    fn topology(&self, problems: &mut Vec<RedisProblem>) -> Option<Topology> {
        let redirects = number(
            env::REDIS_CLUSTER_MAX_REDIRECTS,
            self.redis_cluster_max_redirects.as_deref(),
            problems,
        );
        if let Some(seeds) = nodes(
            env::REDIS_CLUSTER_NODES,
            self.redis_cluster_nodes.as_deref(),
            problems,
        ) {
            return Some(Topology::Cluster {
                seeds,
                redirects: redirects
                    .filter(|redirects| *redirects > 0)
                    .unwrap_or(MAX_REDIRECTS),
            });
        }
        let sentinels = nodes(
            env::REDIS_SENTINEL_NODES,
            self.redis_sentinel_nodes.as_deref(),
            problems,
        );
        match (sentinels, given(self.redis_sentinel_master.as_deref())) {
            (Some(sentinels), Some(master)) => {
                return Some(Topology::Sentinel {
                    master: master.to_owned(),
                    sentinels,
                });
            }
            (Some(_), None) => problems.push(RedisProblem::Incomplete {
                variable: env::REDIS_SENTINEL_NODES,
                needed: env::REDIS_SENTINEL_MASTER,
            }),
            (None, Some(_)) => problems.push(RedisProblem::Incomplete {
                variable: env::REDIS_SENTINEL_MASTER,
                needed: env::REDIS_SENTINEL_NODES,
            }),
            (None, None) => {}
        }
        let port = number(env::REDIS_PORT, self.redis_port.as_deref(), problems);
        given(self.redis_hostname.as_deref()).map(|host| {
            Topology::Standalone(Node {
                host: host.trim_matches(['[', ']']).to_owned(),
                port: port.unwrap_or(PORT),
            })
        })
    }

    fn tls(&self, problems: &mut Vec<RedisProblem>) -> Option<Tls> {
        let wanted = match given(self.redis_ssl.as_deref())
            .map(str::to_ascii_lowercase)
            .as_deref()
        {
            None | Some("false") => false,
            Some("true") => true,
            Some(other) => {
                problems.push(invalid(
                    env::REDIS_SSL,
                    format!("`{other}` is neither `true` nor `false`"),
                ));
                false
            }
        };
        if !wanted {
            return None;
        }
        let authorities = if let Some(path) = given_path(self.redis_ca_file.as_deref()) {
            match read_pem(env::REDIS_CA_FILE, path) {
                Ok(Some(pem)) => Some(pem),
                Ok(None) => {
                    let reason = format!("`{}` holds no certificate in PEM form", path.display());
                    problems.push(invalid(env::REDIS_CA_FILE, reason));
                    None
                }
                Err(problem) => {
                    problems.push(problem);
                    None
                }
            }
        } else if let Some(path) = given_path(self.redis_truststore_path.as_deref()) {
            match read_pem(env::REDIS_TRUSTSTORE_PATH, path) {
                Ok(Some(pem)) => Some(pem),
                Ok(None) => {
                    let path = path.to_owned();
                    problems.push(RedisProblem::Keystore { path });
                    None
                }
                Err(problem) => {
                    problems.push(problem);
                    None
                }
            }
        } else {
            None
        };
        Some(Tls { authorities })
    }

    fn timeout(&self, problems: &mut Vec<RedisProblem>) -> Duration {
        number(env::REDIS_TIMEOUT, self.redis_timeout.as_deref(), problems)
            .filter(|milliseconds| *milliseconds > 0)
            .map_or(TIMEOUT, Duration::from_millis)
            .min(LONGEST_TIMEOUT)
    }
}

/// Charts write empty values for what nobody set.
fn given(value: Option<&str>) -> Option<&str> {
    value.map(str::trim).filter(|value| !value.is_empty())
}

fn given_path(path: Option<&Path>) -> Option<&Path> {
    path.filter(|path| !path.as_os_str().is_empty())
}

fn invalid(variable: &'static str, reason: String) -> RedisProblem {
    RedisProblem::Invalid { variable, reason }
}

fn number<T: std::str::FromStr>(
    variable: &'static str,
    value: Option<&str>,
    problems: &mut Vec<RedisProblem>,
) -> Option<T> {
    let value = given(value)?;
    let number = value.parse().ok();
    if number.is_none() {
        problems.push(invalid(
            variable,
            format!("`{value}` is no number it takes"),
        ));
    }
    number
}

fn nodes(
    variable: &'static str,
    value: Option<&str>,
    problems: &mut Vec<RedisProblem>,
) -> Option<Vec<Node>> {
    let value = given(value)?;
    let mut nodes = Vec::new();
    for text in value
        .split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty())
    {
        match Node::parse(text) {
            Some(node) => nodes.push(node),
            None => problems.push(invalid(variable, format!("`{text}` is not `host:port`"))),
        }
    }
    (!nodes.is_empty()).then_some(nodes)
}

/// `None` for a file that holds something else.
fn read_pem(variable: &'static str, path: &Path) -> Result<Option<Vec<u8>>, RedisProblem> {
    let bytes = fs::read(path).map_err(|source| RedisProblem::Unreadable {
        variable,
        path: path.to_owned(),
        source,
    })?;
    let is_pem = bytes
        .windows(PEM_MARK.len())
        .any(|window| window == PEM_MARK);
    Ok(is_pem.then_some(bytes))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn node(host: &str, port: u16) -> Node {
        Node {
            host: host.to_owned(),
            port,
        }
    }

    #[test]
    fn nothing_set_or_only_blanks_is_no_redis() {
        assert!(RedisArgs::default().resolve().unwrap().is_none());
        let blank = RedisArgs {
            redis_hostname: Some(String::new()),
            redis_port: Some(String::new()),
            redis_ssl: Some(String::new()),
            redis_cluster_nodes: Some(" ".into()),
            redis_cluster_max_redirects: Some("0".into()),
            redis_sentinel_master: Some(String::new()),
            redis_sentinel_nodes: Some(String::new()),
            redis_truststore_path: Some(PathBuf::new()),
            ..RedisArgs::default()
        };
        assert!(blank.resolve().unwrap().is_none());
    }

    #[test]
    fn a_cluster_wins_over_sentinels_and_these_over_a_host() {
        let mut args = RedisArgs {
            redis_hostname: Some("one".into()),
            redis_sentinel_master: Some("mymaster".into()),
            redis_sentinel_nodes: Some("s1:26379, s2:26380".into()),
            redis_cluster_nodes: Some("c1:7000,c2".into()),
            redis_cluster_max_redirects: Some("3".into()),
            ..RedisArgs::default()
        };
        assert_eq!(
            args.resolve().unwrap().unwrap().topology,
            Topology::Cluster {
                seeds: vec![node("c1", 7000), node("c2", 6379)],
                redirects: 3
            }
        );
        args.redis_cluster_nodes = None;
        assert_eq!(
            args.resolve().unwrap().unwrap().topology,
            Topology::Sentinel {
                master: "mymaster".to_owned(),
                sentinels: vec![node("s1", 26379), node("s2", 26380)],
            }
        );
        (args.redis_sentinel_master, args.redis_sentinel_nodes) = (None, None);
        assert_eq!(
            args.resolve().unwrap().unwrap().topology,
            Topology::Standalone(node("one", 6379))
        );
    }

    #[test]
    fn credentials_of_sentinels_open_redis_when_it_has_none() {
        use secrecy::ExposeSecret as _;
        let args = RedisArgs {
            redis_sentinel_master: Some("m".into()),
            redis_sentinel_nodes: Some("s".into()),
            redis_sentinel_username: Some("user".into()),
            redis_sentinel_password: Some("pass".into()),
            ..RedisArgs::default()
        };
        let config = args.resolve().unwrap().unwrap();
        assert_eq!(config.credentials.username.as_deref(), Some("user"));
        let own = RedisArgs {
            redis_password: Some("own".into()),
            ..args
        };
        let config = own.resolve().unwrap().unwrap();
        assert_eq!(config.credentials.username, None);
        assert_eq!(config.credentials.password.unwrap().expose_secret(), "own");
    }

    #[test]
    fn all_problems_are_told_at_once_by_their_variables() {
        let args = RedisArgs {
            redis_hostname: Some("redis".into()),
            redis_port: Some("65536".into()),
            redis_ssl: Some("yes".into()),
            redis_timeout: Some("10s".into()),
            redis_sentinel_nodes: Some("a:b".into()),
            redis_sentinel_master: Some("m".into()),
            ..RedisArgs::default()
        };
        let problems: Vec<String> = args
            .resolve()
            .unwrap_err()
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            problems,
            [
                "`TerrakubeRedisSentinelNodes`: `a:b` is not `host:port`",
                "`TerrakubeRedisSentinelMaster` needs `TerrakubeRedisSentinelNodes`",
                "`TerrakubeRedisPort`: `65536` is no number it takes",
                "`TerrakubeRedisSSL`: `yes` is neither `true` nor `false`",
                "`TerrakubeRedisTimeout`: `10s` is no number it takes",
            ]
        );
    }

    #[test]
    fn a_java_keystore_is_refused_with_what_to_do_instead() {
        let folder = tempfile::tempdir().unwrap();
        let keystore = folder.path().join("truststore.jks");
        fs::write(&keystore, b"\xfe\xed\xfe\xed\0\0\0\x02").unwrap();
        let mut args = RedisArgs {
            redis_hostname: Some("redis".into()),
            redis_ssl: Some("true".into()),
            redis_truststore_path: Some(keystore.clone()),
            redis_truststore_password: Some("changeit".into()),
            ..RedisArgs::default()
        };
        let message = args.resolve().unwrap_err()[0].to_string();
        assert!(message.contains("keytool -exportcert -rfc"), "{message}");
        assert!(message.contains("MAYFLY_REDIS_CA_FILE"), "{message}");
        assert!(!message.contains("changeit"));

        // Without TLS nobody looks at it.
        args.redis_ssl = Some("false".into());
        assert!(args.resolve().unwrap().unwrap().tls.is_none());
        // A bundle of ours wins over it, and so does a bundle in its place.
        args.redis_ssl = Some("TRUE".into());
        let bundle = folder.path().join("ca.pem");
        fs::write(&bundle, "# ours\n-----BEGIN CERTIFICATE-----\n").unwrap();
        args.redis_ca_file = Some(bundle.clone());
        assert!(
            args.resolve()
                .unwrap()
                .unwrap()
                .tls
                .unwrap()
                .authorities
                .is_some()
        );
        (args.redis_ca_file, args.redis_truststore_path) = (None, Some(bundle));
        assert!(
            args.resolve()
                .unwrap()
                .unwrap()
                .tls
                .unwrap()
                .authorities
                .is_some()
        );
        (args.redis_ca_file, args.redis_truststore_path) = (Some(keystore), None);
        let message = args.resolve().unwrap_err()[0].to_string();
        assert!(message.contains("no certificate in PEM form"), "{message}");
    }

    #[rstest]
    #[case("redis", Some(node("redis", 6379)))]
    #[case("redis:1", Some(node("redis", 1)))]
    #[case("[::1]:7000", Some(node("::1", 7000)))]
    #[case("[::1]", Some(node("::1", 6379)))]
    #[case(":6379", None)]
    #[case("redis:port", None)]
    #[case("[::1", None)]
    fn nodes_are_read(#[case] text: &str, #[case] expected: Option<Node>) {
        assert_eq!(Node::parse(text), expected);
    }

    #[test]
    fn no_password_is_ever_shown() {
        let args = RedisArgs {
            redis_hostname: Some("redis".into()),
            redis_password: Some("hunter22".into()),
            redis_sentinel_password: Some("hunter22".into()),
            ..RedisArgs::default()
        };
        let shown = format!("{args:?}{:?}", args.resolve().unwrap().unwrap());
        assert!(!shown.contains("hunter22"), "{shown}");
    }
}
