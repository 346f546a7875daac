//! Helpers for the tests of the hub.

use std::time::Duration;

use pool_protocol::id::TaskId;
use pool_protocol::task::TaskState;
use pool_store::{PoolView, TaskView};

/// Returns a task of pool `eu` in a state. Other fields that belong to the state are empty.
pub(crate) fn task(state: TaskState) -> TaskView {
    TaskView {
        task: TaskId::new(),
        pool: "eu".parse().unwrap(),
        organization: "org".to_owned(),
        workspace: "ws".to_owned(),
        job: "412".to_owned(),
        step: "plan-id".to_owned(),
        kind: "terraformPlan".to_owned(),
        traceparent: None,
        state,
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
        ended: None,
    }
}

/// Returns pool `eu` without agents and tasks.
pub(crate) fn pool() -> PoolView {
    PoolView {
        pool: "eu".parse().unwrap(),
        online: 0,
        offline: 0,
        capacity: 0,
        free: 0,
        unconfirmed: 0,
        available: 0,
        leased: 0,
        running: 0,
        orphaned: 0,
        unreported: 0,
        oldest: None,
    }
}
