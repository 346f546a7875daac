//! Which Terraform or OpenTofu a run uses.

pub mod range;
