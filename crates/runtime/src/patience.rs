//! How long somebody is willing to wait for the platform. Waiting ends sooner when the process is told to stop: the
//! time it has left then is better spent otherwise.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// A time until which something is tried again. Clones share it.
#[derive(Clone, Debug)]
pub struct Patience {
    until: Instant,
    hurry: Option<Arc<Hurry>>,
}

#[derive(Debug)]
struct Hurry {
    order: CancellationToken,
    left: Duration,
    /// Set by whoever hears the order first, so that every wait after it ends at the same moment.
    until: OnceLock<Instant>,
}

impl Patience {
    /// Lasts that long from now on.
    pub fn lasting(time: Duration) -> Self {
        // Beyond any run, and far from where the clock's arithmetic ends.
        const LONGEST: Duration = Duration::from_hours(365 * 24);
        Self {
            until: Instant::now() + time.min(LONGEST),
            hurry: None,
        }
    }

    /// The same, and not longer than that from now on.
    #[must_use]
    pub fn at_most(&self, time: Duration) -> Self {
        Self {
            until: self.until.min(Self::lasting(time).until),
            hurry: self.hurry.clone(),
        }
    }

    /// Lasts only for `left` once `order` is given.
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

    /// Whether it has come to its end. Whoever begins something asks first.
    pub fn is_over(&self) -> bool {
        let now = Instant::now();
        let hurry = self.hurry.as_ref();
        let hurried = hurry.and_then(|hurry| hurry.until.get());
        self.until <= now || hurried.is_some_and(|until| *until <= now)
    }

    /// Returns when it has come to its end.
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
    async fn patience_lasts_as_long_as_it_says() {
        let start = Instant::now();
        Patience::lasting(Duration::from_mins(10)).over().await;
        assert_eq!(start.elapsed().as_secs(), 600);
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_shortens_it_once_for_all_who_wait() {
        let (start, order) = (Instant::now(), CancellationToken::new());
        let patience = Patience::lasting(Duration::from_mins(10))
            .hurried_by(order.clone(), Duration::from_secs(20));
        order.cancel();
        patience.over().await;
        patience.clone().over().await;
        assert_eq!(start.elapsed().as_secs(), 20);
    }

    #[tokio::test(start_paused = true)]
    async fn its_end_is_seen_by_whoever_asks() {
        let order = CancellationToken::new();
        let patience = Patience::lasting(Duration::from_mins(10))
            .hurried_by(order.clone(), Duration::from_secs(20));
        assert!(!patience.is_over());
        order.cancel();
        patience.over().await;
        assert!(patience.is_over());
        let patience = Patience::lasting(Duration::from_secs(1));
        assert!(!patience.is_over());
        patience.over().await;
        assert!(patience.is_over());
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_never_lengthens_it() {
        let (start, order) = (Instant::now(), CancellationToken::new());
        let patience = Patience::lasting(Duration::from_secs(5))
            .hurried_by(order.clone(), Duration::from_mins(1));
        order.cancel();
        patience.over().await;
        assert_eq!(start.elapsed().as_secs(), 5);
    }
}
