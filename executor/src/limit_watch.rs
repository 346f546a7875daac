//! Watches the limits of a run: its time, its silence and its memory. The first limit that is reached gives the stop
//! order, early enough that results can be saved.
//!
//! This module knows nothing of the run's work.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use run_log::{LogWriter, Pulse};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tracing::warn;

use crate::cgroup::MemoryGroup;
use crate::config::RunLimits;
use crate::context::RunContext;
use crate::stop::{Cause, Stop};

/// Control groups of both versions do not notify at a share of the limit, so it is polled. A provider allocates at most
/// some hundred MiB per second.
const MEMORY_EVERY: Duration = Duration::from_millis(250);
/// The warning comes at this percentage of the interrupt's percentage.
const WARN_PERCENT: u64 = 90;

/// The inputs of the watch.
#[derive(Debug)]
pub(crate) struct LimitWatch {
    limits: RunLimits,
    memory: Option<MemoryGroup>,
    pulse: Pulse,
    /// While this is set, the limit on silence does not apply.
    waiting: Arc<AtomicBool>,
    log: LogWriter,
    stop: Stop,
}

impl LimitWatch {
    pub(crate) fn of(run: &RunContext<'_>) -> Self {
        let limits = run.config.run.limits();
        Self {
            limits,
            memory: limits
                .memory_percent
                .and_then(|_| MemoryGroup::of_this_process()),
            pulse: run.log.pulse(),
            waiting: Arc::clone(&run.waiting),
            log: run.log.writer(),
            stop: run.stop.clone(),
        }
    }
}

/// Watches until a limit is reached. Then it gives the stop order, and reports the cause in the run's log.
pub(crate) async fn watch(run: LimitWatch) {
    let cause = tokio::select! {
        cause = deadline(run.limits.deadline) => cause,
        cause = silence(&run) => cause,
        cause = memory(&run) => cause,
        _ = run.stop.ordered() => return,
    };
    warn!(reason = %cause, "limit reached: interrupting tool and scripts, then storing results");
    run.stop.order(cause);
    run.log.line(&format!("mayfly: {cause}")).await;
}

async fn deadline(limit: Option<Duration>) -> Cause {
    match limit.and_then(|limit| Some((limit, Instant::now().checked_add(limit)?))) {
        Some((limit, end)) => {
            sleep_until(end).await;
            Cause::Deadline(limit)
        }
        None => pending().await,
    }
}

async fn silence(run: &LimitWatch) -> Cause {
    let Some(limit) = run.limits.silence else {
        return pending().await;
    };
    let mut last_count = run.pulse.count();
    let mut since = Instant::now();
    // Detection is at most a tenth of the limit late.
    let mut ticks = interval((limit / 10).max(Duration::from_millis(10)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let count = run.pulse.count();
        if count != last_count || run.waiting.load(Ordering::Relaxed) {
            (last_count, since) = (count, Instant::now());
        } else if since.elapsed() >= limit {
            return Cause::Silence(limit);
        }
    }
}

async fn memory(run: &LimitWatch) -> Cause {
    let (Some(group), Some(stop_at)) = (&run.memory, run.limits.memory_percent) else {
        return pending().await;
    };
    let warn_at = stop_at * WARN_PERCENT / 100;
    let (mut warned, mut read_failed) = (false, false);
    let mut ticks = interval(MEMORY_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let usage = match group.usage() {
            Ok(usage) => usage,
            // Lack of memory may be the cause, so the next read matters most.
            Err(error) => {
                if !read_failed {
                    warn!(%error, "memory in use cannot be read, trying again");
                }
                read_failed = true;
                continue;
            }
        };
        if usage.reaches(stop_at) {
            return Cause::Memory {
                used: usage.used,
                limit: usage.limit,
            };
        }
        if usage.reaches(warn_at) && !warned {
            warned = true;
            let text = format!(
                "mayfly: {} of {} MiB of memory are in use; at {stop_at} % the tool is interrupted",
                usage.used >> 20,
                usage.limit >> 20,
            );
            warn!("{text}");
            run.log.line(&text).await;
        } else if !usage.reaches(warn_at * WARN_PERCENT / 100) {
            // Use is well below again, so the next rise gives a new warning.
            warned = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use run_log::{LogConfig, Redactor, RunLog};

    use super::*;

    /// The paused clock advances only when all tasks are idle. So the first read fails before the file exists.
    #[tokio::test(start_paused = true)]
    async fn memory_is_watched_after_a_failed_read() {
        let folder = tempfile::tempdir().unwrap();
        let group = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        group("memory.max", "1000");
        let log = RunLog::start(
            LogConfig::new(folder.path()),
            Redactor::new(Vec::<String>::new()),
            Vec::new(),
        );
        let log = log.unwrap();
        let stop = Stop::default();
        let watching = tokio::spawn(watch(LimitWatch {
            limits: RunLimits {
                memory_percent: Some(80),
                ..RunLimits::default()
            },
            memory: MemoryGroup::find(folder.path(), "0::/\n"),
            pulse: log.pulse(),
            waiting: Arc::default(),
            log: log.writer(),
            stop: stop.clone(),
        }));
        tokio::time::sleep(MEMORY_EVERY / 2).await;
        group("memory.stat", "file 0\nshmem 0\n");
        group("memory.current", "900");
        let ordered = tokio::time::timeout(Duration::from_mins(1), stop.ordered()).await;
        let full = Cause::Memory {
            used: 900,
            limit: 1000,
        };
        assert_eq!(ordered.unwrap().cause, full);
        watching.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_that_waits_for_its_turn_does_not_reach_the_limit_on_silence() {
        let folder = tempfile::tempdir().unwrap();
        let log = RunLog::start(
            LogConfig::new(folder.path()),
            Redactor::new(Vec::<String>::new()),
            Vec::new(),
        );
        let log = log.unwrap();
        let (stop, waiting) = (Stop::default(), Arc::new(AtomicBool::new(true)));
        let limit = Duration::from_mins(1);
        let watching = tokio::spawn(watch(LimitWatch {
            limits: RunLimits {
                silence: Some(limit),
                ..RunLimits::default()
            },
            memory: None,
            pulse: log.pulse(),
            waiting: Arc::clone(&waiting),
            log: log.writer(),
            stop: stop.clone(),
        }));
        tokio::time::sleep(limit * 5).await;
        assert!(stop.given().is_none());
        waiting.store(false, Ordering::Relaxed);
        let ordered = tokio::time::timeout(limit * 2, stop.ordered()).await;
        assert_eq!(ordered.unwrap().cause, Cause::Silence(limit));
        watching.await.unwrap();
    }
}
