//! Measures the time of a store.
//!
//! A store computes all durations from its own time, in milliseconds. Changes of the wall clock do not affect it:
//!
//! - SQLite: the time in the file when it was opened, plus the time since then by a monotonic clock. The time stands
//!   still while no hub runs.
//! - PostgreSQL: `now()` of the database.
//!
//! Only events have wall time, for people.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Milliseconds.
pub type Millis = i64;

/// The clocks of a store. Tests have their own.
pub trait Clock: Send + Sync + 'static {
    /// Returns the time since a fixed moment. It never decreases.
    fn elapsed(&self) -> Duration;
    /// Returns the wall time. It may jump.
    fn wall(&self) -> SystemTime;
    /// Returns the store's time for the time of PostgreSQL.
    fn database(&self, now: Millis) -> Millis {
        now
    }
}

/// The clocks of the machine.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl SystemClock {
    /// Returns a clock that starts at zero.
    pub fn start() -> Self {
        Self(Instant::now())
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

pub(crate) fn millis(duration: Duration) -> Millis {
    Millis::try_from(duration.as_millis()).unwrap_or(Millis::MAX)
}

/// Returns the time between two moments. Zero if the second is before the first.
pub(crate) fn between(from: Millis, to: Millis) -> Duration {
    Duration::from_millis(u64::try_from(to.saturating_sub(from)).unwrap_or_default())
}

/// Returns a wall time as milliseconds since 1970.
pub(crate) fn since_1970(time: SystemTime) -> Millis {
    time.duration_since(UNIX_EPOCH).map_or(0, millis)
}

/// Returns the wall time for milliseconds since 1970.
pub(crate) fn wall_time(at: Millis) -> SystemTime {
    UNIX_EPOCH + between(0, at)
}
