//! What the status page shows of this target: its runs, as those of a pool with one agent. In memory: of runs that ended
//! before the start, it knows nothing.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use job_contract::JobData;
use job_contract::status::StepStatus;
use pool_protocol::id::{AgentName, InstanceId, PoolName, TaskId};
use pool_protocol::task::TaskState;
use pool_store::state::{EndReason, State};
use pool_store::{
    Condition, EndView, EventView, InstanceView, Page, PoolView, TaskFilter, TaskView, Wait,
};
use runtime::regular_file;

use super::blocking;
use super::queue::{RunKey, Stamp};
use crate::hub::tails::Part;
use crate::local::run_folder::RunFolder;

/// How much of the end of a log is shown.
const TAIL: u64 = 256 * 1024;
/// How many runs that are over are kept.
const KEPT: usize = 200;
/// How long they are kept.
const MEMORY: Duration = Duration::from_hours(24);
/// How many events of a run are kept, and how many reasons of its attempts.
const KEPT_EVENTS: usize = 20;
/// Who does what.
const LAUNCHER: &str = "launcher";

/// The runs of this target.
#[derive(Debug)]
pub(crate) struct Journal {
    pool: PoolName,
    agent: AgentName,
    instance: InstanceId,
    capacity: u32,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// In the order of their arrival.
    runs: BTreeMap<TaskId, Run>,
    names: HashMap<RunKey, TaskId>,
}

#[derive(Debug)]
struct Run {
    view: TaskView,
    key: RunKey,
    submitted: Instant,
    /// How long it had waited before this launcher.
    waited: Duration,
    ended: Option<Instant>,
    events: Vec<EventView>,
    log: Log,
}

/// Where the log of a run is.
#[derive(Clone, Debug, Default)]
enum Log {
    #[default]
    None,
    File(PathBuf),
    /// Of a run that is over.
    Kept(Part),
}

/// How a run ended.
#[derive(Debug, Default)]
pub(super) struct RunOutcome {
    pub(super) status: Option<StepStatus>,
    pub(super) exit_code: Option<u8>,
    pub(super) reason: Option<String>,
}

impl Journal {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            pool: "local".parse().expect("a name of a pool"),
            agent: "this-machine".parse().expect("a name of an agent"),
            instance: InstanceId::new(),
            capacity: u32::try_from(capacity).unwrap_or(u32::MAX),
            kept: Mutex::default(),
        }
    }

    /// Notes a run that was accepted at that time, unless it is known.
    pub(super) fn accepted(&self, key: &RunKey, job: &JobData, at: Stamp) {
        let mut kept = self.lock();
        kept.forget();
        if kept.names.contains_key(key) {
            return;
        }
        let now = SystemTime::now();
        let accepted = SystemTime::UNIX_EPOCH + Duration::from_micros(at);
        let task = TaskId::new();
        let run = Run {
            view: TaskView {
                task,
                pool: self.pool.clone(),
                organization: job.organization_id.clone(),
                workspace: job.workspace_id.clone(),
                job: job.job_id.clone(),
                step: job.step_id.clone(),
                kind: job.step_type.clone().unwrap_or_default(),
                traceparent: None,
                state: TaskState::Available,
                wait: None,
                age: Duration::ZERO,
                attempts: 0,
                reasons: Vec::new(),
                lease: None,
                fencing_token: 0,
                instance: None,
                agent: None,
                credential: None,
                executor: None,
                holder: None,
                phase: None,
                silent: None,
                cancel_requested: false,
                end: None,
            },
            key: key.clone(),
            submitted: Instant::now(),
            waited: now.duration_since(accepted).unwrap_or_default(),
            ended: None,
            events: vec![EventView {
                at: accepted,
                from: None,
                to: State::Available.name(),
                actor: "platform".to_owned(),
                note: String::new(),
            }],
            log: Log::None,
        };
        kept.names.insert(key.clone(), task);
        kept.runs.insert(task, run);
    }

    /// Notes that an executor runs.
    pub(super) fn started(&self, key: &RunKey, folder: &RunFolder, executor: Option<i32>) {
        self.change(key, |run| {
            run.view.state = TaskState::Running;
            run.view.agent = Some(self.agent.clone());
            run.view.executor = executor.map(|pid| format!("process {pid}"));
            run.log = Log::File(folder.log());
            run.note(State::Running, "");
        });
    }

    /// Notes an attempt that failed and is repeated.
    pub(super) fn failed(&self, key: &RunKey, reason: &str) {
        self.change(key, |run| {
            run.view.state = TaskState::Available;
            run.view.attempts += 1;
            push(&mut run.view.reasons, reason.to_owned());
            run.note(State::Available, reason);
        });
    }

    /// Notes the end. Keeps the end of the log: its file is removed after this.
    pub(super) async fn ended(&self, key: &RunKey, outcome: RunOutcome) {
        let log = self.lock().of(key).map(|run| run.log.clone());
        let part = match log {
            Some(Log::File(path)) => read(path, 0).await,
            _ => None,
        };
        self.change(key, |run| {
            let (task, state) = match outcome.status {
                Some(StepStatus::Completed) => (TaskState::Completed, State::Completed),
                Some(StepStatus::Cancelled | StepStatus::NotExecuted) => {
                    (TaskState::Cancelled, State::Cancelled)
                }
                _ => (TaskState::Failed, State::Failed),
            };
            run.view.state = task;
            run.ended = Some(Instant::now());
            run.view.end = Some(EndView {
                reason: EndReason::Finished,
                diagnostic: outcome.reason.clone().unwrap_or_default(),
                exit_code: outcome.exit_code.map(i32::from),
                verdict: None,
                final_log_sequence: None,
                report: None,
                ago: Duration::ZERO,
                reported: outcome.status.is_some(),
            });
            run.log = part.map_or(Log::None, Log::Kept);
            run.note(state, outcome.reason.as_deref().unwrap_or_default());
        });
    }

    /// The pool.
    pub(crate) fn counts(&self) -> PoolView {
        let kept = self.lock();
        let running = kept.count(TaskState::Running);
        let waiting = kept.runs.values().filter(|run| run.is_waiting());
        PoolView {
            pool: self.pool.clone(),
            online: 1,
            offline: 0,
            capacity: self.capacity,
            free: self.capacity.saturating_sub(running),
            unconfirmed: 0,
            available: kept.count(TaskState::Available),
            leased: 0,
            running,
            orphaned: 0,
            unreported: 0,
            oldest: waiting.map(Run::age).max(),
        }
    }

    /// The agent.
    pub(crate) fn agents(&self, page: Page<InstanceId>) -> Vec<InstanceView> {
        if page.after.is_some() {
            return Vec::new();
        }
        let counts = self.counts();
        vec![InstanceView {
            instance: self.instance,
            pool: self.pool.clone(),
            agent: self.agent.clone(),
            system_id: String::new(),
            installation: String::new(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            platform: std::env::consts::OS.to_owned(),
            architecture: std::env::consts::ARCH.to_owned(),
            target: "process".to_owned(),
            tags: Vec::new(),
            condition: Condition::Online,
            capacity: counts.capacity,
            free: counts.free,
            tasks: counts.running,
            failures: 0,
            last_seen: Duration::ZERO,
        }]
    }

    /// A part of a list of runs.
    pub(crate) fn runs(&self, listed: TaskFilter, page: Page<TaskId>) -> Vec<TaskView> {
        let kept = self.lock();
        let is_listed = |run: &&Run| match listed {
            TaskFilter::Open => run.ended.is_none(),
            TaskFilter::Over | TaskFilter::Latest => run.ended.is_some(),
            TaskFilter::All => true,
        };
        let limit = page.limit as usize;
        let view = |run: &Run| self.view(&kept, run);
        if listed == TaskFilter::Latest {
            let runs = kept.runs.iter().rev();
            let rest = runs.filter(|(id, _)| page.after.is_none_or(|after| **id < after));
            let runs = rest.map(|(_, run)| run).filter(is_listed);
            return runs.take(limit).map(view).collect();
        }
        let runs = kept.runs.iter();
        let rest = runs.filter(|(id, _)| page.after.is_none_or(|after| **id > after));
        let runs = rest.map(|(_, run)| run).filter(is_listed);
        runs.take(limit).map(view).collect()
    }

    /// One run.
    pub(crate) fn run(&self, run: TaskId) -> Option<TaskView> {
        let kept = self.lock();
        kept.runs.get(&run).map(|run| self.view(&kept, run))
    }

    /// How many runs wait in front of a run, if it waits.
    pub(crate) fn position(&self, run: TaskId) -> Option<u32> {
        let kept = self.lock();
        kept.runs.get(&run).filter(|run| run.is_waiting())?;
        let before = kept.runs.range(..run).filter(|(_, run)| run.is_waiting());
        u32::try_from(before.count()).ok()
    }

    /// What happened to a run.
    pub(crate) fn events(&self, run: TaskId) -> Vec<EventView> {
        let kept = self.lock();
        kept.runs
            .get(&run)
            .map(|run| run.events.clone())
            .unwrap_or_default()
    }

    /// The log of a run from an offset, or all that is shown of it if the offset is not in it.
    pub(crate) async fn log(&self, run: TaskId, from: u64) -> Option<Part> {
        let log = self.lock().runs.get(&run)?.log.clone();
        match log {
            Log::None => None,
            Log::File(path) => read(path, from).await,
            Log::Kept(part) => Some(since(&part, from)),
        }
    }

    fn view(&self, kept: &Kept, run: &Run) -> TaskView {
        let has_room = kept.count(TaskState::Running) < self.capacity;
        let wait = if has_room {
            Wait::Turn
        } else {
            Wait::NoCapacity
        };
        let mut view = run.view.clone();
        view.age = run.age();
        view.wait = run.is_waiting().then_some(wait);
        if let (Some(end), Some(ended)) = (&mut view.end, run.ended) {
            end.ago = ended.elapsed();
        }
        view
    }

    fn change(&self, key: &RunKey, change: impl FnOnce(&mut Run)) {
        let mut kept = self.lock();
        if let Some(task) = kept.names.get(key).copied()
            && let Some(run) = kept.runs.get_mut(&task)
        {
            change(run);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn of(&self, key: &RunKey) -> Option<&Run> {
        self.runs.get(self.names.get(key)?)
    }

    fn count(&self, state: TaskState) -> u32 {
        let runs = self.runs.values();
        u32::try_from(runs.filter(|run| run.view.state == state).count()).unwrap_or(u32::MAX)
    }

    /// Forgets what is too old or too much of the runs that are over.
    fn forget(&mut self) {
        let over = self.runs.iter().filter(|(_, run)| run.ended.is_some());
        let over: Vec<TaskId> = over.map(|(id, _)| *id).collect();
        let surplus = over.len().saturating_sub(KEPT);
        for (number, id) in over.into_iter().enumerate() {
            let is_old = |run: &Run| run.ended.is_some_and(|ended| ended.elapsed() > MEMORY);
            if (number < surplus || self.runs.get(&id).is_some_and(is_old))
                && let Some(run) = self.runs.remove(&id)
            {
                self.names.remove(&run.key);
            }
        }
    }
}

impl Run {
    fn is_waiting(&self) -> bool {
        self.view.state == TaskState::Available
    }

    fn age(&self) -> Duration {
        self.waited + self.submitted.elapsed()
    }

    fn note(&mut self, to: State, note: &str) {
        let event = EventView {
            at: SystemTime::now(),
            from: self.events.last().map(|last| last.to),
            to: to.name(),
            actor: LAUNCHER.to_owned(),
            note: note.to_owned(),
        };
        push(&mut self.events, event);
    }
}

/// Adds to a list, and forgets its oldest entry if there are too many.
fn push<T>(list: &mut Vec<T>, new: T) {
    if list.len() == KEPT_EVENTS {
        list.remove(0);
    }
    list.push(new);
}

/// The part of a log that begins at an offset.
fn since(part: &Part, from: u64) -> Part {
    let skipped = from
        .checked_sub(part.start)
        .and_then(|skipped| usize::try_from(skipped).ok())
        .filter(|skipped| part.text.is_char_boundary(*skipped))
        .unwrap_or(0);
    Part {
        text: part.text[skipped..].to_owned(),
        start: part.start + skipped as u64,
        end: part.end,
    }
}

async fn read(path: PathBuf, from: u64) -> Option<Part> {
    // A log that is not there yet is none.
    blocking(move || read_tail(&path, from)).await.ok()
}

/// Whole lines of the end of a log.
fn read_tail(path: &Path, from: u64) -> io::Result<Part> {
    let mut file = regular_file::open_unlinked(path)?;
    let length = file.metadata()?.len();
    let first = length.saturating_sub(TAIL);
    let is_shown = (first..=length).contains(&from);
    let start = if is_shown { from } else { first };
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    let begin = match bytes.iter().position(|byte| *byte == b'\n') {
        Some(newline) if !is_shown && start > 0 => newline + 1,
        _ => 0,
    };
    let end = bytes.iter().rposition(|byte| *byte == b'\n');
    let end = end.map_or(begin, |newline| newline + 1).max(begin);
    Ok(Part {
        text: String::from_utf8_lossy(&bytes[begin..end]).into_owned(),
        start: start + begin as u64,
        end: start + end as u64,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::mpsc;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    fn job(id: &str) -> (RunKey, JobData) {
        let job = JobData {
            job_id: id.to_owned(),
            step_id: "plan".to_owned(),
            step_type: Some("terraformPlan".to_owned()),
            ..JobData::default()
        };
        (RunKey::of(&job).unwrap(), job)
    }

    fn now() -> Stamp {
        super::super::now()
    }

    #[tokio::test]
    async fn a_run_is_followed_from_the_queue_to_its_end_and_its_log_is_kept() {
        let temp = tempfile::tempdir().unwrap();
        let folder = RunFolder::new(temp.path().to_owned());
        let journal = Journal::new(1);
        let [(first, document), (second, other)] = [job("7"), job("8")];
        journal.accepted(&first, &document, now());
        journal.accepted(&second, &other, now());
        journal.accepted(&first, &document, now());
        journal.started(&first, &folder, Some(42));
        let open = journal.runs(TaskFilter::Open, Page::first());
        assert_eq!(open.len(), 2);
        assert_eq!(open[0].executor.as_deref(), Some("process 42"));
        assert_eq!(open[1].wait, Some(Wait::NoCapacity));
        assert_eq!(journal.position(open[1].task), Some(0));
        assert_eq!((journal.counts().free, journal.counts().available), (0, 1));

        let id = open[0].task;
        assert_eq!(journal.log(id, 0).await, None);
        fs::write(folder.log(), "one\ntwo\nhal").unwrap();
        let part = journal.log(id, 4).await.unwrap();
        assert_eq!((&*part.text, part.start, part.end), ("two\n", 4, 8));
        let outcome = RunOutcome {
            status: Some(StepStatus::Failed),
            exit_code: Some(1),
            reason: Some("the tool failed".to_owned()),
        };
        journal.ended(&first, outcome).await;
        fs::remove_file(folder.log()).unwrap();
        assert_eq!(journal.log(id, 4).await.unwrap().text, "two\n");
        let over = journal.runs(TaskFilter::Latest, Page::first());
        assert_eq!(over[0].state, TaskState::Failed);
        assert_eq!(over[0].end.as_ref().unwrap().diagnostic, "the tool failed");
        let states: Vec<_> = journal.events(id).iter().map(|event| event.to).collect();
        assert_eq!(states, ["available", "running", "failed"]);
        assert_eq!(journal.counts().free, 1);
    }

    #[test]
    fn a_long_log_is_shown_from_a_whole_line_on() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("log");
        let line = format!("{}\n", "x".repeat(999));
        fs::write(&path, line.repeat(400)).unwrap();
        let part = read_tail(&path, 0).unwrap();
        // The first of the last `TAIL` bytes is inside a line.
        let first = (400_000 - TAIL).next_multiple_of(1000);
        assert_eq!((part.start, part.end), (first, 400_000));
        assert!(part.text == line.repeat(262));
        assert_eq!(read_tail(&path, 400_000).unwrap().text, "");
        // An offset of a longer log.
        assert_eq!(read_tail(&path, 400_001).unwrap(), part);
    }

    /// Code of the run can put one in the place of its log. A read that waits for it would keep the slot of the run.
    #[tokio::test]
    async fn a_log_that_is_a_fifo_or_a_link_is_none_and_is_not_waited_for() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("log");
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        let (said, hear) = mpsc::channel();
        let fifo = path.clone();
        std::thread::spawn(move || said.send(read_tail(&fifo, 0).is_err()));
        assert_eq!(hear.recv_timeout(Duration::from_secs(30)), Ok(true));
        fs::write(temp.path().join("other"), "secret\n").unwrap();
        fs::remove_file(&path).unwrap();
        symlink("other", &path).unwrap();
        assert!(read_tail(&path, 0).is_err());
    }

    #[test]
    fn of_a_run_that_fails_again_and_again_the_last_attempts_are_kept() {
        let journal = Journal::new(1);
        let (key, document) = job("7");
        journal.accepted(&key, &document, now());
        for attempt in 1..=KEPT_EVENTS + 5 {
            journal.failed(&key, &format!("attempt {attempt}"));
        }
        let run = journal.runs(TaskFilter::Open, Page::first()).remove(0);
        assert_eq!(run.reasons.len(), KEPT_EVENTS);
        assert_eq!(run.reasons.last().unwrap(), "attempt 25");
        assert_eq!(usize::try_from(run.attempts).unwrap(), KEPT_EVENTS + 5);
        let events = journal.events(run.task);
        assert_eq!(events.len(), KEPT_EVENTS);
        assert_eq!(events[0].note, "attempt 6");
    }

    #[tokio::test]
    async fn the_oldest_runs_that_are_over_are_forgotten() {
        let journal = Journal::new(1);
        let count = KEPT + 3;
        for number in 0..count {
            let (key, document) = job(&number.to_string());
            journal.accepted(&key, &document, now());
            journal.ended(&key, RunOutcome::default()).await;
        }
        let (key, document) = job("1000");
        journal.accepted(&key, &document, now());
        let page = Page {
            after: None,
            limit: u32::MAX,
        };
        let over = journal.runs(TaskFilter::Over, page);
        assert_eq!(over.len(), KEPT);
        assert_eq!(over[0].job, "3");
        let (old, _) = job("0");
        assert!(journal.lock().of(&old).is_none());
    }
}
