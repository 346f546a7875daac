//! What acts on objects: the Job controller and the garbage collector, as clients of an API server.
//!
//! They know only the API, so that they do the same beside a real API server without its controller manager.

pub(crate) mod events;
pub(crate) mod failure;
pub(crate) mod garbage;
pub(crate) mod job;
