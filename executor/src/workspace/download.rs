//! Fetches the tarball of a run without repository (contract 8.6). This module decides which servers get the platform's
//! token. It knows nothing of the tarball's content.

use std::fmt;
use std::fs::File;
use std::io::{self, Seek as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable as _};
use job_contract::chain;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use runtime::regular_file;
use tokio::io::AsyncWriteExt as _;
use url::{Origin, Url};

use super::http::ProxySettings;
use super::source::{self, display_address, local_path};
use super::{NETWORK_HINT, SPACE_HINT, TOO_LARGE_HINT};
use crate::error::StepError;

/// The platform's token for tarballs, and the servers that may get it.
#[derive(Clone)]
pub struct ContentToken {
    /// Schemes, hosts and ports of the platform's API.
    pub origins: Vec<Origin>,
    /// The relay for requests to the platform, if there is one.
    pub relay: Option<Relay>,
    /// Adds the token to one request. A token is valid for a minute, but retries of a download may take longer.
    pub authorize: Arc<dyn Fn(RequestBuilder) -> RequestBuilder + Send + Sync>,
}

/// A hub that relays requests to the platform.
#[derive(Clone, Debug)]
pub struct Relay {
    /// The platform's address in job data.
    pub public: Url,
    pub base: Url,
}

impl fmt::Debug for ContentToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContentToken")
            .field("origins", &self.origins)
            .finish_non_exhaustive()
    }
}

impl ContentToken {
    /// Whether `url` is an address of the platform.
    pub(super) fn is_for(&self, url: &Url) -> bool {
        self.origins.contains(&url.origin())
    }

    /// A request for `url`, which is the platform's own.
    fn request(&self, client: &Client, url: &Url) -> RequestBuilder {
        let relayed = self.relay.as_ref().map(|relay| relay.address(url));
        (self.authorize)(client.get(relayed.unwrap_or_else(|| url.clone())))
    }
}

impl Relay {
    /// Where the relay has what the platform has at `url`.
    pub(super) fn address(&self, url: &Url) -> Url {
        let base = |url: &Url| url.path().trim_end_matches('/').to_owned();
        let path = url.path();
        let rest = path.strip_prefix(&base(&self.public)).unwrap_or(path);
        let mut address = self.base.clone();
        address.set_path(&format!("{}{rest}", base(&self.base)));
        address.set_query(url.query());
        address
    }
}

/// Why there is no tarball. Addresses are displayed without userinfo and query.
#[derive(Debug, thiserror::Error)]
enum DownloadError {
    #[error("could not download the content from `{address}`")]
    Transfer {
        address: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("`{address}` answered {status} instead of the content")]
    Status { address: String, status: StatusCode },
    #[error("{0}")]
    Other(StepError),
}

impl DownloadError {
    fn is_transient(&self) -> bool {
        match self {
            Self::Transfer { .. } => true,
            Self::Status { status, .. } => {
                status.is_server_error()
                    || matches!(
                        *status,
                        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT
                    )
            }
            Self::Other(_) => false,
        }
    }
}

impl From<DownloadError> for StepError {
    fn from(error: DownloadError) -> Self {
        let (text, is_transient) = (chain(&error), error.is_transient());
        let status = match error {
            DownloadError::Other(error) => return error,
            DownloadError::Transfer { .. } => {
                return Self::infrastructure(text).with_hint(NETWORK_HINT);
            }
            DownloadError::Status { status, .. } => status,
        };
        match status {
            _ if is_transient => Self::infrastructure(text),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Self::user(text).with_hint(
                "the platform's token is sent only to the configured API host; check that the address is on it",
            ),
            StatusCode::NOT_FOUND | StatusCode::GONE => Self::user(text)
                .with_hint("the uploaded configuration may have expired; start a new run"),
            _ => Self::user(text),
        }
    }
}

fn keep_error(source: &io::Error) -> DownloadError {
    DownloadError::Other(
        StepError::infrastructure("could not keep the downloaded content")
            .because(source)
            .with_hint(SPACE_HINT),
    )
}

const MAX_REDIRECTS: usize = 10;

/// The inputs of the download, besides the address.
pub(super) struct Download<'a> {
    pub(super) token: Option<&'a ContentToken>,
    pub(super) proxies: &'a ProxySettings,
    pub(super) max_bytes: u64,
    /// The folder of the unnamed file that holds the tarball.
    pub(super) folder: &'a Path,
}

impl Download<'_> {
    /// Opens the tarball at `address`: a URL, a `file://` URL or an absolute path.
    pub(super) async fn open(&self, address: &str) -> Result<File, StepError> {
        let address = address.trim();
        if address.is_empty() {
            return Err(source::missing());
        }
        if let Some(path) = local_path(address) {
            return regular_file::open(&path).map_err(|source| {
                let path = path.display();
                StepError::user(format!("could not open the content `{path}`")).because(&source)
            });
        }
        let url = parse_url(address)?;
        let client = self.proxies.client()?;
        let attempt = async || self.fetch(&client, &url).await;
        let fetched = attempt
            .retry(
                ExponentialBuilder::default()
                    .with_min_delay(Duration::from_millis(200))
                    .with_max_times(2),
            )
            .when(DownloadError::is_transient);
        Ok(fetched.await?)
    }

    async fn fetch(&self, client: &Client, url: &Url) -> Result<File, DownloadError> {
        let mut answer = self.follow(client, url).await?;
        let check = |length: u64| {
            if length <= self.max_bytes {
                return Ok(());
            }
            let (address, limit) = (display_address(url.as_str()), self.max_bytes);
            let text = format!("the content at `{address}` is larger than {limit} bytes");
            let error = StepError::user(text).with_hint(TOO_LARGE_HINT);
            Err(DownloadError::Other(error))
        };
        check(answer.content_length().unwrap_or_default())?;
        let file = tempfile::tempfile_in(self.folder).map_err(|error| keep_error(&error))?;
        let mut file = tokio::fs::File::from_std(file);
        let mut received = 0;
        while let Some(chunk) = answer.chunk().await.map_err(|e| transfer(url, e))? {
            received += chunk.len() as u64;
            check(received)?;
            file.write_all(&chunk)
                .await
                .map_err(|error| keep_error(&error))?;
        }
        let rewound = async {
            file.flush().await?;
            let mut file = file.into_std().await;
            file.rewind()?;
            Ok(file)
        };
        rewound.await.map_err(|error: io::Error| keep_error(&error))
    }

    /// Follows redirects itself, and decides for each of them whether its target may get the token.
    async fn follow(&self, client: &Client, start: &Url) -> Result<Response, DownloadError> {
        let mut url = start.clone();
        for _ in 0..=MAX_REDIRECTS {
            let token = self.token.filter(|token| token.is_for(&url));
            let request = match token {
                Some(token) => token.request(client, &url),
                None => client.get(url.clone()),
            };
            let answer = request.send().await.map_err(|e| transfer(&url, e))?;
            let status = answer.status();
            if status.is_success() {
                return Ok(answer);
            }
            if !status.is_redirection() {
                return Err(DownloadError::Status {
                    address: display_address(url.as_str()),
                    status,
                });
            }
            let location = answer.headers().get("location");
            url = location
                .and_then(|value| value.to_str().ok())
                .and_then(|text| url.join(text).ok())
                .filter(|next| matches!(next.scheme(), "http" | "https"))
                .ok_or_else(|| redirect(start))?;
        }
        Err(redirect(start))
    }
}

fn parse_url(address: &str) -> Result<Url, StepError> {
    let url =
        Url::parse(address).map_err(|_| source::malformed(address, "it is not a valid URL"))?;
    match url.scheme() {
        "http" | "https" => Ok(url),
        other => Err(source::refused_transport(address, other)),
    }
}

fn redirect(start: &Url) -> DownloadError {
    let address = display_address(start.as_str());
    let text = format!("`{address}` redirects too often or to no valid address");
    DownloadError::Other(StepError::user(text))
}

fn transfer(url: &Url, source: reqwest::Error) -> DownloadError {
    DownloadError::Transfer {
        address: display_address(url.as_str()),
        source: source.without_url(),
    }
}
