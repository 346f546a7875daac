//! An API server in this process: HTTP on loopback, objects in memory, the rules of a real one.
//!
//! It stores and refuses; nothing happens by itself. Controllers and the pod runner are clients of it. What it does
//! not do: `OpenAPI` documents, tables for kubectl, protobuf, conversion between versions (except events), admission
//! other than service accounts of pods, and tracking of field owners that do not apply.

mod apply;
pub(crate) mod authorizer;
mod convert;
pub(crate) mod crud;
mod decode;
mod defaulting;
mod discovery;
pub(crate) mod faults;
pub(crate) mod logs;
mod patch;
pub(crate) mod recorder;
mod request;
mod resource;
mod selector;
mod status;
mod storage;
mod validation;
mod view;
mod watch;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{Method, Request, Response, header};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use authorizer::{ADMIN, Action, Authorizer};
use faults::{Fault, Faults};
use logs::Logs;
use recorder::Recorder;
use request::ApiRequest;
use resource::ResourceType;
use selector::Selector;
use status::{ApiError, json_response};
use storage::Store;
use view::View;

const BODY: usize = 3 * 1024 * 1024;
const TOKEN: &str = "token-of-";

/// The bearer token of an identity.
pub(crate) fn token(identity: &str) -> String {
    format!("{TOKEN}{identity}")
}

/// A request that gets no answer: its connection ends.
#[derive(Debug, thiserror::Error)]
#[error("connection dropped")]
struct Dropped;

/// The server; lives as long as its listener task.
#[derive(Debug)]
pub(crate) struct Server {
    store: Arc<Store>,
    pub(crate) authorizer: Authorizer,
    pub(crate) recorder: Recorder,
    pub(crate) faults: Arc<Faults>,
    pub(crate) logs: Arc<Logs>,
    address: SocketAddr,
    stop: CancellationToken,
}

impl Server {
    /// Listens on a free port of loopback until `stop`.
    pub(crate) async fn start(stop: CancellationToken) -> io::Result<Arc<Self>> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let server = Arc::new(Self {
            store: Arc::new(Store::new()),
            authorizer: Authorizer::default(),
            recorder: Recorder::default(),
            faults: Arc::default(),
            logs: Arc::default(),
            address: listener.local_addr()?,
            stop,
        });
        server.make_namespaces();
        tokio::spawn(Arc::clone(&server).accept(listener));
        Ok(server)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn compact(&self) {
        self.store.compact();
    }

    fn make_namespaces(&self) {
        for name in ["default", "kube-system"] {
            let namespace = json!({"metadata": {"name": name}});
            if let Ok(Some(request)) = request::parse(&Method::POST, "/api/v1/namespaces", "") {
                // An empty store refuses nothing.
                let _ = crud::create(&self.store, &request, namespace);
            }
        }
    }

    async fn accept(self: Arc<Self>, listener: TcpListener) {
        loop {
            let connection = tokio::select! {
                connection = listener.accept() => connection,
                () = self.stop.cancelled() => return,
            };
            let Ok((stream, _)) = connection else {
                continue;
            };
            let server = Arc::clone(&self);
            tokio::spawn(async move {
                let stop = server.stop.clone();
                let service = hyper::service::service_fn(move |request| {
                    let server = Arc::clone(&server);
                    async move { server.serve(request).await }
                });
                let io = hyper_util::rt::TokioIo::new(stream);
                let serving =
                    hyper::server::conn::http1::Builder::new().serve_connection(io, service);
                tokio::select! {
                    // A client that goes away is no concern of the server.
                    _ = serving => {}
                    () = stop.cancelled() => {}
                }
            });
        }
    }

    async fn serve(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Dropped> {
        let identity = match identity(&request) {
            Ok(identity) => identity,
            Err(error) => return Ok(error.response()),
        };
        let path = request.uri().path().to_owned();
        let query = request.uri().query().unwrap_or("").to_owned();
        let parsed = request::parse(request.method(), &path, &query);
        let entry = entry(
            &identity,
            &path,
            &query,
            parsed.as_ref().ok().and_then(Option::as_ref),
        );
        let fault = self.faults.take(&entry);
        let at = self.recorder.begin(entry);
        let response = match fault {
            Some(Fault::Hang) => {
                self.stop.cancelled().await;
                return Err(Dropped);
            }
            Some(Fault::DropBefore) => return Err(Dropped),
            Some(Fault::DropAfter) => {
                let _ = self.answer(&identity, request, parsed).await;
                return Err(Dropped);
            }
            Some(fault) => {
                refusal(&fault, parsed.as_ref().ok().and_then(Option::as_ref)).response()
            }
            None => self
                .answer(&identity, request, parsed)
                .await
                .unwrap_or_else(|error| error.response()),
        };
        self.recorder.answered(at, response.status().as_u16());
        Ok(response)
    }

    async fn answer(
        &self,
        identity: &str,
        http: Request<Incoming>,
        parsed: Result<Option<ApiRequest>, ApiError>,
    ) -> Result<Response<Body>, ApiError> {
        let Some(request) = parsed? else {
            let path = http.uri().path();
            if matches!(path, "/healthz" | "/livez" | "/readyz") {
                return Ok(Response::new(Body::from("ok")));
            }
            if http.method() != Method::GET {
                return Err(ApiError::forbidden_path(
                    identity,
                    &http.method().as_str().to_lowercase(),
                    path,
                ));
            }
            let found = discovery::answer(path, &self.address.to_string());
            return found
                .map(|answer| json_response(200, &answer))
                .ok_or_else(ApiError::no_such_path);
        };
        self.authorize(identity, &request)?;
        let view = View::from_accept(header_text(&http, header::ACCEPT));
        let content_type = header_text(&http, header::CONTENT_TYPE);
        let content_type = content_type
            .split(';')
            .next()
            .unwrap_or("")
            .trim()
            .to_owned();
        if request.subresource == "log" {
            let pod = crud::get(&self.store, &request)?;
            return logs::answer(&self.logs, &request, &pod);
        }
        let view = view?;
        let query = &request.query;
        let selector = || {
            Selector::parse(
                request.resource,
                query.get("labelSelector"),
                query.get("fieldSelector"),
            )
        };
        let (code, object) = match request.verb {
            "watch" => {
                let selector = selector()?;
                return watch::watch(&self.store, request, selector, view, self.stop.clone());
            }
            "get" => {
                let object = crud::get(&self.store, &request)?;
                (200, convert::out(request.resource, &object).into_owned())
            }
            "list" => {
                let (code, list) = crud::list(&self.store, &request, &selector()?, view)?;
                return Ok(json_response(code, &list));
            }
            "patch" => {
                let kind = crud::PatchType::from_content_type(&content_type)?;
                let body = body(http).await?;
                let patch: Value = serde_json::from_slice(&body).map_err(|error| {
                    ApiError::bad_request(format!("error decoding patch: {error}"))
                })?;
                crud::patch(&self.store, &request, kind, &patch)?
            }
            "delete" | "deletecollection" => {
                let body = body(http).await?;
                let options = if body.is_empty() {
                    Value::Null
                } else {
                    decode::json(&body)?
                };
                let options = crud::delete_options(&request, options)?;
                if request.verb == "delete" {
                    crud::delete(&self.store, &request, &options)?
                } else {
                    crud::delete_collection(&self.store, &request, &selector()?, &options)?
                }
            }
            verb => {
                if !matches!(content_type.as_str(), "" | "application/json") {
                    return Err(ApiError::unsupported_media_type(&["application/json"]));
                }
                let object = decode::json(&body(http).await?)?;
                match (verb, request.resource.kind) {
                    ("create", "SelfSubjectAccessReview") => {
                        (201, self.review(identity, &request, object)?)
                    }
                    ("create", _) => crud::create(&self.store, &request, object)?,
                    _ => crud::update(&self.store, &request, object)?,
                }
            }
        };
        Ok(json_response(code, &view.object(&object)))
    }

    fn authorize(&self, identity: &str, request: &ApiRequest) -> Result<(), ApiError> {
        let action = action(request);
        if self.authorizer.allows(identity, &action) {
            return Ok(());
        }
        Err(ApiError::refused(
            request.resource,
            &request.name,
            &authorizer::sentence(identity, &action),
        ))
    }

    fn review(&self, identity: &str, request: &ApiRequest, body: Value) -> Result<Value, ApiError> {
        let mut review = decode::object(request.resource, body)?;
        let asked = review["spec"]["resourceAttributes"].clone();
        let text = |field: &str| asked[field].as_str().unwrap_or("").to_owned();
        let (verb, group, resource, subresource, namespace, name) = (
            text("verb"),
            text("group"),
            text("resource"),
            text("subresource"),
            text("namespace"),
            text("name"),
        );
        let action = Action {
            verb: &verb,
            group: &group,
            resource: &resource,
            subresource: &subresource,
            namespace: &namespace,
            name: &name,
        };
        review["status"] = json!({"allowed": self.authorizer.allows(identity, &action)});
        Ok(review)
    }
}

fn action(request: &ApiRequest) -> Action<'_> {
    Action {
        verb: request.verb,
        group: request.resource.group,
        resource: request.resource.plural,
        subresource: &request.subresource,
        namespace: &request.namespace,
        name: &request.name,
    }
}

fn header_text(request: &Request<Incoming>, name: header::HeaderName) -> &str {
    request
        .headers()
        .get(name)
        .and_then(|value| value.to_str().ok())
        .unwrap_or("")
}

/// Who asks. kubectl sends no token over plain HTTP, so that a request without one is the admin's.
fn identity(request: &Request<Incoming>) -> Result<String, ApiError> {
    let given = header_text(request, header::AUTHORIZATION);
    if given.is_empty() {
        return Ok(ADMIN.to_owned());
    }
    let identity = given
        .strip_prefix("Bearer ")
        .and_then(|token| token.strip_prefix(TOKEN));
    identity
        .map(str::to_owned)
        .ok_or_else(ApiError::unauthorized)
}

fn entry(
    identity: &str,
    path: &str,
    query: &str,
    request: Option<&ApiRequest>,
) -> recorder::Request {
    let mark = if query.is_empty() { "" } else { "?" };
    recorder::Request {
        identity: identity.to_owned(),
        verb: request.map_or("get", |request| request.verb).to_owned(),
        group: request
            .map_or("", |request| request.resource.group)
            .to_owned(),
        resource: request
            .map_or("", |request| request.resource.plural)
            .to_owned(),
        subresource: request
            .map_or("", |request| &request.subresource)
            .to_owned(),
        namespace: request.map_or("", |request| &request.namespace).to_owned(),
        name: request.map_or("", |request| &request.name).to_owned(),
        path: format!("{path}{mark}{query}"),
        status: 0,
    }
}

fn refusal(fault: &Fault, request: Option<&ApiRequest>) -> ApiError {
    let about = request.map_or(&resource::RESOURCES[0], |request| request.resource);
    let name = request.map_or("", |request| &request.name);
    match fault {
        Fault::TooManyRequests(seconds) => ApiError::too_many_requests(*seconds),
        Fault::Unavailable => ApiError::new(
            503,
            "ServiceUnavailable",
            "the server is currently unable to handle the request",
        ),
        Fault::QuotaExceeded => {
            let what = quota_name(about);
            let why = format!(
                "exceeded quota: runs, requested: {what}=1, used: {what}=1, limited: {what}=1"
            );
            ApiError::refused(about, name, &why)
        }
        Fault::AdmissionRefused(why) => ApiError::new(
            403,
            "Forbidden",
            format!("admission webhook \"policy.example.com\" denied the request: {why}"),
        ),
        _ => ApiError::internal("ordered by a test"),
    }
}

fn quota_name(resource: &ResourceType) -> String {
    if resource.group.is_empty() {
        resource.plural.to_owned()
    } else {
        format!("count/{}", resource.qualified())
    }
}

async fn body(request: Request<Incoming>) -> Result<Bytes, ApiError> {
    axum::body::to_bytes(Body::new(request.into_body()), BODY)
        .await
        .map_err(|_| ApiError::too_large(BODY))
}
