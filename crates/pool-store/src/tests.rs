//! Tests of the store on real databases. Each case runs on SQLite and on PostgreSQL.

mod agents;
mod custody;
pub(crate) mod failpoint;
pub(crate) mod fixture;
mod kill;
mod leases;
mod lock_removals;
mod many;
mod plans;
mod pressure;
mod recovery;
mod seen_states;
mod submissions;
mod views;
mod workspaces;
