//! When waiting for a peer ends. It ends sooner after a stop order: the process needs the time that is left for other work.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// The moment at which attempts end. Clones share it.
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
    /// That long from now.
    pub fn after(time: Duration) -> Self {
        // Beyond any run, and far from where the clock's arithmetic ends.
        const LONGEST: Duration = Duration::from_hours(365 * 24);
        Self {
            until: Instant::now() + time.min(LONGEST),
            hurry: None,
        }
    }

    /// The same, but at most that long from now.
    #[must_use]
    pub fn at_most(&self, time: Duration) -> Self {
        Self {
            until: self.until.min(Self::after(time).until),
            hurry: self.hurry.clone(),
        }
    }

    /// The same, but at most `left` after `order` is given.
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

    /// Whether it has passed. Ask before you begin something.
    pub fn is_over(&self) -> bool {
        let now = Instant::now();
        let hurry = self.hurry.as_ref();
        let hurried = hurry.and_then(|hurry| hurry.until.get());
        self.until <= now || hurried.is_some_and(|until| *until <= now)
    }

    /// Returns when it passes.
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
