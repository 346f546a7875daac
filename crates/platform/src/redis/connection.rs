//! Finds the server that answers for a key, and keeps connections to it: one host, the one sentinels name, or the
//! nodes of a cluster. Knows neither commands nor what they are for.

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
use super::args::{Credentials, Node, RedisConfig, Topology};

/// Slots of a cluster.
const SLOTS: u16 = 16_384;

/// Open connections and what is known of who serves what.
#[derive(Debug, Default)]
pub(super) struct Connections {
    open: HashMap<Node, Open>,
    /// Whom the sentinels named.
    master: Option<Node>,
    /// Learned from redirections.
    slots: HashMap<u16, Node>,
    generation: u64,
}

#[derive(Clone, Debug)]
struct Open {
    connection: MultiplexedConnection,
    generation: u64,
}

/// A connection on loan.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    pub(super) connection: MultiplexedConnection,
    pub(super) node: Node,
    generation: u64,
}

impl Connections {
    /// A connection to the node that is believed to serve `key`, or to any node if there is no key.
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
                    // Another node may have taken over; the others will say so.
                    self.slots.retain(|_, other| *other != node);
                }
                self.any_of(config, seeds).await
            }
        }
    }

    /// A connection to the node that said it serves `slot`.
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

    /// The connection cannot be used any more, or its server is not what it was.
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
                    debug!(node = %seed, %error, "a node of the cluster cannot be reached");
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

/// Asks one sentinel after the other.
async fn find_master(
    config: &RedisConfig,
    master: &str,
    sentinels: &[Node],
) -> Result<Node, RedisError> {
    let mut last = None;
    for sentinel in sentinels {
        match ask_sentinel(config, sentinel, master).await {
            Ok(Some((host, port))) => return Ok(Node { host, port }),
            Ok(None) => debug!(%sentinel, master, "a sentinel does not know the name"),
            Err(error) => {
                debug!(%sentinel, %error, "a sentinel cannot be asked");
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
        // The platform's settings do not say whether these credentials are meant for sentinels or for Redis, and
        // a sentinel without a password refuses any.
        Err(error) if !credentials.is_empty() && !error.is_io_error() => {
            debug!(%sentinel, %error, "a sentinel refuses the credentials, asking without");
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
    // Naming oneself to the server takes a right that restricted users do not have.
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

/// Which slot of a cluster a key belongs to: CRC-16 (XMODEM), modulo the number of slots. Keys here have no braces,
/// which would restrict what is hashed; a slot that is wrong would cost a redirection and nothing else.
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
