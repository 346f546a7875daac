//! Watches the requests to a service. The client of `object_store` repeats failed requests. This module delays a repetition
//! for the time in `Retry-After`, and reports when the service begins and stops to fail.

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use tokio::sync::watch;

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

/// Creates HTTP clients that record the state of the service.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    pub(crate) service: &'static str,
    pub(crate) health: Health,
    /// The longest pause, even if `Retry-After` asks for more.
    pub(crate) longest_pause: Duration,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Watched {
            client: ReqwestConnector::default().connect(options)?,
            connector: self.clone(),
        }))
    }
}

#[derive(Debug)]
struct Watched {
    client: HttpClient,
    connector: Connector,
}

#[async_trait]
impl HttpService for Watched {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let Connector {
            service,
            health,
            longest_pause,
        } = &self.connector;
        let answer = self.client.execute(request).await;
        match &answer {
            Ok(response) => {
                let status = response.status();
                let is_trouble = status.is_server_error() || matches!(status.as_u16(), 408 | 429);
                health.set(is_trouble.then(|| format!("{service} answers {status}")));
                let headers = response.headers();
                if is_trouble && let Some(pause) = headers.get("retry-after") {
                    let pause = pause.to_str().ok().and_then(asked_pause);
                    tokio::time::sleep(pause.unwrap_or_default().min(*longest_pause)).await;
                }
            }
            Err(error) => health.set(Some(match error.kind() {
                HttpErrorKind::Connect => format!("{service} cannot be reached"),
                HttpErrorKind::Timeout => format!("{service} does not answer in time"),
                _ => format!("{service} closed the connection"),
            })),
        }
        answer
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
        let later = SystemTime::now() + Duration::from_mins(1);
        let pause = asked_pause(&httpdate::fmt_http_date(later)).unwrap();
        assert!((58..=60).contains(&pause.as_secs()), "{pause:?}");
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
