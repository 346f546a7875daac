//! The hub as a process, with the test platform, and a small client in the fixture of agents and executors.

mod agent;
mod agent_config;
mod agent_in_cluster;
mod agent_stops;
mod artifacts;
mod at_rest;
pub(crate) mod client;
mod crashes;
mod direct_in_cluster;
mod endings;
pub(crate) mod fixture;
mod full_disk;
mod identity;
mod installed_in_cluster;
pub(crate) mod kills;
mod lasting;
mod limits;
mod network;
mod network_in_cluster;
mod oidc;
mod proxies;
mod queue;
mod references;
mod relay;
mod runs;
mod status_page;
mod two_hubs;
