//! The API server's clock. Waiting times start at times that the API server wrote. The clock of this machine may be
//! minutes off, so those times are compared only with the server's clock.

use std::sync::atomic::{AtomicI64, Ordering};

use http::HeaderMap;
use http::header::DATE;
use k8s_openapi::jiff::fmt::rfc2822::DateTimeParser;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use tracing::warn;

/// The header has no fractions of a second.
const RESOLUTION: SignedDuration = SignedDuration::from_secs(1);
/// A larger difference is logged, because it affects tokens and certificates too.
const NOTABLE: SignedDuration = SignedDuration::from_secs(30);

/// The server's clock, estimated from its responses. Before the first response, it is this machine's clock.
#[derive(Debug, Default)]
pub(super) struct ServerClock {
    /// Milliseconds it is ahead of this machine's.
    ahead: AtomicI64,
}

impl ServerClock {
    pub(super) fn now(&self) -> Timestamp {
        let ahead = SignedDuration::from_millis(self.ahead.load(Ordering::Relaxed));
        let now = Timestamp::now();
        now.checked_add(ahead).unwrap_or(now)
    }

    /// Updates the estimate from a response. The times are this machine's, of the request and of the response.
    pub(super) fn hear(&self, headers: &HeaderMap, sent: Timestamp, received: Timestamp) {
        let date = headers
            .get(DATE)
            .and_then(|date| DateTimeParser::new().parse_timestamp(date.as_bytes()).ok());
        let Some(date) = date else { return };
        let ahead = ahead(date, sent, received);
        let millis = i64::try_from(ahead.as_millis()).unwrap_or_default();
        let before = SignedDuration::from_millis(self.ahead.swap(millis, Ordering::Relaxed));
        if ahead.abs() >= NOTABLE && before.abs() < NOTABLE {
            warn!(
                seconds_ahead = ahead.as_secs(),
                "the clock of the API server is not this machine's: runs are timed by the server's"
            );
        }
    }
}

/// Returns the smallest difference to the server's clock. Zero if the duration of the response can explain the
/// difference.
fn ahead(date: Timestamp, sent: Timestamp, received: Timestamp) -> SignedDuration {
    let at_least = date.duration_since(received);
    let at_most = date.duration_since(sent) + RESOLUTION;
    if at_least.is_positive() {
        at_least
    } else {
        at_most.min(SignedDuration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millisecond(784_111_777_000 + millis).unwrap()
    }

    #[test]
    fn a_clock_difference_leaves_out_latency_and_the_precision_of_the_header() {
        let of = |date, sent, received| ahead(at(date), at(sent), at(received)).as_millis();
        // The server's moment lies anywhere in the second of its date.
        assert_eq!(of(0, 999, 1_500), 0);
        assert_eq!(of(0, -4_000, 1_000), 0);
        assert_eq!(of(60_000, 0, 500), 59_500);
        assert_eq!(of(-60_000, 0, 500), -59_000);
        // The clock here was set back meanwhile.
        assert_eq!(of(0, 500, -60_000), 60_000);
    }

    #[test]
    fn the_time_is_that_of_the_last_answer_that_had_one() {
        let clock = ServerClock::default();
        let heard = |date: &'static str| {
            let headers = HeaderMap::from_iter([(DATE, HeaderValue::from_static(date))]);
            clock.hear(&headers, at(0), at(0));
            clock.ahead.load(Ordering::Relaxed)
        };
        assert_eq!(heard("Sun, 06 Nov 1994 08:59:37 GMT"), 600_000);
        assert_eq!(heard("yesterday"), 600_000);
        let (before, told, after) = (Timestamp::now(), clock.now(), Timestamp::now());
        let here = told - SignedDuration::from_mins(10);
        assert!(before <= here && here <= after, "{before} {told} {after}");
        assert_eq!(heard("Sun, 06 Nov 1994 08:49:37 GMT"), 0);
    }
}
