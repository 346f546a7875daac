//! Runs one Terraform or OpenTofu step in its own process.

pub mod tool;
pub mod workspace;
