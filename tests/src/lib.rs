//! The base of the journeys: fixture repositories, job data, a data directory with its records, and the two programs as
//! processes with a deadline. It knows the contract and starts programs. It asserts nothing.

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
pub mod machine;
pub mod panic_at;
pub mod test_secrets;
pub mod tool;
pub mod waiting_platform;

pub use fake_tool::FakeTool;
pub use laptop::Laptop;
pub use machine::{ExecutorRun, Machine, Outcome};
pub use test_peers::gate::Gate;
pub use test_peers::process::{self, Finished, Running};
pub use test_peers::repository::{self, Repository};
pub use test_secrets::{Search, TestSecret};
pub use waiting_platform::WaitingPlatform;
