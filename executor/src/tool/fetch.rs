//! HTTP for release files, with limits, timeouts and a few retries. It also formats addresses for messages.
//!
//! This module knows nothing of versions or archives. Proxies come from the environment.

use std::{
    error::Error,
    fmt,
    io::{Seek, SeekFrom, Write},
    path::Path,
    time::Duration,
};

use backon::{ExponentialBuilder, Retryable};
use job_contract::{Exit, chain};
use reqwest::{Client, Response, StatusCode, header, redirect};
use tokio::time::Instant;
use url::Url;

use super::cache::cache_error;
use crate::error::StepError;

/// How long requests to an unusable server are repeated. Including the last attempt, this takes less than 30 seconds,
/// both if connections are refused and if packets are dropped.
pub(crate) const RETRY_FOR: Duration = Duration::from_secs(15);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest silence of a server. A slow but steady download may take any time.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
const MAX_REDIRECTS: usize = 10;
/// Retries of an interrupted download.
const RETRIES: usize = 3;

/// An address for messages: without credentials, query and fragment, because all of them can hold secrets.
pub(crate) struct Shown<'a>(pub(crate) &'a Url);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut url = self.0.clone();
        if !url.username().is_empty() || url.password().is_some() {
            // Neither call fails for an address that had credentials.
            let _ = url.set_password(None);
            let _ = url.set_username("***");
        }
        if url.query().is_some() {
            url.set_query(Some("***"));
        }
        url.set_fragment(None);
        f.write_str(url.as_str())
    }
}

impl fmt::Debug for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a file could not be fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error("could not reach `{url}`")]
    Unreachable { url: String, source: reqwest::Error },
    #[error("`{url}` answered {status}")]
    Status { url: String, status: StatusCode },
    #[error("the download of `{url}` was interrupted")]
    Interrupted { url: String, source: reqwest::Error },
    #[error("`{url}` is larger than {limit_mib} MiB")]
    TooLarge { url: String, limit_mib: u64 },
}

impl FetchError {
    /// Whether the release server was unusable, and did not refuse the request.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { source, .. } => !source.is_redirect() && !source.is_builder(),
            Self::Interrupted { .. } => true,
            Self::Status { status, .. } => {
                status.is_server_error()
                    || matches!(
                        *status,
                        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS
                    )
            }
            Self::TooLarge { .. } => false,
        }
    }

    pub(super) fn hint(&self) -> &'static str {
        let status = match self {
            Self::Unreachable { .. } | Self::Interrupted { .. } => {
                return "put this version on PATH (in the executor's image) or into the tool cache, name a release index or \
                        mirror that can be reached, or correct the proxy settings";
            }
            Self::TooLarge { .. } => return "no release is that large; check the address",
            Self::Status { status, .. } => *status,
        };
        match status {
            StatusCode::NOT_FOUND => "check the address of the index or mirror",
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                "the server requires credentials, or refuses those in the address"
            }
            StatusCode::TOO_MANY_REQUESTS => {
                "the server limits requests; use a mirror or an index that caches"
            }
            _ => "the server reports an error; try again later",
        }
    }
}

/// The retries are over. So the cause of an unreachable server is a missing route to the releases, or the missing version
/// in the image. Another executor would have the same error.
impl From<FetchError> for StepError {
    fn from(error: FetchError) -> Self {
        let is_unreachable = matches!(error, FetchError::Unreachable { .. });
        let exit = if is_unreachable && error.is_transient() {
            Exit::BadConfiguration
        } else {
            Exit::Infrastructure
        };
        Self::new(exit, chain(&error)).with_hint(error.hint())
    }
}

/// Why a file could not be fetched into another one.
enum TransferError {
    Fetch(FetchError),
    Write(StepError),
}

impl From<FetchError> for TransferError {
    fn from(error: FetchError) -> Self {
        Self::Fetch(error)
    }
}

/// Fetches release files.
#[derive(Debug, Clone)]
pub(crate) struct Fetcher {
    client: Client,
    retry_for: Duration,
}

impl Fetcher {
    pub(crate) fn new(retry_for: Duration) -> Result<Self, StepError> {
        Self::with_idle_timeout(retry_for, Some(IDLE_TIMEOUT))
    }

    /// Waits for a silent server, and never tries again: somebody else decides about both.
    pub(crate) fn patient() -> Result<Self, StepError> {
        Self::with_idle_timeout(Duration::ZERO, None)
    }

    fn with_idle_timeout(retry_for: Duration, idle: Option<Duration>) -> Result<Self, StepError> {
        // Without a provider, building a client panics.
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            let text = "no TLS provider was installed before resolving a tool";
            return Err(StepError::defect(text));
        }
        let mut client = Client::builder()
            // GitHub answers 403 to requests without a user agent.
            .user_agent(concat!("mayfly/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .redirect(redirect_policy());
        if let Some(idle) = idle {
            client = client.read_timeout(idle);
        }
        let client = client.build().map_err(|error| {
            StepError::defect("could not set up HTTP").because(&error.without_url())
        })?;
        Ok(Self { client, retry_for })
    }

    /// Fetches a small file into memory.
    pub(crate) async fn bytes(&self, url: &Url, limit: u64) -> Result<Vec<u8>, FetchError> {
        Ok(self.page(url, limit).await?.0)
    }

    /// Fetches a small file into memory, and returns its address after redirects too.
    pub(crate) async fn located(
        &self,
        url: &Url,
        limit: u64,
    ) -> Result<(Vec<u8>, Url), FetchError> {
        let response = self.answer(url, limit).await?;
        let located = response.url().clone();
        Ok((content(url, response, limit).await?, located))
    }

    /// Fetches a page of a listing, and the address of the next one (`Link: <…>; rel="next"`).
    pub(crate) async fn page(
        &self,
        url: &Url,
        limit: u64,
    ) -> Result<(Vec<u8>, Option<Url>), FetchError> {
        let began = Instant::now();
        (|| self.try_bytes(url, limit))
            .retry(backoff().without_max_times())
            .when(|error| error.is_transient() && began.elapsed() < self.retry_for)
            .await
    }

    /// Fetches a small file, or returns `None` if the server has none.
    pub(crate) async fn bytes_if_any(
        &self,
        url: &Url,
        limit: u64,
    ) -> Result<Option<Vec<u8>>, FetchError> {
        match self.bytes(url, limit).await {
            Ok(bytes) => Ok(Some(bytes)),
            // Without the permission to list, object stores answer 403 for missing objects.
            Err(FetchError::Status {
                status: StatusCode::NOT_FOUND | StatusCode::GONE | StatusCode::FORBIDDEN,
                ..
            }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Fetches a large file into `file`, which is at `path`.
    pub(crate) async fn file(
        &self,
        url: &Url,
        limit: u64,
        file: &std::fs::File,
        path: &Path,
    ) -> Result<(), StepError> {
        let began = Instant::now();
        let again = |error: &TransferError| match error {
            // The server answered, so retries do not depend on the time until then.
            TransferError::Fetch(FetchError::Interrupted { .. }) => true,
            TransferError::Fetch(error) => error.is_transient() && began.elapsed() < self.retry_for,
            TransferError::Write(_) => false,
        };
        let fetched = (|| self.try_file(url, limit, file, path))
            .retry(backoff().with_max_times(RETRIES))
            .when(again)
            .await;
        fetched.map_err(|error| match error {
            TransferError::Fetch(error) => error.into(),
            TransferError::Write(error) => error,
        })
    }

    async fn try_bytes(&self, url: &Url, limit: u64) -> Result<(Vec<u8>, Option<Url>), FetchError> {
        let response = self.answer(url, limit).await?;
        let next = next_page(url, &response);
        Ok((content(url, response, limit).await?, next))
    }

    async fn try_file(
        &self,
        url: &Url,
        limit: u64,
        mut file: &std::fs::File,
        path: &Path,
    ) -> Result<(), TransferError> {
        let mut response = self.answer(url, limit).await?;
        let cache = |error| TransferError::Write(cache_error(path, &error));
        // An earlier attempt may have left partial content.
        file.set_len(0).map_err(cache)?;
        file.seek(SeekFrom::Start(0)).map_err(cache)?;
        let mut size = 0;
        while let Some(chunk) = next_chunk(url, &mut response).await? {
            size += chunk.len() as u64;
            within(url, size, limit)?;
            // A chunk is the content of the socket's buffer. Writing it takes microseconds, which is less than a switch
            // to another thread.
            file.write_all(&chunk).map_err(cache)?;
        }
        Ok(())
    }

    /// A good answer, before its body has come.
    pub(crate) async fn answer(&self, url: &Url, limit: u64) -> Result<Response, FetchError> {
        let response = self.client.get(url.clone()).send().await.map_err(|error| {
            FetchError::Unreachable {
                url: Shown(url).to_string(),
                // The client's own text would contain the address with its credentials.
                source: error.without_url(),
            }
        })?;
        let status = response.status();
        if !status.is_success() {
            return Err(FetchError::Status {
                url: Shown(url).to_string(),
                status,
            });
        }
        within(url, response.content_length().unwrap_or_default(), limit)?;
        Ok(response)
    }
}

async fn content(url: &Url, mut response: Response, limit: u64) -> Result<Vec<u8>, FetchError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = next_chunk(url, &mut response).await? {
        bytes.extend_from_slice(&chunk);
        within(url, bytes.len() as u64, limit)?;
    }
    Ok(bytes)
}

async fn next_chunk(
    url: &Url,
    response: &mut Response,
) -> Result<Option<impl AsRef<[u8]> + std::ops::Deref<Target = [u8]>>, FetchError> {
    response
        .chunk()
        .await
        .map_err(|error| FetchError::Interrupted {
            url: Shown(url).to_string(),
            source: error.without_url(),
        })
}

fn within(url: &Url, size: u64, limit: u64) -> Result<(), FetchError> {
    if size > limit {
        return Err(FetchError::TooLarge {
            url: Shown(url).to_string(),
            limit_mib: limit >> 20,
        });
    }
    Ok(())
}

fn backoff() -> ExponentialBuilder {
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(200))
        .with_max_delay(MAX_RETRY_DELAY)
        .with_jitter()
}

/// Follows redirects, but never from https to http.
fn redirect_policy() -> redirect::Policy {
    redirect::Policy::custom(|attempt| {
        let was_secure = attempt
            .previous()
            .last()
            .is_some_and(|url| url.scheme() == "https");
        if was_secure && attempt.url().scheme() != "https" {
            attempt.error(RedirectError("it redirects from https to http"))
        } else if attempt.previous().len() > MAX_REDIRECTS {
            attempt.error(RedirectError("it redirects too often"))
        } else {
            attempt.follow()
        }
    })
}

#[derive(Debug)]
struct RedirectError(&'static str);

impl fmt::Display for RedirectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl Error for RedirectError {}

/// The next page of a listing. A page on another host is ignored, because an index is trusted only for its own host.
fn next_page(url: &Url, response: &Response) -> Option<Url> {
    let links = response.headers().get(header::LINK)?.to_str().ok()?;
    let target = links.split(',').find_map(|link| {
        let (target, parameters) = link.split_once(';')?;
        let next = parameters
            .split(';')
            .any(|p| matches!(p.trim(), "rel=\"next\"" | "rel=next"));
        next.then(|| target.trim().strip_prefix('<')?.strip_suffix('>'))?
    })?;
    let mut next = url.join(target).ok()?;
    if next.origin() != url.origin() {
        return None;
    }
    let _ = next.set_username(url.username());
    let _ = next.set_password(url.password());
    Some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_shown_without_possible_secrets() {
        let shown = |text: &str| Shown(&Url::parse(text).unwrap()).to_string();
        assert_eq!(
            shown("https://bob:hunter2@mirror.test:8443/a/b.zip?sig=hunter2#hunter2"),
            "https://***@mirror.test:8443/a/b.zip?***"
        );
        assert_eq!(
            shown("https://hunter2@mirror.test/a"),
            "https://***@mirror.test/a"
        );
        assert_eq!(shown("http://mirror.test/a"), "http://mirror.test/a");
    }
}
