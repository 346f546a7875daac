//! What tests may rely on in a cluster, whichever it is.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail the test"
)]

mod honest;
mod pods;
