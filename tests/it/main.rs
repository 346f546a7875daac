//! Journeys across both programs, against the real tool, real git and real signals. One module per journey.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::needless_pass_by_value,
    reason = "these are tests"
)]

mod apply;
mod docs;
mod failure;
mod kubernetes;
mod launcher;
mod limits;
mod log;
mod outcome;
mod plan;
mod real_node;
mod scripts;
mod secrets;
mod signals;
mod sources;
mod state;
mod stores;
mod terrakube;
mod variables;
mod workflows;

use integration_tests::{Laptop, Site};

/// A fresh data directory whose runs use the executor of this build.
fn site() -> Site {
    Site::new(env!("CARGO_BIN_EXE_executor_under_test"))
}

/// A fresh home and folder for the launcher of this build.
fn laptop(module: &str) -> Laptop {
    Laptop::new(env!("CARGO_BIN_EXE_launcher_under_test"), module)
}
