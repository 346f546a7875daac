//! What each process of Mayfly needs, whatever it does: diagnostics on stderr, hardening, settings, deadlines and files that
//! belong to their owner alone. Knows neither runs nor platforms nor Kubernetes.

pub mod deadline;
pub mod hardening;
pub mod private_file;
pub mod regular_file;
pub mod setting;
pub mod telemetry;

pub use deadline::Deadline;
