//! Settings for a test's own server, and functions that read its content.

use std::time::Duration;

use job_contract::chain;
use platform::java;
use platform::redis::{Field, Redis, RedisArgs};
use test_peers::redis::RedisServer;
use test_peers::wait::{DEADLINE, until};

/// Longer than any of these tests takes, so that a hang fails.
pub(crate) const LONG: Duration = DEADLINE;

pub(crate) fn args(server: &RedisServer) -> RedisArgs {
    RedisArgs {
        redis_hostname: Some("127.0.0.1".into()),
        redis_port: Some(server.port().to_string().into()),
        ..RedisArgs::default()
    }
}

pub(crate) fn redis(args: &RedisArgs) -> Redis {
    Redis::new(args.resolve().unwrap().unwrap())
}

pub(crate) fn redis_at(server: &RedisServer) -> Redis {
    redis(&args(server))
}

/// Waits until the server answers in time. On a busy machine, a short timeout may pass a few times.
pub(crate) async fn until_it_answers(redis: &Redis) {
    until("the server answers", async || {
        redis.ping().await.map_err(|error| chain(&error))
    })
    .await;
}

/// One entry. Of Mayfly's code, only the codec is used to read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeenEntry {
    pub(crate) id: String,
    pub(crate) fields: Vec<(String, String)>,
}

impl SeenEntry {
    pub(crate) fn field(&self, name: &str) -> &str {
        let found = self.fields.iter().find(|(known, _)| known == name);
        assert!(found.is_some(), "{self:?} has no {name}");
        &found.unwrap().1
    }
}

/// A whole stream.
pub(crate) fn stream(client: &mut redis::Connection, name: &str) -> Vec<SeenEntry> {
    let entries: Vec<(String, Vec<Field>)> = redis::cmd("XRANGE")
        .arg(java::encode(name))
        .arg("-")
        .arg("+")
        .query(client)
        .unwrap();
    let text = |bytes: Vec<u8>| java::decode(&bytes).unwrap();
    entries
        .into_iter()
        .map(|(id, fields)| SeenEntry {
            id,
            fields: fields
                .into_iter()
                .map(|(name, value)| (text(name), text(value)))
                .collect(),
        })
        .collect()
}
