//! Requests for leases share transactions: what comes while one transaction is under way is served by the next one. A
//! transaction lasts as long as the disk takes, so hundreds of agents that ask at once would wait for each other.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use pool_protocol::id::PoolName;
use tokio::sync::oneshot;

use super::Store;
use crate::error::Error;
use crate::model::{LeaseRequest, LeasedTask};

/// Leases of one transaction, at most. Other operations wait for its end.
const BATCH: usize = 64;

/// The requests that are not served yet, by pool: no pool waits for the requests of another one.
#[derive(Debug, Default)]
pub(super) struct LeaseBatches(Mutex<HashMap<PoolName, Arc<PoolBatches>>>);

#[derive(Debug, Default)]
struct PoolBatches {
    waiting: Mutex<VecDeque<Asked>>,
    /// Locked by the one who serves.
    serving: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Asked {
    request: LeaseRequest,
    answer: oneshot::Sender<Result<Option<LeasedTask>, Error>>,
}

impl Store {
    /// Leases a task if there is one, together with others who ask at the same time. If the caller leaves during the
    /// transaction, the lease is one whose response was lost.
    pub(super) async fn lease_soon(
        &self,
        request: &LeaseRequest,
    ) -> Result<Option<LeasedTask>, Error> {
        let (answer, answered) = oneshot::channel();
        let batches = self.batches.of(&request.pool);
        batches.lock().push_back(Asked {
            request: request.clone(),
            answer,
        });
        // A task of its own: a caller who leaves does not end the transaction of the others. Each caller starts one, so
        // all are served, also after one has failed.
        let store = self.clone();
        tokio::spawn(async move { store.serve(&batches).await });
        let answered = answered.await;
        answered.unwrap_or_else(|lost| Err(Error::Unavailable(lost.into())))
    }

    /// Serves requests until none is left.
    async fn serve(&self, batches: &PoolBatches) {
        let _alone = batches.serving.lock().await;
        loop {
            let mut batch = batches.take();
            if batch.is_empty() {
                return;
            }
            let requests: Vec<_> = batch.iter().map(|asked| &asked.request).collect();
            let answers: Vec<_> = match self.lease_all(&requests).await {
                Ok(results) => results
                    .into_iter()
                    .map(|result| result.map_err(Error::from))
                    .collect(),
                Err(Error::Unavailable(source)) => {
                    let why = source.to_string();
                    let unavailable = |_| Err(Error::Unavailable(why.as_str().into()));
                    requests.iter().map(unavailable).collect()
                }
                Err(Error::Refused(refusal)) => {
                    let refused = |_| Err(refusal.clone().into());
                    requests.iter().map(refused).collect()
                }
            };
            let rest = batch.split_off(answers.len());
            for (asked, answer) in batch.into_iter().zip(answers) {
                // If it has left, its lease is given again when it asks again.
                let _ = asked.answer.send(answer);
            }
            let mut waiting = batches.lock();
            rest.into_iter()
                .rev()
                .for_each(|asked| waiting.push_front(asked));
        }
    }
}

impl LeaseBatches {
    fn of(&self, pool: &PoolName) -> Arc<PoolBatches> {
        let mut pools = runtime::lock(&self.0);
        Arc::clone(pools.entry(pool.clone()).or_default())
    }
}

impl PoolBatches {
    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Asked>> {
        runtime::lock(&self.waiting)
    }

    /// The next ones. Those who have left are forgotten.
    fn take(&self) -> Vec<Asked> {
        let mut waiting = self.lock();
        waiting.retain(|asked| !asked.answer.is_closed());
        let count = waiting.len().min(BATCH);
        waiting.drain(..count).collect()
    }
}
