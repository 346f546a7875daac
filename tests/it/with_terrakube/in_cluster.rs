//! Journeys whose runs are Jobs of a cluster.

mod beats;
mod cancel;
mod endings;
mod leaks;
mod one_executor;
mod open;
mod runs;
mod stock;
