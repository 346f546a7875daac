//! A Kubernetes cluster for tests.

mod api_server;

pub use api_server::authorizer::Rule;
pub(crate) const CONTROLLERS: &str = "controllers";
