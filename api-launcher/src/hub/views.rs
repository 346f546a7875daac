//! The view of all pools for readiness and metrics. Nobody authenticates for these, so the store is read once a second for
//! all who ask.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pool_store::{PoolView, Store};
use tokio::sync::Mutex;

/// How long a view counts.
pub(super) const FRESH: Duration = Duration::from_secs(1);

type Pools = Result<Arc<[PoolView]>, String>;

/// The last view.
#[derive(Debug, Default)]
pub(super) struct CachedViews(Mutex<Option<(Instant, Pools)>>);

impl CachedViews {
    /// Returns the pools of the store, or why they cannot be read. Callers wait for one reader.
    pub(super) async fn pools(&self, store: &Store) -> Pools {
        let mut last = self.0.lock().await;
        match &*last {
            Some((at, pools)) if at.elapsed() < FRESH => pools.clone(),
            _ => {
                let read = store.pools().await;
                let pools = read.map(Arc::from).map_err(|error| error.to_string());
                *last = Some((Instant::now(), pools.clone()));
                pools
            }
        }
    }
}
