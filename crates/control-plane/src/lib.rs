//! How both programs speak to the platform that ordered a run: the job's standing, claims, status reports, job
//! context, state history and the run's log. Knows neither Kubernetes nor how Terraform is run.

pub mod context;
pub mod heartbeat;
pub mod java;
pub mod live;
pub mod local;
pub mod logs;
pub mod patience;
pub mod platform;
pub mod redis;
pub mod report_key;
pub mod setting;
pub mod terrakube;

pub use patience::Patience;
pub use platform::{Platform, PlatformError, StepRef};
