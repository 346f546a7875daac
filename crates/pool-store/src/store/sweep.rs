//! What time does, and what happens when no time was measured.

use pool_protocol::id::PoolName;

use super::Store;
use super::rows::read;
use crate::clock::{Millis, millis};
use crate::db::{Tx, Value};
use crate::error::{Error, OpenError};
use crate::model::Swept;
use crate::state::{Event, apply};

/// How many tasks one sweep changes.
const BATCH: i64 = 200;
/// How often the store's time is written, at least.
const TICK: Millis = 5000;
/// If it was not written for so long, no hub was there, or no hub could write.
const GAP: Millis = 15_000;

const TIMED_OUT: &str = "SELECT * FROM tasks WHERE deadline <= $1 ORDER BY deadline LIMIT $2";
/// Tasks whose pause is over since the last tick.
const PAUSE_OVER: &str = "\
    SELECT pool, count(*) AS tasks FROM tasks \
    WHERE state = 'available' AND not_before > $1 AND not_before <= $2 GROUP BY pool";

const UNCONFIRMED_AGAIN: &str = "\
    INSERT INTO events (task, seq, at, from_state, to_state, actor, note) \
    SELECT t.id, (SELECT coalesce(max(e.seq), 0) + 1 FROM events e WHERE e.task = t.id), \
    $1, 'available', 'submitted', 'hub', 'the hub starts: the platform must confirm it again' \
    FROM tasks t WHERE t.state = 'available'";
const UNCONFIRMED: &str =
    "UPDATE tasks SET state = 'submitted', asks = 0, ask_at = $1 WHERE state = 'available'";
const LATER: &str = "\
    UPDATE tasks SET submitted_at = submitted_at + $1, not_before = not_before + $1, deadline = deadline + $1 \
    WHERE state = 'submitted'";
const HEARD_NOW: &str = "\
    UPDATE tasks SET heard_at = $1, deadline = $1 + CASE state WHEN 'leased' THEN $2 WHEN 'started' THEN $3 \
    WHEN 'running' THEN $4 ELSE $5 END WHERE state IN ('leased', 'started', 'running', 'orphaned')";
const ASK_NOW: &str = "UPDATE tasks SET ask_at = $1 WHERE ask_at IS NOT NULL";
/// Instances that were online count as seen now. The others have not been offline for longer.
const SEEN_NOW: &str =
    "UPDATE instances SET seen_at = CASE WHEN seen_at > $2 THEN $1 ELSE seen_at + $3 END";

impl Store {
    /// Ends what has timed out, and forgets what is old. Call it every second, and at once if there is more to do. With
    /// PostgreSQL each hub calls it, and one of them does the work. After 15 s without a sweep all time limits begin anew:
    /// agents and executors may have spoken while nothing could be stored.
    pub async fn sweep(&self) -> Result<Swept, Error> {
        let mut tx = self.begin().await?;
        let mut swept = Swept::default();
        if !tx.try_alone("sweep").await? {
            tx.rollback().await?;
            return Ok(swept);
        }
        let tick = last_tick(&mut tx).await?;
        let gap = tx.now - tick;
        if gap.abs() > GAP {
            self.rearm(&mut tx, tick).await?;
            tx.commit().await?;
            tracing::warn!(
                milliseconds = gap,
                "nothing was swept for a while: all time limits begin anew"
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
                tx.forget(task.id).await?;
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
        tx.commit().await?;
        Ok(swept)
    }

    /// The store was just opened.
    pub(super) async fn resume(&self) -> Result<(), OpenError> {
        let resumed = async {
            let mut tx = self.begin().await?;
            tx.alone("sweep").await?;
            let tick = last_tick(&mut tx).await?;
            // With PostgreSQL another hub may be there, and have measured the time.
            if self.database.is_shared() && (tx.now - tick).abs() <= GAP {
                unconfirm(&mut tx).await?;
            } else {
                self.rearm(&mut tx, tick).await?;
            }
            tx.commit().await
        };
        resumed.await.map_err(|error| match error {
            Error::Unavailable(source) => match source.downcast::<sqlx::Error>() {
                Ok(error) => OpenError::Database(*error),
                Err(other) => OpenError::Database(sqlx::Error::Protocol(other.to_string())),
            },
            Error::Refused(refusal) => {
                OpenError::Database(sqlx::Error::Protocol(refusal.to_string()))
            }
        })
    }

    /// All that was silent may have spoken while nothing listened: all time limits begin anew. The time that has passed
    /// since the tick does not count.
    async fn rearm(&self, tx: &mut Tx, tick: Millis) -> Result<(), Error> {
        unconfirm(tx).await?;
        let now = Value::from(tx.now);
        let gap = Value::from(tx.now - tick);
        tx.execute(LATER, std::slice::from_ref(&gap)).await?;
        let rules = &self.rules;
        let limits = [
            rules.lease,
            rules.unaccepted,
            rules.orphaned_after,
            rules.lost_after,
        ];
        let mut values = vec![now.clone()];
        values.extend(limits.map(|limit| Value::from(millis(limit))));
        tx.execute(HEARD_NOW, &values).await?;
        tx.execute(ASK_NOW, std::slice::from_ref(&now)).await?;
        let online = Value::from(tick - millis(rules.offline_after));
        tx.execute(SEEN_NOW, &[now, online, gap]).await?;
        write_tick(tx).await
    }
}

/// All tasks that wait for an instance must be confirmed again, because the store may be a restored backup.
async fn unconfirm(tx: &mut Tx) -> Result<(), Error> {
    tx.execute(UNCONFIRMED_AGAIN, &[Value::from(tx.wall)])
        .await?;
    tx.execute(UNCONFIRMED, &[Value::from(tx.now)]).await?;
    Ok(())
}

async fn last_tick(tx: &mut Tx) -> Result<Millis, Error> {
    let row = tx.row("SELECT at FROM clock", &[]).await?;
    row.ok_or(sqlx::Error::RowNotFound)?.int("at")
}

async fn write_tick(tx: &mut Tx) -> Result<(), Error> {
    let now = [Value::from(tx.now)];
    tx.execute("UPDATE clock SET at = $1", &now).await.map(drop)
}
