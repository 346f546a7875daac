//! The wire between a hub and those who speak to it: agents, which take tasks, and executors, which run them.
//!
//! It follows the draft of Terrakube's executor coordinator protocol, version 1: pools, instances, tasks, leases with
//! fencing tokens, long polling, version negotiation. `openapi.yaml` beside this file describes it for people who write an
//! agent of their own; the tests hold both together. What is ours beyond the draft is marked `x-mayfly` there.
//!
//! This crate performs no I/O and knows no HTTP library.

pub mod exchange;
pub mod id;
pub mod instance;
pub mod lease;
pub mod log;
pub mod path;
pub mod problem;
pub mod task;
pub mod token;
pub mod version;

#[cfg(test)]
mod openapi;

/// The document that describes the wire.
pub const OPENAPI: &str = include_str!("../openapi.yaml");

/// Names each request that changes something, so that its repetition changes nothing more. A UUID.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
