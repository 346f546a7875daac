//! Terrakube's API as the executor and the launcher use it.

pub mod token;

pub use token::{SecretError, TokenSource};
