//! Watches the runs while this replica holds the Lease.

use std::sync::{Arc, Mutex};

use cluster::Cluster;
use cluster::lease::{LeaseSettings, LeaseState};
use cluster::rights::LEASE;
use cluster::settings::ClusterSettings;
use http_service::Shutdown;
use job_contract::env;
use reporter::PlatformReporter;
use tracing::warn;

use super::background::BackgroundTasks;
use super::observer::{Observer, WatchGuard};
use super::readiness::SharedLeaseState;
use crate::metrics::Metrics;

#[derive(Debug)]
pub(super) struct RunWatcher {
    pub(super) cluster: Cluster,
    pub(super) namespace: String,
    pub(super) settings: ClusterSettings,
    pub(super) reporter: Option<Arc<dyn PlatformReporter>>,
    pub(super) metrics: Metrics,
    pub(super) lease: SharedLeaseState,
    pub(super) shutdown: Shutdown,
}

impl RunWatcher {
    /// Sends one heartbeat for each unfinished run. A former launcher may have died, and its Lease has to expire first. The
    /// heartbeats keep the platform from ending runs until a replica watches.
    pub(super) async fn send_first_heartbeats(&self, background: &BackgroundTasks) {
        let Some(reporter) = self
            .reporter
            .as_ref()
            .filter(|reporter| reporter.heartbeats().is_some())
        else {
            return;
        };
        let unfinished = tokio::select! {
            unfinished = self.cluster.unfinished() => unfinished,
            () = self.shutdown.draining.cancelled() => return,
        };
        match unfinished {
            // Their executors may be running.
            Ok(runs) => runs.iter().for_each(|run| {
                background
                    .send_one_heartbeat(reporter.start_heartbeat_until_executor(&run.job_id, None));
            }),
            Err(error) => warn!(%error, "runs of launchers before this one were not looked for"),
        }
    }

    /// Watches whenever this replica holds the Lease, until the launcher drains: the next replica watches while this one
    /// still accepts dispatches.
    pub(super) async fn watch_as_leader(&self) {
        let lease = LeaseSettings::new(&self.namespace, LEASE, replica_name());
        let stop = self.shutdown.draining.cancelled();
        // If the API server is unreachable, the term ends and no replica watches. The last holder then keeps the guard,
        // and with it the heartbeats, until it watches again or another replica does.
        let guard = Mutex::new(None);
        let replace_guard = |next: Option<WatchGuard>| {
            *runtime::lock(&guard) = next;
        };
        let work = || {
            let observer = Observer::new(self.reporter.clone(), self.metrics.clone())
                .recovering_from(self.cluster.clone());
            let observer = Arc::new(observer);
            replace_guard(Some(observer.start_watch()));
            async move {
                let _watching = self.metrics.watch();
                tokio::join!(
                    self.cluster
                        .watch(self.settings.watch.clone(), Arc::clone(&observer) as _),
                    observer.stop_cancelled(&self.cluster),
                );
            }
        };
        let on_state = |state| {
            if state == LeaseState::StandsBy {
                replace_guard(None);
            }
            *runtime::lock(&self.lease) = Some(state);
        };
        self.cluster.lead(&lease, stop, work, on_state).await;
    }
}

/// Returns the name that this replica writes into the Lease: the pod, or host and process outside of a cluster.
fn replica_name() -> String {
    std::env::var(env::POD_NAME).unwrap_or_else(|_| {
        let host = nix::unistd::gethostname()
            .ok()
            .and_then(|name| name.into_string().ok());
        format!(
            "{}-{}",
            host.as_deref().unwrap_or("launcher"),
            std::process::id()
        )
    })
}
