//! Keeps a second request away from a service that may still do the first one. A service that deletes without a condition would
//! otherwise delete what somebody else has stored in between.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use object_store::client::{HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpResponse};

use crate::error::element;

/// How long after its decision a request may be sent. The process may have been frozen in between.
const DECIDED: Duration = Duration::from_mins(1);

/// One request at most that may be done late.
#[derive(Debug)]
pub(crate) struct Once {
    /// When the request was decided.
    since: SystemTime,
    is_unknown: AtomicBool,
}

/// Why a request was not sent.
#[derive(Debug, thiserror::Error)]
enum NotSent {
    #[error("an earlier attempt may still be done")]
    Unknown,
    #[error("it was decided too long ago")]
    Late,
}

impl Once {
    pub(crate) const fn new(since: SystemTime) -> Self {
        Self {
            since,
            is_unknown: AtomicBool::new(false),
        }
    }

    /// Whether the service may still do a request, or has done it without saying so.
    pub(crate) fn is_unknown(&self) -> bool {
        self.is_unknown.load(Ordering::SeqCst)
    }

    pub(crate) async fn send(
        &self,
        http: &HttpClient,
        request: HttpRequest,
    ) -> Result<HttpResponse, HttpError> {
        // The client repeats no request after an error of this kind.
        let not_sent = |why: NotSent| Err(HttpError::new(HttpErrorKind::Unknown, why));
        if self.is_unknown() {
            return not_sent(NotSent::Unknown);
        }
        let since = self.since.elapsed();
        if !since.is_ok_and(|since| since <= DECIDED) {
            return not_sent(NotSent::Late);
        }
        // A caller that leaves does not learn the end of it.
        self.is_unknown.store(true, Ordering::SeqCst);
        match http.execute(request).await {
            Ok(answer) => self.judge(answer).await,
            Err(error) => {
                let was_sent = error.kind() != HttpErrorKind::Connect;
                self.is_unknown.store(was_sent, Ordering::SeqCst);
                Err(error)
            }
        }
    }

    /// Notes whether the service is done with the request.
    async fn judge(&self, answer: HttpResponse) -> Result<HttpResponse, HttpError> {
        let (answer, is_over) = match answer.status().as_u16() {
            408 => (answer, false),
            200..=499 | 501 => (answer, true),
            503 => {
                // Its own code says that it has not begun. Something in front of it knows nothing of that.
                let (head, body) = answer.into_parts();
                let body = body.bytes().await?;
                let text = std::str::from_utf8(&body).unwrap_or_default();
                let is_own = element(text, "Code").is_some();
                (HttpResponse::from_parts(head, body.into()), is_own)
            }
            _ => (answer, false),
        };
        self.is_unknown.store(!is_over, Ordering::SeqCst);
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use object_store::client::{HttpRequestBody, HttpService};
    use reqwest::StatusCode;
    use rstest::rstest;

    use super::*;

    /// Answers each request with the last of these that is left.
    #[derive(Debug)]
    struct Service(Mutex<Vec<(u16, &'static str)>>);

    #[async_trait]
    impl HttpService for Service {
        async fn call(&self, _request: HttpRequest) -> Result<HttpResponse, HttpError> {
            let (status, body) = self.0.lock().unwrap().pop().unwrap();
            if status == 0 {
                let kind = match body {
                    "refused" => HttpErrorKind::Connect,
                    _ => HttpErrorKind::Timeout,
                };
                return Err(HttpError::new(kind, NotSent::Late));
            }
            let mut answer = HttpResponse::new(body.to_owned().into());
            *answer.status_mut() = StatusCode::from_u16(status).unwrap();
            Ok(answer)
        }
    }

    fn request() -> HttpRequest {
        HttpRequest::new(HttpRequestBody::empty())
    }

    const BUSY: &str = "<Error><Code>SlowDown</Code></Error>";

    #[rstest]
    #[case::done(204, "", false)]
    #[case::refused(403, "", false)]
    #[case::changed(412, "", false)]
    #[case::without_conditions(501, "", false)]
    #[case::busy(503, BUSY, false)]
    #[case::no_connection(0, "refused", false)]
    #[case::proxy(503, "<html>", true)]
    #[case::timeout_of_a_proxy(408, "", true)]
    #[case::failed(500, BUSY, true)]
    #[case::gateway(504, "", true)]
    #[case::no_answer(0, "", true)]
    #[tokio::test]
    async fn a_request_that_may_still_be_done_is_not_sent_again(
        #[case] status: u16,
        #[case] body: &'static str,
        #[case] is_unknown: bool,
    ) {
        let service = Service(Mutex::new(vec![(204, ""), (status, body)]));
        let http = HttpClient::new(service);
        let once = Once::new(SystemTime::now());
        drop(once.send(&http, request()).await);
        assert_eq!(once.is_unknown(), is_unknown);
        let again = once.send(&http, request()).await;
        assert_eq!(again.is_err(), is_unknown);
        assert_eq!(once.is_unknown(), is_unknown);
    }

    #[tokio::test]
    async fn a_request_that_was_decided_long_ago_is_not_sent() {
        let http = HttpClient::new(Service(Mutex::default()));
        for since in [
            SystemTime::now() - 2 * DECIDED,
            SystemTime::now() + 2 * DECIDED,
        ] {
            let once = Once::new(since);
            let error = once.send(&http, request()).await.unwrap_err();
            assert_eq!(error.kind(), HttpErrorKind::Unknown);
            assert!(!once.is_unknown());
        }
    }
}
