//! Basic services of all Mayfly processes: diagnostics on stderr, hardening, settings, deadlines and private files. Knows
//! neither runs nor platforms nor Kubernetes.

pub mod deadline;
pub mod hardening;
pub mod private_file;
pub mod regular_file;
pub mod setting;
pub mod telemetry;

pub use deadline::Deadline;
