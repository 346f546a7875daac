//! The durable queue of a hub. It stores the tasks of pools, their leases, and the instances of agents.
//!
//! - [`state`] is the state machine of a task: a pure function from a task and an event to the changed task. It
//!   performs no I/O.
//! - [`Store`] stores tasks in a SQLite file, or in PostgreSQL for several hubs. Each operation is one transaction. Its
//!   result is durable when it returns.
//!
//! Until an executor accepts a task, its lease may end, and the task returns to the queue. After that, the task is
//! never leased again.
//!
//! The crate knows no HTTP, no Kubernetes and no platform. The hub asks the platform, and passes the answer to the
//! store.

mod clock;
mod db;
mod document_keys;
mod error;
mod model;
mod rules;
pub mod state;
mod store;
mod text;
mod turns;
mod view;
mod waiters;

#[cfg(test)]
mod tests;

pub use clock::{Clock, Millis, SystemClock};
pub use document_keys::{DocumentKeySource, DocumentKeys};
pub use error::{Error, OpenError, Refusal};
pub use model::{
    Content, Ending, LeaseRequest, LeaseStatus, LeasedTask, Orders, Payload, PlatformState,
    RegisteredInstance, Submission, Submitted, Swept,
};
pub use rules::Rules;
pub use store::{LockRemoval, SeenState, Store};
pub use view::{
    Condition, EventView, InstanceView, PAGE, Page, PoolView, TaskFilter, TaskView, Wait,
};
