//! The time limits and attempts of tasks and instances.

use std::time::Duration;

/// The time limits of tasks and instances, and the number of attempts.
#[derive(Clone, Debug)]
pub struct Rules {
    /// How long a lease is valid without a heartbeat of its instance, until an executor exists.
    pub lease: Duration,
    /// How long a lease is valid without a heartbeat once an executor exists, until it accepts the task. And how long an
    /// instance with heartbeats may take until an executor exists.
    pub unaccepted: Duration,
    /// An accepted task without a heartbeat for so long is orphaned.
    pub orphaned_after: Duration,
    /// An accepted task without a heartbeat for so long is lost.
    pub lost_after: Duration,
    /// How long a task may wait until an executor accepts it.
    pub queue_timeout: Duration,
    /// An instance without a heartbeat for so long is offline.
    pub offline_after: Duration,
    /// A lease without an executor for so long counts as a failure of its instance.
    pub start_within: Duration,
    /// How long an offline instance stays in the list.
    pub listed_for: Duration,
    /// How long a task is kept after its end. A task whose outcome is not reported is kept longer.
    pub remembered_for: Duration,
    /// How many leases of a task may fail until the task fails.
    pub attempts: u32,
    /// The pauses before the second lease, the third, and so on. The last pause repeats.
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
