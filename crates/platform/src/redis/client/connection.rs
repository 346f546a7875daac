//! Finds the server for a key and keeps connections: to one host, to the server that the sentinels name, or to the nodes of
//! a cluster. Knows neither commands nor their purpose.

use std::collections::HashMap;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, IntoConnectionInfo as _, RedisConnectionInfo,
    TlsCertificates,
};
use secrecy::ExposeSecret as _;
use tracing::debug;

use super::RedisError;
use crate::redis::args::Node;
use crate::redis::config::{Credentials, RedisConfig, Topology};

/// Slots of a cluster.
const SLOTS: u16 = 16_384;

/// Open connections, and the servers of keys as far as they are known.
#[derive(Debug, Default)]
pub(super) struct Connections {
    open: HashMap<Node, Open>,
    /// The server that the sentinels named.
    master: Option<Node>,
    /// The nodes of slots, learned from redirections.
    slots: HashMap<u16, Node>,
    generation: u64,
}

#[derive(Clone, Debug)]
struct Open {
    connection: MultiplexedConnection,
    generation: u64,
}

/// A connection that a caller uses.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    pub(super) connection: MultiplexedConnection,
    pub(super) node: Node,
    generation: u64,
}

impl Connections {
    /// A connection to the node that probably serves `key`. Without a key, to any node.
    pub(super) async fn lease(
        &mut self,
        config: &RedisConfig,
        key: Option<&[u8]>,
    ) -> Result<Lease, RedisError> {
        match &config.topology {
            Topology::Standalone(node) => self.open(config, node).await,
            Topology::Sentinel { master, sentinels } => {
                let node = match self.master.clone() {
                    Some(node) => node,
                    None => find_master(config, master, sentinels).await?,
                };
                let lease = self.open(config, &node).await;
                self.master = lease.is_ok().then_some(node);
                lease
            }
            Topology::Cluster { seeds, .. } => {
                let known = key.and_then(|key| self.slots.get(&slot_of(key)).cloned());
                if let Some(node) = known {
                    let lease = self.open(config, &node).await;
                    if lease.is_ok() {
                        return lease;
                    }
                    // Another node may serve the slot now. The other nodes redirect to it.
                    self.slots.retain(|_, other| *other != node);
                }
                self.any_of(config, seeds).await
            }
        }
    }

    /// A connection to the node of a redirection, which serves `slot` from now on.
    pub(super) async fn follow(
        &mut self,
        config: &RedisConfig,
        slot: Option<u16>,
        node: &Node,
    ) -> Result<Lease, RedisError> {
        let lease = self.open(config, node).await?;
        if let Some(slot) = slot {
            self.slots.insert(slot, node.clone());
        }
        Ok(lease)
    }

    /// Drops a connection that cannot be used any more, or whose server has another role now.
    pub(super) fn discard(&mut self, lease: &Lease) {
        let is_it = |open: &Open| open.generation == lease.generation;
        if self.open.get(&lease.node).is_some_and(is_it) {
            self.open.remove(&lease.node);
            self.master = None;
            self.slots.retain(|_, node| *node != lease.node);
        }
    }

    async fn any_of(&mut self, config: &RedisConfig, seeds: &[Node]) -> Result<Lease, RedisError> {
        if let Some(node) = self.open.keys().next().cloned() {
            return self.open(config, &node).await;
        }
        let mut last = None;
        for seed in seeds {
            match self.open(config, seed).await {
                Ok(lease) => return Ok(lease),
                Err(error) => {
                    debug!(node = %seed, %error, "could not connect to a node of the cluster");
                    last = Some(error);
                }
            }
        }
        Err(last.expect("a cluster is configured with at least one node"))
    }

    async fn open(&mut self, config: &RedisConfig, node: &Node) -> Result<Lease, RedisError> {
        let open = if let Some(open) = self.open.get(node) {
            open.clone()
        } else {
            let connection =
                connect(config, node, &config.credentials)
                    .await
                    .map_err(|source| RedisError::Connect {
                        node: node.to_string(),
                        source,
                    })?;
            self.generation += 1;
            let open = Open {
                connection,
                generation: self.generation,
            };
            self.open.insert(node.clone(), open.clone());
            open
        };
        Ok(Lease {
            connection: open.connection,
            node: node.clone(),
            generation: open.generation,
        })
    }
}

/// Asks the sentinels in order for the server.
async fn find_master(
    config: &RedisConfig,
    master: &str,
    sentinels: &[Node],
) -> Result<Node, RedisError> {
    let mut last = None;
    for sentinel in sentinels {
        match ask_sentinel(config, sentinel, master).await {
            Ok(Some((host, port))) => return Ok(Node { host, port }),
            Ok(None) => debug!(%sentinel, master, "a sentinel does not know the server's name"),
            Err(error) => {
                debug!(%sentinel, %error, "a sentinel did not answer");
                last = Some(error);
            }
        }
    }
    Err(RedisError::NoMaster {
        master: master.to_owned(),
        source: last,
    })
}

async fn ask_sentinel(
    config: &RedisConfig,
    sentinel: &Node,
    master: &str,
) -> redis::RedisResult<Option<(String, u16)>> {
    let credentials = &config.sentinel_credentials;
    let connected = connect(config, sentinel, credentials).await;
    let mut connection = match connected {
        // The platform's settings do not say whether these credentials are for sentinels or for Redis. A sentinel without a
        // password refuses all credentials.
        Err(error) if !credentials.is_empty() && !error.is_io_error() => {
            debug!(%sentinel, %error, "a sentinel refused the credentials, connecting without them");
            connect(config, sentinel, &Credentials::default()).await?
        }
        connected => connected?,
    };
    redis::cmd("SENTINEL")
        .arg("get-master-addr-by-name")
        .arg(master)
        .query_async(&mut connection)
        .await
}

async fn connect(
    config: &RedisConfig,
    node: &Node,
    credentials: &Credentials,
) -> redis::RedisResult<MultiplexedConnection> {
    let (host, port) = (node.host.clone(), node.port);
    let address = match &config.tls {
        None => ConnectionAddr::Tcp(host, port),
        Some(_) => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: false,
            tls_params: None,
        },
    };
    // Restricted users do not have the right to set the client's name.
    let mut settings = RedisConnectionInfo::default().set_skip_set_lib_name();
    if let Some(password) = &credentials.password {
        settings = settings.set_password(password.expose_secret());
        if let Some(username) = &credentials.username {
            settings = settings.set_username(username);
        }
    }
    let info = address
        .into_connection_info()?
        .set_tcp_settings(TcpSettings::default().set_nodelay(true))
        .set_redis_settings(settings);
    let client = match &config.tls {
        None => Client::open(info)?,
        Some(tls) => Client::build_with_tls(
            info,
            TlsCertificates {
                client_tls: None,
                root_cert: tls.authorities.clone(),
            },
        )?,
    };
    let limits = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(config.timeout))
        .set_response_timeout(Some(config.timeout));
    client
        .get_multiplexed_async_connection_with_config(&limits)
        .await
}

/// The slot of a key in a cluster: CRC-16 (XMODEM) modulo the number of slots. Keys here have no braces, which would restrict
/// what is hashed. A wrong slot would only cost a redirection.
pub(super) fn slot_of(key: &[u8]) -> u16 {
    let crc = key.iter().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| {
            let shifted = crc << 1;
            if crc & 0x8000 == 0 {
                shifted
            } else {
                shifted ^ 0x1021
            }
        })
    });
    crc % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the cluster specification, and `CLUSTER KEYSLOT`.
    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot_of(b"123456789"), 0x31c3);
        assert_eq!(slot_of(b"foo"), 12_182);
        assert_eq!(slot_of(b""), 0);
    }
}
