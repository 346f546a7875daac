//! Real peers that tests start on loopback, each on a free port, each stopped when its value is dropped.

pub mod git_http;
pub mod http;
pub mod redis;
pub mod sshd;
