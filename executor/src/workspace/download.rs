//! Fetches the tarball of a run without repository (contract 8.6). This module decides which servers get the platform's
//! token. It knows nothing of the tarball's content.

use std::fmt;
use std::fs::File;
use std::io::{self, Seek as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable as _};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use runtime::regular_file;
use tokio::io::AsyncWriteExt as _;
use url::{Origin, Url};

use super::ErrorKind;
use super::http::ProxySettings;
use super::source::{SourceError, display_address, local_path};

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
    /// The address of the relay.
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
    fn address(&self, url: &Url) -> Url {
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
pub enum DownloadError {
    /// The address is invalid.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A local tarball cannot be opened.
    #[error("could not open the content `{}`", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The HTTP client cannot be set up, for example because a proxy's address is malformed.
    #[error("could not set up the HTTP client")]
    Client(#[source] reqwest::Error),
    /// There is no answer, or an incomplete one.
    #[error("could not download the content from `{address}`")]
    Transfer {
        address: String,
        #[source]
        source: reqwest::Error,
    },
    /// The answer is not the content.
    #[error("`{address}` answered {status} instead of the content")]
    Status { address: String, status: StatusCode },
    /// The redirects form a circle, or have no valid target.
    #[error("`{address}` redirects too often or to no valid address")]
    Redirect { address: String },
    /// Larger than the limit.
    #[error("the content at `{address}` is larger than {limit} bytes")]
    TooLarge { address: String, limit: u64 },
    /// The spool file cannot be written.
    #[error("could not keep the downloaded content")]
    Keep(#[source] io::Error),
}

impl DownloadError {
    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            Self::Source(_) | Self::Open { .. } | Self::Redirect { .. } | Self::TooLarge { .. } => {
                ErrorKind::User
            }
            Self::Status { .. } if !self.is_transient() => ErrorKind::User,
            Self::Status { .. } | Self::Transfer { .. } | Self::Client(_) | Self::Keep(_) => {
                ErrorKind::Infrastructure
            }
        }
    }

    pub(super) fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Source(error) => error.hint(),
            Self::Status { status, .. } => match *status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    "the platform's token is sent only to the configured API host; check that the address is on it"
                }
                StatusCode::NOT_FOUND | StatusCode::GONE => {
                    "the uploaded configuration may have expired; start a new run"
                }
                _ => return None,
            },
            Self::Transfer { .. } => {
                "check the address, and the proxy and network policy of the executor"
            }
            Self::TooLarge { .. } => {
                "exclude what the run does not need with `.terraformignore`, or raise the limit of the executor"
            }
            Self::Keep(_) => "check the free space of the work directory",
            Self::Client(_) => "check the proxy variables of the executor",
            Self::Open { .. } | Self::Redirect { .. } => return None,
        };
        Some(hint.to_owned())
    }

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
            _ => false,
        }
    }
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
    pub(super) async fn open(&self, address: &str) -> Result<File, DownloadError> {
        let address = address.trim();
        if address.is_empty() {
            return Err(SourceError::Missing.into());
        }
        if let Some(path) = local_path(address) {
            return open_local(path);
        }
        let url = parse_url(address)?;
        let client = self.proxies.client().map_err(DownloadError::Client)?;
        let attempt = async || self.fetch(&client, &url).await;
        attempt
            .retry(
                ExponentialBuilder::default()
                    .with_min_delay(Duration::from_millis(200))
                    .with_max_times(2),
            )
            .when(DownloadError::is_transient)
            .await
    }

    async fn fetch(&self, client: &Client, url: &Url) -> Result<File, DownloadError> {
        let address = || display_address(url.as_str());
        let mut answer = self.follow(client, url).await?;
        let too_large = || DownloadError::TooLarge {
            address: address(),
            limit: self.max_bytes,
        };
        if answer
            .content_length()
            .is_some_and(|length| length > self.max_bytes)
        {
            return Err(too_large());
        }
        let file = tempfile::tempfile_in(self.folder).map_err(DownloadError::Keep)?;
        let mut file = tokio::fs::File::from_std(file);
        let mut received = 0;
        while let Some(chunk) = answer.chunk().await.map_err(|e| transfer(url, e))? {
            received += chunk.len() as u64;
            if received > self.max_bytes {
                return Err(too_large());
            }
            file.write_all(&chunk).await.map_err(DownloadError::Keep)?;
        }
        file.flush().await.map_err(DownloadError::Keep)?;
        let mut file = file.into_std().await;
        file.rewind().map_err(DownloadError::Keep)?;
        Ok(file)
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

fn open_local(path: PathBuf) -> Result<File, DownloadError> {
    regular_file::open(&path).map_err(|source| DownloadError::Open { path, source })
}

fn parse_url(address: &str) -> Result<Url, SourceError> {
    let malformed = |reason| SourceError::Malformed {
        address: display_address(address),
        reason,
    };
    let url = Url::parse(address).map_err(|_| malformed("it is not a valid URL"))?;
    match url.scheme() {
        "http" | "https" => Ok(url),
        other => Err(SourceError::Transport {
            address: display_address(address),
            transport: other.to_owned(),
        }),
    }
}

fn redirect(start: &Url) -> DownloadError {
    DownloadError::Redirect {
        address: display_address(start.as_str()),
    }
}

fn transfer(url: &Url, source: reqwest::Error) -> DownloadError {
    DownloadError::Transfer {
        address: display_address(url.as_str()),
        source: source.without_url(),
    }
}
