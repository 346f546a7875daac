//! Redis: streams, keys that expire, and messages.
//!
//! A build without the feature `full` has no client. Its [`Redis`] cannot be made, and [`RedisArgs::resolve`] refuses settings that
//! name one.

#[cfg_attr(
    not(feature = "full"),
    expect(dead_code, reason = "only the client reads the nodes")
)]
mod args;
#[cfg(feature = "full")]
mod client;
#[cfg(not(feature = "full"))]
#[path = "redis/no_client.rs"]
mod client;
#[cfg(feature = "full")]
mod config;

use std::time::Duration;

pub use self::args::{Nodes, RedisArgs};
pub use self::client::{Redis, RedisConfig, RedisError};

/// Name and value of a field.
pub type Field = (Vec<u8>, Vec<u8>);

/// One entry of a stream: its fields in order.
pub type StreamEntry = Vec<Field>;

/// An entry with its id on the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEntry {
    /// Two numbers with a hyphen between them. Later entries have greater ids.
    pub id: String,
    pub entry: StreamEntry,
}

/// How much of a stream is kept after entries are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// About how many entries are kept, the newest ones.
    pub entries: Option<u64>,
    /// How long the stream is kept after its last entry.
    pub expiry: Option<Duration>,
}

/// The result of [`Redis::append_after`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Appended {
    /// Id of the last entry.
    pub last_id: Option<String>,
    /// Whether the entry was there after which they were to be added. Without it, the stream was deleted.
    pub follows: bool,
}

/// The result of [`Redis::take`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    Ours,
    /// The key has this other value.
    ByOther(Vec<u8>),
}
