//! Time, as a store measures it.
//!
//! All durations of a store are differences of its own time, in milliseconds, which no wall clock can move:
//!
//! - SQLite: the time that was stored last when the store was opened, and what has passed since by a monotonic clock.
//!   It stands still while no hub runs.
//! - PostgreSQL: `now()` of the database.
//!
//! Wall time appears in events alone, for people.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Milliseconds.
pub type Millis = i64;

/// What a store reads the time from. Tests bring their own.
pub trait Clock: Send + Sync + 'static {
    /// How much time has passed since a moment that stays the same. It never goes back.
    fn elapsed(&self) -> Duration;
    /// The wall clock. It may jump.
    fn wall(&self) -> SystemTime;
    /// What the time is if PostgreSQL says that it is `now`.
    fn database(&self, now: Millis) -> Millis {
        now
    }
}

/// The clocks of the machine.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl SystemClock {
    /// Starts at zero.
    #[must_use]
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// A duration as milliseconds.
pub(crate) fn millis(duration: Duration) -> Millis {
    Millis::try_from(duration.as_millis()).unwrap_or(Millis::MAX)
}

/// The time between two moments, or nothing if the second is before the first.
pub(crate) fn between(from: Millis, to: Millis) -> Duration {
    Duration::from_millis(u64::try_from(to.saturating_sub(from)).unwrap_or_default())
}

/// A wall time as milliseconds since 1970.
pub(crate) fn since_1970(time: SystemTime) -> Millis {
    time.duration_since(UNIX_EPOCH).map_or(0, millis)
}

/// The opposite of [`since_1970`].
pub(crate) fn wall_time(at: Millis) -> SystemTime {
    UNIX_EPOCH + between(0, at)
}
