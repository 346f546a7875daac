//! Many runs through real launchers and executors while everything around them fails in turn; then the books are
//! balanced from what was seen outside our programs.
//!
//! [`schedule`] decides from a seed what is run and what happens to it, [`journey`] makes it happen in a [`world`],
//! [`facts`] are read off the peers afterwards, and [`books`] says what does not add up.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a harness ends by panicking when it cannot go on, with all there is to know about it"
)]

pub mod books;
mod dice;
mod facts;
pub mod journey;
pub mod schedule;
mod strikes;
pub mod tally;
mod world;
