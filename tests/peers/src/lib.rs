//! Real peers that tests start on loopback, each on a free port, each stopped when its value is dropped. And the programs
//! under test as processes.

pub mod azurite;
pub mod browser;
pub mod clock;
pub mod clouds;
mod daemon;
pub mod evidence;
pub mod gate;
pub mod gcs;
pub mod git_http;
pub mod github;
pub mod google_secrets;
pub mod http;
pub mod http_proxy;
pub mod key_vault;
pub mod modules;
mod moto;
pub mod name_server;
pub mod oidc;
pub mod openbao;
pub mod port;
pub mod postgres;
pub mod process;
pub mod providers;
pub mod proxy;
pub mod redis;
pub mod repository;
pub mod s3;
pub mod secrets_manager;
pub mod skips;
pub mod sshd;
pub mod terraform;
mod times;
pub mod vault_aws;
pub mod wait;

pub use daemon::installed;
