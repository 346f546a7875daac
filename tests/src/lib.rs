//! What the journeys stand on: fixture repositories, job data, a data directory with its records, and the two
//! programs as processes under a deadline. Knows the contract and how to start things; asserts nothing.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::must_use_candidate,
    clippy::return_self_not_must_use,
    reason = "a harness fails a test by panicking, with all there is to know about it"
)]

pub mod container;
pub mod fake_tool;
pub mod job;
pub mod laptop;
pub mod planted;
pub mod process;
pub mod repository;
pub mod site;
pub mod tool;

pub use fake_tool::FakeTool;
pub use laptop::Laptop;
pub use planted::{Planted, Search};
pub use process::{Finished, Running};
pub use repository::Repository;
pub use site::{ExecutorRun, Outcome, Site, fifo};
