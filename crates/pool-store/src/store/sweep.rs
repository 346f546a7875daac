//! Applies time limits, and starts them again after a gap without sweeps.

use pool_protocol::id::PoolName;

use super::Store;
use super::rows::read;
use crate::clock::{Millis, millis};
use crate::db::{Tx, Value};
use crate::error::{Error, OpenError};
use crate::model::Swept;
use crate::state::{Event, apply};

/// The largest number of tasks that one sweep changes.
const BATCH: i64 = 200;
/// The longest pause between two writes of the store's time.
const TICK: Millis = 5000;
/// If the store's time was not written for so long, no hub was running, or no hub could write.
const MAX_GAP: Millis = 15_000;

const TIMED_OUT: &str = "SELECT * FROM tasks WHERE deadline <= $1 ORDER BY deadline LIMIT $2";
/// Counts the tasks whose pause has ended since the last tick.
const PAUSE_OVER: &str = "\
    SELECT pool, count(*) AS tasks FROM tasks \
    WHERE state = 'available' AND not_before > $1 AND not_before <= $2 GROUP BY pool";

/// Marks the tasks for the next two statements, and locks them before their history grows.
const UNCONFIRM: &str =
    "UPDATE tasks SET state = 'submitted', asks = -1, ask_at = $1 WHERE state = 'available'";
const UNCONFIRMED_AGAIN: &str = "\
    INSERT INTO events (task, seq, at, from_state, to_state, actor, note) \
    SELECT t.id, (SELECT coalesce(max(e.seq), 0) + 1 FROM events e WHERE e.task = t.id), \
    $1, 'available', 'submitted', 'hub', 'the hub starts: the platform must confirm it again' \
    FROM tasks t WHERE t.asks = -1";
const UNCONFIRMED: &str = "UPDATE tasks SET asks = 0 WHERE asks = -1";
const SHIFT_SUBMITTED: &str = "UPDATE tasks SET deadline = deadline + $1 WHERE state = 'submitted'";
/// The limits of a task depend on these times, and not only on the last heartbeat.
const SHIFT_OPEN: &str = "\
    UPDATE tasks SET submitted_at = submitted_at + $1, not_before = not_before + $1, leased_at = leased_at + $1 \
    WHERE end_reason IS NULL";
const RENEW_ALL: &str = "\
    UPDATE tasks SET heard_at = $1, deadline = $1 + CASE state WHEN 'leased' THEN $2 WHEN 'started' THEN $3 \
    WHEN 'running' THEN $4 ELSE $5 END WHERE state IN ('leased', 'started', 'running', 'orphaned')";
const CHECK_ALL_NOW: &str = "UPDATE tasks SET ask_at = $1 WHERE ask_at IS NOT NULL";
/// Instances that were online count as seen now. The offline time of the others does not grow by the gap.
const SHIFT_SEEN: &str =
    "UPDATE instances SET seen_at = CASE WHEN seen_at > $2 THEN $1 ELSE seen_at + $3 END";

impl Store {
    /// Applies time limits to tasks, and deletes old tasks and instances. The hub calls it every second, and again at
    /// once if `more` is set. With PostgreSQL, every hub calls it, and one of them does the work. After 15 s without a
    /// sweep, all time limits start again, because requests of agents and executors may have failed in that time.
    pub async fn sweep(&self) -> Result<Swept, Error> {
        let swept = self.sweep_once().await;
        self.swept();
        match &swept {
            Err(error) => self.wrote(Some(error)),
            // Another hub may do all the work from here on. It could write, or this sweep would have tried to.
            Ok(_) if self.database.is_shared() => self.wrote(None),
            Ok(_) => {}
        }
        swept
    }

    async fn sweep_once(&self) -> Result<Swept, Error> {
        let mut tx = self.begin().await?;
        let mut swept = Swept::default();
        if !tx.try_lock("sweep").await? {
            tx.rollback().await?;
            return Ok(swept);
        }
        self.read_reusable(&mut tx).await?;
        let tick = last_tick(&mut tx).await?;
        let gap = tx.now - tick;
        if gap.abs() > MAX_GAP {
            self.rearm(&mut tx, tick).await?;
            tx.commit().await?;
            self.wrote(None);
            tracing::warn!(
                milliseconds = gap,
                "there was no sweep for a while: all time limits start again"
            );
            swept.resumed = true;
            return Ok(swept);
        }
        for row in tx
            .rows(PAUSE_OVER, &[Value::from(tick), Value::from(tx.now)])
            .await?
        {
            let pool: PoolName = row.parsed("pool")?;
            let tasks = usize::try_from(row.int("tasks")?).unwrap_or_default();
            tx.wake(&pool, tasks);
        }
        let values = [Value::from(tx.now), Value::from(BATCH)];
        let rows = tx.rows_to_change(TIMED_OUT, &values).await?;
        let mut changed = Vec::new();
        for row in &rows {
            let task = read(row)?;
            if task.state.is_over() {
                tx.delete_task(task.id).await?;
                continue;
            }
            let transition = apply(&task, Event::TimeOut, tx.now, &self.rules)?;
            tx.save(task.state, &transition, &self.rules).await?;
            changed.push(transition.task);
        }
        let gone = Value::from(tx.now - millis(self.rules.listed_for));
        let sql = "DELETE FROM instances WHERE seen_at <= $1";
        let removed = tx.execute(sql, &[gone]).await?;
        swept.changed = self.views(&mut tx, &changed).await?;
        swept.more = i64::try_from(rows.len()) == Ok(BATCH);
        if rows.is_empty() && removed == 0 && gap < TICK {
            tx.commit().await?;
            return Ok(swept);
        }
        write_tick(&mut tx).await?;
        let now = tx.now;
        tx.commit().await?;
        self.wrote(None);
        self.checkpoint(now).await?;
        Ok(swept)
    }

    /// Starts the time limits again after the store was opened.
    pub(super) async fn resume(&self) -> Result<(), OpenError> {
        let resume = async || {
            let mut tx = self.begin().await?;
            tx.lock("sweep").await?;
            let tick = last_tick(&mut tx).await?;
            // With PostgreSQL, another hub may be running and have swept in the meantime.
            if self.database.is_shared() && (tx.now - tick).abs() <= MAX_GAP {
                unconfirm(&mut tx).await?;
            } else {
                self.rearm(&mut tx, tick).await?;
            }
            tx.commit().await
        };
        let mut resumed = resume().await;
        if resumed.is_err() && self.database.is_shared() {
            // PostgreSQL ends a transaction that waits for one of another hub, while that one waits for it.
            resumed = resume().await;
        }
        resumed.map_err(|error| match error {
            Error::Unavailable(source) => match source.downcast::<sqlx::Error>() {
                Ok(error) => OpenError::Database(*error),
                Err(other) => OpenError::Database(sqlx::Error::Protocol(other.to_string())),
            },
            Error::Refused(refusal) => {
                OpenError::Database(sqlx::Error::Protocol(refusal.to_string()))
            }
        })
    }

    /// Starts all time limits again. Agents and executors may have sent requests while no hub could store them. The
    /// time since the last tick does not count.
    async fn rearm(&self, tx: &mut Tx, tick: Millis) -> Result<(), Error> {
        unconfirm(tx).await?;
        let now = Value::from(tx.now);
        let gap = Value::from(tx.now - tick);
        for sql in [SHIFT_SUBMITTED, SHIFT_OPEN] {
            tx.execute(sql, std::slice::from_ref(&gap)).await?;
        }
        let rules = &self.rules;
        let limits = [
            rules.lease,
            rules.unaccepted,
            rules.orphaned_after,
            rules.lost_after,
        ];
        let mut values = vec![now.clone()];
        values.extend(limits.map(|limit| Value::from(millis(limit))));
        tx.execute(RENEW_ALL, &values).await?;
        tx.execute(CHECK_ALL_NOW, std::slice::from_ref(&now))
            .await?;
        let online = Value::from(tick - millis(rules.offline_after));
        tx.execute(SHIFT_SEEN, &[now, online, gap]).await?;
        write_tick(tx).await
    }
}

/// Makes all available tasks unconfirmed, because the store may be a restored backup.
async fn unconfirm(tx: &mut Tx) -> Result<(), Error> {
    tx.execute(UNCONFIRM, &[Value::from(tx.now)]).await?;
    tx.execute(UNCONFIRMED_AGAIN, &[Value::from(tx.wall)])
        .await?;
    tx.execute(UNCONFIRMED, &[]).await.map(drop)
}

async fn last_tick(tx: &mut Tx) -> Result<Millis, Error> {
    let row = tx.row("SELECT at FROM clock", &[]).await?;
    row.ok_or(sqlx::Error::RowNotFound)?.int("at")
}

async fn write_tick(tx: &mut Tx) -> Result<(), Error> {
    let now = [Value::from(tx.now)];
    tx.execute("UPDATE clock SET at = $1", &now).await.map(drop)
}
