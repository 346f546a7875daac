//! The clients with which both programs use the platform: step views, claims, status reports, job context, state history,
//! heartbeats and the live log. This crate knows neither Kubernetes nor how Terraform is run.

pub mod context;
mod error;
pub mod heartbeat;
pub mod java;
pub mod lease;
pub mod live;
pub mod local;
mod platform;
pub mod redis;
pub mod report_key;
pub mod sinks;
mod step;
pub mod terrakube;

pub use error::PlatformError;
pub use platform::Platform;
pub use step::{
    Claim, History, Holder, Outcome, PlanReference, RunEnd, RunResult, StartPermission,
    StartReport, StepRef, StepView,
};
