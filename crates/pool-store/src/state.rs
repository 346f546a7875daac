//! What happens to a task: a pure function from a task and an event to the next task.
//!
//! ```text
//!                                   ┌──────────── beat ────────────┐
//! SUBMITTED ─ found ─▶ AVAILABLE ─ lease ─▶ LEASED ─ started ─▶ STARTED ─ accept ─▶ RUNNING ─▶ over
//!     ▲                    │                  │  └───── accept ────│───────────────▶│  ▲
//!     │                    └─ time-out ─▶ over│                    │         silence│  │beat
//!     └───────── decline, silence ────────────┴────────────────────┘                ▼  │
//!                                                                              ORPHANED ─ silence ─▶ over
//! ```
//!
//! On the wire, SUBMITTED is AVAILABLE too, and STARTED is LEASED.

mod event;
mod task;
mod transition;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use event::Event;
pub use task::{EndReason, State, Task, TaskEnd};
pub use transition::{LeaseOutcome, Record, Transition, apply};
