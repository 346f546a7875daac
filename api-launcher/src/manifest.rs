//! The objects a run needs in the cluster: a Job, and a Secret with its job data.
//!
//! Pure: no client, clock, randomness or environment. The same document and the same deployment give the same
//! bytes, so a second delivery makes nothing new, and `render` shows exactly what would be created.

mod check;
pub mod image;
pub mod labels;
pub mod names;
pub mod overrides;
pub mod pairs;
pub mod pod_security;
pub mod policy;
pub mod problem;
pub mod quantity;
pub mod tolerations;
