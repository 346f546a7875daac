//! Journeys across both programs, against the real tool, real git and real signals. One module per journey.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::needless_pass_by_value,
    reason = "these are tests"
)]

/// What a test needs, or the end of a test that was skipped for want of it.
macro_rules! or_skip {
    ($found:expr) => {
        match $found {
            Some(found) => found,
            None => return,
        }
    };
}

/// A test of each case with Terraform, and one with OpenTofu, which is left to the stage `tools`.
macro_rules! with_both_tools {
    ($($case:ident),* $(,)?) => {
        mod terraform {
            $(#[test]
            fn $case() {
                super::$case(job_contract::Tool::Terraform);
            })*
        }
        mod tools {
            mod opentofu {
                $(#[test]
                fn $case() {
                    let tool = job_contract::Tool::OpenTofu;
                    let program = integration_tests::tool::program(tool);
                    if test_peers::skips::needed(program).is_some() {
                        super::super::$case(tool);
                    }
                })*
            }
        }
    };
}

mod apply;
mod authorities;
mod chart;
mod deploy_roles;
mod docs;
mod failure;
mod hooks;
mod identity;
mod in_cluster;
mod in_pools;
mod launcher;
mod limits;
mod log;
mod lost_readers;
mod modules;
mod outcome;
mod panics;
mod plan;
mod real_node;
mod references;
mod scripts;
mod secrets;
mod signals;
mod small_disk;
mod sources;
mod state;
mod stores;
mod templates;
mod tools;
mod variables;
mod with_terrakube;
mod workflows;

use integration_tests::{Laptop, Machine};

/// The programs of this build.
const EXECUTOR: &str = env!("CARGO_BIN_EXE_executor_under_test");
const LAUNCHER: &str = env!("CARGO_BIN_EXE_launcher_under_test");

/// A fresh data directory whose runs use the executor of this build.
fn machine() -> Machine {
    Machine::new(EXECUTOR)
}

/// A fresh home and folder for the launcher of this build.
fn laptop(module: &str) -> Laptop {
    Laptop::new(LAUNCHER, module)
}
