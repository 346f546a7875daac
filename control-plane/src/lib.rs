//! How both programs speak to the platform that ordered a run: the job's standing, claims, status reports, job
//! context, state history and the run's log. Knows neither Kubernetes nor how Terraform is run.

pub mod local;
pub mod logs;
pub mod platform;
pub mod terrakube;

pub use platform::{Platform, PlatformError, StepRef};
