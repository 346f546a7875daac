//! The settings that follow from the options of Redis. All errors are reported at once, by the names of their variables and
//! without values of secrets.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Duration;

use job_contract::env;
use secrecy::SecretString;

use runtime::setting::{Milliseconds, ReadSetting as _, SettingError};

use super::args::{Node, Nodes, PORT, RedisArgs};

/// The timeout of the platform's own programs.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A heartbeat expires after 45 s. A command that takes longer than this timeout could let it expire.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(15);
/// The default number of redirections in a cluster. The platform's `0` means the default of its library, which is five.
const MAX_REDIRECTS: u32 = 5;
const PEM_MARK: &[u8] = b"-----BEGIN";

/// User and password.
#[derive(Clone, Debug, Default)]
pub(super) struct Credentials {
    pub(super) username: Option<String>,
    pub(super) password: Option<SecretString>,
}

impl Credentials {
    pub(super) fn is_empty(&self) -> bool {
        self.password.is_none()
    }
}

/// The kind of Redis installation.
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

/// The checked settings of Redis.
#[derive(Clone, Debug)]
pub struct RedisConfig {
    pub(super) topology: Topology,
    pub(super) credentials: Credentials,
    pub(super) sentinel_credentials: Credentials,
    pub(super) tls: Option<Tls>,
    pub(super) timeout: Duration,
}

/// The certificate authorities that are trusted.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Tls {
    /// PEM bundle. `None` uses the system's authorities.
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
    /// Checks all options. `None` if there is no Redis.
    pub fn resolve(&self) -> Result<Option<RedisConfig>, Vec<SettingError>> {
        let mut errors = Vec::new();
        let topology = self.topology(&mut errors);
        let tls = self.tls(&mut errors);
        let timeout = self.redis_timeout.read(&mut errors);
        let sentinel_credentials = Credentials {
            username: self.redis_sentinel_username.read(&mut errors),
            password: self.redis_sentinel_password.read(&mut errors),
        };
        let own = Credentials {
            username: self.redis_username.read(&mut errors),
            password: self.redis_password.read(&mut errors),
        };
        if !errors.is_empty() {
            return Err(errors);
        }
        let timeout = timeout.map(|Milliseconds(timeout)| timeout);
        Ok(topology.map(|topology| RedisConfig {
            // The platform's own programs also use the sentinels' credentials for Redis itself.
            credentials: match topology {
                Topology::Sentinel { .. } if own.is_empty() => sentinel_credentials.clone(),
                _ => own,
            },
            topology,
            sentinel_credentials,
            tls,
            timeout: timeout
                .filter(|timeout| !timeout.is_zero())
                .unwrap_or(TIMEOUT)
                .min(LONGEST_TIMEOUT),
        }))
    }

    fn topology(&self, errors: &mut Vec<SettingError>) -> Option<Topology> {
        let redirects = self.redis_cluster_max_redirects.read(errors);
        if let Some(Nodes(seeds)) = self.redis_cluster_nodes.read(errors) {
            return Some(Topology::Cluster {
                seeds,
                redirects: redirects
                    .filter(|redirects| *redirects > 0)
                    .unwrap_or(MAX_REDIRECTS),
            });
        }
        if self.redis_sentinel_nodes.is_set() || self.redis_sentinel_master.is_set() {
            let needs = |needed| format!("needs `{needed}`");
            if !self.redis_sentinel_master.is_set() {
                let text = needs(env::REDIS_SENTINEL_MASTER);
                errors.push(SettingError::new(env::REDIS_SENTINEL_NODES, text));
            }
            if !self.redis_sentinel_nodes.is_set() {
                let text = needs(env::REDIS_SENTINEL_NODES);
                errors.push(SettingError::new(env::REDIS_SENTINEL_MASTER, text));
            }
            let Nodes(sentinels) = self.redis_sentinel_nodes.read(errors)?;
            let master = self.redis_sentinel_master.read(errors)?;
            return Some(Topology::Sentinel { master, sentinels });
        }
        let port = self.redis_port.read(errors).unwrap_or(PORT);
        let host = self.redis_hostname.read(errors)?;
        let host = host.trim_matches(['[', ']']).to_owned();
        Some(Topology::Standalone(Node { host, port }))
    }

    fn tls(&self, errors: &mut Vec<SettingError>) -> Option<Tls> {
        if self.redis_ssl.read(errors) != Some(true) {
            return None;
        }
        let (variable, path) = match self.redis_ca_file.read(errors) {
            Some(path) => (env::REDIS_CA_FILE, path),
            None => match self.redis_truststore_path.read(errors) {
                Some(path) => (env::REDIS_TRUSTSTORE_PATH, path),
                None => return Some(Tls { authorities: None }),
            },
        };
        match read_pem(&path) {
            Ok(pem) => Some(Tls {
                authorities: Some(pem),
            }),
            Err(text) => {
                errors.push(SettingError::new(variable, text));
                None
            }
        }
    }
}

/// Reads a PEM file, or returns the problem as text.
fn read_pem(path: &Path) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let bytes = fs::read(path).map_err(|error| format!("could not read `{shown}`: {error}"))?;
    let is_pem = bytes
        .windows(PEM_MARK.len())
        .any(|window| window == PEM_MARK);
    if is_pem {
        return Ok(bytes);
    }
    Err(format!(
        "`{shown}` holds no certificate in PEM form. A Java keystore cannot be read: export its certificates \
         (`keytool -exportcert -rfc -keystore {shown} -alias ALIAS`) to a PEM file and name that in `{}`",
        env::REDIS_CA_FILE
    ))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use runtime::setting::from_variables;

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
            redis_hostname: Some("".into()),
            redis_port: Some("".into()),
            redis_ssl: Some("".into()),
            redis_cluster_nodes: Some(" ".into()),
            redis_cluster_max_redirects: Some("0".into()),
            redis_sentinel_master: Some("".into()),
            redis_sentinel_nodes: Some("".into()),
            redis_truststore_path: Some("".into()),
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

    fn errors(settings: &[(&str, &str)]) -> Vec<String> {
        let errors = from_variables::<RedisArgs>(settings).resolve().unwrap_err();
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn all_errors_are_reported_at_once_with_their_variables() {
        let told = errors(&[
            (env::REDIS_HOSTNAME, "redis"),
            (env::REDIS_PORT, "65536"),
            (env::REDIS_SSL, "yes"),
            (env::REDIS_TIMEOUT, "10s"),
        ]);
        assert_eq!(
            told,
            [
                "`TerrakubeRedisPort` is `65536`, expected a number from 0 to 65535",
                "`TerrakubeRedisSSL` is `yes`, expected `true` or `false`",
                "`TerrakubeRedisTimeout` is `10s`, expected a number of milliseconds",
            ]
        );
        assert_eq!(
            errors(&[(env::REDIS_SENTINEL_NODES, "a:b")]),
            [
                "`TerrakubeRedisSentinelNodes` needs `TerrakubeRedisSentinelMaster`",
                "`TerrakubeRedisSentinelNodes` has `a:b`, expected `host:port`",
            ]
        );
        assert_eq!(
            errors(&[(env::REDIS_SENTINEL_MASTER, "m")]),
            ["`TerrakubeRedisSentinelMaster` needs `TerrakubeRedisSentinelNodes`"]
        );
    }

    #[test]
    fn a_java_keystore_is_refused_with_what_to_do_instead() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let (keystore, bundle) = (path("truststore.jks"), path("ca.pem"));
        fs::write(&keystore, b"\xfe\xed\xfe\xed\0\0\0\x02").unwrap();
        fs::write(&bundle, "# ours\n-----BEGIN CERTIFICATE-----\n").unwrap();
        let tls = |ssl: &str, ours: &str, javas: &str| {
            from_variables::<RedisArgs>(&[
                (env::REDIS_HOSTNAME, "redis"),
                (env::REDIS_SSL, ssl),
                (env::REDIS_CA_FILE, ours),
                (env::REDIS_TRUSTSTORE_PATH, javas),
                (env::REDIS_TRUSTSTORE_PASSWORD, "changeit"),
            ])
            .resolve()
            .map(|config| config.unwrap().tls)
        };
        for (ours, javas, variable) in [
            ("", &*keystore, env::REDIS_TRUSTSTORE_PATH),
            (&*keystore, "", env::REDIS_CA_FILE),
        ] {
            let error = tls("true", ours, javas).unwrap_err().remove(0);
            assert_eq!(error.variable, variable);
            let text = error.text;
            assert!(text.contains("no certificate in PEM form"), "{text}");
            assert!(text.contains("keytool -exportcert -rfc"), "{text}");
            assert!(text.contains("MAYFLY_REDIS_CA_FILE"), "{text}");
            assert!(!text.contains("changeit"));
        }
        // Without TLS the trust store is not used.
        assert!(tls("false", "", &keystore).unwrap().is_none());
        // A CA file wins over the trust store. A PEM file works in its place too.
        for (ours, javas) in [(&*bundle, &*keystore), ("", &*bundle)] {
            let tls = tls("TRUE", ours, javas).unwrap().unwrap();
            assert!(tls.authorities.is_some());
        }
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
