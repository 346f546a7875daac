//! Tests everything that uses Redis with a real server.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod client;
mod heartbeat;
mod live;
mod log;
mod support;
