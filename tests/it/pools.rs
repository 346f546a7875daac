//! The hub as a process, with the test platform, and a small client in the fixture of agents and executors.

mod agent;
mod agent_in_cluster;
mod agent_stops;
mod client;
mod crashes;
mod endings;
mod fixture;
mod identity;
mod kills;
mod lasting;
mod oidc;
mod relay;
mod runs;
mod sealing;
mod status_page;
