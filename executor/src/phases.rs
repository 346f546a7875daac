//! The phases of a step, one file each. They do not know one another's order.

pub(crate) mod conclude;
pub(crate) mod live_view;
pub(crate) mod release_lock;
pub(crate) mod save_state;
