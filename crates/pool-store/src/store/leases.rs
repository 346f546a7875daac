//! Leases tasks to instances.

use std::sync::Arc;
use std::time::Duration;

use pool_protocol::id::{AgentName, InstanceId, LeaseId, PoolName, TaskId};
use tokio::time::{Instant, timeout_at};

use super::Store;
use super::choice::Choice;
use super::rows::read;
use crate::clock::{between, millis};
use crate::db::{Tx, Value};
use crate::document_keys::Owner;
use crate::error::{Error, Refusal};
use crate::model::{LeaseRequest, LeasedTask, Payload};
use crate::state::{Event, State, Task, apply};
use crate::text::limited;
use crate::turns::Line;
use crate::waiters::Woken;

/// The largest number of leases that an instance may name in one request.
pub(super) const MAX_LEASES: usize = 1000;
/// The longest wait. Proxies often close idle connections after a minute.
const MAX_WAIT: Duration = Duration::from_secs(55);

/// Bytes of the documents of one transaction, at which no more are added. All are in memory until they are sent.
const BATCH_BYTES: usize = 8 << 20;
/// Leases that the requests of one transaction look through, at which no more requests are added. Other pools wait for its end.
const BATCH_LEASES: usize = 1024;

/// Leases that an instance may not know of, or whose instance of the same agent has gone. Among one more than it names, it knows
/// one not.
const UNDELIVERED: &str = "\
    SELECT * FROM tasks t WHERE t.pool = $1 AND t.agent = $2 AND t.state = 'leased' AND (t.instance = $3 \
    OR NOT EXISTS (SELECT 1 FROM instances i WHERE i.id = t.instance AND i.seen_at > $4)) ORDER BY t.id LIMIT $5";

impl Store {
    /// Leases a task to an instance. A lease that the instance already has and did not name is returned again. If no
    /// task is available, waits for one. Returns `None` when the wait is over. The future may be dropped at any time.
    pub async fn lease(&self, request: &LeaseRequest) -> Result<Option<LeasedTask>, Error> {
        limited("`holding`", request.holding.len(), MAX_LEASES)?;
        let until = Instant::now() + request.wait.min(MAX_WAIT);
        let waiters = self.waiters();
        let mut woken: Option<Woken> = None;
        loop {
            let queue = waiters.queue(&request.pool);
            let next = queue.notified();
            tokio::pin!(next);
            // From here on, this request is notified of new tasks. If it does not need the notification, it passes it
            // to another request.
            next.as_mut().enable();
            let leased = self.lease_soon(request).await?;
            // Only a task that is given again leaves the new one to others.
            let again = leased.as_ref().is_some_and(|leased| leased.redelivered);
            if let Some(woken) = woken.take().filter(|_| !again) {
                woken.used();
            }
            if leased.is_some() || waiters.is_closed() {
                return Ok(leased);
            }
            #[cfg(test)]
            let _asleep = waiters.fall_asleep(&request.pool);
            if timeout_at(until, next).await.is_err() {
                return Ok(None);
            }
            woken = Some(Woken::by(Arc::clone(&queue)));
        }
    }

    /// Leases a task to each request, in their order, in one transaction. All are for the same pool. The last ones have no
    /// result if the documents of the others are large.
    pub(crate) async fn lease_all(
        &self,
        requests: &[&LeaseRequest],
    ) -> Result<Vec<Result<Option<LeasedTask>, Refusal>>, Error> {
        let first = requests
            .first()
            .map_or(Line::Hub, |request| Line::Pool(request.pool.clone()));
        let mut batch = Batch {
            tx: self.database.begin(&first).await?,
            choice: None,
            bytes: 0,
            leases: 0,
            changed: false,
        };
        let mut results = Vec::with_capacity(requests.len());
        for (request, left) in requests.iter().zip((1..=requests.len()).rev()) {
            if batch.bytes >= BATCH_BYTES || batch.leases >= BATCH_LEASES {
                break;
            }
            results.push(match self.lease_one(&mut batch, request, left).await {
                Ok(leased) => Ok(leased),
                Err(Error::Refused(refusal)) => Err(refusal),
                Err(error @ Error::Unavailable(_)) => return Err(error),
            });
        }
        if batch.changed {
            batch.tx.commit().await?;
        } else {
            batch.tx.rollback().await?;
        }
        Ok(results)
    }

    /// `left`: so many requests of the transaction have no task yet.
    async fn lease_one(
        &self,
        batch: &mut Batch,
        request: &LeaseRequest,
        left: usize,
    ) -> Result<Option<LeasedTask>, Error> {
        let agent = agent_of(&mut batch.tx, request.instance, &request.pool).await?;
        if let Some((task, payload)) = self.redeliver(batch, request, &agent).await? {
            return self.leased(&batch.tx, task, payload, true).map(Some);
        }
        if batch.choice.is_none() {
            batch.choice = Some(Choice::begin(&mut batch.tx, &request.pool).await?);
        }
        while let Some(id) = batch.next(left).await? {
            // It may be over by now.
            let Some(task) = batch.tx.task(id).await? else {
                continue;
            };
            let event = Event::Lease {
                lease: LeaseId::new(),
                instance: request.instance,
                agent: &agent,
                credential: &request.credential,
            };
            let leased = apply(&task, event, batch.tx.now, &self.rules)?;
            if leased.task.state != State::Leased || !leased.changed {
                continue;
            }
            let Some(payload) = self.payload(batch, &task).await? else {
                continue;
            };
            batch.tx.save(task.state, &leased, &self.rules).await?;
            batch.taken(&leased.task);
            return self
                .leased(&batch.tx, leased.task, payload, false)
                .map(Some);
        }
        Ok(None)
    }

    /// Returns a lease that the instance has and did not name, because its response was lost.
    async fn redeliver(
        &self,
        batch: &mut Batch,
        request: &LeaseRequest,
        agent: &AgentName,
    ) -> Result<Option<(Task, Payload)>, Error> {
        let values = [
            Value::text(&request.pool),
            Value::text(agent),
            Value::text(request.instance),
            Value::from(batch.tx.now - millis(self.rules.offline_after)),
            Value::from(i64::try_from(request.holding.len() + 1).unwrap_or(i64::MAX)),
        ];
        let unknown = |task: &Task| {
            task.lease
                .is_some_and(|lease| !request.holding.contains(&lease))
        };
        let rows = batch.tx.rows_to_change(UNDELIVERED, &values).await?;
        batch.leases += rows.len();
        for row in rows {
            let task = read(&row)?;
            if !unknown(&task) {
                continue;
            }
            let Some(payload) = self.payload(batch, &task).await? else {
                continue;
            };
            let event = Event::Renewed {
                instance: request.instance,
                credential: &request.credential,
                reason: task.phase.as_deref(),
            };
            let renewed = apply(&task, event, batch.tx.now, &self.rules)?;
            batch.tx.save(task.state, &renewed, &self.rules).await?;
            return Ok(Some((renewed.task, payload)));
        }
        Ok(None)
    }

    /// Returns the document of a task. A task whose document cannot be read goes back to the queue.
    async fn payload(&self, batch: &mut Batch, task: &Task) -> Result<Option<Payload>, Error> {
        batch.changed = true;
        let read = match batch.tx.document(task.id).await? {
            Some(stored) => self.keys.document_keys().decrypt(&Owner::of(task), stored),
            None => Err(
                "the store has no job document: an earlier version of the hub stored the run"
                    .to_owned(),
            ),
        };
        match read {
            Ok(payload) => {
                batch.bytes += payload.0.len();
                Ok(Some(payload))
            }
            Err(reason) => {
                tracing::error!(task = %task.id, job_id = task.job, step_id = task.step, reason, "a run cannot be leased");
                let event = Event::Unreadable { reason: &reason };
                let delayed = apply(task, event, batch.tx.now, &self.rules)?;
                batch.tx.save(task.state, &delayed, &self.rules).await?;
                Ok(None)
            }
        }
    }

    fn leased(
        &self,
        tx: &Tx,
        task: Task,
        payload: Payload,
        redelivered: bool,
    ) -> Result<LeasedTask, Error> {
        self.known_pools.add(&task);
        let grant = task
            .grant()
            .ok_or_else(|| crate::db::unreadable("lease", "a leased task has no lease"))?;
        Ok(LeasedTask {
            grant,
            expires_in: between(tx.now, task.deadline(&self.rules)),
            attempt: task.attempts + 1,
            redelivered,
            task,
            payload,
        })
    }
}

/// One transaction for several requests.
struct Batch {
    tx: Tx,
    choice: Option<Choice>,
    /// The bytes of the documents so far.
    bytes: usize,
    /// The leases that its requests have looked through so far.
    leases: usize,
    changed: bool,
}

impl Batch {
    async fn next(&mut self, wanted: usize) -> Result<Option<TaskId>, Error> {
        match &mut self.choice {
            Some(choice) => choice.next(&mut self.tx, wanted).await,
            None => Ok(None),
        }
    }

    fn taken(&mut self, task: &Task) {
        if let Some(choice) = &mut self.choice {
            choice.taken(task);
        }
    }
}

/// Returns the agent of an instance. Refuses an instance of another pool.
pub(super) async fn agent_of(
    tx: &mut Tx,
    instance: InstanceId,
    pool: &PoolName,
) -> Result<AgentName, Error> {
    let sql = "SELECT pool, agent FROM instances WHERE id = $1";
    let row = tx.row(sql, &[Value::text(instance)]).await?;
    let row = row.ok_or(Refusal::InstanceUnknown)?;
    if row.parsed::<PoolName>("pool")? != *pool {
        return Err(Refusal::InstancePoolMismatch.into());
    }
    row.parsed("agent")
}
