//! What the requests to a service share: their timing, the state of the service, and the pause that it asks for.

use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use crate::error::{Answer, StoreError};

/// Timeouts and retries of the requests to a service.
#[derive(Clone, Debug)]
pub struct RequestTiming {
    pub connect_timeout: Duration,
    /// The longest time without data while the service sends a response.
    pub read_timeout: Duration,
    /// For one request with its content. A download that takes longer continues at the same place.
    pub request_timeout: Duration,
    /// How long a request is repeated after its first failure.
    pub retry_for: Duration,
    /// The first pause between two attempts. The next ones grow at random.
    pub first_pause: Duration,
    pub longest_pause: Duration,
}

impl Default for RequestTiming {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_mins(5),
            // A repeated request keeps the signature of its first attempt. Services refuse an old signature.
            retry_for: Duration::from_mins(5),
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(15),
        }
    }
}

/// What is wrong with a service at the moment. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Health(watch::Sender<Option<String>>);

impl Health {
    pub(crate) fn watch(&self) -> watch::Receiver<Option<String>> {
        self.0.subscribe()
    }

    pub(crate) fn set(&self, trouble: Option<String>) {
        self.0.send_if_modified(|last| {
            let is_other = last.is_some() != trouble.is_some();
            *last = trouble;
            is_other
        });
    }
}

/// Checks that the program has installed a TLS provider. Without one, building a client panics.
pub(crate) fn check_tls(service: &'static str) -> Result<(), StoreError> {
    match rustls::crypto::CryptoProvider::get_default() {
        Some(_) => Ok(()),
        None => Err(StoreError::Client {
            service,
            source: Answer::new("the program has installed no TLS provider"),
        }),
    }
}

/// The pause in a `Retry-After` header: seconds, or a date.
pub(crate) fn asked_pause(value: &str) -> Option<Duration> {
    if let Ok(seconds) = value.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value.trim()).ok()?;
    date.duration_since(SystemTime::now()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_asked_for_in_seconds_or_as_a_date() {
        assert_eq!(asked_pause(" 7 "), Some(Duration::from_secs(7)));
        let later = SystemTime::now() + Duration::from_hours(1);
        let pause = asked_pause(&httpdate::fmt_http_date(later)).unwrap();
        assert!((3500..=3600).contains(&pause.as_secs()), "{pause:?}");
        for text in ["", "soon", "-1", "Sun, 06 Nov 1994 08:49:37 GMT"] {
            assert_eq!(asked_pause(text), None, "{text}");
        }
    }

    #[test]
    fn observers_are_notified_when_failures_begin_and_end() {
        let health = Health::default();
        let mut watch = health.watch();
        for text in ["one", "two"] {
            health.set(Some(text.to_owned()));
        }
        assert!(watch.has_changed().unwrap());
        assert_eq!(watch.borrow_and_update().as_deref(), Some("two"));
        health.set(Some("three".to_owned()));
        assert!(!watch.has_changed().unwrap());
        health.set(None);
        assert!(watch.has_changed().unwrap());
    }
}
