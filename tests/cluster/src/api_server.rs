//! An API server in this process: objects in memory, the rules of a real one. The front gives it its requests.
//!
//! It stores and refuses; nothing happens by itself. Controllers and the pod runner are clients of it. What it does
//! not do: `OpenAPI` documents of types, tables for kubectl, protobuf but of what Helm sends, conversion between versions
//! (except events), admission other than service accounts of pods, and tracking of field owners that do not apply.

mod apply;
pub(crate) mod authorizer;
mod convert;
pub(crate) mod crud;
mod decode;
mod defaulting;
mod discovery;
mod patch;
mod protobuf;
pub(crate) mod request;
mod resource;
mod selector;
pub(crate) mod status;
mod storage;
pub(crate) mod validation;
mod view;
mod watch;

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{Method, Request, Response, header};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use authorizer::{Action, Authorizer};
use request::ApiRequest;
use selector::Selector;
use status::{ApiError, json_response};
use storage::Store;
use view::View;

const BODY: usize = 3 * 1024 * 1024;
/// The server; its watches end with `stop`.
#[derive(Debug)]
pub(crate) struct Server {
    store: Arc<Store>,
    pub(crate) authorizer: Authorizer,
    stop: CancellationToken,
}

impl Server {
    pub(crate) fn new(stop: CancellationToken) -> Self {
        let server = Self {
            store: Arc::new(Store::new()),
            authorizer: Authorizer::default(),
            stop,
        };
        server.make_namespaces();
        server
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

    pub(crate) async fn answer(
        &self,
        identity: &str,
        http: Request<Incoming>,
    ) -> Result<Response<Body>, ApiError> {
        let Some(request) = parsed(&http)? else {
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
            let found = discovery::answer(path, header_text(&http, &header::HOST));
            return found
                .map(|answer| json_response(200, &answer))
                .ok_or_else(ApiError::no_such_path);
        };
        self.authorize(identity, &request)?;
        let view = View::from_accept(header_text(&http, &header::ACCEPT))?;
        let content_type = header_text(&http, &header::CONTENT_TYPE);
        let content_type = content_type
            .split(';')
            .next()
            .unwrap_or("")
            .trim()
            .to_owned();
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
                    decoded(&content_type, &body)?
                };
                let options = crud::delete_options(&request, options)?;
                if request.verb == "delete" {
                    crud::delete(&self.store, &request, &options)?
                } else {
                    crud::delete_collection(&self.store, &request, &selector()?, &options)?
                }
            }
            verb => {
                let known = ["", "application/json", protobuf::MEDIA_TYPE];
                if !known.contains(&content_type.as_str()) {
                    return Err(ApiError::unsupported_media_type(&["application/json"]));
                }
                let object = decoded(&content_type, &body(http).await?)?;
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

    /// The pod whose log is asked for, by somebody who may read it.
    pub(crate) fn pod_of_log(
        &self,
        identity: &str,
        http: &Request<Incoming>,
    ) -> Result<Value, ApiError> {
        let request = parsed(http)?.ok_or_else(ApiError::no_such_path)?;
        self.authorize(identity, &request)?;
        Ok((*crud::get(&self.store, &request)?).clone())
    }

    fn authorize(&self, identity: &str, request: &ApiRequest) -> Result<(), ApiError> {
        let action = action(request);
        if self.authorizer.allows(identity, &action) {
            return Ok(());
        }
        Err(ApiError::refused(
            action.group,
            action.resource,
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

fn parsed(http: &Request<Incoming>) -> Result<Option<ApiRequest>, ApiError> {
    let uri = http.uri();
    request::parse(http.method(), uri.path(), uri.query().unwrap_or(""))
}

pub(crate) fn header_text<'a>(
    request: &'a Request<Incoming>,
    name: &header::HeaderName,
) -> &'a str {
    request
        .headers()
        .get(name)
        .and_then(|value| value.to_str().ok())
        .unwrap_or("")
}

fn decoded(content_type: &str, body: &Bytes) -> Result<Value, ApiError> {
    if content_type == protobuf::MEDIA_TYPE {
        protobuf::decode(body)
    } else {
        decode::json(body)
    }
}

async fn body(request: Request<Incoming>) -> Result<Bytes, ApiError> {
    axum::body::to_bytes(Body::new(request.into_body()), BODY)
        .await
        .map_err(|_| ApiError::too_large(BODY))
}
