//! Limits the bytes that the hub holds for its callers: bodies that arrive, what is read from them, and job documents that are
//! sent to agents. Each pool and each task has a share, so one leaves memory for the others. When shares of others have taken
//! everything, each pool and each task still has a small reserve, which is enough for a heartbeat.

use std::sync::Arc;

use pool_protocol::id::{PoolName, TaskId};

use super::shares::{Share, Shares};

const MIB: usize = 1024 * 1024;
/// The bytes of all. The memory limit of the chart follows from it.
const TOTAL: usize = 64 * MIB;
/// The bytes of one pool.
const OF_A_POOL: usize = 16 * MIB;
/// The bytes of all tasks of one pool: its agents have the rest.
const OF_TASKS: usize = 12 * MIB;
/// The bytes of one task: its pool has more tasks.
const OF_A_TASK: usize = 4 * MIB;
/// The reserve of the agents of each pool.
const RESERVE_OF_A_POOL: usize = 256 * 1024;
/// The reserve of each task.
const RESERVE_OF_A_TASK: usize = 16 * 1024;

/// The bytes of all pools.
#[derive(Debug)]
pub(super) struct Budget {
    pools: Arc<Shares<PoolName>>,
    tasks_of_pools: Arc<Shares<PoolName>>,
    tasks: Arc<Shares<TaskId>>,
    reserves_of_pools: Arc<Shares<PoolName>>,
    reserves_of_tasks: Arc<Shares<TaskId>>,
}

/// Bytes of one pool, until it is dropped.
#[derive(Debug)]
pub(super) struct TakenBytes {
    of_pool: Share<PoolName>,
    of: Holder,
}

/// Who has the bytes.
#[derive(Debug)]
enum Holder {
    Agent {
        reserve: Share<PoolName>,
    },
    Task {
        of_tasks: Share<PoolName>,
        of_task: Share<TaskId>,
        reserve: Share<TaskId>,
    },
}

impl Budget {
    pub(super) fn new() -> Self {
        Self {
            pools: Shares::new(OF_A_POOL, TOTAL),
            tasks_of_pools: Shares::new(OF_TASKS, usize::MAX),
            tasks: Shares::new(OF_A_TASK, usize::MAX),
            reserves_of_pools: Shares::new(RESERVE_OF_A_POOL, usize::MAX),
            reserves_of_tasks: Shares::new(RESERVE_OF_A_TASK, usize::MAX),
        }
    }

    /// Returns no bytes of the agents of a pool, which can grow.
    pub(super) fn of_pool(&self, pool: &PoolName) -> TakenBytes {
        TakenBytes {
            of_pool: self.pools.open(pool),
            of: Holder::Agent {
                reserve: self.reserves_of_pools.open(pool),
            },
        }
    }

    /// Returns no bytes of a task.
    pub(super) fn of_task(&self, pool: &PoolName, task: TaskId) -> TakenBytes {
        TakenBytes {
            of_pool: self.pools.open(pool),
            of: Holder::Task {
                of_tasks: self.tasks_of_pools.open(pool),
                of_task: self.tasks.open(&task),
                reserve: self.reserves_of_tasks.open(&task),
            },
        }
    }
}

impl TakenBytes {
    /// Takes more bytes. Returns whether there were enough.
    pub(super) fn grow(&mut self, bytes: usize) -> bool {
        let of_pool = &mut self.of_pool;
        match &mut self.of {
            Holder::Agent { reserve } => of_pool.grow(bytes) || reserve.grow(bytes),
            Holder::Task {
                of_tasks,
                of_task,
                reserve,
            } => {
                of_task.grow(bytes) && of_tasks.grow(bytes) && of_pool.grow(bytes)
                    || reserve.grow(bytes)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_and_a_task_leave_bytes_for_the_others() {
        let (budget, task) = (Budget::new(), TaskId::new());
        let (eu, us) = ("eu".parse().unwrap(), "us".parse().unwrap());
        let mut first = budget.of_task(&eu, task);
        assert!(first.grow(OF_A_TASK));
        assert!(!budget.of_task(&eu, task).grow(MIB));
        assert!(budget.of_task(&eu, TaskId::new()).grow(MIB));
        let mut others = budget.of_pool(&eu);
        assert!(others.grow(OF_A_POOL - OF_A_TASK));
        assert!(!budget.of_pool(&eu).grow(MIB));
        assert!(budget.of_pool(&us).grow(OF_A_POOL));
        drop(first);
        assert!(budget.of_task(&eu, task).grow(MIB));
    }

    #[test]
    fn the_tasks_of_a_pool_leave_bytes_for_its_agents() {
        let (budget, eu) = (Budget::new(), "eu".parse().unwrap());
        let open = || budget.of_task(&eu, TaskId::new());
        let mut tasks = [open(), open(), open(), open()];
        let taken = tasks.each_mut().map(|taken| taken.grow(OF_A_TASK));
        assert_eq!(taken, [true, true, true, false]);
        assert!(budget.of_pool(&eu).grow(OF_A_POOL - OF_TASKS));
        // Another task can still send a heartbeat.
        let mut other = open();
        assert!(other.grow(RESERVE_OF_A_TASK) && !other.grow(1));
    }

    #[test]
    fn a_pool_has_a_reserve_when_others_have_taken_everything() {
        let budget = Budget::new();
        let pools: [PoolName; 4] = ["a", "b", "c", "d"].map(|name| name.parse().unwrap());
        let mut all = pools.map(|pool| budget.of_pool(&pool));
        assert!(all.iter_mut().all(|taken| taken.grow(OF_A_POOL)));
        let eu = "eu".parse().unwrap();
        let mut late = budget.of_pool(&eu);
        assert!(!late.grow(MIB));
        assert!(late.grow(RESERVE_OF_A_POOL) && !late.grow(1));
        assert!(budget.of_task(&eu, TaskId::new()).grow(RESERVE_OF_A_TASK));
        drop(late);
        assert!(budget.of_pool(&eu).grow(1));
    }
}
