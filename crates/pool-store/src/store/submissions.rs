//! Operations for the platform: submissions, confirmations, cancellations and reports.

use pool_protocol::id::TaskId;
use pool_protocol::task::TaskState;

use super::Store;
use super::rows::{CHECK, is_refused_dispatch, read};
use crate::clock::Millis;
use crate::db::{Row, Tx, Value};
use crate::document_keys::{Owner, StoredDocument};
use crate::error::{Error, Refusal};
use crate::model::{Content, Payload, PlatformState, Submission, Submitted};
use crate::state::{EndReason, Event, HistoryEntry, State, Task, TaskEnd};
use crate::text::{DIAGNOSTIC, cut, identifier};
use crate::view::{PAGE, TaskView};

/// The largest payload, in bytes.
const PAYLOAD: usize = 9 << 20;
/// The largest sum of the waiting documents of one pool, in bytes, as [`StoredDocument::size`] counts them. So one pool does not fill the
/// disk for the others. It is enough for ten thousand runs of the usual size, or for 64 of the largest.
const POOL: i64 = 256 << 20;
/// The pauses between the first checks of an unconfirmed task, and between the first reports of a refused dispatch.
const CHECKS: [Millis; 3] = [200, 700, 2000];
/// The pause after the first report. It doubles up to the longest pause, because a report can take a while.
const REPORT: Millis = 30_000;
const LONGEST_REPORT: Millis = 120_000;

impl Store {
    /// Stores a task. The hub must then confirm it at the platform, or report it if its content is refused. The store also
    /// refuses the content of a task whose pool has too many waiting bytes.
    pub async fn submit(&self, mut submission: Submission) -> Result<Submitted, Error> {
        check(&submission)?;
        let id = submission.task;
        let mut document = match &mut submission.content {
            Content::Payload(payload) => {
                let owner = Owner {
                    task: id,
                    pool: &submission.pool,
                    job: &submission.job,
                    step: &submission.step,
                };
                Some(
                    self.keys
                        .document_keys()
                        .encrypt(&owner, std::mem::take(payload))?,
                )
            }
            Content::Refused(_) => None,
        };
        // Not in the line of the pool: a dispatch that has to be repeated delays those of all pools.
        let mut tx = self.begin().await?;
        if let Some(wanted) = &document
            && let Some(reason) = lacks_share(&mut tx, &submission, wanted).await?
        {
            // The platform would repeat a dispatch that is not stored, before those of all other pools.
            submission.content = Content::Refused(reason);
            document = None;
        }
        let task = new_task(id, &submission, tx.now);
        if !tx.insert(&task, &self.rules).await? {
            let sql = "SELECT * FROM tasks WHERE job = $1 AND step = $2";
            let values = [Value::text(&task.job), Value::text(&task.step)];
            let row = tx.row_to_change(sql, &values).await?;
            if let Some(known) = row.as_ref().map(read).transpose()? {
                let superseded = |end: &TaskEnd| end.reason == EndReason::Superseded;
                if !known.end.as_ref().is_some_and(superseded) {
                    tx.rollback().await?;
                    return Ok(Submitted::Duplicate(known.id));
                }
                tx.delete_task(known.id).await?;
            }
            if !tx.insert(&task, &self.rules).await? {
                // Other hubs stored the same step twice in the meantime.
                return Err(sqlx::Error::RowNotFound.into());
            }
        }
        let (actor, note) = ("platform".to_owned(), String::new());
        tx.add_entry(id, None, task.state, &HistoryEntry { actor, note })
            .await?;
        if let Some(document) = document {
            let length = document.data.len();
            if let Err(error) = self.require_space(&mut tx, length).await {
                tx.rollback().await?;
                return Err(error);
            }
            tx.insert_document(&task, document).await?;
        }
        tx.commit().await?;
        if let Content::Refused(reason) = &submission.content {
            tracing::warn!(pool = %task.pool, job_id = task.job, step_id = task.step, reason, "refused a run of a pool");
        }
        Ok(Submitted::New(id))
    }

    /// Tasks that the hub must check now at the platform: whether unconfirmed ones are still wanted, and whether the others,
    /// which no executor has accepted, were cancelled. A task is given again after a while: soon if it was not
    /// confirmed, and after 5 s otherwise. The hub asks in a loop, at least 10 times a second while something waits to be
    /// confirmed. Confirmed tasks that wait for an instance are an eighth at most, because a long queue would keep
    /// the platform and the store busy, and hold up the others.
    pub async fn to_check(&self, limit: u32) -> Result<Vec<TaskView>, Error> {
        let sql = "SELECT * FROM tasks WHERE ask_at <= $1 AND state <> 'available' AND reported = 0 \
            AND end_reason IS NULL ORDER BY ask_at LIMIT $2";
        let pause = |task: &Task, asks: usize| match task.state {
            State::Submitted => CHECKS.get(asks).copied().unwrap_or(CHECK),
            _ => CHECK,
        };
        let mut due = self.due(sql, limit, pause).await?;
        let sql = "SELECT * FROM tasks WHERE ask_at <= $1 AND state = 'available' ORDER BY ask_at LIMIT $2";
        due.extend(self.due(sql, limit.div_ceil(8), |_, _| CHECK).await?);
        Ok(due)
    }

    /// Applies the state of a step on the platform. Does nothing to a task that is not unconfirmed.
    pub async fn apply_platform_state(
        &self,
        task: TaskId,
        state: PlatformState,
    ) -> Result<TaskState, Error> {
        let event = Event::PlatformState(state);
        let task = self.change_for_hub(task, event).await?;
        Ok(task.state.protocol_state())
    }

    /// Stores that the platform has cancelled the task. A task without a lease is over at once. Otherwise its instance
    /// and executor get a signal.
    pub async fn request_cancel(&self, task: TaskId) -> Result<TaskState, Error> {
        let task = self.change_for_hub(task, Event::Cancel).await?;
        Ok(task.state.protocol_state())
    }

    /// Returns the tasks that are over and whose outcome the hub must report to the platform. The same task is due
    /// again after 30 s or more, until [`Store::reported`]. After a refused dispatch, it is due again sooner. The hub reads
    /// the step first, because the platform may already have the outcome.
    pub async fn to_report(&self, limit: u32) -> Result<Vec<TaskView>, Error> {
        let sql = "SELECT * FROM tasks WHERE ask_at <= $1 AND state <> 'available' AND reported = 0 \
            AND end_reason IS NOT NULL ORDER BY ask_at LIMIT $2";
        let pause = |task: &Task, asks: usize| {
            let soon = if is_refused_dispatch(task) {
                &CHECKS[..]
            } else {
                &[]
            };
            let late = asks.saturating_sub(soon.len());
            let pause = (REPORT << late.min(8)).min(LONGEST_REPORT);
            soon.get(asks).copied().unwrap_or(pause)
        };
        self.due(sql, limit, pause).await
    }

    /// Stores that the platform has the outcome of the task.
    pub async fn reported(&self, task: TaskId) -> Result<(), Error> {
        self.change_for_hub(task, Event::Reported).await.map(drop)
    }

    /// Returns the tasks that are due now. Each is due again after a pause.
    async fn due(
        &self,
        sql: &'static str,
        limit: u32,
        pause: impl Fn(&Task, usize) -> Millis,
    ) -> Result<Vec<TaskView>, Error> {
        let mut tx = self.begin().await?;
        let values = [Value::from(tx.now), Value::from(limit.min(PAGE))];
        let rows = tx.rows_to_change(sql, &values).await?;
        if rows.is_empty() {
            tx.rollback().await?;
            return Ok(Vec::new());
        }
        let mut tasks = Vec::new();
        for row in &rows {
            tasks.push(postpone(&mut tx, row, &pause).await?);
        }
        let views = self.views(&mut tx, &tasks).await?;
        tx.commit().await?;
        Ok(views)
    }
}

/// Returns why a document is not stored: those of its pool have too many bytes with it.
async fn lacks_share(
    tx: &mut Tx,
    submission: &Submission,
    document: &StoredDocument,
) -> Result<Option<String>, Error> {
    let pool = &submission.pool;
    let sql =
        "SELECT CAST(coalesce(sum(size), 0) AS BIGINT) AS bytes FROM payloads WHERE pool = $1";
    let row = tx.row(sql, &[Value::text(pool)]).await?;
    let waiting = row.map_or(Ok(0), |row| row.int("bytes"))?;
    let bytes = waiting.saturating_add(document.size());
    Ok((bytes > POOL).then(|| {
        format!(
            "the runs that wait in pool `{pool}` would have {bytes} bytes, and {POOL} are stored: let agents take runs, or cancel some. Then start the run again"
        )
    }))
}

async fn postpone(
    tx: &mut Tx,
    row: &Row,
    pause: impl Fn(&Task, usize) -> Millis,
) -> Result<Task, Error> {
    let task = read(row)?;
    let asks = usize::try_from(row.count("asks")?).unwrap_or(usize::MAX);
    let next = tx.now + pause(&task, asks);
    let sql = "UPDATE tasks SET asks = asks + 1, ask_at = $2 WHERE id = $1";
    tx.execute(sql, &[Value::text(task.id), Value::from(next)])
        .await?;
    Ok(task)
}

fn check(submission: &Submission) -> Result<(), Refusal> {
    for (what, text) in [
        ("the organization", &submission.organization),
        ("the workspace", &submission.workspace),
        ("the job", &submission.job),
        ("the step", &submission.step),
        ("the type of the step", &submission.kind),
    ] {
        identifier(what, text)?;
    }
    if let Some(trace) = &submission.traceparent {
        identifier("the trace", trace)?;
    }
    if let Content::Payload(Payload(data)) = &submission.content
        && data.len() > PAYLOAD
    {
        return Err(Refusal::RequestInvalid(format!(
            "the payload has {} bytes: at most {PAYLOAD} are stored",
            data.len()
        )));
    }
    Ok(())
}

fn new_task(id: TaskId, submission: &Submission, now: Millis) -> Task {
    let end = match &submission.content {
        Content::Payload(_) => None,
        Content::Refused(why) => {
            let why = cut(why.clone(), DIAGNOSTIC);
            Some(TaskEnd::new(EndReason::Refused, why, now))
        }
    };
    Task {
        id,
        pool: submission.pool.clone(),
        organization: submission.organization.clone(),
        workspace: submission.workspace.clone(),
        job: submission.job.clone(),
        step: submission.step.clone(),
        kind: submission.kind.clone(),
        traceparent: submission.traceparent.clone(),
        state: if end.is_some() {
            State::Failed
        } else {
            State::Submitted
        },
        fencing_token: 0,
        lease: None,
        instance: None,
        agent: None,
        credential: None,
        attempts: 0,
        reasons: Vec::new(),
        submitted_at: now,
        not_before: now,
        leased_at: now,
        heard_at: now,
        executor: None,
        holder: None,
        phase: None,
        cancel_requested: false,
        end,
    }
}
