//! Reads and writes tasks as rows.

use pool_protocol::id::TaskId;
use pool_protocol::lease::Holder;

use crate::clock::Millis;
use crate::db::{Row, Tx, Value, unreadable};
use crate::document_keys::StoredDocument;
use crate::error::Error;
use crate::rules::Rules;
use crate::state::{EndReason, HistoryEntry, LeaseOutcome, State, Task, TaskEnd, Transition};

const INSERT: &str = "\
    INSERT INTO tasks (id, pool, organization, workspace, job, step, kind, traceparent, \
    state, fencing_token, lease, instance, agent, attempts, reasons, submitted_at, not_before, leased_at, \
    heard_at, executor, holder_uid, holder_name, phase, cancel_requested, end_reason, end_diagnostic, end_exit_code, \
    end_verdict, end_log_sequence, end_report, ended_at, reported, deadline, credential, ask_at, asks) \
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, \
    $24, $25, $26, $27, $28, $29, $30, $31, $32, $33, $34, $35, 0) ON CONFLICT (job, step) DO NOTHING";
const UPDATE: &str = "\
    UPDATE tasks SET state = $2, fencing_token = $3, lease = $4, instance = $5, agent = $6, attempts = $7, reasons = $8, \
    submitted_at = $9, not_before = $10, leased_at = $11, heard_at = $12, executor = $13, \
    holder_uid = $14, holder_name = $15, phase = $16, cancel_requested = $17, end_reason = $18, end_diagnostic = $19, \
    end_exit_code = $20, end_verdict = $21, end_log_sequence = $22, end_report = $23, ended_at = $24, reported = $25, \
    deadline = $26, credential = $27, asks = CASE WHEN $28 = 1 THEN 0 ELSE asks END, \
    ask_at = CASE WHEN $28 = 1 THEN $29 ELSE ask_at END WHERE id = $1";
const EVENT: &str = "\
    INSERT INTO events (task, seq, at, from_state, to_state, actor, note) \
    VALUES ($1, (SELECT coalesce(max(seq), 0) + 1 FROM events WHERE task = $1), $2, $3, $4, $5, $6)";

/// How many entries of its history a task keeps when it returns to the queue, which it may do as often as its agents like.
const HISTORY: i64 = 100;
const FORGET: &str = "DELETE FROM events WHERE task = $1 AND seq <= (SELECT max(seq) FROM events WHERE task = $1) - $2";

/// The delay before the first check or report of a new task. The platform may not have committed the step before.
const FIRST_CHECK: Millis = 100;
/// The pause between two checks of a task that waits or is leased.
pub(super) const CHECK: Millis = 5000;

impl Tx {
    /// Returns a task, and locks it until the transaction ends.
    pub(super) async fn task(&mut self, task: TaskId) -> Result<Option<Task>, Error> {
        let sql = "SELECT * FROM tasks WHERE id = $1";
        let row = self.row_to_change(sql, &[Value::text(task)]).await?;
        row.as_ref().map(read).transpose()
    }

    /// Writes a new task. Returns `false` if the job and step already have a task.
    pub(super) async fn insert(&mut self, task: &Task, rules: &Rules) -> Result<bool, Error> {
        let mut values = vec![
            Value::text(task.id),
            Value::text(&task.pool),
            Value::text(&task.organization),
            Value::text(&task.workspace),
            Value::text(&task.job),
            Value::text(&task.step),
            Value::text(&task.kind),
            Value::maybe(task.traceparent.as_ref()),
        ];
        values.extend(changing(task, rules)?);
        values.push(Value::Int(first_due(task, self.now)));
        Ok(self.execute(INSERT, &values).await? == 1)
    }

    pub(super) async fn save(
        &mut self,
        before: State,
        transition: &Transition,
        rules: &Rules,
    ) -> Result<(), Error> {
        if !transition.changed {
            return Ok(());
        }
        let task = &transition.task;
        let mut values = vec![Value::text(task.id)];
        values.extend(changing(task, rules)?);
        // An entry in the history means a new state, so checks and reports start again.
        values.push(Value::from(transition.entry.is_some()));
        values.push(Value::Int(first_due(task, self.now)));
        self.execute(UPDATE, &values).await?;
        if let Some(entry) = &transition.entry {
            self.add_entry(task.id, Some(before), task.state, entry)
                .await?;
            if task.state == State::Submitted {
                let values = [Value::text(task.id), Value::from(HISTORY)];
                self.execute(FORGET, &values).await?;
            }
        }
        if transition.drops_payload {
            let sql = "DELETE FROM payloads WHERE task = $1";
            self.execute(sql, &[Value::text(task.id)]).await?;
        }
        if let Some((instance, outcome)) = transition.instance {
            let sql = match outcome {
                LeaseOutcome::Started => {
                    "UPDATE instances SET failures = 0 WHERE id = $1 AND failures > 0"
                }
                LeaseOutcome::Failed => {
                    "UPDATE instances SET failures = failures + 1 WHERE id = $1"
                }
            };
            self.execute(sql, &[Value::text(instance)]).await?;
        }
        // The next task of the workspace may have waited for the end of this one.
        let frees_workspace = before.is_active() && !task.state.is_active();
        let is_available = task.state == State::Available && task.not_before <= self.now;
        if frees_workspace || is_available {
            self.wake(&task.pool, 1);
        }
        Ok(())
    }

    pub(super) async fn add_entry(
        &mut self,
        task: TaskId,
        from: Option<State>,
        to: State,
        entry: &HistoryEntry,
    ) -> Result<(), Error> {
        let values = [
            Value::text(task),
            Value::from(self.wall),
            Value::maybe(from.map(State::name)),
            Value::text(to.name()),
            Value::text(&entry.actor),
            Value::text(&entry.note),
        ];
        self.execute(EVENT, &values).await.map(drop)
    }

    pub(super) async fn insert_document(
        &mut self,
        task: &Task,
        document: StoredDocument,
    ) -> Result<(), Error> {
        let sql =
            "INSERT INTO payloads (task, pool, stored_key, size, data) VALUES ($1, $2, $3, $4, $5)";
        let size = document.size();
        let values = [
            Value::text(task.id),
            Value::text(&task.pool),
            Value::Text(Some(document.key)),
            Value::from(size),
            Value::Bytes(document.data),
        ];
        self.execute(sql, &values).await.map(drop)
    }

    /// Returns the document of a task that is not accepted yet. A migration of the store has removed some.
    pub(super) async fn document(&mut self, task: TaskId) -> Result<Option<StoredDocument>, Error> {
        let sql = "SELECT stored_key, data FROM payloads WHERE task = $1";
        let Some(row) = self.row(sql, &[Value::text(task)]).await? else {
            return Ok(None);
        };
        Ok(Some(StoredDocument {
            key: row.text("stored_key")?,
            data: row.bytes("data")?,
        }))
    }

    pub(super) async fn delete_task(&mut self, task: TaskId) -> Result<(), Error> {
        let id = [Value::text(task)];
        self.execute("DELETE FROM events WHERE task = $1", &id)
            .await?;
        self.execute("DELETE FROM state_locks WHERE task = $1", &id)
            .await?;
        self.execute("DELETE FROM seen_states WHERE task = $1", &id)
            .await?;
        self.execute("DELETE FROM tasks WHERE id = $1", &id).await?;
        Ok(())
    }
}

/// Returns the time of the first check or report of a task in this state.
fn first_due(task: &Task, now: Millis) -> Option<Millis> {
    match task.state {
        State::Submitted => Some(now + FIRST_CHECK),
        State::Available | State::Leased | State::Started if !task.cancel_requested => {
            Some(now + CHECK)
        }
        _ if is_refused_dispatch(task) => Some(now + FIRST_CHECK),
        _ if task.is_unreported() => Some(now),
        _ => None,
    }
}

/// Returns whether the task was refused at its dispatch and is not reported. The platform stores the dispatch only after
/// the hub's response, and takes no report before.
pub(super) fn is_refused_dispatch(task: &Task) -> bool {
    let is_refused = |end: &TaskEnd| end.reason == EndReason::Refused && !end.reported;
    task.fencing_token == 0 && task.end.as_ref().is_some_and(is_refused)
}

/// Returns the values of the columns that change, in the order of the statements.
fn changing(task: &Task, rules: &Rules) -> Result<[Value; 26], Error> {
    let end = task.end.as_ref();
    let reported = end.is_some_and(|end| end.reported);
    let deadline = (!task.is_unreported()).then(|| task.deadline(rules));
    Ok([
        Value::text(task.state.name()),
        signed(task.fencing_token)?,
        Value::maybe(task.lease),
        Value::maybe(task.instance),
        Value::maybe(task.agent.as_ref()),
        Value::from(task.attempts),
        Value::text(serde_json::Value::from(task.reasons.clone())),
        Value::from(task.submitted_at),
        Value::from(task.not_before),
        Value::from(task.leased_at),
        Value::from(task.heard_at),
        Value::maybe(task.executor.as_ref()),
        Value::maybe(task.holder.as_ref().map(|holder| &holder.uid)),
        Value::maybe(task.holder.as_ref().map(|holder| &holder.name)),
        Value::maybe(task.phase.as_ref()),
        Value::from(task.cancel_requested),
        Value::maybe(end.map(|end| end.reason.name())),
        Value::maybe(end.map(|end| &end.diagnostic)),
        Value::Int(end.and_then(|end| end.exit_code.map(i64::from))),
        Value::maybe(end.and_then(|end| end.verdict.as_ref())),
        match end.and_then(|end| end.final_log_sequence) {
            Some(sequence) => signed(sequence)?,
            None => Value::Int(None),
        },
        Value::maybe(end.and_then(|end| end.report.as_ref())),
        Value::Int(end.map(|end| end.at)),
        Value::from(reported),
        Value::Int(deadline),
        Value::maybe(task.credential.as_ref()),
    ])
}

/// Returns a signed number. The engines have no unsigned numbers.
fn signed(number: u64) -> Result<Value, Error> {
    let number = i64::try_from(number).map_err(|error| unreadable("number", error))?;
    Ok(Value::from(number))
}

pub(super) fn read(row: &Row) -> Result<Task, Error> {
    let end = match row.maybe_text("end_reason")? {
        None => None,
        Some(name) => Some(TaskEnd {
            reason: EndReason::of_name(&name).ok_or_else(|| unreadable("end_reason", name))?,
            diagnostic: row.text("end_diagnostic")?,
            exit_code: row
                .maybe_int("end_exit_code")?
                .and_then(|code| i32::try_from(code).ok()),
            verdict: row.maybe_text("end_verdict")?,
            final_log_sequence: row
                .maybe_int("end_log_sequence")?
                .and_then(|number| u64::try_from(number).ok()),
            report: row.maybe_text("end_report")?,
            at: row.int("ended_at")?,
            reported: row.flag("reported")?,
        }),
    };
    let holder = row.maybe_text("holder_uid")?.map(|uid| {
        let name = row.maybe_text("holder_name")?.unwrap_or_default();
        Ok::<_, Error>(Holder { uid, name })
    });
    let state = row.text("state")?;
    Ok(Task {
        id: row.parsed("id")?,
        pool: row.parsed("pool")?,
        organization: row.text("organization")?,
        workspace: row.text("workspace")?,
        job: row.text("job")?,
        step: row.text("step")?,
        kind: row.text("kind")?,
        traceparent: row.maybe_text("traceparent")?,
        state: State::of_name(&state).ok_or_else(|| unreadable("state", state))?,
        fencing_token: u64::try_from(row.int("fencing_token")?)
            .map_err(|error| unreadable("fencing_token", error))?,
        lease: row.maybe_parsed("lease")?,
        instance: row.maybe_parsed("instance")?,
        agent: row.maybe_parsed("agent")?,
        credential: row.maybe_text("credential")?,
        attempts: row.count("attempts")?,
        reasons: texts(row, "reasons")?,
        submitted_at: row.int("submitted_at")?,
        not_before: row.int("not_before")?,
        leased_at: row.int("leased_at")?,
        heard_at: row.int("heard_at")?,
        executor: row.maybe_text("executor")?,
        holder: holder.transpose()?,
        phase: row.maybe_text("phase")?,
        cancel_requested: row.flag("cancel_requested")?,
        end,
    })
}

/// Reads a list of texts that is stored as JSON.
pub(super) fn texts(row: &Row, column: &str) -> Result<Vec<String>, Error> {
    serde_json::from_str(&row.text(column)?).map_err(|error| unreadable(column, error))
}
