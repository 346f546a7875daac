//! Changes of objects under a condition. The client of `object_store` cannot ask for all of them, so a header is added to its
//! requests: also to the one that joins the parts of an object, and to the one that deletes it.
//!
//! Some services delete without a condition. There, [`Once`] keeps a second request for the same away from them.

mod once;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientOptions, HeaderValue, ObjectMeta, ObjectStore};
use reqwest::StatusCode;

use crate::clouds::connector::Connector;
use crate::error::element;
use crate::transfer::Condition;

pub(crate) use self::once::Once;

/// A header of a request.
pub(crate) type Header = (&'static str, HeaderValue);
type Made = object_store::Result<Arc<dyn ObjectStore>>;

/// What a client does with its requests that change an object.
#[derive(Clone, Debug)]
pub(crate) struct Manner {
    /// It adds this header.
    pub(crate) header: Option<Header>,
    /// It sends one request at most that may be done late.
    pub(crate) once: Option<Arc<Once>>,
}

/// What a service compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compared {
    Tag,
    /// The number of a write. Google Cloud Storage joins parts without a condition.
    Generation,
}

impl Compared {
    /// The header that asks for a condition; `None` if nothing is asked.
    pub(crate) fn header(self, condition: &Condition) -> Option<Header> {
        let generation = "x-goog-if-generation-match";
        match (self, condition) {
            (_, Condition::Any) => None,
            (Self::Tag, Condition::Absent) => {
                Some(("if-none-match", HeaderValue::from_static("*")))
            }
            (Self::Generation, Condition::Absent) => {
                Some((generation, HeaderValue::from_static("0")))
            }
            (Self::Tag, Condition::Version(tag)) => {
                // A proxy that compresses contents makes a tag weak. The service knows the strong one.
                let tag = tag.strip_prefix("W/").unwrap_or(tag);
                Some(("if-match", header_value(tag)))
            }
            (Self::Generation, Condition::Version(number)) => {
                Some((generation, header_value(number)))
            }
        }
    }
}

fn header_value(version: &str) -> HeaderValue {
    HeaderValue::from_str(version).expect("a version came in a header")
}

/// Makes clients that change objects only under a condition.
#[derive(Clone)]
pub(crate) struct Writers {
    compared: Compared,
    make: Arc<dyn Fn(Manner) -> Made + Send + Sync>,
}

impl fmt::Debug for Writers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writers")
            .field("compared", &self.compared)
            .finish_non_exhaustive()
    }
}

impl Writers {
    /// `make` makes a client that changes objects in this manner.
    pub(crate) fn new(
        compared: Compared,
        make: impl Fn(Manner) -> Made + Send + Sync + 'static,
    ) -> Self {
        let make = Arc::new(make);
        Self { compared, make }
    }

    /// A client for a condition; `None` if every client keeps it.
    pub(crate) fn client(
        &self,
        condition: &Condition,
    ) -> object_store::Result<Option<Arc<dyn ObjectStore>>> {
        let header = self.compared.header(condition);
        if header.is_none() {
            return Ok(None);
        }
        (self.make)(Manner { header, once: None }).map(Some)
    }

    /// A client for a condition that deletes with one request at most that may be done late.
    pub(crate) fn client_once(&self, condition: &Condition, once: &Arc<Once>) -> Made {
        (self.make)(Manner {
            header: self.compared.header(condition),
            once: Some(Arc::clone(once)),
        })
    }

    /// Whether parts can be joined under a condition.
    pub(crate) fn cover_parts(&self) -> bool {
        self.compared == Compared::Tag
    }

    /// The version of an object; empty if the service names none.
    pub(crate) fn version(&self, object: &ObjectMeta) -> String {
        let version = match self.compared {
            Compared::Tag => &object.e_tag,
            Compared::Generation => &object.version,
        };
        version.clone().unwrap_or_default()
    }
}

/// The requests of all clients with conditions to one service. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Requests {
    connector: Connector,
    options: ClientOptions,
    /// Made at its first use: only hubs ask for conditions.
    http: Arc<OnceLock<HttpClient>>,
    is_refused: Arc<[AtomicBool; KINDS]>,
}

impl Requests {
    pub(crate) fn new(connector: Connector, options: ClientOptions) -> Self {
        Self {
            connector,
            options,
            http: Arc::default(),
            is_refused: Arc::default(),
        }
    }

    /// The requests of one client that changes objects in this manner.
    pub(crate) fn with(&self, manner: Manner) -> object_store::Result<Conditional> {
        let http = if let Some(http) = self.http.get() {
            http.clone()
        } else {
            let made = self.connector.connect(&self.options)?;
            self.http.get_or_init(|| made).clone()
        };
        Ok(Conditional {
            http,
            manner,
            service: self.connector.service,
            is_refused: Arc::clone(&self.is_refused),
        })
    }
}

/// Sends requests. Those that change an object are sent in a manner of their own.
#[derive(Clone, Debug)]
pub(crate) struct Conditional {
    http: HttpClient,
    manner: Manner,
    service: &'static str,
    is_refused: Arc<[AtomicBool; KINDS]>,
}

impl HttpConnector for Conditional {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Conditional {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let Some(kind) = kind_of_change(&request) else {
            return self.http.execute(request).await;
        };
        let is_refused = &self.is_refused[kind];
        let asks = self.manner.header.as_ref();
        let Some((name, value)) = asks.filter(|_| !is_refused.load(Ordering::Relaxed)) else {
            return self.change(request).await;
        };
        let mut answer = self.change(asked(&request, name, value)).await?;
        if answer.status() == StatusCode::PRECONDITION_FAILED
            && let Some(bare) = without_quotes(value)
        {
            // Some services compare a tag without the quotes that they answer with. If it has changed, this fails too.
            answer = self.change(asked(&request, name, &bare)).await?;
        }
        if !matches!(answer.status().as_u16(), 400 | 501) {
            return Ok(answer);
        }
        let (head, body) = answer.into_parts();
        let body = body.bytes().await?;
        if !is_refusal(&body) {
            return Ok(HttpResponse::from_parts(head, body.into()));
        }
        // A state that nobody can write is worse than one that is written as before.
        if !is_refused.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                service = self.service,
                method = %request.method(),
                "the artifact store refuses conditions: a late write can replace a newer object"
            );
        }
        self.change(request).await
    }
}

impl Conditional {
    async fn change(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        match &self.manner.once {
            Some(once) => once.send(&self.http, request).await,
            None => self.http.execute(request).await,
        }
    }
}

fn asked(request: &HttpRequest, name: &'static str, value: &HeaderValue) -> HttpRequest {
    let mut request = request.clone();
    request.headers_mut().insert(name, value.clone());
    request
}

/// The tag in quotes.
fn without_quotes(tag: &HeaderValue) -> Option<HeaderValue> {
    let tag = tag.to_str().ok()?.strip_prefix('"')?.strip_suffix('"')?;
    HeaderValue::from_str(tag).ok()
}

/// How many kinds of requests change an object. A service may take conditions of some alone.
const KINDS: usize = 3;

/// The kind of a request by which an object appears, changes or goes. A part of it alone does not change it.
fn kind_of_change(request: &HttpRequest) -> Option<usize> {
    let query = request.uri().query().unwrap_or_default();
    let has = |name: &str| {
        let mut names = query.split('&').filter_map(|pair| pair.split('=').next());
        names.any(|known| known == name)
    };
    match request.method().as_str() {
        "PUT" if !has("partNumber") => Some(0),
        "POST" if has("uploadId") => Some(1),
        "DELETE" if !has("uploadId") => Some(2),
        _ => None,
    }
}

/// Whether the service itself says that it has no conditions.
fn is_refusal(body: &[u8]) -> bool {
    let text = std::str::from_utf8(body).unwrap_or_default();
    element(text, "Code") == Some("NotImplemented")
}
