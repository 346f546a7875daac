//! Requests for leases share transactions: what comes while one transaction is under way is served by the next one. A
//! transaction lasts as long as the disk takes, so hundreds of agents that ask at once would wait for each other.

use std::sync::{Mutex, PoisonError};

use pool_protocol::id::PoolName;
use tokio::sync::oneshot;

use super::Store;
use crate::error::Error;
use crate::model::{LeaseRequest, LeasedTask};

/// Leases of one transaction, at most. Other operations wait for its end.
const BATCH: usize = 64;

/// The requests that are not served yet.
#[derive(Debug, Default)]
pub(super) struct LeaseBatches {
    waiting: Mutex<Vec<Asked>>,
    /// Held by the one who serves.
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
        self.batches.add(Asked {
            request: request.clone(),
            answer,
        });
        // A task of its own: a caller who leaves does not end the transaction of the others. Each caller starts one, so
        // all are served, also after one has failed.
        let store = self.clone();
        tokio::spawn(async move { store.serve_batch().await });
        let answered = answered.await;
        answered.unwrap_or_else(|lost| Err(Error::Unavailable(lost.into())))
    }

    async fn serve_batch(&self) {
        let _alone = self.batches.serving.lock().await;
        let batch = self.batches.take();
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
        for (asked, answer) in batch.into_iter().zip(answers) {
            // If it has left, its lease is given again when it asks again.
            let _ = asked.answer.send(answer);
        }
    }
}

impl LeaseBatches {
    fn add(&self, asked: Asked) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push(asked);
    }

    /// The next ones, all of the pool whose request is the oldest. Those who have left are forgotten.
    fn take(&self) -> Vec<Asked> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|asked| !asked.answer.is_closed());
        let first: Option<PoolName> = waiting.first().map(|asked| asked.request.pool.clone());
        let mut taken = 0;
        let is_next = |asked: &mut Asked| {
            let is_next = taken < BATCH && Some(&asked.request.pool) == first.as_ref();
            taken += usize::from(is_next);
            is_next
        };
        waiting.extract_if(.., is_next).collect()
    }
}
