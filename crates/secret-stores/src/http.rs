//! Requests to stores and their token services: with limits on time and size, without redirects, and retried only if the
//! service is unavailable. Text of responses never gets into errors.

use std::net::IpAddr;
use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Certificate, Identity, Method, Url};
use secrecy::{ExposeSecret as _, SecretSlice, SecretString};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep};
use url::Host;

use crate::error::{ErrorClass, ReadError};
use crate::reference::StoreKind;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// The largest response: secrets have 64 KiB, and a document around them.
const MAX_BYTES: usize = 1024 * 1024;
const MAX_RETRIES: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(4);
/// A store that wants to be asked later than this is asked no more: no clock can tell all times that it may name.
const LONGEST_ANSWER: Duration = Duration::from_hours(1);
/// From this difference on, the clock may be why a signature or a token is refused.
const MAX_SKEW: Duration = Duration::from_mins(5);

/// Sends requests.
#[derive(Clone, Debug)]
pub struct Http {
    /// By the proxy of the executor's own environment, if there is one.
    usual: reqwest::Client,
    /// For this machine, its metadata services and its pod's agents.
    direct: reqwest::Client,
}

/// What a client trusts and presents beside the usual.
#[derive(Clone, Debug, Default)]
pub struct TlsSettings {
    /// More authorities, in PEM.
    pub authorities: Option<String>,
    /// Certificate and key of the client, in PEM.
    pub identity: Option<SecretString>,
}

/// One request.
#[derive(Debug)]
pub struct Request {
    pub method: Method,
    pub url: Url,
    headers: Vec<(&'static str, SecretString)>,
    body: Option<SecretString>,
}

impl Request {
    pub const fn new(method: Method, url: Url) -> Self {
        Self {
            method,
            url,
            headers: Vec::new(),
            body: None,
        }
    }

    #[must_use]
    pub fn header(mut self, name: &'static str, value: impl Into<SecretString>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    #[must_use]
    pub fn bearer(self, token: &SecretString) -> Self {
        self.header("authorization", format!("Bearer {}", token.expose_secret()))
    }

    #[must_use]
    pub fn body(mut self, media_type: &'static str, body: impl Into<SecretString>) -> Self {
        self.body = Some(body.into());
        self.header("content-type", media_type)
    }

    #[must_use]
    pub fn json(self, document: &serde_json::Value) -> Self {
        self.body("application/json", document.to_string())
    }

    #[must_use]
    pub fn form(self, pairs: &[(&str, &str)]) -> Self {
        let mut form = url::form_urlencoded::Serializer::new(String::new());
        let body = form.extend_pairs(pairs).finish();
        self.body("application/x-www-form-urlencoded", body)
    }
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    body: SecretSlice<u8>,
}

impl Answer {
    pub const fn is_success(&self) -> bool {
        self.status >= 200 && self.status < 300
    }

    /// The text of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The document in a response. Its text does not get into the error.
    pub fn json<T: DeserializeOwned>(&self, store: StoreKind) -> Result<T, ReadError> {
        serde_json::from_slice(self.body.expose_secret()).map_err(|_| self.foreign(store))
    }

    /// The document, or `None` if the body is none.
    pub fn document(&self) -> Option<serde_json::Value> {
        serde_json::from_slice(self.body.expose_secret()).ok()
    }

    pub(crate) fn text(&self) -> Option<&str> {
        std::str::from_utf8(self.body.expose_secret()).ok()
    }

    /// The error for a response that is not what the store's interface has.
    pub fn foreign(&self, store: StoreKind) -> ReadError {
        let detail = format!(
            "status {} with a body that is not of this store",
            self.status
        );
        ReadError::new(store, ErrorClass::Unusable, detail)
    }

    /// The error for a status, with a code of the store.
    pub fn refused(&self, store: StoreKind, class: ErrorClass, code: &str) -> ReadError {
        let mut detail = format!("status {}", self.status);
        // A code has no blanks. Anything else could be text of the secret.
        let is_code = |code: &str| {
            code.len() <= 64
                && code
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
        };
        if !code.is_empty() && is_code(code) {
            detail = format!("{code}, {detail}");
        }
        if class == ErrorClass::CredentialsRejected && self.clock_is_wrong() {
            detail.push_str("; the clocks differ by more than five minutes");
        }
        ReadError {
            retry_after: self.retry_after(),
            ..ReadError::new(store, class, detail)
        }
    }

    /// The error for a login, with a code of the service.
    pub fn login_refused(&self, store: StoreKind, code: &str) -> ReadError {
        let class = match self.usual_class() {
            ErrorClass::Unavailable => ErrorClass::Unavailable,
            _ => ErrorClass::CredentialsRejected,
        };
        self.refused(store, class, code)
    }

    /// The class of a status that means the same everywhere.
    pub const fn usual_class(&self) -> ErrorClass {
        match self.status {
            401 => ErrorClass::CredentialsRejected,
            403 => ErrorClass::Denied,
            404 => ErrorClass::NotFound,
            429 | 500.. => ErrorClass::Unavailable,
            _ => ErrorClass::Unusable,
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        let seconds = self.headers.get(RETRY_AFTER)?.to_str().ok()?;
        let seconds: u64 = seconds.trim().parse().ok()?;
        Some(Duration::from_secs(seconds).min(LONGEST_ANSWER))
    }

    fn clock_is_wrong(&self) -> bool {
        let date = self.header("date");
        let Some(theirs) = date.and_then(|date| httpdate::parse_http_date(date).ok()) else {
            return false;
        };
        let now = std::time::SystemTime::now();
        let skew = now
            .duration_since(theirs)
            .unwrap_or_else(|behind| behind.duration());
        skew > MAX_SKEW
    }
}

impl Http {
    /// # Errors
    /// Says which certificates cannot be used.
    pub fn new(tls: &TlsSettings) -> Result<Self, String> {
        let builder = || {
            let mut builder = reqwest::Client::builder()
                .redirect(Policy::none())
                .connect_timeout(CONNECT_TIMEOUT)
                .timeout(REQUEST_TIMEOUT)
                .user_agent(concat!("mayfly/", env!("CARGO_PKG_VERSION")));
            if let Some(pem) = &tls.authorities {
                let authorities = Certificate::from_pem_bundle(pem.as_bytes())
                    .map_err(|_| "the authorities are no PEM certificates")?;
                builder = builder.tls_certs_merge(authorities);
            }
            if let Some(pem) = &tls.identity {
                let identity = Identity::from_pem(pem.expose_secret().as_bytes()).map_err(
                    |_| "the certificate and the key of the client are no PEM without a passphrase",
                )?;
                builder = builder.identity(identity);
            }
            Ok::<_, String>(builder)
        };
        let build =
            |builder: reqwest::ClientBuilder| builder.build().map_err(|error| error.to_string());
        Ok(Self {
            usual: build(builder()?)?,
            direct: build(builder()?.no_proxy())?,
        })
    }

    /// Sends a request once.
    pub async fn send(&self, store: StoreKind, request: &Request) -> Result<Answer, ReadError> {
        self.send_at_most(store, request, REQUEST_TIMEOUT).await
    }

    /// Sends a request once, with a limit on its time.
    pub async fn send_at_most(
        &self,
        store: StoreKind,
        request: &Request,
        limit: Duration,
    ) -> Result<Answer, ReadError> {
        let place = place(&request.url);
        let client = match place {
            Place::Here => &self.direct,
            Place::Elsewhere if request.url.scheme() == "https" => &self.usual,
            Place::Elsewhere => {
                let detail = "only `https` is allowed for other machines";
                return Err(ReadError::new(store, ErrorClass::NotConfigured, detail));
            }
        };
        let mut outgoing = client
            .request(request.method.clone(), request.url.clone())
            .timeout(limit);
        for (name, value) in &request.headers {
            let invalid = || {
                ReadError::new(
                    store,
                    ErrorClass::NotConfigured,
                    format!("the value of the header `{name}` has control characters"),
                )
            };
            let mut value = HeaderValue::from_str(value.expose_secret()).map_err(|_| invalid())?;
            value.set_sensitive(true);
            outgoing = outgoing.header(HeaderName::from_static(name), value);
        }
        if let Some(body) = &request.body {
            outgoing = outgoing.body(body.expose_secret().to_owned());
        }
        let host = request.url.host_str().unwrap_or_default().to_owned();
        let unreachable = |error: &reqwest::Error| {
            let what = if error.is_timeout() {
                "no response in time"
            } else if error.is_connect() {
                "no connection, or no valid certificate"
            } else {
                "the connection broke"
            };
            ReadError::new(store, ErrorClass::Unreachable, format!("{host}: {what}"))
        };
        let mut response = outgoing.send().await.map_err(|error| unreachable(&error))?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let mut body = Vec::new();
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| unreachable(&error))?
        {
            if body.len() + chunk.len() > MAX_BYTES {
                return Err(ReadError::new(
                    store,
                    ErrorClass::Unusable,
                    "the response is larger than 1 MiB",
                ));
            }
            body.extend_from_slice(&chunk);
        }
        let answer = Answer {
            status,
            headers,
            body: body.into(),
        };
        if (300..400).contains(&status) {
            let detail = "it answers with a redirect, which is not followed";
            return Err(answer
                .refused(store, ErrorClass::NotConfigured, "")
                .with_detail(detail));
        }
        Ok(answer)
    }
}

impl ReadError {
    fn with_detail(mut self, detail: &str) -> Self {
        detail.clone_into(&mut self.detail);
        self
    }
}

/// Repeats an attempt while the service is unavailable, until the deadline.
pub async fn with_retries<T>(
    deadline: Instant,
    attempt: impl AsyncFn() -> Result<T, ReadError>,
) -> Result<T, ReadError> {
    let mut retries = 0;
    loop {
        let error = match attempt().await {
            Err(error) if error.class.is_transient() && retries < MAX_RETRIES => error,
            done => return done,
        };
        let most = (FIRST_PAUSE * 2u32.pow(retries)).min(LONGEST_PAUSE);
        let pause = error
            .retry_after
            .unwrap_or_else(|| most.mul_f64(fastrand::f64()));
        if Instant::now() + pause >= deadline {
            return Err(error);
        }
        retries += 1;
        sleep(pause).await;
    }
}

/// Where a host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// On this machine or next to it. No proxy leads there, and plain HTTP is safe.
    Here,
    Elsewhere,
}

/// Addresses of the clouds' metadata services and identity agents.
const NEXT_TO_US: [&str; 4] = [
    "169.254.169.254",
    "169.254.170.2",
    "169.254.170.23",
    "fd00:ec2::23",
];

fn place(url: &Url) -> Place {
    let is_here = match url.host() {
        Some(Host::Ipv4(address)) => is_next_to_us(address.into()),
        Some(Host::Ipv6(address)) => is_next_to_us(address.into()),
        Some(Host::Domain(name)) => ["localhost", "metadata.google.internal"].contains(&name),
        None => false,
    };
    if is_here {
        Place::Here
    } else {
        Place::Elsewhere
    }
}

fn is_next_to_us(address: IpAddr) -> bool {
    address.is_loopback() || NEXT_TO_US.iter().any(|known| known.parse() == Ok(address))
}

#[cfg(test)]
mod tests {
    use test_peers::clock::hold_clock;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::advance;

    use super::*;

    /// Each byte comes in time, and the answer does not.
    #[tokio::test(start_paused = true)]
    async fn the_limit_is_for_the_whole_answer() {
        // Only the server moves the clock.
        let held = hold_clock();
        let limit = Duration::from_secs(5);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await.unwrap();
            let start = b"HTTP/1.1 200 Yes\r\nContent-Length: 1000\r\n\r\n";
            stream.write_all(start).await.unwrap();
            while stream.write_all(b"x").await.is_ok() {
                advance(limit / 20).await;
            }
        });
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = Http::new(&TlsSettings::default()).unwrap();
        let request = Request::new(Method::GET, Url::parse(&url).unwrap());
        let began = Instant::now();
        let error = http.send_at_most(StoreKind::Vault, &request, limit).await;
        let error = error.unwrap_err();
        assert_eq!(error.class, ErrorClass::Unreachable);
        assert!(error.detail.ends_with("no response in time"), "{error}");
        let took = began.elapsed();
        assert!((limit..2 * limit).contains(&took), "{took:?}");
        server.await.unwrap();
        drop(held);
    }

    #[test]
    fn only_this_machine_and_its_agents_are_asked_without_tls_and_proxy() {
        for (url, expected) in [
            ("http://127.0.0.1:8200", Place::Here),
            ("http://[::1]", Place::Here),
            ("http://[fd00:ec2::23]/v1/credentials", Place::Here),
            ("http://169.254.170.23", Place::Here),
            ("http://metadata.google.internal", Place::Here),
            ("http://169.254.169.255", Place::Elsewhere),
            ("http://localhost.evil.com", Place::Elsewhere),
            ("https://vault.example.test", Place::Elsewhere),
        ] {
            assert_eq!(place(&Url::parse(url).unwrap()), expected, "{url}");
        }
    }
}
