//! Queries for the status page and for metrics.

use std::collections::BTreeMap;

use pool_protocol::id::{InstanceId, PoolName, TaskId};

use super::Store;
use super::rows::{read, texts};
use crate::clock::{between, millis, wall_time};
use crate::db::{Row, Tx, Value, unreadable};
use crate::error::Error;
use crate::state::{State, Task};
use crate::view::{
    Condition, EventView, InstanceView, PAGE, Page, PoolView, TaskFilter, TaskView, Wait,
};

/// An instance with so many failed leases in a row is degraded.
const DEGRADED: i64 = 3;

const UNFINISHED: &str = "\
    SELECT pool, state, count(*) AS tasks, min(submitted_at) AS oldest FROM tasks WHERE reported = 0 \
    GROUP BY pool, state";
const CAPACITIES: &str = "\
    SELECT pool, \
    CAST(sum(CASE WHEN seen_at > $1 THEN 1 ELSE 0 END) AS BIGINT) AS online, \
    CAST(sum(CASE WHEN seen_at > $1 THEN 0 ELSE 1 END) AS BIGINT) AS offline, \
    CAST(sum(CASE WHEN seen_at > $1 THEN capacity ELSE 0 END) AS BIGINT) AS capacity, \
    CAST(sum(CASE WHEN seen_at > $1 AND draining = 0 THEN free ELSE 0 END) AS BIGINT) AS free \
    FROM instances GROUP BY pool";
const INSTANCES: &str = "\
    SELECT i.*, \
    (SELECT count(*) FROM tasks t WHERE t.instance = i.id AND t.state IN ('leased', 'started', 'running', 'orphaned')) \
        AS tasks, \
    (SELECT count(*) FROM tasks t WHERE t.instance = i.id AND t.state IN ('leased', 'started', 'running', 'orphaned') \
        AND t.state = 'leased' AND t.leased_at <= $4) AS overdue \
    FROM instances i WHERE i.id > $1 AND ($2 = '' OR i.pool = $2) ORDER BY i.id LIMIT $3";
const TASKS: &str =
    "SELECT * FROM tasks WHERE id > $1 AND ($2 = '' OR pool = $2) ORDER BY id LIMIT $3";
const OPEN: &str = "\
    SELECT * FROM tasks WHERE id > $1 AND ($2 = '' OR pool = $2) AND end_reason IS NULL ORDER BY id LIMIT $3";
// Ended tasks are many. For one pool, `tasks_over` has its own alone.
const LATEST: &str = "\
    SELECT * FROM tasks WHERE ($1 = '' OR id < $1) AND $2 = '' AND end_reason IS NOT NULL ORDER BY id DESC LIMIT $3";
const LATEST_IN_POOL: &str = "\
    SELECT * FROM tasks WHERE ($1 = '' OR id < $1) AND pool = $2 AND end_reason IS NOT NULL ORDER BY id DESC LIMIT $3";
const AHEAD: &str = "\
    SELECT count(*) AS tasks FROM tasks WHERE reported = 0 AND pool = $1 AND state IN ('submitted', 'available') \
    AND (submitted_at < $2 OR (submitted_at = $2 AND id < $3))";
const BEHIND: &str = "\
    SELECT t.id, a.id AS active FROM tasks t JOIN tasks a ON a.pool = t.pool AND a.organization = t.organization \
    AND a.workspace = t.workspace AND a.state IN ('leased', 'started', 'running', 'orphaned') \
    WHERE t.id >= $1 AND t.id <= $2 AND ($3 = '' OR t.pool = $3) AND t.end_reason IS NULL AND t.state = 'available'";
const CREDENTIALS: &str = "\
    SELECT DISTINCT pool, credential FROM tasks WHERE state IN ('leased', 'started', 'running', 'orphaned') \
    AND credential IS NOT NULL";
const EVENTS: &str = "\
    SELECT * FROM (SELECT * FROM events WHERE task = $1 ORDER BY seq DESC LIMIT $2) AS latest ORDER BY seq";

impl Store {
    /// Returns all pools that have instances, or tasks that are not over or not reported.
    pub async fn pools(&self) -> Result<Vec<PoolView>, Error> {
        let mut tx = self.begin().await?;
        let mut pools = self.capacities(&mut tx).await?;
        for row in tx.rows(UNFINISHED, &[]).await? {
            let pool: PoolName = row.parsed("pool")?;
            let view = pools.entry(pool.clone()).or_insert_with(|| empty(pool));
            let state = row.text("state")?;
            let state = State::of_name(&state).ok_or_else(|| unreadable("state", state))?;
            *count_of(view, state) += row.count("tasks")?;
            if matches!(state, State::Submitted | State::Available) {
                let age = between(row.int("oldest")?, tx.now);
                view.oldest = view.oldest.max(Some(age));
            }
        }
        tx.rollback().await?;
        Ok(pools.into_values().collect())
    }

    /// Returns the instances of a pool, or of all pools.
    pub async fn instances(
        &self,
        pool: Option<&PoolName>,
        page: Page<InstanceId>,
    ) -> Result<Vec<InstanceView>, Error> {
        let mut tx = self.begin_to_list(pool).await?;
        let mut values = paged(pool, page);
        values.push(Value::from(tx.now - millis(self.rules.start_within)));
        let rows = tx.rows(INSTANCES, &values).await?;
        let views = rows.iter().map(|row| self.instance_view(row, tx.now));
        let views = views.collect::<Result<_, _>>()?;
        tx.rollback().await?;
        Ok(views)
    }

    /// Returns the tasks of a pool, or of all pools. The oldest is first, except with [`TaskFilter::Latest`].
    pub async fn tasks(
        &self,
        pool: Option<&PoolName>,
        filter: TaskFilter,
        page: Page<TaskId>,
    ) -> Result<Vec<TaskView>, Error> {
        let sql = match (filter, pool) {
            (TaskFilter::Open, _) => OPEN,
            (TaskFilter::Latest, None) => LATEST,
            (TaskFilter::Latest, Some(_)) => LATEST_IN_POOL,
            (TaskFilter::All, _) => TASKS,
        };
        let mut tx = self.begin_to_list(pool).await?;
        let rows = tx.rows(sql, &paged(pool, page)).await?;
        let tasks: Vec<_> = rows.iter().map(read).collect::<Result<_, _>>()?;
        let views = self.views(&mut tx, &tasks).await?;
        tx.rollback().await?;
        Ok(views)
    }

    async fn begin_to_list(&self, pool: Option<&PoolName>) -> Result<Tx, Error> {
        match pool {
            Some(pool) => self.begin_for_pool(pool).await,
            None => self.begin().await,
        }
    }

    /// Returns one task, for a call.
    pub async fn task(&self, task: TaskId) -> Result<Option<TaskView>, Error> {
        let tx = self.begin_for_task(task).await?;
        self.task_in(tx, task).await
    }

    /// Returns a task of a pool. A call with any id waits in the line of this pool, and not in that of unknown tasks.
    pub async fn task_of(&self, pool: &PoolName, task: TaskId) -> Result<Option<TaskView>, Error> {
        let tx = self.begin_for_pool(pool).await?;
        let found = self.task_in(tx, task).await?;
        Ok(found.filter(|found| found.pool == *pool))
    }

    /// Returns one task, for a duty of the hub. It does not wait for the calls of the pool.
    pub async fn task_for_hub(&self, task: TaskId) -> Result<Option<TaskView>, Error> {
        let tx = self.begin().await?;
        self.task_in(tx, task).await
    }

    async fn task_in(&self, mut tx: Tx, task: TaskId) -> Result<Option<TaskView>, Error> {
        let sql = "SELECT * FROM tasks WHERE id = $1";
        let row = tx.row(sql, &[Value::text(task)]).await?;
        let task = row.as_ref().map(read).transpose()?;
        let views = self.views(&mut tx, task.as_slice()).await?;
        tx.rollback().await?;
        Ok(views.into_iter().next())
    }

    /// Returns the pools and credentials of all leases.
    pub async fn credentials(&self) -> Result<Vec<(PoolName, String)>, Error> {
        let mut tx = self.begin().await?;
        let rows = tx.rows(CREDENTIALS, &[]).await?;
        tx.rollback().await?;
        let credential = |row: &Row| Ok((row.parsed("pool")?, row.text("credential")?));
        rows.iter().map(credential).collect()
    }

    /// Returns how many tasks of the pool are before a waiting task. `None` if the task does not wait.
    pub async fn position(&self, task: TaskId) -> Result<Option<u32>, Error> {
        let mut tx = self.begin_for_task(task).await?;
        let sql = "SELECT pool, submitted_at FROM tasks WHERE id = $1 AND state IN ('submitted', 'available')";
        let ahead = match tx.row(sql, &[Value::text(task)]).await? {
            None => None,
            Some(row) => {
                let pool = Value::Text(Some(row.text("pool")?));
                let since = Value::from(row.int("submitted_at")?);
                let ahead = tx.row(AHEAD, &[pool, since, Value::text(task)]).await?;
                ahead.map(|row| row.count("tasks")).transpose()?
            }
        };
        tx.rollback().await?;
        Ok(ahead)
    }

    /// Returns the last [`PAGE`] entries of the history of a task, oldest first.
    pub async fn events(&self, task: TaskId) -> Result<Vec<EventView>, Error> {
        let mut tx = self.begin_for_task(task).await?;
        let rows = tx
            .rows(EVENTS, &[Value::text(task), Value::from(PAGE)])
            .await?;
        tx.rollback().await?;
        rows.iter().map(event_view).collect()
    }

    /// Returns the views of tasks. From here on, calls about them wait in the lines of their pools: the hub lists all open tasks
    /// every few seconds, also after a restart, and those of other hubs.
    pub(super) async fn views(&self, tx: &mut Tx, tasks: &[Task]) -> Result<Vec<TaskView>, Error> {
        for task in tasks {
            self.known_pools.add(task);
        }
        let waits = |task: &&Task| matches!(task.state, State::Submitted | State::Available);
        let waiting: Vec<_> = tasks.iter().filter(waits).collect();
        let (capacities, behind) = if waiting.is_empty() {
            Default::default()
        } else {
            (self.capacities(tx).await?, behind(tx, &waiting).await?)
        };
        let now = tx.now;
        let view = |task: &Task| {
            let active = behind.get(&task.id).copied();
            let wait = wait(task, capacities.get(&task.pool), active, now);
            task_view(task, wait, now)
        };
        Ok(tasks.iter().map(view).collect())
    }

    async fn capacities(&self, tx: &mut Tx) -> Result<BTreeMap<PoolName, PoolView>, Error> {
        let online = Value::from(tx.now - millis(self.rules.offline_after));
        let mut pools = BTreeMap::new();
        for row in tx.rows(CAPACITIES, &[online]).await? {
            let pool: PoolName = row.parsed("pool")?;
            let view = PoolView {
                online: row.count("online")?,
                offline: row.count("offline")?,
                capacity: row.count("capacity")?,
                free: row.count("free")?,
                ..empty(pool.clone())
            };
            pools.insert(pool, view);
        }
        Ok(pools)
    }

    fn instance_view(&self, row: &Row, now: crate::Millis) -> Result<InstanceView, Error> {
        let last_seen = between(row.int("seen_at")?, now);
        let failures = row.int("failures")? + row.int("overdue")?;
        let condition = if last_seen >= self.rules.offline_after {
            Condition::Offline
        } else if row.flag("draining")? {
            Condition::Draining
        } else if failures >= DEGRADED {
            Condition::Degraded
        } else {
            Condition::Online
        };
        Ok(InstanceView {
            instance: row.parsed("id")?,
            pool: row.parsed("pool")?,
            agent: row.parsed("agent")?,
            version: row.text("version")?,
            operating_system: row.text("platform")?,
            architecture: row.text("architecture")?,
            target: row.text("target")?,
            tags: texts(row, "tags")?,
            condition,
            capacity: row.count("capacity")?,
            free: row.count("free")?,
            tasks: row.count("tasks")?,
            failures: u32::try_from(failures).unwrap_or(u32::MAX),
            last_seen,
        })
    }
}

/// Returns those of the tasks that wait for an active one of their workspace, with that one.
async fn behind(tx: &mut Tx, waiting: &[&Task]) -> Result<BTreeMap<TaskId, TaskId>, Error> {
    let ids = || waiting.iter().map(|task| task.id);
    let (Some(first), Some(last)) = (ids().min(), ids().max()) else {
        return Ok(BTreeMap::new());
    };
    let pool = &waiting[0].pool;
    let pool = waiting
        .iter()
        .all(|task| task.pool == *pool)
        .then_some(pool);
    let values = [
        Value::text(first),
        Value::text(last),
        Value::text(pool.map_or("", PoolName::as_str)),
    ];
    let rows = tx.rows(BEHIND, &values).await?;
    let pair = |row: &Row| Ok((row.parsed("id")?, row.parsed("active")?));
    rows.iter().map(pair).collect()
}

fn paged<Id: std::fmt::Display>(pool: Option<&PoolName>, page: Page<Id>) -> Vec<Value> {
    vec![
        Value::Text(Some(
            page.after.map_or_else(String::new, |id| id.to_string()),
        )),
        Value::text(pool.map_or("", PoolName::as_str)),
        Value::from(page.limit.min(PAGE)),
    ]
}

fn empty(pool: PoolName) -> PoolView {
    PoolView {
        pool,
        online: 0,
        offline: 0,
        capacity: 0,
        free: 0,
        unconfirmed: 0,
        available: 0,
        leased: 0,
        running: 0,
        orphaned: 0,
        unreported: 0,
        oldest: None,
    }
}

fn count_of(view: &mut PoolView, state: State) -> &mut u32 {
    match state {
        State::Submitted => &mut view.unconfirmed,
        State::Available => &mut view.available,
        State::Leased | State::Started => &mut view.leased,
        State::Running => &mut view.running,
        State::Orphaned => &mut view.orphaned,
        State::Completed | State::Failed | State::Cancelled => &mut view.unreported,
    }
}

/// `active`: the active task of its workspace.
fn wait(
    task: &Task,
    capacity: Option<&PoolView>,
    active: Option<TaskId>,
    now: crate::Millis,
) -> Option<Wait> {
    if !matches!(task.state, State::Submitted | State::Available) {
        return None;
    }
    if task.not_before <= now
        && task.state == State::Available
        && let Some(active) = active
    {
        return Some(Wait::Workspace(active));
    }
    Some(match capacity {
        _ if task.not_before > now => Wait::Pause(between(now, task.not_before)),
        _ if task.state == State::Submitted => Wait::Unconfirmed,
        None => Wait::NoInstance,
        Some(capacity) if capacity.online == 0 => Wait::NoInstance,
        Some(capacity) if capacity.free == 0 => Wait::NoCapacity,
        Some(_) => Wait::Turn,
    })
}

fn task_view(task: &Task, wait: Option<Wait>, now: crate::Millis) -> TaskView {
    let name = |holder: &pool_protocol::lease::Holder| match holder.name.as_str() {
        "" => holder.uid.clone(),
        name => name.to_owned(),
    };
    TaskView {
        task: task.id,
        pool: task.pool.clone(),
        organization: task.organization.clone(),
        workspace: task.workspace.clone(),
        job: task.job.clone(),
        step: task.step.clone(),
        kind: task.kind.clone(),
        traceparent: task.traceparent.clone(),
        state: task.state.protocol_state(),
        wait,
        age: between(task.submitted_at, now),
        attempts: task.attempts,
        reasons: task.reasons.clone(),
        lease: task.lease,
        fencing_token: task.fencing_token,
        instance: task.instance,
        agent: task.agent.clone(),
        credential: task.credential.clone(),
        executor: task.executor.clone(),
        holder: task.holder.as_ref().map(name),
        phase: task.phase.clone(),
        silent: task.state.is_active().then(|| between(task.heard_at, now)),
        cancel_requested: task.cancel_requested,
        end: task.end.clone(),
        ended: task.end.as_ref().map(|end| between(end.at, now)),
    }
}

fn event_view(row: &Row) -> Result<EventView, Error> {
    let state = |text: String| {
        let state = State::of_name(&text).ok_or_else(|| unreadable("to_state", text))?;
        Ok::<_, Error>(state.name())
    };
    Ok(EventView {
        at: wall_time(row.int("at")?),
        from: row.maybe_text("from_state")?.map(state).transpose()?,
        to: state(row.text("to_state")?)?,
        actor: row.text("actor")?,
        note: row.text("note")?,
    })
}
