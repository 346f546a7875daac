//! Leases tasks to instances.

use std::sync::Arc;
use std::time::Duration;

use pool_protocol::id::{AgentName, InstanceId, LeaseId, PoolName};
use tokio::time::{Instant, timeout_at};

use super::Store;
use super::choice::Choice;
use super::rows::read;
use crate::clock::{between, millis};
use crate::db::{Tx, Value};
use crate::error::{Error, Refusal};
use crate::model::{LeaseRequest, LeasedTask};
use crate::state::{Event, State, Task, apply};
use crate::text::limited;
use crate::waiters::Woken;

/// The largest number of leases that an instance may name in one request.
pub(super) const MAX_LEASES: usize = 1000;
/// The longest wait. Proxies often close idle connections after a minute.
const MAX_WAIT: Duration = Duration::from_secs(55);

/// Leases that an instance may not know of, or whose instance of the same agent has gone.
const UNDELIVERED: &str = "\
    SELECT * FROM tasks t WHERE t.pool = $1 AND t.agent = $2 AND t.state = 'leased' AND (t.instance = $3 \
    OR NOT EXISTS (SELECT 1 FROM instances i WHERE i.id = t.instance AND i.seen_at > $4)) ORDER BY t.id";

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

    /// Leases a task to each request, in their order, in one transaction. All are for the same pool.
    pub(super) async fn lease_all(
        &self,
        requests: &[&LeaseRequest],
    ) -> Result<Vec<Result<Option<LeasedTask>, Refusal>>, Error> {
        let mut tx = self.begin().await?;
        let mut choice = None;
        let mut results = Vec::with_capacity(requests.len());
        for (request, left) in requests.iter().zip((1..=requests.len()).rev()) {
            results.push(
                match self.lease_one(&mut tx, request, &mut choice, left).await {
                    Ok(leased) => Ok(leased),
                    Err(Error::Refused(refusal)) => Err(refusal),
                    Err(error @ Error::Unavailable(_)) => return Err(error),
                },
            );
        }
        if results.iter().flatten().any(Option::is_some) {
            tx.commit().await?;
        } else {
            tx.rollback().await?;
        }
        Ok(results)
    }

    /// `left`: so many requests of the transaction have no task yet.
    async fn lease_one(
        &self,
        tx: &mut Tx,
        request: &LeaseRequest,
        choice: &mut Option<Choice>,
        left: usize,
    ) -> Result<Option<LeasedTask>, Error> {
        let agent = agent_of(tx, request.instance, &request.pool).await??;
        if let Some(task) = self.redeliver(tx, request, &agent).await? {
            return self.leased(tx, task, true).await.map(Some);
        }
        let choice = match choice {
            Some(choice) => choice,
            None => choice.insert(Choice::begin(tx, &request.pool).await?),
        };
        while let Some(id) = choice.next(tx, left).await? {
            // It may be over by now.
            let Some(task) = tx.task(id).await? else {
                continue;
            };
            let event = Event::Lease {
                lease: LeaseId::new(),
                instance: request.instance,
                agent: &agent,
            };
            let leased = apply(&task, event, tx.now, &self.rules)?;
            if leased.task.state == State::Leased && leased.changed {
                tx.save(task.state, &leased, &self.rules).await?;
                choice.taken(&leased.task.organization);
                return self.leased(tx, leased.task, false).await.map(Some);
            }
        }
        Ok(None)
    }

    /// Returns a lease that the instance has and did not name, because its response was lost.
    async fn redeliver(
        &self,
        tx: &mut Tx,
        request: &LeaseRequest,
        agent: &AgentName,
    ) -> Result<Option<Task>, Error> {
        let values = [
            Value::text(&request.pool),
            Value::text(agent),
            Value::text(request.instance),
            Value::from(tx.now - millis(self.rules.offline_after)),
        ];
        let unknown = |task: &Task| {
            task.lease
                .is_some_and(|lease| !request.holding.contains(&lease))
        };
        for row in tx.rows_to_change(UNDELIVERED, &values).await? {
            let task = read(&row)?;
            if unknown(&task) {
                let event = Event::Renewed {
                    instance: request.instance,
                    reason: task.phase.as_deref(),
                };
                let renewed = apply(&task, event, tx.now, &self.rules)?;
                tx.save(task.state, &renewed, &self.rules).await?;
                return Ok(Some(renewed.task));
            }
        }
        Ok(None)
    }

    async fn leased(
        &self,
        tx: &mut Tx,
        task: Task,
        redelivered: bool,
    ) -> Result<LeasedTask, Error> {
        let payload = tx.payload(task.id).await?;
        let grant = task
            .grant()
            .ok_or_else(|| crate::db::unreadable("lease", "a leased task has no lease"))?;
        Ok(LeasedTask {
            grant,
            expires_in: between(tx.now, task.deadline(&self.rules)),
            attempt: task.attempts + 1,
            redelivered,
            organization: task.organization,
            workspace: task.workspace,
            job: task.job,
            step: task.step,
            kind: task.kind,
            traceparent: task.traceparent,
            payload,
        })
    }
}

/// Returns the agent of an instance. Refuses an instance of another pool.
pub(super) async fn agent_of(
    tx: &mut Tx,
    instance: InstanceId,
    pool: &PoolName,
) -> Result<Result<AgentName, Refusal>, Error> {
    let sql = "SELECT pool, agent FROM instances WHERE id = $1";
    let Some(row) = tx.row(sql, &[Value::text(instance)]).await? else {
        return Ok(Err(Refusal::InstanceUnknown));
    };
    if row.parsed::<PoolName>("pool")? != *pool {
        return Ok(Err(Refusal::InstancePoolMismatch));
    }
    Ok(Ok(row.parsed("agent")?))
}
