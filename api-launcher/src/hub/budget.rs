//! Limits the bytes that the hub holds for its callers: bodies that arrive, what is read from them, and job documents that are
//! sent to agents. Each pool and each task has a share, so one leaves memory for the others.

use std::sync::Arc;

use pool_protocol::id::{PoolName, TaskId};

use super::shares::{Share, Shares};

const MIB: usize = 1024 * 1024;
/// The bytes of all. The memory limit of the chart follows from it.
const TOTAL: usize = 64 * MIB;
/// The bytes of one pool.
const OF_A_POOL: usize = 16 * MIB;
/// The bytes of one task in the relay: its pool has more tasks.
const OF_A_TASK: usize = 4 * MIB;

/// The bytes of all pools.
#[derive(Debug)]
pub(super) struct Budget {
    pools: Arc<Shares<PoolName>>,
    tasks: Arc<Shares<TaskId>>,
}

/// Bytes of one pool, until it is dropped.
#[derive(Debug)]
pub(super) struct Held {
    of_pool: Share<PoolName>,
    of_task: Option<Share<TaskId>>,
}

impl Budget {
    pub(super) fn new() -> Self {
        Self {
            pools: Shares::new(OF_A_POOL, TOTAL),
            tasks: Shares::new(OF_A_TASK, usize::MAX),
        }
    }

    /// Returns no bytes of a pool, which can grow.
    pub(super) fn of_pool(&self, pool: &PoolName) -> Held {
        Held {
            of_pool: self.pools.open(pool),
            of_task: None,
        }
    }

    /// Returns no bytes of a task.
    pub(super) fn of_task(&self, pool: &PoolName, task: TaskId) -> Held {
        Held {
            of_task: Some(self.tasks.open(&task)),
            ..self.of_pool(pool)
        }
    }
}

impl Held {
    /// Takes more bytes. Returns whether there were enough.
    pub(super) fn grow(&mut self, bytes: usize) -> bool {
        let of_task = self.of_task.as_mut();
        of_task.is_none_or(|share| share.grow(bytes)) && self.of_pool.grow(bytes)
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
        assert!(!budget.of_task(&eu, task).grow(1));
        assert!(budget.of_task(&eu, TaskId::new()).grow(1));
        let mut others = budget.of_pool(&eu);
        assert!(others.grow(OF_A_POOL - OF_A_TASK));
        assert!(!budget.of_pool(&eu).grow(1));
        assert!(budget.of_pool(&us).grow(OF_A_POOL));
        drop(first);
        assert!(budget.of_task(&eu, task).grow(1));
    }
}
