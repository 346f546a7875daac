//! The store on real engines.

pub(crate) mod failpoint;
