//! Sessions of an identity at a cloud, for a store without a key: requested by one request, kept until shortly before their end.

use std::sync::Arc;
use std::time::Duration;

use object_store::client::{HttpClient, HttpRequest};
use secrecy::SecretString;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// A session is replaced so long before its end.
const BEFORE_ITS_END: Duration = Duration::from_mins(5);
/// The longest use of a session, whatever its service says.
const LONGEST: Duration = Duration::from_hours(12);
/// More than any answer of a token service.
const MAX_ANSWER_BYTES: usize = 1 << 18;
/// How often a request is made, if the service fails.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);

/// A session that is kept.
#[derive(Debug)]
pub(crate) struct Kept<T> {
    session: Mutex<Option<(Arc<T>, Instant)>>,
}

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self {
            session: Mutex::new(None),
        }
    }
}

impl<T> Kept<T> {
    /// The session, or a new one with its lifetime.
    pub(crate) async fn get(
        &self,
        obtain: impl Future<Output = object_store::Result<(T, Duration)>> + Send,
    ) -> object_store::Result<Arc<T>> {
        let mut kept = self.session.lock().await;
        if let Some((session, until)) = &*kept
            && *until > Instant::now()
        {
            return Ok(Arc::clone(session));
        }
        let (session, lifetime) = obtain.await?;
        let session = Arc::new(session);
        let lifetime = lifetime.min(LONGEST);
        // Half of a short lifetime is left for use.
        let until = Instant::now() + lifetime.saturating_sub(BEFORE_ITS_END).max(lifetime / 2);
        *kept = Some((Arc::clone(&session), until));
        Ok(session)
    }
}

/// An error that names what was done, and never an answer.
pub(crate) fn failed(store: &'static str, text: impl Into<String>) -> object_store::Error {
    object_store::Error::Generic {
        store,
        source: text.into().into(),
    }
}

/// Sends a request to a token service, and returns the body of its answer. `what` names the service.
pub(crate) async fn ask(
    http: &HttpClient,
    store: &'static str,
    what: &str,
    make: impl Fn() -> object_store::Result<HttpRequest> + Send + Sync,
) -> object_store::Result<SecretString> {
    let mut attempt = 1;
    loop {
        let problem = match http.execute(make()?).await {
            Ok(response) if response.status().is_success() => {
                let body = response.into_body().bytes().await;
                let body = body.map_err(|error| failed(store, format!("{what}: {error}")))?;
                let text = std::str::from_utf8(&body)
                    .ok()
                    .filter(|_| body.len() <= MAX_ANSWER_BYTES);
                let text = text.ok_or_else(|| {
                    failed(store, format!("{what} sent an answer that cannot be read"))
                })?;
                return Ok(SecretString::from(text));
            }
            Ok(response) if !response.status().is_server_error() => {
                return Err(failed(
                    store,
                    format!("{what} refused the identity: status {}", response.status()),
                ));
            }
            Ok(response) => format!("{what} failed: status {}", response.status()),
            Err(error) => format!("{what} cannot be reached: {error}"),
        };
        if attempt == ATTEMPTS {
            return Err(failed(store, problem));
        }
        tokio::time::sleep(PAUSE * attempt).await;
        attempt += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_session_is_replaced_before_it_ends() {
        let kept = Kept::default();
        let get = async |name: &'static str| {
            let session = kept
                .get(async { Ok((name, Duration::from_hours(1))) })
                .await;
            *session.unwrap()
        };
        assert_eq!(get("first").await, "first");
        tokio::time::advance(Duration::from_mins(54)).await;
        assert_eq!(get("second").await, "first");
        tokio::time::advance(Duration::from_mins(2)).await;
        assert_eq!(get("third").await, "third");
    }

    #[tokio::test(start_paused = true)]
    async fn no_lifetime_that_a_service_says_does_harm() {
        let of = async |kept: &Kept<&'static str>, name: &'static str, lifetime| {
            let session = kept.get(async { Ok((name, lifetime)) }).await;
            *session.unwrap()
        };
        let none = Kept::default();
        assert_eq!(of(&none, "first", Duration::ZERO).await, "first");
        assert_eq!(of(&none, "second", Duration::ZERO).await, "second");
        for endless in [Duration::MAX, Duration::from_hours(10 * 365 * 24)] {
            let kept = Kept::default();
            assert_eq!(of(&kept, "first", endless).await, "first");
            assert_eq!(of(&kept, "second", endless).await, "first");
            tokio::time::advance(LONGEST).await;
            assert_eq!(of(&kept, "third", endless).await, "third");
        }
    }
}
