//! Tests of the store on real databases. Each case runs on SQLite and on PostgreSQL.

mod agents;
pub(crate) mod failpoint;
mod fixture;
mod kill;
mod leases;
mod many;
mod platform;
mod recovery;
mod views;
