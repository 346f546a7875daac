//! Live logs and heartbeats: in a real Redis as Java keeps them (contract 2.6, 7.2 to 7.5), or,
//! without one, the logs in memory.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisResult, cmd};
use serde_json::Value;
use test_peers::wait::DEADLINE;

use crate::java;
use crate::ledger::Rule;

/// Entries of one read. A read of a whole stream may exceed the timeout.
const PAGE: usize = 100;
const FIELDS: [&str; 4] = ["jobId", "stepId", "lineNumber", "output"];

/// One entry of a log stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    pub job_id: String,
    pub step_id: String,
    pub line_number: u64,
    pub output: String,
}

/// The position of a reader in a stream.
#[derive(Debug, Clone)]
pub(crate) struct StreamPosition {
    /// Position in the current stream, in the form of Redis.
    from: String,
    /// Number of deleted entries that were read.
    gone: usize,
}

impl Default for StreamPosition {
    fn default() -> Self {
        Self {
            from: "-".to_owned(),
            gone: 0,
        }
    }
}

/// A broken rule and how.
pub(crate) type Findings = Vec<(Rule, String)>;

#[derive(Debug)]
pub(crate) struct Streams {
    redis: Option<redis::Client>,
    memory: Mutex<BTreeMap<u32, Vec<LogEntry>>>,
    /// The entries of deleted streams.
    gone: Mutex<BTreeMap<u32, Vec<LogEntry>>>,
    /// Held while entries move from a stream to `gone`.
    moving: tokio::sync::Mutex<()>,
}

impl Streams {
    pub(crate) fn new(redis: Option<&str>) -> RedisResult<Self> {
        Ok(Self {
            redis: redis.map(redis::Client::open).transpose()?,
            memory: Mutex::default(),
            gone: Mutex::default(),
            moving: tokio::sync::Mutex::default(),
        })
    }

    pub(crate) fn has_redis(&self) -> bool {
        self.redis.is_some()
    }

    /// A connection for a few commands. Redis may restart between them.
    async fn connect(client: &redis::Client) -> RedisResult<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(DEADLINE))
            .set_response_timeout(Some(DEADLINE));
        client
            .get_multiplexed_async_connection_with_config(&config)
            .await
    }

    /// The current entries. Malformed entries are omitted, as in the API, and noted.
    pub(crate) async fn read(&self, job: u32) -> RedisResult<(Vec<LogEntry>, Findings)> {
        self.read_on(job, &mut StreamPosition::default()).await
    }

    /// The entries after a position. The position moves behind them.
    async fn read_on(
        &self,
        job: u32,
        position: &mut StreamPosition,
    ) -> RedisResult<(Vec<LogEntry>, Findings)> {
        let Some(client) = &self.redis else {
            let memory = lock(&self.memory).get(&job).cloned();
            return Ok((memory.unwrap_or_default(), Findings::new()));
        };
        let mut redis = Self::connect(client).await?;
        let (mut entries, mut findings) = (Vec::new(), Findings::new());
        loop {
            let page: Vec<(String, Vec<Vec<u8>>)> = cmd("XRANGE")
                .arg(key(job))
                .arg(&position.from)
                .arg("+")
                .arg("COUNT")
                .arg(PAGE)
                .query_async(&mut redis)
                .await?;
            let Some((last, _)) = page.last() else {
                return Ok((entries, findings));
            };
            position.from = format!("({last}");
            for (id, pairs) in page {
                match entry(job, &pairs) {
                    Ok(entry) => entries.push(entry),
                    Err((rule, why)) => {
                        findings.push((rule, format!("entry {id} of job {job}: {why}")));
                    }
                }
            }
        }
    }

    /// Deletes the stream of a job, and returns what was in it. Readers have not seen the lines of the step `unseen`.
    pub(crate) async fn delete(
        &self,
        job: u32,
        unseen: Option<&str>,
    ) -> RedisResult<(Vec<LogEntry>, Findings)> {
        let _moving = self.moving.lock().await;
        let found = self.read(job).await?;
        match &self.redis {
            None => drop(lock(&self.memory).remove(&job)),
            Some(client) => {
                let mut redis = Self::connect(client).await?;
                () = cmd("DEL").arg(key(job)).query_async(&mut redis).await?;
            }
        }
        let seen = found.0.iter();
        let seen = seen.filter(|entry| Some(entry.step_id.as_str()) != unseen);
        lock(&self.gone)
            .entry(job)
            .or_default()
            .extend(seen.cloned());
        Ok(found)
    }

    /// The entries since the last call. Some may be repeated, and without Redis all are.
    pub(crate) async fn news(
        &self,
        job: u32,
        position: &mut StreamPosition,
    ) -> RedisResult<Vec<LogEntry>> {
        let _moving = self.moving.lock().await;
        let mut entries = {
            let gone = lock(&self.gone);
            let gone = gone.get(&job).map_or(&[][..], Vec::as_slice);
            let new = gone[position.gone..].to_vec();
            position.gone = gone.len();
            new
        };
        entries.extend(self.read_on(job, position).await?.0);
        Ok(entries)
    }

    /// All entries that were in the stream.
    pub(crate) async fn all(&self, job: u32) -> RedisResult<(Vec<LogEntry>, Findings)> {
        let _moving = self.moving.lock().await;
        let (now, findings) = self.read(job).await?;
        let mut entries = lock(&self.gone).get(&job).cloned().unwrap_or_default();
        entries.extend(now);
        Ok((entries, findings))
    }

    /// Appends entries that came over HTTP.
    pub(crate) async fn append(&self, job: u32, entries: &[LogEntry]) -> RedisResult<()> {
        let Some(client) = &self.redis else {
            lock(&self.memory)
                .entry(job)
                .or_default()
                .extend_from_slice(entries);
            return Ok(());
        };
        let mut redis = Self::connect(client).await?;
        for entry in entries {
            let mut add = cmd("XADD");
            add.arg(key(job)).arg("*");
            let number = entry.line_number.to_string();
            let values = [&entry.job_id, &entry.step_id, &number, &entry.output];
            for (field, value) in FIELDS.iter().zip(values) {
                add.arg(java::encode(field)).arg(java::encode(value));
            }
            () = add.query_async(&mut redis).await?;
        }
        Ok(())
    }

    /// Makes the groups of a job's stream, and the stream.
    pub(crate) async fn create_groups(&self, job: u32) -> RedisResult<()> {
        let Some(client) = &self.redis else {
            return Ok(());
        };
        let mut redis = Self::connect(client).await?;
        for group in ["CLI", "UI"] {
            let made: RedisResult<()> = cmd("XGROUP")
                .arg("CREATE")
                .arg(key(job))
                .arg(group)
                .arg("$")
                .arg("MKSTREAM")
                .query_async(&mut redis)
                .await;
            // The groups may exist.
            drop(made);
        }
        Ok(())
    }

    /// How long the heartbeat of a job still lasts; none when there is none.
    pub(crate) async fn heartbeat(&self, job: u32) -> RedisResult<Option<Duration>> {
        let Some(client) = &self.redis else {
            return Ok(None);
        };
        let mut redis = Self::connect(client).await?;
        let key = java::encode(&format!("executor-job-heartbeat:{job}"));
        let left: i64 = cmd("PTTL").arg(key).query_async(&mut redis).await?;
        Ok(match left {
            -2 => None,
            // The key does not expire.
            -1 => Some(Duration::MAX),
            left => Some(Duration::from_millis(u64::try_from(left).unwrap_or(0))),
        })
    }

    /// The documents in the structured live stream of a job (contract 7.4).
    pub(crate) async fn structured(&self, job: u32) -> RedisResult<(Vec<Value>, Findings)> {
        let Some(client) = &self.redis else {
            return Ok((Vec::new(), Findings::new()));
        };
        let mut redis = Self::connect(client).await?;
        let key = java::encode(&format!("{job}-context"));
        let raw: Vec<(String, Vec<Vec<u8>>)> = cmd("XRANGE")
            .arg(&key)
            .arg("-")
            .arg("+")
            .query_async(&mut redis)
            .await?;
        let left: i64 = cmd("TTL").arg(&key).query_async(&mut redis).await?;
        let (mut documents, mut findings) = (Vec::new(), Findings::new());
        if left == -1 {
            let why = format!("the structured stream of job {job} stays for ever");
            findings.push((Rule::StreamWithoutExpiry, why));
        }
        for (id, pairs) in raw {
            let document = fields(&pairs).and_then(|fields| {
                let output = fields.iter().find(|(name, _)| name == "output");
                let (_, text) = output.ok_or((Rule::LogEntry, "no output".to_owned()))?;
                serde_json::from_str(text).map_err(|error| (Rule::LogEntry, error.to_string()))
            });
            match document {
                Ok(document) => documents.push(document),
                Err((rule, why)) => {
                    findings.push((rule, format!("entry {id} of {job}-context: {why}")));
                }
            }
        }
        Ok((documents, findings))
    }

    /// Keys of a job that were written without serialisation. The API does not read them.
    pub(crate) async fn plain_keys(&self, job: u32) -> RedisResult<Findings> {
        let Some(client) = &self.redis else {
            return Ok(Findings::new());
        };
        let mut redis = Self::connect(client).await?;
        let mut findings = Findings::new();
        for key in [
            job.to_string(),
            format!("{job}-context"),
            format!("executor-job-heartbeat:{job}"),
        ] {
            if cmd("EXISTS").arg(&key).query_async(&mut redis).await? {
                findings.push((Rule::PlainRedis, format!("the key `{key}`")));
            }
        }
        Ok(findings)
    }
}

fn key(job: u32) -> Vec<u8> {
    java::encode(&job.to_string())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fields(pairs: &[Vec<u8>]) -> Result<Vec<(String, String)>, (Rule, String)> {
    let text = |bytes: &Vec<u8>| {
        let error = |why| {
            let bytes = String::from_utf8_lossy(bytes).into_owned();
            (Rule::PlainRedis, format!("{bytes:?}: {why}"))
        };
        java::decode(bytes).map_err(error)
    };
    pairs
        .chunks_exact(2)
        .map(|pair| Ok((text(&pair[0])?, text(&pair[1])?)))
        .collect()
}

fn entry(job: u32, pairs: &[Vec<u8>]) -> Result<LogEntry, (Rule, String)> {
    let wrong = |why: String| (Rule::LogEntry, why);
    let fields = fields(pairs)?;
    let names: Vec<&str> = fields.iter().map(|(name, _)| name.as_str()).collect();
    if names != FIELDS {
        return Err(wrong(format!("fields {names:?}")));
    }
    let value = |at: usize| fields[at].1.clone();
    if value(0) != job.to_string() {
        return Err(wrong(format!("job id {:?}", value(0))));
    }
    let number = value(2);
    // Lines of a run are counted from 1. Lines of the launcher have number 0.
    let line_number = number.parse().ok();
    Ok(LogEntry {
        job_id: value(0),
        step_id: value(1),
        line_number: line_number.ok_or_else(|| wrong(format!("line number {number:?}")))?,
        output: value(3),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Vec<Vec<u8>> {
        let flat = pairs.iter().flat_map(|(name, value)| [name, value]);
        flat.map(|text| java::encode(text)).collect()
    }

    #[test]
    fn an_entry_has_four_fields_in_their_order() {
        let good = [
            ("jobId", "7"),
            ("stepId", "s"),
            ("lineNumber", "1"),
            ("output", "a\nb"),
        ];
        let read = entry(7, &pairs(&good)).unwrap();
        assert_eq!((read.line_number, read.output.as_str()), (1, "a\nb"));
        let rule = |pairs: &[Vec<u8>]| entry(7, pairs).unwrap_err().0;
        assert_eq!(rule(&pairs(&good[..3])), Rule::LogEntry);
        let mut swapped = good;
        swapped.swap(2, 3);
        assert_eq!(rule(&pairs(&swapped)), Rule::LogEntry);
        for (at, value) in [(0, "8"), (2, "-1"), (2, "one")] {
            let mut wrong = good;
            wrong[at].1 = value;
            assert_eq!(rule(&pairs(&wrong)), Rule::LogEntry, "{value}");
        }
        let mut plain = pairs(&good);
        plain[7] = b"a".to_vec();
        assert_eq!(rule(&plain), Rule::PlainRedis);
    }
}
