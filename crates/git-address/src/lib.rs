//! Addresses of git repositories in one canonical form, and the operator's rule that says which of them are allowed.
//!
//! [`Address`] reads an address, [`AllowList`] judges it. Nothing here resolves a name, opens a connection or knows a
//! credential: user names of HTTP and passwords are dropped while an address is read.

mod address;
mod allow_list;

pub use address::{Address, AddressError, Transport};
pub use allow_list::{AllowList, Match, Refusal, RuleError};
