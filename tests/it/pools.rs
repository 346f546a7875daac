//! The hub as a process, with the test platform, and a small client in the place of agents and executors.

mod client;
mod crashes;
mod endings;
mod identity;
mod place;
mod runs;
