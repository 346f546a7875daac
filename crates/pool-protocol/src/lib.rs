//! The protocol between a hub, the agents, which take tasks, and the executors, which run them.
//!
//! It follows the draft of Terrakube's executor coordinator protocol, version 1: pools, instances, tasks, leases with
//! fencing tokens, long polling, version negotiation. `openapi.yaml` beside this file describes the protocol for
//! authors of other agents. Tests check that the document and the types agree. Additions to the draft are marked with
//! `x-mayfly`.
//!
//! This crate performs no I/O and knows no HTTP library.

pub mod artifact;
pub mod exchange;
pub mod id;
pub mod instance;
pub mod lease;
mod names;
pub mod path;
pub mod problem;
pub mod task;
pub mod token;
pub mod version;

#[cfg(test)]
mod openapi;

/// The OpenAPI document of the protocol.
pub const OPENAPI: &str = include_str!("../openapi.yaml");

/// The header with a UUID for each request that changes something. A repeated request has the same UUID, and changes
/// nothing more.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
