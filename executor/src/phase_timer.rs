//! Times the phases of a run, and logs when each begins and ends.

use std::fmt;
use std::future::Future;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use job_contract::progress::{self, Phase, Progress};
use job_contract::report::PhaseTiming;
use platform::Platform;
use tracing::info;

/// Durations of the phases that have ended, in that order.
pub(crate) struct PhaseTimer {
    timings: Mutex<Vec<PhaseTiming>>,
    /// Learns of each phase that begins.
    platform: Platform,
}

impl fmt::Debug for PhaseTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.timings()).finish()
    }
}

impl PhaseTimer {
    pub(crate) const fn new(platform: Platform) -> Self {
        Self {
            timings: Mutex::new(Vec::new()),
            platform,
        }
    }

    /// Times a piece of work; `ok` tells whether its result is a success.
    pub(crate) async fn time<T>(
        &self,
        phase: Phase,
        work: impl Future<Output = T>,
        ok: impl FnOnce(&T) -> bool,
    ) -> T {
        announce_start(phase);
        self.platform.enter(phase);
        let start = Instant::now();
        let result = work.await;
        let duration_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let ok = ok(&result);
        announce_end(phase, duration_ms, ok);
        self.lock().push(PhaseTiming {
            phase,
            duration_ms,
            ok,
        });
        result
    }

    /// The durations of the phases that have ended.
    pub(crate) fn timings(&self) -> Vec<PhaseTiming> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PhaseTiming>> {
        runtime::lock(&self.timings)
    }
}

/// Logs that a phase begins.
fn announce_start(phase: Phase) {
    info!(
        target: progress::TARGET,
        event = Progress::PhaseStarted.name(),
        phase = phase.name(),
        "{phase} started"
    );
}

/// Logs that a phase has ended.
fn announce_end(phase: Phase, duration_ms: u64, ok: bool) {
    info!(
        target: progress::TARGET,
        event = Progress::PhaseFinished.name(),
        phase = phase.name(),
        duration_ms,
        ok,
        "{phase} {}",
        if ok { "finished" } else { "failed" }
    );
}
