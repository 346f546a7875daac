//! Everything that speaks to Redis, against a real one.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod client;
mod heartbeat;
mod live;
mod log;
mod support;
