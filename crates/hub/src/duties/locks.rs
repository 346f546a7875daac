//! Releases the locks of states that runs have left. Their executors died, and no person must have to remove what they left.

use std::sync::Arc;
use std::time::Duration;

use super::StoreLog;
use crate::Hub;
use crate::artifacts::locks::release_left;

const PAUSE: Duration = Duration::from_secs(5);

pub(super) async fn perform(hub: &Arc<Hub>) {
    let mut log = StoreLog::default();
    loop {
        let left = hub.store.left_state_locks().await;
        for task in log.log_result("locks", left).unwrap_or_default() {
            if release_left(hub, &task).await {
                log.log_result("locks", hub.store.forget_state_lock(task.task).await);
            }
        }
        if !hub.pause(PAUSE).await {
            break;
        }
    }
}
