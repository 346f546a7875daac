//! Giving tasks to instances.

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

/// The most leases an instance may name at once.
pub(super) const HELD: usize = 1000;
/// The longest wait. Proxies cut connections after a minute.
const WAIT: Duration = Duration::from_secs(55);

/// The oldest task of the organization that has the fewest active ones. It looks at one task of each organization, however
/// many there are.
const NEXT: &str = "\
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
/// Leases that an instance may not know of, or whose instance of the same agent has gone.
const GIVEN: &str = "\
    SELECT * FROM tasks t WHERE t.pool = $1 AND t.agent = $2 AND t.state = 'leased' AND (t.instance = $3 \
    OR NOT EXISTS (SELECT 1 FROM instances i WHERE i.id = t.instance AND i.seen_at > $4)) ORDER BY t.id";

impl Store {
    /// Gives a task to an instance: one that it was given before and does not know of, or a new one. Waits for a task if
    /// there is none, and returns `None` when the time is over. May be dropped at any time.
    pub async fn lease(&self, request: &LeaseRequest) -> Result<Option<LeasedTask>, Error> {
        limited("`holding`", request.holding.len(), HELD)?;
        let until = Instant::now() + request.wait.min(WAIT);
        let waiters = self.waiters();
        let mut woken: Option<Woken> = None;
        loop {
            let queue = waiters.of(&request.pool);
            let next = queue.notified();
            tokio::pin!(next);
            // What becomes available from here on is heard of. If this call does not need it, another one hears of it.
            next.as_mut().enable();
            let leased = self.try_lease(request).await?;
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

    async fn try_lease(&self, request: &LeaseRequest) -> Result<Option<LeasedTask>, Error> {
        let mut tx = self.begin().await?;
        let agent = match agent_of(&mut tx, request.instance, &request.pool).await? {
            Ok(agent) => agent,
            Err(refusal) => {
                tx.rollback().await?;
                return Err(refusal.into());
            }
        };
        let leased = match self.given(&mut tx, request, &agent).await? {
            Some(task) => Some((task, true)),
            None => self
                .next(&mut tx, request, &agent)
                .await?
                .map(|task| (task, false)),
        };
        let Some((task, redelivered)) = leased else {
            tx.rollback().await?;
            return Ok(None);
        };
        let leased = self.leased(&mut tx, task, redelivered).await?;
        tx.commit().await?;
        Ok(Some(leased))
    }

    /// A lease that the instance has and does not know of: the response was lost.
    async fn given(
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
        for row in tx.rows_to_change(GIVEN, &values).await? {
            let task = read(&row)?;
            if unknown(&task) {
                let instance = request.instance;
                let named = apply(&task, Event::Named { instance }, tx.now, &self.rules)?;
                tx.save(task.state, &named, &self.rules).await?;
                return Ok(Some(named.task));
            }
        }
        Ok(None)
    }

    /// A new lease on the next task.
    async fn next(
        &self,
        tx: &mut Tx,
        request: &LeaseRequest,
        agent: &AgentName,
    ) -> Result<Option<Task>, Error> {
        // Two that choose at the same time would choose the same task, or the same organization.
        tx.alone(&format!("lease {}", request.pool)).await?;
        loop {
            let values = [Value::text(&request.pool), Value::from(tx.now)];
            let Some(row) = tx.row(NEXT, &values).await? else {
                return Ok(None);
            };
            let id: TaskId = row.parsed("id")?;
            // It may be over by now.
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

/// The name of an instance in a pool.
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
