//! Many runs with real launchers, or a real hub and agents, and executors while their peers fail. Afterwards the rules are
//! checked with facts from outside the programs under test.
//!
//! [`schedule`] decides from a seed which runs and faults there are. [`journey`] makes the runs with the [`peers`], and
//! [`faults`] injects the faults. [`facts`] reads the peers afterwards, and [`check`] finds violations.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    reason = "if the harness cannot continue, it panics with all details"
)]

pub mod check;
mod facts;
mod faults;
mod files;
mod hub;
pub mod journey;
mod launchers;
mod peers;
mod process;
mod random;
pub mod schedule;
mod side;
pub mod summary;
mod wire;
