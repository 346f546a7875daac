//! Signs of life in Redis, by which the platform knows that a job has not been lost (contract 2.6): from a thread of
//! their own with a runtime of its own, which no run and no other task can starve (W-44). Redis may be away for as
//! long as it likes; no task waits for a heartbeat.
//!
//! The launcher keeps a job alive until the job's executor does, and not beside it: who beats for a dead executor hides
//! its death. The platform only looks whether the key is there, so that the launcher writes a value of its own into it,
//! and knows by any other that the executor has taken over.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc as std_mpsc;
use std::thread;
use std::time::Duration;

use futures_util::future::join_all;
use job_contract::{Exit, chain};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use crate::java;
use crate::redis::{Redis, RedisError};

/// How long a sign of life is valid. The platform's own programs use the same.
pub const EXPIRY: Duration = Duration::from_secs(45);
/// Leaves time for three attempts within [`EXPIRY`]; the contract asks for 15 s at most.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// After a failure.
const RETRY: Duration = Duration::from_secs(2);
/// How long one attempt may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the end waits for the last key to be removed.
const FAREWELL: Duration = Duration::from_secs(2);
/// How many commands are under way at a time.
const AT_ONCE: usize = 64;
/// What an executor writes, as a stock one does.
const EXECUTOR: &str = "1";
/// What a launcher writes.
const LAUNCHER: &str = "launcher";

/// Who has written the last sign of life of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// No process, for [`EXPIRY`] at least.
    Nobody,
    /// A launcher, which says nothing of the executor.
    Launcher,
    /// The executor.
    Executor,
}

/// Whose the sign of life is that a job has at the moment.
pub async fn sign_of(redis: &Redis, job_id: &str) -> Result<Sign, RedisError> {
    let value = redis.get(&key(job_id)).await?;
    Ok(match value {
        None => Sign::Nobody,
        Some(value) if value == java::encode(LAUNCHER) => Sign::Launcher,
        Some(_) => Sign::Executor,
    })
}

/// Why there is no heartbeat.
#[derive(Debug, thiserror::Error)]
#[error("could not start the heartbeat's thread")]
pub struct HeartbeatError {
    #[source]
    source: io::Error,
}

impl HeartbeatError {
    /// Whose fault it is: the machine's.
    pub const fn exit(&self) -> Exit {
        Exit::Infrastructure
    }
}

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
    /// Begins to beat, at once.
    pub fn start(redis: &Redis, job_id: &str) -> Result<Self, HeartbeatError> {
        let heartbeats = Heartbeats::writing(redis, EXECUTOR)?;
        let beat = heartbeats.beat(job_id);
        Ok(Self {
            heartbeats,
            _beat: beat,
        })
    }

    /// Ends it and removes its key, unless Redis takes longer than two seconds. Dropping does the same, and blocks.
    pub async fn stop(mut self) {
        if let Some(gone) = self.heartbeats.send_end(AtTheEnd::Remove) {
            // Late or never: the key expires by itself.
            let _ = timeout(FAREWELL, gone).await;
        }
    }

    /// Ends it and lets its key expire: another process may beat for the same job.
    pub fn leave(mut self) {
        let _ = self.heartbeats.send_end(AtTheEnd::LetExpire);
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        if let Some(gone) = self.heartbeats.send_end(AtTheEnd::Remove) {
            wait_blocking(gone);
        }
    }
}

/// A launcher's heartbeats for many jobs, from one thread.
///
/// Dropping it ends them all; their keys expire by themselves, because other processes may beat for the same jobs.
#[derive(Debug)]
pub struct Heartbeats {
    orders: UnboundedSender<Order>,
    gone: Option<oneshot::Receiver<()>>,
}

/// One reason to beat for a job. Dropping the last one of a job ends its heartbeat; the key expires by itself, because
/// the executor of the job may beat for it too.
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
    Hold(String, Reason),
    Release(String, Reason),
    End(AtTheEnd),
}

/// Why a job is kept alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// It has no executor that could do it.
    NoExecutor,
    /// Its executor is about to do it, and has time for that until then.
    Until(Instant),
}

/// The reasons to beat for one job.
#[derive(Debug, Default)]
struct Held {
    reasons: Vec<Reason>,
    /// Its executor has been seen to beat, and is not beaten for again.
    taken_over: bool,
}

/// How one beat is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// Any earlier writer of the key.
    Overwrite,
    /// Not over what the executor has written.
    Yield,
}

impl Held {
    fn manner(&self, now: Instant) -> Option<Manner> {
        if self.reasons.contains(&Reason::NoExecutor) {
            return Some(Manner::Overwrite);
        }
        let waits = |reason: &Reason| matches!(reason, Reason::Until(until) if *until > now);
        (!self.taken_over && self.reasons.iter().any(waits)).then_some(Manner::Yield)
    }

    fn hold(&mut self, reason: Reason) {
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
enum AtTheEnd {
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
            .map_err(|source| HeartbeatError { source })?;
        let (orders, receiver) = mpsc::unbounded_channel();
        let (ended, gone) = oneshot::channel();
        thread::Builder::new()
            .name("heartbeat".to_owned())
            .spawn(move || {
                runtime.block_on(beat(&redis, value, receiver));
                let _ = ended.send(());
            })
            .map_err(|source| HeartbeatError { source })?;
        Ok(Self {
            orders,
            gone: Some(gone),
        })
    }

    /// Beats for a job that has no running executor, from now on and as long as what is returned lives.
    pub fn beat(&self, job_id: &str) -> Beat {
        self.hold(job_id, Reason::NoExecutor)
    }

    /// Beats for a job whose executor is about to, as long as what is returned lives: until the executor has been seen to
    /// beat, and for that time at most. After that it is the executor's own, whatever becomes of that.
    pub fn beat_until_taken_over(&self, job_id: &str, within: Duration) -> Beat {
        self.hold(job_id, Reason::Until(Instant::now() + within))
    }

    fn hold(&self, job_id: &str, reason: Reason) -> Beat {
        let _ = self.orders.send(Order::Hold(job_id.to_owned(), reason));
        Beat {
            job_id: job_id.to_owned(),
            reason,
            orders: self.orders.clone(),
        }
    }

    fn send_end(&mut self, end: AtTheEnd) -> Option<oneshot::Receiver<()>> {
        let gone = self.gone.take()?;
        let _ = self.orders.send(Order::End(end));
        Some(gone)
    }
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        // The thread ends by itself; nothing is left to be waited for.
        let _ = self.send_end(AtTheEnd::LetExpire);
    }
}

/// In a destructor, which may run inside a runtime and must not depend on it.
fn wait_blocking(gone: oneshot::Receiver<()>) {
    let (tell, told) = std_mpsc::channel();
    let waiter = thread::Builder::new().spawn(move || {
        let _ = gone.blocking_recv();
        let _ = tell.send(());
    });
    if waiter.is_ok() {
        let _ = told.recv_timeout(FAREWELL);
    }
}

async fn beat(redis: &Redis, value: &str, mut orders: UnboundedReceiver<Order>) {
    let mut jobs: BTreeMap<String, Held> = BTreeMap::new();
    let mut state = State::Fine;
    let mut next = Instant::now();
    loop {
        let order = tokio::select! {
            order = orders.recv() => Some(order.unwrap_or(Order::End(AtTheEnd::LetExpire))),
            () = sleep_until(next), if !jobs.is_empty() => None,
        };
        match order {
            Some(Order::Hold(job, reason)) => {
                if jobs.is_empty() {
                    next = Instant::now() + INTERVAL;
                }
                let held = jobs.entry(job.clone()).or_default();
                let before = held.manner(Instant::now());
                held.hold(reason);
                let now = held.manner(Instant::now());
                let Some(manner) = now.filter(|_| now != before) else {
                    continue;
                };
                // While Redis is away, a new job waits for the next attempt, not everybody for the new job.
                if state == State::Failing
                    || !beat_for(redis, value, &[(job, manner)], &mut jobs, &mut state).await
                {
                    next = next.min(Instant::now() + RETRY);
                }
            }
            Some(Order::Release(job, reason)) => {
                if let Some(held) = jobs.get_mut(&job) {
                    held.release(reason);
                    if held.reasons.is_empty() {
                        jobs.remove(&job);
                    }
                }
            }
            Some(Order::End(end)) => {
                if end == AtTheEnd::Remove {
                    remove(redis, jobs.into_keys()).await;
                }
                return;
            }
            None => {
                let started = Instant::now();
                let all: Vec<_> = jobs
                    .iter()
                    .filter_map(|(job, held)| Some((job.clone(), held.manner(started)?)))
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
    Fine,
    Failing,
}

/// Returns whether all have a sign of life now. Gives up at the first that cannot be written: what keeps it from
/// Redis keeps the others too.
async fn beat_for(
    redis: &Redis,
    value: &str,
    due: &[(String, Manner)],
    jobs: &mut BTreeMap<String, Held>,
    state: &mut State,
) -> bool {
    for some in due.chunks(AT_ONCE) {
        let beats = some
            .iter()
            .map(|(job, manner)| beat_once(redis, value, job, *manner));
        let mut failure = None;
        for ((job, _), beat) in some.iter().zip(join_all(beats).await) {
            match beat {
                Ok(Wrote::Yes) => {}
                Ok(Wrote::TheExecutorHad) => {
                    if let Some(held) = jobs.get_mut(job) {
                        held.taken_over = true;
                    }
                }
                Err(error) => failure = Some(error),
            }
        }
        if let Some(failure) = failure {
            if *state == State::Fine {
                warn!(error = %failure, "heartbeats do not reach Redis, trying again");
            } else {
                debug!(error = %failure, "heartbeats do not reach Redis yet");
            }
            *state = State::Failing;
            return false;
        }
    }
    if *state == State::Failing && !due.is_empty() {
        info!("heartbeats reach Redis again");
        *state = State::Fine;
    }
    true
}

/// Whether a beat was needed.
enum Wrote {
    Yes,
    TheExecutorHad,
}

async fn beat_once(
    redis: &Redis,
    value: &str,
    job_id: &str,
    manner: Manner,
) -> Result<Wrote, String> {
    let (key, value) = (key(job_id), java::encode(value));
    let beat = async {
        // What the executor writes between the two is seen the next time: it writes more often than a key expires.
        if manner == Manner::Yield && sign_of(redis, job_id).await? == Sign::Executor {
            return Ok(Wrote::TheExecutorHad);
        }
        redis.set(&key, &value, EXPIRY).await?;
        Ok::<_, RedisError>(Wrote::Yes)
    };
    match timeout(PATIENCE, beat).await {
        Ok(result) => result.map_err(|error| chain(&error)),
        Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
    }
}

async fn remove(redis: &Redis, jobs: impl Iterator<Item = String>) {
    for job in jobs {
        let removed: Result<(), RedisError> = redis.delete(&key(&job)).await;
        if let Err(error) = removed {
            debug!(job, error = %chain(&error), "a heartbeat's key is left to expire");
            return;
        }
    }
}
