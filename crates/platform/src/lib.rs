//! The clients with which both programs use the platform: step views, claims, status reports, job context, state history,
//! heartbeats and the live log.
//!
//! - [`Platform`] is the platform of a step: [`terrakube`], the records of one machine ([`local`]), or the lease of a hub ([`lease`]).
//! - [`heartbeat`] and [`redis`] keep a job alive, and [`sinks`] shows its log.
//!
//! Without the feature `full` there is no client of Redis, and Terrakube and hubs are refused.
//!
//! This crate must not know Kubernetes, or how Terraform is run.

mod calls;
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
