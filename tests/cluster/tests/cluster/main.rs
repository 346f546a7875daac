//! What tests may rely on in a cluster beyond Kubernetes itself.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail the test"
)]

mod in_cluster;
mod waits;
