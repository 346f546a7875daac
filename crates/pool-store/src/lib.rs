//! The durable queue of a hub: tasks of pools, the leases on them, and the instances that take them.
//!
//! - [`state`] decides: a pure function from a task and an event to the next task. It performs no I/O.
//! - [`Store`] keeps: in a SQLite file, or in PostgreSQL for several hubs. Each operation is one transaction, and its
//!   result is durable when it returns.
//!
//! A lease may end and the task be given out again, until an executor accepts it. After that it is never given out again.
//!
//! The crate knows no HTTP, no Kubernetes and no platform. The hub asks the platform and tells the store what it found.

mod clock;
mod db;
mod error;
mod model;
mod rules;
pub mod state;
mod store;
mod text;
mod view;
mod waiters;

#[cfg(test)]
mod tests;

pub use clock::{Clock, Millis, SystemClock};
pub use error::{Error, OpenError, Refusal};
pub use model::{
    Content, Ending, Found, LeaseRequest, LeaseStatus, LeasedTask, Orders, Payload,
    RegisteredInstance, Submission, Submitted, Swept,
};
pub use rules::Rules;
pub use store::Store;
pub use view::{
    Condition, EndView, EventView, InstanceView, Listed, PAGE, Page, PoolView, TaskView, Wait,
};
