//! The client. It connects at the first call and again after each lost connection. Every call has a timeout. The client knows one
//! host, sentinels and clusters, but not what is stored. Only this module and those below it know the crate `redis`.

mod connection;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ErrorKind, FromRedisValue, Pipeline, ServerErrorKind, Value};
use tokio::sync::Mutex;

use self::connection::{Connections, Lease};
use super::args::Node;
pub use super::config::RedisConfig;
use super::config::Topology;
use super::{Appended, Field, Retention, StoredEntry, StreamEntry, Taken};

/// Why a call of Redis failed. An `action` is a verb phrase for the command.
#[derive(Debug, thiserror::Error)]
pub enum RedisError {
    #[error("could not connect to Redis at `{node}`")]
    Connect {
        node: String,
        #[source]
        source: redis::RedisError,
    },
    #[error("no sentinel names the server of `{master}`")]
    NoMaster {
        /// The name of the server in the settings of the sentinels.
        master: String,
        /// The error of the last sentinel, if one answered with an error.
        #[source]
        source: Option<redis::RedisError>,
    },
    /// No answer in time. Redis may have executed the command.
    #[error("Redis did not {action} within {} ms", limit.as_millis())]
    Timeout {
        action: &'static str,
        limit: Duration,
    },
    /// Redis refused the command, or the connection was lost before the answer. In the second case Redis may have
    /// executed it.
    #[error("Redis could not {action}")]
    Command {
        action: &'static str,
        #[source]
        source: redis::RedisError,
    },
    #[error("Redis could not {action}: more than {redirects} redirections")]
    Redirects {
        action: &'static str,
        redirects: u32,
    },
}

impl RedisError {
    /// Whether the connection cannot be used any more.
    fn ends_connection(&self) -> bool {
        match self {
            Self::Timeout { .. } => true,
            Self::Command { source, .. } => {
                source.is_unrecoverable_error()
                    || source.is_io_error()
                    || matches!(
                        source.kind(),
                        // After a failover the old server is a read-only replica.
                        ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown)
                    )
                    || is_aborted_by(source, ServerErrorKind::ReadOnly)
            }
            Self::Connect { .. } | Self::NoMaster { .. } | Self::Redirects { .. } => false,
        }
    }
}

/// Whether a command may be sent again if Redis may have executed it already.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeat {
    Yes,
    No,
}

/// A Redis. Clones share their connections.
///
/// # Caveats
/// A connection lives in the runtime that opened it. A runtime of one's own needs [`Redis::separate`].
#[derive(Clone)]
pub struct Redis {
    config: Arc<RedisConfig>,
    connections: Arc<Mutex<Connections>>,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("topology", &self.config.topology)
            .field("tls", &self.config.tls)
            .finish_non_exhaustive()
    }
}

impl Redis {
    /// A client that does not connect yet.
    pub fn new(config: RedisConfig) -> Self {
        Self::over(Arc::new(config))
    }

    fn over(config: Arc<RedisConfig>) -> Self {
        Self {
            config,
            connections: Arc::default(),
        }
    }

    /// A client of the same Redis with its own connections.
    #[must_use]
    pub fn separate(&self) -> Self {
        Self::over(Arc::clone(&self.config))
    }

    /// Hosts and ports, for messages.
    pub fn address(&self) -> String {
        let list = |nodes: &[Node]| {
            let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
            nodes.join(",")
        };
        match &self.config.topology {
            Topology::Standalone(node) => node.to_string(),
            Topology::Sentinel { master, sentinels } => format!("{master}@{}", list(sentinels)),
            Topology::Cluster { seeds, .. } => list(seeds),
        }
    }

    /// Checks that Redis answers.
    pub async fn ping(&self) -> Result<(), RedisError> {
        let command = redis::cmd("PING");
        self.run("answer a ping", None, &command, Repeat::Yes).await
    }

    /// Adds entries to the end of a stream in one transaction, and returns their ids.
    ///
    /// # Errors
    /// After [`RedisError::Timeout`] and [`RedisError::Command`] the entries may have been added.
    pub async fn append(
        &self,
        stream: &[u8],
        entries: &[StreamEntry],
        retention: Retention,
    ) -> Result<Vec<String>, RedisError> {
        if entries.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipeline = redis::pipe();
        pipeline.atomic();
        for fields in entries {
            add_entry(&mut pipeline, stream, fields, retention);
        }
        if let Some(expiry) = retention.expiry {
            pipeline
                .cmd("EXPIRE")
                .arg(stream)
                .arg(expiry.as_secs().max(1))
                .ignore();
        }
        self.run_all("append to a stream", stream, &pipeline).await
    }

    /// Adds entries to the end of a stream in one transaction, which also checks that the entry with the id `after` is still there.
    ///
    /// # Errors
    /// As [`Redis::append`].
    pub async fn append_after(
        &self,
        stream: &[u8],
        after: Option<&str>,
        entries: &[StreamEntry],
    ) -> Result<Appended, RedisError> {
        let action = "append to a stream";
        let mut pipeline = redis::pipe();
        pipeline.atomic();
        if let Some(id) = after {
            pipeline.cmd("XRANGE").arg(stream).arg(id).arg(id);
        }
        for fields in entries {
            add_entry(&mut pipeline, stream, fields, Retention::default());
        }
        let answers: Vec<Value> = self.run_all(action, stream, &pipeline).await?;
        let mut answers = answers.into_iter();
        let found: Option<Vec<Value>> = match after {
            Some(_) => answers
                .next()
                .map(|found| read(action, found))
                .transpose()?,
            None => None,
        };
        let last_id = answers.next_back().map(|id| read(action, id));
        Ok(Appended {
            last_id: last_id.transpose()?,
            follows: found.is_none_or(|found| !found.is_empty()),
        })
    }

    /// Removes the entries with these ids, and adds entries to the end of the stream, in one transaction. Returns the id of the last one
    /// that was added.
    pub async fn replace(
        &self,
        stream: &[u8],
        ids: &[String],
        entries: &[StreamEntry],
    ) -> Result<Option<String>, RedisError> {
        let action = "replace entries of a stream";
        let mut pipeline = redis::pipe();
        pipeline.atomic();
        if !ids.is_empty() {
            pipeline.cmd("XDEL").arg(stream).arg(ids).ignore();
        }
        for fields in entries {
            add_entry(&mut pipeline, stream, fields, Retention::default());
        }
        if pipeline.is_empty() {
            return Ok(None);
        }
        let mut added: Vec<Value> = self.run_all(action, stream, &pipeline).await?;
        added.pop().map(|id| read(action, id)).transpose()
    }

    /// Whether a stream has the entry with this id.
    pub async fn has_entry(&self, stream: &[u8], id: &str) -> Result<bool, RedisError> {
        let mut command = redis::cmd("XRANGE");
        command.arg(stream).arg(id).arg(id);
        let found = self.entries(stream, &command).await?;
        Ok(!found.is_empty())
    }

    /// Creates a consumer group after the stream's last entry, and the stream if there is none. An existing group stays.
    pub async fn create_group(&self, stream: &[u8], group: &str) -> Result<(), RedisError> {
        let mut command = redis::cmd("XGROUP");
        command
            .arg("CREATE")
            .arg(stream)
            .arg(group)
            .arg("$")
            .arg("MKSTREAM");
        let created: Result<Value, _> = self
            .run(
                "create a consumer group",
                Some(stream),
                &command,
                Repeat::Yes,
            )
            .await;
        match created {
            Err(RedisError::Command { source, .. }) if source.code() == Some("BUSYGROUP") => Ok(()),
            created => created.map(drop),
        }
    }

    /// The id of a stream's last entry.
    pub async fn last_id(&self, stream: &[u8]) -> Result<Option<String>, RedisError> {
        let mut command = redis::cmd("XREVRANGE");
        command.arg(stream).arg("+").arg("-").arg("COUNT").arg(1);
        let entries = self.entries(stream, &command).await?;
        Ok(entries.into_iter().next().map(|entry| entry.id))
    }

    /// The entries of a stream after the one with this id. Without an id, from the beginning.
    pub async fn entries_after(
        &self,
        stream: &[u8],
        id: Option<&str>,
        count: usize,
    ) -> Result<Vec<StoredEntry>, RedisError> {
        let mut command = redis::cmd("XRANGE");
        command
            .arg(stream)
            .arg(id.unwrap_or("-"))
            .arg("+")
            .arg("COUNT")
            // Redis before 6.2 has no exclusive ranges, so the first entry is read too.
            .arg(count + usize::from(id.is_some()));
        let mut entries = self.entries(stream, &command).await?;
        entries.retain(|entry| Some(entry.id.as_str()) != id);
        Ok(entries)
    }

    async fn entries(&self, stream: &[u8], command: &Cmd) -> Result<Vec<StoredEntry>, RedisError> {
        let entries: Vec<(String, Vec<Field>)> = self
            .run("read a stream", Some(stream), command, Repeat::Yes)
            .await?;
        Ok(entries
            .into_iter()
            .map(|(id, entry)| StoredEntry { id, entry })
            .collect())
    }

    /// Sets a key that expires.
    pub async fn set(&self, key: &[u8], value: &[u8], expiry: Duration) -> Result<(), RedisError> {
        let mut command = redis::cmd("SET");
        command
            .arg(key)
            .arg(value)
            .arg("EX")
            .arg(expiry.as_secs().max(1));
        self.run("set a key", Some(key), &command, Repeat::Yes)
            .await
    }

    /// Sets a key if it does not exist. This is atomic: of all callers, one takes the key. A caller that repeats the call with
    /// the same value still has the key.
    pub async fn take(
        &self,
        key: &[u8],
        value: &[u8],
        expiry: Duration,
    ) -> Result<Taken, RedisError> {
        let mut command = redis::cmd("SET");
        command
            .arg(key)
            .arg(value)
            .arg("NX")
            .arg("EX")
            .arg(expiry.as_secs().max(1));
        loop {
            let set: Option<Value> = self
                .run("take a key", Some(key), &command, Repeat::Yes)
                .await?;
            if set.is_some() {
                return Ok(Taken::Ours);
            }
            match self.get(key).await? {
                Some(found) if found == value => return Ok(Taken::Ours),
                Some(found) => return Ok(Taken::ByOther(found)),
                // The key expired between the two commands.
                None => {}
            }
        }
    }

    /// The value of a key.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, RedisError> {
        let mut command = redis::cmd("GET");
        command.arg(key);
        self.run("get a key", Some(key), &command, Repeat::Yes)
            .await
    }

    /// Removes a key if it exists.
    pub async fn delete(&self, key: &[u8]) -> Result<(), RedisError> {
        let mut command = redis::cmd("DEL");
        command.arg(key);
        self.run("delete a key", Some(key), &command, Repeat::Yes)
            .await
            .map(|_: u64| ())
    }

    /// Publishes a message on a channel.
    pub async fn publish(&self, channel: &str, message: &[u8]) -> Result<(), RedisError> {
        let mut command = redis::cmd("PUBLISH");
        command.arg(channel).arg(message);
        self.run("publish a message", None, &command, Repeat::No)
            .await
            .map(|_: u64| ())
    }

    async fn run<T: FromRedisValue>(
        &self,
        action: &'static str,
        key: Option<&[u8]>,
        command: &Cmd,
        repeat: Repeat,
    ) -> Result<T, RedisError> {
        let request = Request::One(command);
        let value = self.within_time(action, key, request, repeat).await?;
        read(action, value)
    }

    async fn run_all<T: FromRedisValue>(
        &self,
        action: &'static str,
        key: &[u8],
        pipeline: &Pipeline,
    ) -> Result<T, RedisError> {
        let request = Request::All(pipeline);
        let value = self
            .within_time(action, Some(key), request, Repeat::No)
            .await?;
        read(action, value)
    }

    async fn within_time(
        &self,
        action: &'static str,
        key: Option<&[u8]>,
        request: Request<'_>,
        repeat: Repeat,
    ) -> Result<Value, RedisError> {
        let limit = self.config.timeout;
        let mut used = None;
        let attempts = async {
            let first = self.attempt(action, key, request, &mut used).await;
            match first {
                // The loss of an idle connection shows only at the next command.
                Err(RedisError::Command { source, .. })
                    if repeat == Repeat::Yes && source.is_connection_dropped() =>
                {
                    self.attempt(action, key, request, &mut used).await
                }
                first => first,
            }
        };
        let Ok(result) = tokio::time::timeout(limit, attempts).await else {
            if let Some(lease) = &used {
                self.connections.lock().await.discard(lease);
            }
            return Err(RedisError::Timeout { action, limit });
        };
        result
    }

    /// Sends the request to the node that serves the key, and follows redirections of the cluster.
    async fn attempt(
        &self,
        action: &'static str,
        key: Option<&[u8]>,
        request: Request<'_>,
        used: &mut Option<Lease>,
    ) -> Result<Value, RedisError> {
        let redirects = match self.config.topology {
            Topology::Cluster { redirects, .. } => redirects,
            Topology::Standalone(_) | Topology::Sentinel { .. } => 0,
        };
        let mut lease = self
            .connections
            .lock()
            .await
            .lease(&self.config, key)
            .await?;
        let mut asking = false;
        for _ in 0..=redirects {
            *used = Some(lease.clone());
            let source = match request.send(&mut lease, asking).await {
                Ok(value) => return Ok(value),
                Err(source) => source,
            };
            let Some(redirect) = Redirect::of(&source, &lease.node).filter(|_| redirects > 0)
            else {
                let error = RedisError::Command { action, source };
                if error.ends_connection() {
                    self.connections.lock().await.discard(&lease);
                }
                return Err(error);
            };
            asking = redirect.slot.is_none();
            lease = self
                .connections
                .lock()
                .await
                .follow(&self.config, redirect.slot, &redirect.node)
                .await?;
        }
        Err(RedisError::Redirects { action, redirects })
    }
}

fn add_entry(pipeline: &mut Pipeline, stream: &[u8], fields: &[Field], retention: Retention) {
    let command = pipeline.cmd("XADD").arg(stream);
    if let Some(entries) = retention.entries {
        command.arg("MAXLEN").arg("~").arg(entries);
    }
    command.arg("*");
    for (name, value) in fields {
        command.arg(name).arg(value);
    }
}

fn read<T: FromRedisValue>(action: &'static str, value: Value) -> Result<T, RedisError> {
    redis::from_redis_value(value).map_err(|error| RedisError::Command {
        action,
        source: error.into(),
    })
}

/// What is sent in one request.
#[derive(Clone, Copy)]
enum Request<'a> {
    One(&'a Cmd),
    All(&'a Pipeline),
}

impl Request<'_> {
    async fn send(self, lease: &mut Lease, asking: bool) -> redis::RedisResult<Value> {
        let connection = &mut lease.connection;
        match self {
            Self::One(command) if asking => {
                let mut both = redis::pipe();
                both.cmd("ASKING").ignore().add_command(command.clone());
                let values: Vec<Value> = both.query_async(connection).await?;
                Ok(values.into_iter().next().unwrap_or(Value::Nil))
            }
            Self::One(command) => command.query_async(connection).await,
            // While the slot of a key moves, the cluster refuses transactions on it. Callers retry.
            Self::All(pipeline) => pipeline.query_async(connection).await,
        }
    }
}

/// A redirection by a node of a cluster. The node has not executed the command.
struct Redirect {
    /// The moved slot. `None` redirects only this command.
    slot: Option<u16>,
    node: Node,
}

impl Redirect {
    fn of(error: &redis::RedisError, asked: &Node) -> Option<Self> {
        let errors = error.clone().into_server_errors()?;
        let (_, error) = errors.first()?;
        let moved = match error.kind()? {
            ServerErrorKind::Moved => true,
            ServerErrorKind::Ask => false,
            _ => return None,
        };
        let (slot, address) = error.details()?.split_once(' ')?;
        // The port follows the last colon, also in an IPv6 address without brackets. An empty host means the host of the
        // node that answered.
        let (host, port) = address.trim().rsplit_once(':')?;
        let host = match host.trim_matches(['[', ']']) {
            "" => asked.host.clone(),
            host => host.to_owned(),
        };
        Some(Self {
            slot: if moved {
                Some(slot.parse().ok()?)
            } else {
                None
            },
            node: Node {
                host,
                port: port.parse().ok()?,
            },
        })
    }
}

fn is_aborted_by(error: &redis::RedisError, kind: ServerErrorKind) -> bool {
    error
        .clone()
        .into_server_errors()
        .is_some_and(|errors| errors.iter().any(|(_, error)| error.kind() == Some(kind)))
}
