//! Limits the requests to the Kubernetes API, for clusters whose API server has no limit. It is off by default, because
//! the API server knows better which request must wait.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

/// Requests per second, and the burst.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateLimit {
    interval: Duration,
    burst: u32,
}

impl RateLimit {
    /// `None`: the rate lets no request through. The default burst is twice the rate.
    pub fn new(per_second: f64, burst: Option<u32>) -> Option<Self> {
        let interval = Duration::try_from_secs_f64(1.0 / per_second).ok()?;
        let usual = Duration::from_secs(2)
            .as_nanos()
            .checked_div(interval.as_nanos())?;
        let burst = burst.unwrap_or_else(|| u32::try_from(usual).unwrap_or(u32::MAX).max(1));
        (burst > 0).then_some(Self { interval, burst })
    }
}

/// Lets requests through in their order.
#[derive(Debug)]
pub(super) struct Limiter {
    limit: RateLimit,
    /// When the bucket is full again.
    full_at: Mutex<Instant>,
}

impl Limiter {
    pub(super) fn new(limit: RateLimit) -> Self {
        Self {
            limit,
            full_at: Mutex::new(Instant::now()),
        }
    }

    /// Returns when the request may be sent.
    pub(super) async fn turn(&self) {
        tokio::time::sleep_until(self.reserve(Instant::now())).await;
    }

    fn reserve(&self, now: Instant) -> Instant {
        let mut full_at = self.full_at.lock().expect("no holder of this lock panics");
        *full_at = (*full_at).max(now) + self.limit.interval;
        let room = self.limit.interval.saturating_mul(self.limit.burst);
        full_at.checked_sub(room).unwrap_or(now).max(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_goes_at_once_and_the_rest_at_the_rate() {
        let limiter = Limiter::new(RateLimit::new(10.0, Some(3)).unwrap());
        let now = Instant::now();
        let waits: Vec<u128> = (0..5)
            .map(|_| limiter.reserve(now).duration_since(now).as_millis())
            .collect();
        assert_eq!(waits, [0, 0, 0, 100, 200]);
        // A second of rest fills the bucket, and no more than that.
        let later = now + Duration::from_secs(1);
        let waits: Vec<u128> = (0..4)
            .map(|_| limiter.reserve(later).duration_since(later).as_millis())
            .collect();
        assert_eq!(waits, [0, 0, 0, 100]);
    }

    #[test]
    fn a_rate_that_lets_nothing_through_is_none() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(RateLimit::new(rate, None), None, "{rate}");
        }
        assert_eq!(RateLimit::new(1.0, Some(0)), None);
        assert_eq!(RateLimit::new(20.0, None), RateLimit::new(20.0, Some(40)));
        assert_eq!(RateLimit::new(0.1, None), RateLimit::new(0.1, Some(1)));
    }
}
