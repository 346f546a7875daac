//! Deadlines for waiting on a peer. A stop order shortens them, because the process needs the rest of its time for other work.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// The time at which attempts end. Clones share it.
#[derive(Clone, Debug)]
pub struct Deadline {
    until: Instant,
    hurry: Option<Arc<Hurry>>,
}

#[derive(Debug)]
struct Hurry {
    order: CancellationToken,
    left: Duration,
    /// Set by the first task that sees the order, so that all tasks end at the same moment.
    until: OnceLock<Instant>,
}

impl Deadline {
    /// A deadline after that time from now.
    pub fn after(time: Duration) -> Self {
        // Longer than any run, and short enough that the clock cannot overflow.
        const LONGEST: Duration = Duration::from_hours(365 * 24);
        Self {
            until: Instant::now() + time.min(LONGEST),
            hurry: None,
        }
    }

    /// The same deadline, but not later than that time from now.
    #[must_use]
    pub fn at_most(&self, time: Duration) -> Self {
        Self {
            until: self.until.min(Self::after(time).until),
            hurry: self.hurry.clone(),
        }
    }

    /// The same deadline, but not later than `left` after `order`.
    #[must_use]
    pub fn hurried_by(self, order: CancellationToken, left: Duration) -> Self {
        Self {
            until: self.until,
            hurry: Some(Arc::new(Hurry {
                order,
                left,
                until: OnceLock::new(),
            })),
        }
    }

    /// Whether the deadline has passed. Check it before you begin new work.
    pub fn is_over(&self) -> bool {
        let now = Instant::now();
        let hurry = self.hurry.as_ref();
        let hurried = hurry.and_then(|hurry| hurry.until.get());
        self.until <= now || hurried.is_some_and(|until| *until <= now)
    }

    /// Returns when the deadline passes.
    pub async fn over(&self) {
        let Some(hurry) = &self.hurry else {
            return sleep_until(self.until).await;
        };
        tokio::select! {
            () = sleep_until(self.until) => {}
            () = async {
                hurry.order.cancelled().await;
                let until = *hurry.until.get_or_init(|| Instant::now() + hurry.left);
                sleep_until(until).await;
            } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_deadline_passes_at_its_time() {
        let start = Instant::now();
        Deadline::after(Duration::from_mins(10)).over().await;
        assert_eq!(start.elapsed().as_secs(), 600);
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_shortens_it_once_for_all_who_wait() {
        let (start, order) = (Instant::now(), CancellationToken::new());
        let deadline = Deadline::after(Duration::from_mins(10))
            .hurried_by(order.clone(), Duration::from_secs(20));
        order.cancel();
        deadline.over().await;
        deadline.clone().over().await;
        assert_eq!(start.elapsed().as_secs(), 20);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_that_has_passed_is_seen_without_waiting() {
        let order = CancellationToken::new();
        let deadline = Deadline::after(Duration::from_mins(10))
            .hurried_by(order.clone(), Duration::from_secs(20));
        assert!(!deadline.is_over());
        order.cancel();
        deadline.over().await;
        assert!(deadline.is_over());
        let deadline = Deadline::after(Duration::from_secs(1));
        assert!(!deadline.is_over());
        deadline.over().await;
        assert!(deadline.is_over());
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_never_lengthens_it() {
        let (start, order) = (Instant::now(), CancellationToken::new());
        let deadline = Deadline::after(Duration::from_secs(5))
            .hurried_by(order.clone(), Duration::from_mins(1));
        order.cancel();
        deadline.over().await;
        assert_eq!(start.elapsed().as_secs(), 5);
    }
}
