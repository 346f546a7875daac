//! The background duties of a hub. It confirms tasks at the platform, applies time limits, reports outcomes, keeps jobs
//! alive, ends leases of removed tokens, releases locks that runs have left, and writes into run logs why tasks wait. Once, it asks the
//! artifact store which conditions it keeps.

mod conditions;
mod confirm;
mod locks;
mod report;
mod revoke;
pub(super) mod sweep;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::Hub;

pub(super) async fn perform(hub: &Arc<Hub>) {
    let read_files = async {
        // Files are also read while there is no request, so that waiting requests notice a change.
        while hub.pause(Duration::from_secs(1)).await {
            drop(hub.pools.current());
            drop(hub.keys.current());
        }
    };
    tokio::join!(
        confirm::perform(hub),
        sweep::perform(hub),
        report::perform(hub),
        watch::perform(hub),
        revoke::perform(hub),
        locks::perform(hub),
        conditions::perform(hub),
        read_files,
    );
}

impl Hub {
    /// Waits. Returns `false` if the hub must stop.
    async fn pause(&self, time: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(time) => true,
            () = self.shutdown.graceful.cancelled() => false,
        }
    }
}

/// Logs once that the store cannot be used, and once that it can be used again.
#[derive(Debug, Default)]
struct StoreLog {
    is_failing: bool,
}

impl StoreLog {
    /// Logs an error. Returns the value if there is no error.
    fn log_result<T>(&mut self, duty: &str, result: Result<T, pool_store::Error>) -> Option<T> {
        match result {
            Ok(value) => {
                if std::mem::take(&mut self.is_failing) {
                    info!(duty, "the store of pools can be used again");
                }
                Some(value)
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    warn!(duty, %error, "the store of pools cannot be used, trying again");
                }
                None
            }
        }
    }
}
