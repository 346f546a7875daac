//! The order to stop, from SIGTERM, SIGINT or SIGHUP to everything that waits. What stopping means is decided
//! by whoever hears it.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Two steps: finish what was begun, then leave at once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shutdown {
    /// Begin nothing new.
    pub(crate) graceful: CancellationToken,
    /// Wait for nothing any more.
    pub(crate) immediate: CancellationToken,
}

impl Shutdown {
    /// Gives the first order on the first signal and the second on the second. Listens from now on.
    pub(crate) fn on_signals(&self) -> io::Result<()> {
        for kind in [
            SignalKind::terminate(),
            SignalKind::interrupt(),
            SignalKind::hangup(),
        ] {
            let mut arrivals = signal(kind)?;
            let shutdown = self.clone();
            tokio::spawn(async move {
                while arrivals.recv().await.is_some() {
                    if shutdown.graceful.is_cancelled() {
                        warn!("stopping at once: accepted runs are kept for the next start");
                        shutdown.immediate.cancel();
                    } else {
                        warn!("stopping: nothing new is accepted; another signal stops at once");
                        shutdown.graceful.cancel();
                    }
                }
            });
        }
        Ok(())
    }
}
