//! The order to stop, from SIGTERM, SIGINT or SIGHUP to everything that waits. Each receiver decides
//! what stopping means.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Three steps: take the launcher out of service, finish what was begun, then leave at once.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    /// Say that this launcher is not ready, hand over what another can do, and accept as before.
    pub draining: CancellationToken,
    /// Begin nothing new.
    pub graceful: CancellationToken,
    /// Wait for nothing any more.
    pub immediate: CancellationToken,
}

impl Shutdown {
    /// Obeys signals from now on. SIGTERM leaves `drain` between the first step and the second, for endpoints to follow.
    /// SIGINT and SIGHUP come from a terminal, where no supervisor follows. The second signal ends the process.
    pub fn on_signals(&self, drain: Duration) -> io::Result<()> {
        for (kind, drain) in [
            (SignalKind::terminate(), drain),
            (SignalKind::interrupt(), Duration::ZERO),
            (SignalKind::hangup(), Duration::ZERO),
        ] {
            let mut arrivals = signal(kind)?;
            let shutdown = self.clone();
            tokio::spawn(async move {
                while arrivals.recv().await.is_some() {
                    shutdown.order(drain);
                }
            });
        }
        Ok(())
    }

    fn order(&self, drain: Duration) {
        if self.draining.is_cancelled() {
            warn!("stopping at once: accepted runs are kept for the next start");
            self.immediate.cancel();
            self.graceful.cancel();
            return;
        }
        self.draining.cancel();
        if drain.is_zero() {
            // A launcher that runs steps on this machine accepts dispatches until its executors have reported.
            warn!("stopping: no further run begins here; another signal stops at once");
            self.graceful.cancel();
            return;
        }
        warn!(
            seconds = drain.as_secs(),
            "stopping: not ready any more, and accepting until the endpoints have followed; another signal stops at once"
        );
        let graceful = self.graceful.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(drain) => graceful.cancel(),
                () = graceful.cancelled() => {}
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    const DRAIN: Duration = Duration::from_secs(50);

    #[tokio::test(start_paused = true)]
    async fn accepting_ends_when_the_endpoints_have_had_time_to_follow() {
        let shutdown = Shutdown::default();
        let begun = Instant::now();
        shutdown.order(DRAIN);
        assert!(shutdown.draining.is_cancelled());
        assert!(!shutdown.graceful.is_cancelled());
        shutdown.graceful.cancelled().await;
        assert_eq!(begun.elapsed().as_secs(), DRAIN.as_secs());
        assert!(!shutdown.immediate.is_cancelled());
    }

    #[tokio::test]
    async fn the_second_order_and_one_without_a_drain_do_not_wait() {
        let shutdown = Shutdown::default();
        shutdown.order(DRAIN);
        shutdown.order(DRAIN);
        assert!(shutdown.graceful.is_cancelled());
        assert!(shutdown.immediate.is_cancelled());
        let shutdown = Shutdown::default();
        shutdown.order(Duration::ZERO);
        assert!(shutdown.draining.is_cancelled());
        assert!(shutdown.graceful.is_cancelled());
        assert!(!shutdown.immediate.is_cancelled());
    }
}
