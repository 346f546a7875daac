//! Keeps the jobs of all open tasks alive, and writes into run logs why tasks wait.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use job_contract::chain;
use pool_protocol::id::{PoolName, TaskId};
use pool_protocol::task::TaskState;
use pool_store::{PoolView, TaskView, Wait};
use tracing::debug;

use super::StoreLog;
use crate::page::words::count;
use crate::task_work::TaskWork;
use crate::{Hub, step_of};

const PAUSE: Duration = Duration::from_secs(5);
/// Shorter waits are not written into the run log.
const SHORTEST_WAIT: Duration = Duration::from_secs(10);
/// How often the reason for waiting is written into the run log.
const INTERVAL: Duration = Duration::from_mins(1);
/// The largest number of lines that are written at the same time.
const AT_ONCE: usize = 16;

pub(super) async fn perform(hub: &Arc<Hub>) {
    let (lines, mut log) = (TaskWork::new(AT_ONCE), StoreLog::default());
    let mut written_at = HashMap::new();
    loop {
        if let Some(tasks) = log.log_result("watch", hub.open_tasks().await) {
            keep_alive(hub, &tasks).await;
            explain(hub, &tasks, &mut written_at, &lines).await;
        }
        if !hub.pause(PAUSE).await {
            break;
        }
    }
    lines.finish().await;
}

/// Keeps the jobs of open tasks alive, including silent runs, which may be disconnected from the hub. Heartbeats of
/// tasks that are over end when the platform has the outcome, or when the time for the report is over.
async fn keep_alive(hub: &Hub, tasks: &[TaskView]) {
    let mut open = HashSet::new();
    for task in tasks {
        open.insert(task.task);
        hub.heartbeats
            .start(&task.task, || hub.reporter.start_heartbeat(&task.job));
    }
    for task in hub.heartbeats.runs() {
        if open.contains(&task) {
            continue;
        }
        // A task that was submitted after the list was read is open.
        match hub.store.task_for_hub(task).await {
            Ok(Some(view)) => {
                let is_late = view.ended >= Some(hub.reporter.report_patience());
                if view.end.is_some_and(|end| end.reported || is_late) {
                    hub.heartbeats.release(&task);
                }
            }
            Ok(None) => hub.heartbeats.release(&task),
            Err(error) => debug!(%task, %error, "a task could not be read"),
        }
    }
}

/// Writes a line into the run logs of tasks that wait or are silent.
async fn explain(
    hub: &Arc<Hub>,
    tasks: &[TaskView],
    written_at: &mut HashMap<TaskId, Instant>,
    lines: &TaskWork,
) {
    let due: Vec<&TaskView> = tasks
        .iter()
        .filter(|task| is_worth_a_line(task))
        .filter(|task| {
            written_at
                .get(&task.task)
                .is_none_or(|at| at.elapsed() >= INTERVAL)
        })
        .collect();
    let open: HashSet<TaskId> = tasks.iter().map(|task| task.task).collect();
    written_at.retain(|task, _| open.contains(task));
    if due.is_empty() {
        return;
    }
    let Ok(pools) = hub.store.pools().await else {
        return;
    };
    let pools: HashMap<&PoolName, &PoolView> =
        pools.iter().map(|pool| (&pool.pool, pool)).collect();
    let positions = positions(tasks);
    for task in due {
        let position = positions.get(&task.task).copied();
        let line = line(task, pools.get(&task.pool).copied(), position);
        written_at.insert(task.task, Instant::now());
        let (hub, task, pool) = (Arc::clone(hub), task.clone(), &task.pool);
        lines.start(pool, task.task, async move {
            let written = hub.reporter.add_log_line(&step_of(&task), &line).await;
            if let Err(error) = written {
                debug!(task = %task.task, error = chain(&error), "why a run waits could not be written into its log");
            }
        });
    }
}

/// Returns how many tasks of its pool are before each that waits for an agent. The tasks are all that are open, the oldest first.
fn positions(tasks: &[TaskView]) -> HashMap<TaskId, u32> {
    let mut lengths = HashMap::new();
    let waiting = tasks
        .iter()
        .filter(|task| task.state == TaskState::Available)
        .filter(|task| !matches!(task.wait, Some(Wait::Workspace(_))));
    waiting
        .map(|task| {
            let length = lengths.entry(&task.pool).or_default();
            let before = *length;
            *length += 1;
            (task.task, before)
        })
        .collect()
}

fn is_worth_a_line(task: &TaskView) -> bool {
    match task.state {
        TaskState::Available => {
            task.age >= SHORTEST_WAIT && !matches!(task.wait, None | Some(Wait::Unconfirmed))
        }
        TaskState::Leased => task.phase.is_some(),
        TaskState::Orphaned => true,
        _ => false,
    }
}

fn line(task: &TaskView, pool: Option<&PoolView>, position: Option<u32>) -> String {
    let name = &task.pool;
    let agent = task.agent.as_ref();
    let agent = agent.map_or_else(String::new, |agent| format!(" `{agent}`"));
    if let (TaskState::Leased, Some(reason)) = (task.state, &task.phase) {
        return format!("Agent{agent} of pool `{name}`: {reason}");
    }
    if task.state == TaskState::Orphaned {
        let silent = task.silent.unwrap_or_default().as_secs();
        return format!(
            "No heartbeat from the executor of this run or its agent{agent} for {silent} s. It may still run."
        );
    }
    let place = position.map_or_else(String::new, |before| format!(", position {}", before + 1));
    let (online, free) = pool.map_or((0, 0), |pool| (pool.online, pool.free));
    let why = match task.wait {
        Some(Wait::Workspace(_)) => "another step of its workspace is in progress".to_owned(),
        Some(Wait::NoInstance) => "the pool has no agent that is online".to_owned(),
        Some(Wait::Pause(time)) => format!("the next attempt is in {} s", time.as_secs()),
        _ => {
            let verb = if online == 1 { "is" } else { "are" };
            let (agents, slots) = (count(online, "agent"), count(free, "free slot"));
            format!("{agents} {verb} online, with {slots}")
        }
    };
    let last = task.reasons.last().map_or_else(String::new, |reason| {
        format!(". The last attempt failed: {reason}")
    });
    format!("Waiting in pool `{name}`{place}: {why}{last}")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::sample_views::{pool, task};

    #[rstest]
    #[case(
        Wait::NoInstance,
        None,
        "Waiting in pool `eu`, position 3: the pool has no agent that is online"
    )]
    #[case(
        Wait::NoCapacity,
        None,
        "Waiting in pool `eu`, position 3: 0 agents are online, with 0 free slots"
    )]
    #[case(
        Wait::Pause(Duration::from_secs(20)),
        Some("no node"),
        "Waiting in pool `eu`, position 3: the next attempt is in 20 s. The last attempt failed: no node"
    )]
    #[case(
        Wait::Workspace(TaskId::new()),
        None,
        "Waiting in pool `eu`: another step of its workspace is in progress"
    )]
    fn a_line_has_the_reason_for_waiting(
        #[case] wait: Wait,
        #[case] reason: Option<&str>,
        #[case] expected: &str,
    ) {
        let task = TaskView {
            wait: Some(wait),
            age: SHORTEST_WAIT,
            reasons: reason.into_iter().map(str::to_owned).collect(),
            ..task(TaskState::Available)
        };
        assert!(is_worth_a_line(&task));
        let is_in_line = positions(std::slice::from_ref(&task)).contains_key(&task.task);
        assert_eq!(line(&task, None, is_in_line.then_some(2)), expected);
    }

    #[test]
    fn tasks_of_a_pool_wait_in_the_order_of_their_submission() {
        let of = |pool: &str, state| TaskView {
            pool: pool.parse().unwrap(),
            ..task(state)
        };
        let tasks = [
            of("eu", TaskState::Available),
            of("us", TaskState::Available),
            of("eu", TaskState::Running),
            of("eu", TaskState::Available),
        ];
        let found = positions(&tasks);
        let found = tasks.each_ref().map(|task| found.get(&task.task).copied());
        assert_eq!(found, [Some(0), Some(0), None, Some(1)]);
    }

    #[test]
    fn new_and_running_tasks_get_no_line() {
        let waits = |state, age, wait| TaskView {
            wait,
            age,
            ..task(state)
        };
        let turn = Some(Wait::Turn);
        for quiet in [
            waits(TaskState::Available, Duration::ZERO, turn),
            waits(TaskState::Available, SHORTEST_WAIT, Some(Wait::Unconfirmed)),
            waits(TaskState::Running, SHORTEST_WAIT, None),
            waits(TaskState::Leased, SHORTEST_WAIT, None),
        ] {
            assert!(!is_worth_a_line(&quiet), "{quiet:?}");
        }
    }

    #[test]
    fn an_executor_that_does_not_start_has_a_line_with_the_reason() {
        let task = TaskView {
            agent: Some("eu-1".parse().unwrap()),
            phase: Some("waiting for a node".to_owned()),
            ..task(TaskState::Leased)
        };
        assert!(is_worth_a_line(&task));
        assert_eq!(
            line(&task, None, None),
            "Agent `eu-1` of pool `eu`: waiting for a node"
        );
    }

    #[test]
    fn the_line_of_a_silent_run_names_its_agent() {
        let task = TaskView {
            agent: Some("eu-1".parse().unwrap()),
            silent: Some(Duration::from_secs(90)),
            ..task(TaskState::Orphaned)
        };
        assert!(is_worth_a_line(&task));
        let line = line(&task, None, None);
        assert!(
            line.contains("for 90 s") && line.contains("`eu-1`"),
            "{line}"
        );
    }

    #[test]
    fn a_line_counts_one_agent_and_one_slot() {
        let pool = PoolView {
            online: 1,
            free: 1,
            ..pool()
        };
        let line = line(&task(TaskState::Available), Some(&pool), None);
        assert!(
            line.contains(": 1 agent is online, with 1 free slot"),
            "{line}"
        );
    }
}
