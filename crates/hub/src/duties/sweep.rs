//! Applies time limits every second.

use std::sync::Arc;
use std::time::Duration;

use pool_store::TaskView;
use pool_store::state::EndReason;
use tracing::{info, warn};

use super::StoreLog;
use crate::Hub;

const PAUSE: Duration = Duration::from_secs(1);

pub(super) async fn perform(hub: &Arc<Hub>) {
    let mut log = StoreLog::default();
    while hub.pause(PAUSE).await {
        while let Some(swept) = log.log_result("sweep", hub.store.sweep().await) {
            swept.changed.iter().for_each(|task| log_change(hub, task));
            if !swept.more || hub.shutdown.graceful.is_cancelled() {
                break;
            }
        }
    }
}

/// Logs and counts that a task is over, or that its state has changed.
pub(crate) fn log_change(hub: &Hub, task: &TaskView) {
    let Some(end) = &task.end else {
        info!(task = %task.task, state = ?task.state, "a task has timed out");
        return;
    };
    warn!(
        task = %task.task,
        pool = %task.pool,
        job_id = task.job,
        step_id = task.step,
        reason = ?end.reason,
        diagnostic = end.diagnostic,
        "a task is over"
    );
    match end.reason {
        EndReason::Lost => hub.metrics.lost(&task.pool),
        EndReason::Poison => hub.metrics.poison(&task.pool),
        _ => {}
    }
    hub.ended.notify_one();
}
