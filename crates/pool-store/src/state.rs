//! The state machine of a task: a pure function from a task and an event to the changed task.
//!
//! ```text
//!                                   ┌───────── heartbeat ──────────┐
//! SUBMITTED ─confirm─▶ AVAILABLE ─ lease ─▶ LEASED ─ started ─▶ STARTED ─ accept ─▶ RUNNING ─▶ over
//!     ▲                    │                  │  └───── accept ────│───────────────▶│  ▲
//!     │                    └─ time-out ─▶ over│                    │         silence│  │heartbeat
//!     └───────── decline, silence ────────────┴────────────────────┘                ▼  │
//!                                                                              ORPHANED ─ silence ─▶ over
//! ```
//!
//! In the protocol, SUBMITTED is AVAILABLE too, and STARTED is LEASED.

mod event;
mod task;
mod transition;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use event::Event;
pub use task::{EndReason, State, Task, TaskEnd};
pub use transition::{HistoryEntry, LeaseOutcome, Transition, apply};
