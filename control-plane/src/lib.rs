//! How both programs speak to the platform that ordered a run: the job's standing, claims, status reports, job
//! context, state history and the run's log. Knows neither Kubernetes nor how Terraform is run.

pub mod heartbeat;
pub mod java;
pub mod live;
pub mod local;
pub mod logs;
pub mod platform;
pub mod redis;

pub use platform::{Platform, PlatformError, StepRef};
