//! How both programs speak to the platform that ordered a run: the job's standing, claims, status reports, job
//! context and state history. Knows neither Kubernetes nor how Terraform is run.

pub mod local;
pub mod platform;

pub use platform::{Platform, PlatformError, StepRef};
