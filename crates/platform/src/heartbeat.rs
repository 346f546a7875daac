//! Heartbeats in Redis, by which the platform knows that a job is not lost (contract 2.6).
//!
//! A thread with its own runtime sends them, so no run and no other task can delay them (W-44). No task waits for a
//! heartbeat, so Redis may be unreachable for any time.
//!
//! The launcher sends heartbeats for a job until the job's executor sends its own. It never sends them beside the executor:
//! that would hide that the executor is dead. The platform only checks that the key exists. So the launcher writes a value
//! of its own, and any other value shows that the executor has taken over.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc as std_mpsc;
use std::thread;
use std::time::Duration;

use futures_util::future::join_all;
use job_contract::chain;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use crate::java;
use crate::redis::{Redis, RedisError};

/// How long a heartbeat is valid. The platform's own programs use the same time.
pub const EXPIRY: Duration = Duration::from_secs(45);
/// The time between two heartbeats. Three attempts fit in [`EXPIRY`]. The contract asks for at most 15 s.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// The pause after a failure.
const RETRY: Duration = Duration::from_secs(2);
/// How long one attempt may take.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the end of a heartbeat waits until its key is removed.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(2);
/// How many commands are sent at the same time.
const AT_ONCE: usize = 64;
/// The value that an executor writes. A stock executor writes the same.
const EXECUTOR: &str = "1";
/// The value that a launcher writes.
const LAUNCHER: &str = "launcher";

/// Which process wrote the last heartbeat of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeartbeatState {
    /// No process has written one for at least [`EXPIRY`].
    Missing,
    /// A launcher. This says nothing about the executor.
    FromLauncher,
    FromExecutor,
}

/// Reads which process wrote the current heartbeat of a job.
pub async fn heartbeat_state(redis: &Redis, job_id: &str) -> Result<HeartbeatState, RedisError> {
    let value = redis.get(&key(job_id)).await?;
    Ok(match value {
        None => HeartbeatState::Missing,
        Some(value) if value == java::encode(LAUNCHER) => HeartbeatState::FromLauncher,
        Some(_) => HeartbeatState::FromExecutor,
    })
}

/// Why the heartbeats could not start.
#[derive(Debug, thiserror::Error)]
#[error("could not start the heartbeat's thread")]
pub struct HeartbeatError(#[source] io::Error);

/// The key of a job's heartbeat.
pub fn key(job_id: &str) -> Vec<u8> {
    java::encode(&format!("executor-job-heartbeat:{job_id}"))
}

/// The heartbeat of one job, for as long as this value lives.
#[derive(Debug)]
pub struct Heartbeat {
    heartbeats: Heartbeats,
    _beat: Beat,
}

impl Heartbeat {
    /// Starts the heartbeat and sends the first one at once.
    pub fn start(redis: &Redis, job_id: &str) -> Result<Self, HeartbeatError> {
        let heartbeats = Heartbeats::writing(redis, EXECUTOR)?;
        let beat = heartbeats.beat(job_id);
        Ok(Self {
            heartbeats,
            _beat: beat,
        })
    }

    /// Ends the heartbeat and removes its key, unless Redis needs more than two seconds. Dropping does the same, but
    /// blocks.
    pub async fn stop(mut self) {
        if let Some(gone) = self.heartbeats.send_end(KeyAtEnd::Remove) {
            // If that fails, the key expires by itself.
            let _ = timeout(REMOVAL_TIMEOUT, gone).await;
        }
    }

    /// Ends the heartbeat and lets its key expire, because another process may send heartbeats for the same job.
    pub fn leave(mut self) {
        let _ = self.heartbeats.send_end(KeyAtEnd::LetExpire);
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        if let Some(gone) = self.heartbeats.send_end(KeyAtEnd::Remove) {
            wait_blocking(gone);
        }
    }
}

/// A launcher's heartbeats for many jobs, sent by one thread.
///
/// Dropping it ends them all. Their keys expire by themselves, because other processes may send heartbeats for the same
/// jobs.
#[derive(Debug)]
pub struct Heartbeats {
    orders: UnboundedSender<Order>,
    gone: Option<oneshot::Receiver<()>>,
}

/// One reason to send heartbeats for a job. Dropping the last reason of a job ends its heartbeats. The key expires by
/// itself, because the job's executor may send heartbeats too.
#[derive(Debug)]
pub struct Beat {
    job_id: String,
    reason: Reason,
    orders: UnboundedSender<Order>,
}

impl Drop for Beat {
    fn drop(&mut self) {
        let released = Order::Release(self.job_id.clone(), self.reason);
        let _ = self.orders.send(released);
    }
}

#[derive(Debug)]
enum Order {
    Add(String, Reason),
    Release(String, Reason),
    End(KeyAtEnd),
}

/// Why the launcher sends heartbeats for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// The job has no executor yet that could send them.
    NoExecutor,
    /// The job's executor starts. It must send its first heartbeat before this time.
    Until(Instant),
}

/// The reasons to send heartbeats for one job.
#[derive(Debug, Default)]
struct JobReasons {
    reasons: Vec<Reason>,
    /// The executor has sent a heartbeat, so the launcher sends no more for it.
    taken_over: bool,
}

/// How one heartbeat is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteMode {
    /// Over the value of any earlier writer.
    Overwrite,
    /// Only if the value is not the executor's.
    UnlessExecutor,
}

impl JobReasons {
    fn mode(&self, now: Instant) -> Option<WriteMode> {
        if self.reasons.contains(&Reason::NoExecutor) {
            return Some(WriteMode::Overwrite);
        }
        let waits = |reason: &Reason| matches!(reason, Reason::Until(until) if *until > now);
        (!self.taken_over && self.reasons.iter().any(waits)).then_some(WriteMode::UnlessExecutor)
    }

    fn add(&mut self, reason: Reason) {
        self.reasons.push(reason);
        if reason == Reason::NoExecutor {
            self.taken_over = false;
        }
    }

    fn release(&mut self, reason: Reason) {
        if let Some(at) = self.reasons.iter().position(|known| *known == reason) {
            self.reasons.swap_remove(at);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyAtEnd {
    Remove,
    LetExpire,
}

impl Heartbeats {
    /// Starts the thread. It sends no heartbeat yet.
    pub fn start(redis: &Redis) -> Result<Self, HeartbeatError> {
        Self::writing(redis, LAUNCHER)
    }

    fn writing(redis: &Redis, value: &'static str) -> Result<Self, HeartbeatError> {
        let redis = redis.separate();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(HeartbeatError)?;
        let (orders, receiver) = mpsc::unbounded_channel();
        let (ended, gone) = oneshot::channel();
        thread::Builder::new()
            .name("heartbeat".to_owned())
            .spawn(move || {
                runtime.block_on(beat(&redis, value, receiver));
                let _ = ended.send(());
            })
            .map_err(HeartbeatError)?;
        Ok(Self {
            orders,
            gone: Some(gone),
        })
    }

    /// Sends heartbeats for a job without a running executor until the returned value is dropped.
    pub fn beat(&self, job_id: &str) -> Beat {
        self.add(job_id, Reason::NoExecutor)
    }

    /// Sends heartbeats for a job whose executor starts. Ends with the executor's first heartbeat, after `within`, or when
    /// the returned value is dropped. After that only the executor sends them.
    pub fn beat_until_taken_over(&self, job_id: &str, within: Duration) -> Beat {
        self.add(job_id, Reason::Until(Instant::now() + within))
    }

    fn add(&self, job_id: &str, reason: Reason) -> Beat {
        let _ = self.orders.send(Order::Add(job_id.to_owned(), reason));
        Beat {
            job_id: job_id.to_owned(),
            reason,
            orders: self.orders.clone(),
        }
    }

    fn send_end(&mut self, end: KeyAtEnd) -> Option<oneshot::Receiver<()>> {
        let gone = self.gone.take()?;
        let _ = self.orders.send(Order::End(end));
        Some(gone)
    }
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        // The thread ends by itself, so this does not wait.
        let _ = self.send_end(KeyAtEnd::LetExpire);
    }
}

/// Waits in a destructor, which may run inside a runtime and must not depend on it.
fn wait_blocking(gone: oneshot::Receiver<()>) {
    let (tell, told) = std_mpsc::channel();
    let waiter = thread::Builder::new().spawn(move || {
        let _ = gone.blocking_recv();
        let _ = tell.send(());
    });
    if waiter.is_ok() {
        let _ = told.recv_timeout(REMOVAL_TIMEOUT);
    }
}

async fn beat(redis: &Redis, value: &str, mut orders: UnboundedReceiver<Order>) {
    let mut jobs: BTreeMap<String, JobReasons> = BTreeMap::new();
    let mut state = State::Working;
    let mut next = Instant::now();
    loop {
        let order = tokio::select! {
            order = orders.recv() => Some(order.unwrap_or(Order::End(KeyAtEnd::LetExpire))),
            () = sleep_until(next), if !jobs.is_empty() => None,
        };
        match order {
            Some(Order::Add(job, reason)) => {
                if jobs.is_empty() {
                    next = Instant::now() + INTERVAL;
                }
                let reasons = jobs.entry(job.clone()).or_default();
                let before = reasons.mode(Instant::now());
                reasons.add(reason);
                let now = reasons.mode(Instant::now());
                let Some(mode) = now.filter(|_| now != before) else {
                    continue;
                };
                // While Redis is unreachable, a new job waits for the next attempt. So the other jobs need not wait for it.
                if state == State::Failing
                    || !beat_for(redis, value, &[(job, mode)], &mut jobs, &mut state).await
                {
                    next = next.min(Instant::now() + RETRY);
                }
            }
            Some(Order::Release(job, reason)) => {
                if let Some(reasons) = jobs.get_mut(&job) {
                    reasons.release(reason);
                    if reasons.reasons.is_empty() {
                        jobs.remove(&job);
                    }
                }
            }
            Some(Order::End(end)) => {
                if end == KeyAtEnd::Remove {
                    remove(redis, jobs.into_keys()).await;
                }
                return;
            }
            None => {
                let started = Instant::now();
                let all: Vec<_> = jobs
                    .iter()
                    .filter_map(|(job, reasons)| Some((job.clone(), reasons.mode(started)?)))
                    .collect();
                next = if beat_for(redis, value, &all, &mut jobs, &mut state).await {
                    started + INTERVAL
                } else {
                    Instant::now() + RETRY
                };
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Working,
    Failing,
}

/// Returns whether all jobs have a heartbeat now. Stops at the first failure: its cause in Redis affects the others too.
async fn beat_for(
    redis: &Redis,
    value: &str,
    due: &[(String, WriteMode)],
    jobs: &mut BTreeMap<String, JobReasons>,
    state: &mut State,
) -> bool {
    for some in due.chunks(AT_ONCE) {
        let beats = some
            .iter()
            .map(|(job, mode)| beat_once(redis, value, job, *mode));
        let mut failure = None;
        for ((job, _), beat) in some.iter().zip(join_all(beats).await) {
            match beat {
                Ok(Written::ByUs) => {}
                Ok(Written::ByExecutor) => {
                    if let Some(reasons) = jobs.get_mut(job) {
                        reasons.taken_over = true;
                    }
                }
                Err(error) => failure = Some(error),
            }
        }
        if let Some(failure) = failure {
            if *state == State::Working {
                warn!(error = %failure, "could not write heartbeats to Redis, retrying");
            } else {
                debug!(error = %failure, "could not write heartbeats to Redis, still retrying");
            }
            *state = State::Failing;
            return false;
        }
    }
    if *state == State::Failing && !due.is_empty() {
        info!("Redis takes heartbeats again");
        *state = State::Working;
    }
    true
}

/// Which process wrote the current heartbeat.
enum Written {
    ByUs,
    ByExecutor,
}

async fn beat_once(
    redis: &Redis,
    value: &str,
    job_id: &str,
    mode: WriteMode,
) -> Result<Written, String> {
    let (key, value) = (key(job_id), java::encode(value));
    let beat = async {
        // If the executor writes between the two commands, the next round sees it: it writes more often than a key expires.
        if mode == WriteMode::UnlessExecutor
            && heartbeat_state(redis, job_id).await? == HeartbeatState::FromExecutor
        {
            return Ok(Written::ByExecutor);
        }
        redis.set(&key, &value, EXPIRY).await?;
        Ok::<_, RedisError>(Written::ByUs)
    };
    match timeout(ATTEMPT_TIMEOUT, beat).await {
        Ok(result) => result.map_err(|error| chain(&error)),
        Err(_) => Err(format!("no answer within {} s", ATTEMPT_TIMEOUT.as_secs())),
    }
}

async fn remove(redis: &Redis, jobs: impl Iterator<Item = String>) {
    for job in jobs {
        let removed: Result<(), RedisError> = redis.delete(&key(&job)).await;
        if let Err(error) = removed {
            debug!(job, error = %chain(&error), "could not remove the key of a heartbeat; it expires");
            return;
        }
    }
}
