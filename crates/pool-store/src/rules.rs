//! For how long, and how often.

use std::time::Duration;

/// The time limits of tasks and instances.
#[derive(Clone, Debug)]
pub struct Rules {
    /// How long a lease is valid without a heartbeat of its instance, until an executor exists.
    pub lease: Duration,
    /// The same once an executor exists, until it accepts the task.
    pub unaccepted: Duration,
    /// After which silence an accepted task is orphaned.
    pub orphaned_after: Duration,
    /// After which silence an accepted task is lost.
    pub lost_after: Duration,
    /// For how long a task may wait before it is accepted by an executor.
    pub queue_timeout: Duration,
    /// After which silence an instance is offline.
    pub offline_after: Duration,
    /// An instance that has a lease for this long, and no executor for it, counts it as a failure.
    pub start_within: Duration,
    /// For how long an offline instance is listed.
    pub listed_for: Duration,
    /// For how long a task is remembered once it is over and reported.
    pub remembered_for: Duration,
    /// How often a task is leased before it is given up.
    pub attempts: u32,
    /// The pauses before the second lease, the third, and so on. The last one repeats.
    pub delays: Vec<Duration>,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            unaccepted: Duration::from_mins(5),
            orphaned_after: Duration::from_secs(90),
            lost_after: Duration::from_mins(10),
            queue_timeout: Duration::from_hours(1),
            offline_after: Duration::from_secs(30),
            start_within: Duration::from_mins(2),
            listed_for: Duration::from_hours(2),
            remembered_for: Duration::from_hours(24),
            attempts: 5,
            delays: [10, 20, 40, 80].map(Duration::from_secs).to_vec(),
        }
    }
}
