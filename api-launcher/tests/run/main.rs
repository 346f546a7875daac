//! `api-launcher run` as a process, with a scripted executor.

#![expect(
    clippy::unwrap_used,
    reason = "a harness that cannot go on fails its test"
)]

mod documents;
mod harness;
mod outcomes;
mod signals;
mod terminal;
