//! Which task is leased next: the oldest one of the organization that has the fewest active ones. So a burst of one
//! organization does not hold up another. Steps of one workspace run one after another, so a task whose workspace has an active
//! one is left in the queue: an executor would wait for the folder or the state, and use a slot.

use std::collections::VecDeque;

use pool_protocol::id::{PoolName, TaskId};

use crate::db::{Tx, Value};
use crate::error::Error;
use crate::state::Task;

/// Each organization with available tasks, and how many of its tasks are active. It looks at one task of each organization,
/// however many there are.
const ORGANIZATIONS: &str = "\
    WITH RECURSIVE o (organization) AS (\
        SELECT min(organization) FROM tasks WHERE pool = $1 AND state = 'available' \
        UNION ALL \
        SELECT (SELECT min(t.organization) FROM tasks t \
            WHERE t.pool = $1 AND t.state = 'available' AND t.organization > o.organization) \
        FROM o WHERE o.organization IS NOT NULL) \
    SELECT o.organization, \
        (SELECT count(*) FROM tasks t WHERE t.pool = $1 AND t.organization = o.organization \
            AND t.state IN ('leased', 'started', 'running', 'orphaned')) AS active \
    FROM o WHERE o.organization IS NOT NULL";
const OLDEST: &str = "\
    SELECT t.id, t.workspace FROM tasks t \
    WHERE t.pool = $1 AND t.state = 'available' AND t.organization = $2 AND t.not_before <= $3 \
    AND NOT EXISTS (SELECT 1 FROM tasks a WHERE a.pool = t.pool AND a.organization = t.organization \
        AND a.workspace = t.workspace AND a.state IN ('leased', 'started', 'running', 'orphaned')) \
    ORDER BY t.submitted_at, t.id LIMIT $4";

/// The next tasks of a pool, for one transaction.
pub(super) struct Choice {
    pool: PoolName,
    lines: Vec<Line>,
}

/// The tasks of one organization.
struct Line {
    organization: String,
    active: i64,
    /// The oldest available ones, with their workspaces.
    oldest: VecDeque<(TaskId, String)>,
}

impl Choice {
    /// Looks at the pool. Until the transaction ends, other transactions wait that would choose too.
    pub(super) async fn begin(tx: &mut Tx, pool: &PoolName) -> Result<Self, Error> {
        // Two that choose at the same time would choose the same task, or the same organization.
        tx.lock(&format!("lease {pool}")).await?;
        let rows = tx.rows(ORGANIZATIONS, &[Value::text(pool)]).await?;
        let line = |row: &crate::db::Row| {
            Ok(Line {
                organization: row.text("organization")?,
                active: row.int("active")?,
                oldest: VecDeque::new(),
            })
        };
        Ok(Self {
            pool: pool.clone(),
            lines: rows.iter().map(line).collect::<Result<_, Error>>()?,
        })
    }

    /// The next task. `wanted`: so many are wanted in this transaction.
    pub(super) async fn next(
        &mut self,
        tx: &mut Tx,
        wanted: usize,
    ) -> Result<Option<TaskId>, Error> {
        let at_once = wanted.div_ceil(self.lines.len().max(1));
        loop {
            let lines = self.lines.iter().enumerate();
            let least = lines.min_by_key(|(_, line)| (line.active, &line.organization));
            let Some((index, _)) = least else {
                return Ok(None);
            };
            let line = &mut self.lines[index];
            if line.oldest.is_empty() {
                let values = [
                    Value::text(&self.pool),
                    Value::text(&line.organization),
                    Value::from(tx.now),
                    Value::from(i64::try_from(at_once).unwrap_or(i64::MAX)),
                ];
                for row in tx.rows(OLDEST, &values).await? {
                    let next = (row.parsed("id")?, row.text("workspace")?);
                    line.oldest.push_back(next);
                }
            }
            if let Some((id, _)) = line.oldest.pop_front() {
                return Ok(Some(id));
            }
            self.lines.swap_remove(index);
        }
    }

    /// This task is active now.
    pub(super) fn taken(&mut self, task: &Task) {
        let mut lines = self.lines.iter_mut();
        if let Some(line) = lines.find(|line| line.organization == task.organization) {
            line.active += 1;
            line.oldest
                .retain(|(_, workspace)| *workspace != task.workspace);
        }
    }
}
