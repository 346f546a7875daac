//! Leases tasks to instances.

use std::sync::Arc;
use std::time::Duration;

use pool_protocol::id::{AgentName, InstanceId, LeaseId, PoolName, TaskId};
use tokio::time::{Instant, timeout_at};

use super::Store;
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

/// Selects the oldest task of the organization that has the fewest active ones. It reads one task of each organization,
/// however many tasks wait.
const NEXT_TASK: &str = "\
    WITH RECURSIVE o (organization) AS (\
        SELECT min(organization) FROM tasks WHERE pool = $1 AND state = 'available' \
        UNION ALL \
        SELECT (SELECT min(t.organization) FROM tasks t \
            WHERE t.pool = $1 AND t.state = 'available' AND t.organization > o.organization) \
        FROM o WHERE o.organization IS NOT NULL) \
    SELECT c.id FROM (\
        SELECT o.organization, \
            (SELECT t.id FROM tasks t WHERE t.pool = $1 AND t.state = 'available' AND t.organization = o.organization \
                AND t.not_before <= $2 ORDER BY t.submitted_at, t.id LIMIT 1) AS id, \
            (SELECT count(*) FROM tasks t WHERE t.pool = $1 AND t.organization = o.organization \
                AND t.state IN ('leased', 'started', 'running', 'orphaned')) AS active \
        FROM o WHERE o.organization IS NOT NULL) c \
    WHERE c.id IS NOT NULL ORDER BY c.active, c.organization LIMIT 1";
/// Selects leases of the agent without an executor: those of this instance, and those of instances that are offline or
/// removed.
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
            let leased = self.try_lease(request).await?;
            // A repeated lease uses no new task, so the notification goes to another request.
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

    async fn try_lease(&self, request: &LeaseRequest) -> Result<Option<LeasedTask>, Error> {
        let mut tx = self.begin().await?;
        let agent = match agent_of(&mut tx, request.instance, &request.pool).await? {
            Ok(agent) => agent,
            Err(refusal) => {
                tx.rollback().await?;
                return Err(refusal.into());
            }
        };
        let leased = match self.redeliver(&mut tx, request, &agent).await? {
            Some(task) => Some((task, true)),
            None => self
                .lease_next(&mut tx, request, &agent)
                .await?
                .map(|task| (task, false)),
        };
        let Some((task, redelivered)) = leased else {
            tx.rollback().await?;
            return Ok(None);
        };
        let leased = self.with_payload(&mut tx, task, redelivered).await?;
        tx.commit().await?;
        Ok(Some(leased))
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
                let instance = request.instance;
                let renewed = apply(&task, Event::Renewed { instance }, tx.now, &self.rules)?;
                tx.save(task.state, &renewed, &self.rules).await?;
                return Ok(Some(renewed.task));
            }
        }
        Ok(None)
    }

    /// Returns a new lease of the next task.
    async fn lease_next(
        &self,
        tx: &mut Tx,
        request: &LeaseRequest,
        agent: &AgentName,
    ) -> Result<Option<Task>, Error> {
        // Without the lock, two requests could select the same task or the same organization.
        tx.lock(&format!("lease {}", request.pool)).await?;
        loop {
            let values = [Value::text(&request.pool), Value::from(tx.now)];
            let Some(row) = tx.row(NEXT_TASK, &values).await? else {
                return Ok(None);
            };
            let id: TaskId = row.parsed("id")?;
            // The task may have been deleted in the meantime.
            let Some(task) = tx.task(id).await? else {
                continue;
            };
            let event = Event::Lease {
                lease: LeaseId::new(),
                instance: request.instance,
                agent,
            };
            let leased = apply(&task, event, tx.now, &self.rules)?;
            if leased.task.state == State::Leased && leased.changed {
                tx.save(task.state, &leased, &self.rules).await?;
                return Ok(Some(leased.task));
            }
        }
    }

    async fn with_payload(
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
