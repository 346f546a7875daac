//! The pools of tasks that calls are about. A job token names no pool, and the turn of a call must be known before its task
//! is read.

use std::collections::HashMap;
use std::sync::Mutex;

use pool_protocol::id::{PoolName, TaskId};

use crate::state::Task;
use crate::turns::Line;

/// The largest number of tasks. Then all are forgotten, and each is learned again from its next call.
const MOST: usize = 20_000;

/// The pools of tasks. A task never changes its pool.
#[derive(Debug, Default)]
pub(super) struct KnownPools(Mutex<HashMap<TaskId, PoolName>>);

impl KnownPools {
    pub(super) fn add(&self, task: &Task) {
        let mut pools = runtime::lock(&self.0);
        if pools.contains_key(&task.id) {
            return;
        }
        if pools.len() >= MOST {
            pools.clear();
        }
        pools.insert(task.id, task.pool.clone());
    }

    pub(super) fn line(&self, task: TaskId) -> Line {
        let pools = runtime::lock(&self.0);
        pools.get(&task).cloned().map_or(Line::Unknown, Line::Pool)
    }
}
