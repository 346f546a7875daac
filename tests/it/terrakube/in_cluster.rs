//! Journeys whose runs are Jobs of a cluster.

mod beats;
mod cancel;
mod endings;
mod leaks;
mod once;
mod open;
mod runs;
mod stock;
