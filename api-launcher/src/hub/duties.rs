//! What a hub does beside answering requests: confirms tasks with the platform, ends what has timed out, reports outcomes, keeps
//! jobs alive, and says in run logs why tasks wait.

mod confirm;
mod report;
mod sweep;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::Hub;

/// Does all of it until the launcher stops.
pub(super) async fn perform(hub: &Arc<Hub>) {
    let watched = async {
        // Files are looked at also while no request comes, so that waiting requests learn of a change.
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
        watched,
    );
}

impl Hub {
    /// Waits. Returns whether the hub goes on.
    async fn pause(&self, time: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(time) => true,
            () = self.shutdown.graceful.cancelled() => false,
        }
    }
}

/// Says once that the store cannot be used, and once that it can be again.
#[derive(Debug, Default)]
struct StoreLog {
    is_failing: bool,
}

impl StoreLog {
    /// Returns what the store returned, if it did.
    fn note<T>(&mut self, duty: &str, result: Result<T, pool_store::Error>) -> Option<T> {
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
