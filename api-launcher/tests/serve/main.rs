//! `api-launcher serve` as a process: real sockets, the embedded executor, real git and Terraform.

#![expect(
    clippy::unwrap_used,
    reason = "a harness that cannot go on fails its test"
)]

mod crashes;
mod harness;
mod hidden;
mod journeys;
mod overload;
mod page;
mod routing;
