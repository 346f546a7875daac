//! What passes and what does not, as tables.
