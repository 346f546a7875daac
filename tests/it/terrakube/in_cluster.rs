//! Journeys whose runs are Jobs of a cluster.

mod beats;
mod cancel;
mod endings;
mod once;
mod open;
mod planted;
mod runs;
mod stock;
