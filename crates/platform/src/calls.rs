//! HTTP calls to the platform, or to the hub before it. `terrakube` and `lease` make them. Nothing here knows what a call means.

pub(crate) mod address;
pub(crate) mod client;
pub(crate) mod error;
pub(crate) mod job_token;
pub(crate) mod text;
pub mod token;
