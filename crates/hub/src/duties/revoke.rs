//! Ends leases whose token, or whose trust in a provider, was removed from the file of the pools. Nothing that depends on the
//! number of waiting runs delays this.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pool_protocol::id::{AgentName, PoolName};
use pool_store::TaskView;
use tracing::{debug, warn};

use super::StoreLog;
use crate::Hub;
use crate::pools::Pools;

const PAUSE: Duration = Duration::from_secs(5);
/// How long an agent may take to renew its leases with another token, after the one it used was removed. The file of a token
/// often changes a little later than the file of the pools.
const REVOKED_AFTER: Duration = Duration::from_secs(20);

/// A pool, and the credential of leases of it.
type Credential = (PoolName, String);

pub(super) async fn perform(hub: &Arc<Hub>) {
    let (mut log, mut since) = (StoreLog::default(), HashMap::new());
    loop {
        if let Some(known) = log.log_result("revoke", hub.store.credentials().await) {
            since = revoked(&hub.pools.current(), known, &since);
            let due = since.iter().filter(|(_, at)| at.elapsed() >= REVOKED_AFTER);
            let due: HashSet<&Credential> = due.map(|(credential, _)| credential).collect();
            if !due.is_empty() {
                log.log_result("revoke", end_leases(hub, &due).await);
            }
        }
        if !hub.pause(PAUSE).await {
            break;
        }
    }
}

/// Returns the credentials that are no longer in the file of the pools, and since when.
fn revoked(
    pools: &Pools,
    known: Vec<Credential>,
    since: &HashMap<Credential, Instant>,
) -> HashMap<Credential, Instant> {
    let now = Instant::now();
    let is_revoked = |(pool, credential): &Credential| !pools.has_credential(pool, credential);
    let with_time = |credential: Credential| {
        let at = since.get(&credential).copied().unwrap_or(now);
        (credential, at)
    };
    known
        .into_iter()
        .filter(is_revoked)
        .map(with_time)
        .collect()
}

async fn end_leases(hub: &Hub, due: &HashSet<&Credential>) -> Result<(), pool_store::Error> {
    for task in hub.open_tasks().await? {
        let Some(credential) = task.credential.clone() else {
            continue;
        };
        let credential = (task.pool.clone(), credential);
        if due.contains(&credential) {
            end_lease(hub, &task, &credential.1).await;
        }
    }
    Ok(())
}

async fn end_lease(hub: &Hub, task: &TaskView, credential: &str) {
    match hub.store.revoke(task.task, credential).await {
        Ok(state) => {
            warn!(
                task = %task.task,
                pool = %task.pool,
                job_id = task.job,
                step_id = task.step,
                agent = task.agent.as_ref().map(AgentName::as_str),
                ?state,
                "the token of an agent was removed, and its lease has ended"
            );
            hub.ended.notify_one();
        }
        Err(error) => debug!(task = %task.task, %error, "a lease could not be revoked"),
    }
}
