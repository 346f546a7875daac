//! The API server behind the front: requests are passed on as they came, as another user where they impersonate one.
//!
//! Whom a test restricts is impersonated, so that the server's own RBAC decides; everybody else asks as the
//! administrator whose credentials the front has.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Request, Response, header};
use hyper::body::Incoming;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client, Config};
use serde_json::Value;
use test_peers::wait;

use super::request::Target;
use super::status::ApiError;
use crate::rights::{Action, Rule, sentence};

/// More than the server takes of a body, so that it is the one who says so.
const BODY: usize = 64 * 1024 * 1024;

/// Why a request could not be handed on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpstreamError {
    #[error("the request has no readable body")]
    Body(#[from] axum::Error),
    #[error("the API server gave no answer")]
    NoAnswer(#[from] kube::Error),
}

/// A Role of a test, with its binding of the same name.
#[derive(Debug, Clone)]
struct Granted {
    namespace: String,
    name: String,
    rules: Vec<Rule>,
}

/// The way to the API server.
pub(crate) struct Upstream {
    client: Client,
    /// What those may do who are restricted.
    grants: Mutex<HashMap<String, Vec<Granted>>>,
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstream").finish_non_exhaustive()
    }
}

impl Upstream {
    pub(crate) fn new(mut config: Config) -> Result<Self, kube::Error> {
        // What a client gets to see, and whether it comes again, is its own affair.
        config.default_retry = false;
        config.read_timeout = None;
        Ok(Self {
            client: Client::try_from(config)?,
            grants: Mutex::default(),
        })
    }

    /// A client that goes past the front: unrecorded, untouched by faults.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    fn is_restricted(&self, identity: &str) -> bool {
        let grants = self.grants.lock().unwrap_or_else(PoisonError::into_inner);
        grants.contains_key(identity)
    }

    /// Hands a request on, and its answer back, a watch line by line.
    pub(crate) async fn answer(
        &self,
        identity: &str,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, UpstreamError> {
        let (mut parts, body) = request.into_parts();
        hop_by_hop(&mut parts.headers);
        parts.headers.remove(header::HOST);
        parts.headers.remove(header::AUTHORIZATION);
        if self.is_restricted(identity)
            && let Ok(name) = HeaderValue::from_str(identity)
        {
            parts.headers.insert("impersonate-user", name);
        }
        let body = axum::body::to_bytes(Body::new(body), BODY).await?;
        let request = Request::from_parts(parts, kube::client::Body::from(body));
        let (mut parts, body) = self.client.send(request).await?.into_parts();
        hop_by_hop(&mut parts.headers);
        Ok(Response::from_parts(parts, Body::new(body)))
    }

    /// The pod whose log is requested by a user who may read it.
    pub(crate) async fn pod_of_log(
        &self,
        identity: &str,
        target: &Target,
    ) -> Result<Result<Value, ApiError>, UpstreamError> {
        let action = action(target);
        if self.is_restricted(identity) && !self.allows(identity, &action).await? {
            let why = sentence(identity, &action);
            return Ok(Err(ApiError::forbidden("pods", &target.name, &why)));
        }
        let pods = Api::<Pod>::namespaced(self.client.clone(), &target.namespace);
        let pod = match pods.get(&target.name).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {
                return Ok(Err(ApiError::new(404, "NotFound", status.message)));
            }
            found => found?,
        };
        let pod = serde_json::to_value(&pod).map_err(kube::Error::SerdeError)?;
        Ok(Ok(pod))
    }

    async fn allows(&self, identity: &str, action: &Action<'_>) -> Result<bool, kube::Error> {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(identity.to_owned()),
                resource_attributes: Some(ResourceAttributes {
                    verb: some(action.verb),
                    group: some(action.group),
                    resource: some(action.resource),
                    subresource: some(action.subresource),
                    namespace: some(action.namespace),
                    name: some(action.name),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let answer = Api::<SubjectAccessReview>::all(self.client.clone())
            .create(&PostParams::default(), &review)
            .await?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }

    /// Makes a Role of these rules and binds it; returns when the server decides by it.
    pub(crate) async fn grant(
        &self,
        identity: &str,
        namespace: &str,
        rules: &[Rule],
    ) -> Result<(), kube::Error> {
        let granted = Granted {
            namespace: namespace.to_owned(),
            name: format!("{identity}-{}", uuid::Uuid::new_v4().simple()),
            rules: rules.to_vec(),
        };
        let (role, binding) = (role(&granted), binding(&granted, identity));
        let role_api = Api::<Role>::namespaced(self.client.clone(), namespace);
        let binding_api = Api::<RoleBinding>::namespaced(self.client.clone(), namespace);
        role_api.create(&PostParams::default(), &role).await?;
        binding_api.create(&PostParams::default(), &binding).await?;
        self.until(identity, &granted, true).await?;
        let mut grants = self.grants.lock().unwrap_or_else(PoisonError::into_inner);
        grants.entry(identity.to_owned()).or_default().push(granted);
        Ok(())
    }

    /// Takes back what was granted; returns when the server decides by it.
    pub(crate) async fn revoke(&self, identity: &str) -> Result<(), kube::Error> {
        let before = {
            let mut grants = self.grants.lock().unwrap_or_else(PoisonError::into_inner);
            grants.insert(identity.to_owned(), Vec::new())
        };
        for granted in before.into_iter().flatten() {
            let (client, namespace) = (self.client.clone(), &granted.namespace);
            Api::<RoleBinding>::namespaced(client.clone(), namespace)
                .delete(&granted.name, &DeleteParams::default())
                .await?;
            Api::<Role>::namespaced(client, namespace)
                .delete(&granted.name, &DeleteParams::default())
                .await?;
            self.until(identity, &granted, false).await?;
        }
        Ok(())
    }

    async fn until(
        &self,
        identity: &str,
        granted: &Granted,
        allowed: bool,
    ) -> Result<(), kube::Error> {
        for rule in granted.rules.iter().flat_map(Rule::singles) {
            let resource = rule.resources[0].as_str();
            let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
            let action = Action {
                verb: &rule.verbs[0],
                group: &rule.api_groups[0],
                resource,
                subresource,
                namespace: &granted.namespace,
                name: rule.resource_names.first().map_or("", String::as_str),
            };
            let has_effect = || async {
                match self.allows(identity, &action).await {
                    Ok(now) if now == allowed => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            };
            // The server's RBAC follows Roles by a watch of its own.
            let decided = wait::within(wait::DEADLINE, "the effect of a Role", has_effect).await;
            decided.map_err(|late| kube::Error::Service(Box::new(late)))?;
        }
        Ok(())
    }
}

fn action(target: &Target) -> Action<'_> {
    Action {
        verb: target.verb,
        group: &target.group,
        resource: &target.resource,
        subresource: &target.subresource,
        namespace: &target.namespace,
        name: &target.name,
    }
}

/// Headers of one connection; the other one has its own.
fn hop_by_hop(headers: &mut HeaderMap) {
    for name in [
        header::CONNECTION,
        header::TRANSFER_ENCODING,
        header::CONTENT_LENGTH,
        header::UPGRADE,
        header::TE,
    ] {
        headers.remove(name);
    }
}

fn role(granted: &Granted) -> Role {
    let some = |list: &[String]| (!list.is_empty()).then(|| list.to_vec());
    let rules = granted.rules.iter().map(|rule| PolicyRule {
        api_groups: some(&rule.api_groups),
        resources: some(&rule.resources),
        resource_names: some(&rule.resource_names),
        verbs: rule.verbs.clone(),
        non_resource_urls: None,
    });
    let mut role = Role {
        rules: Some(rules.collect()),
        ..Role::default()
    };
    role.metadata.name = Some(granted.name.clone());
    role
}

fn binding(granted: &Granted, identity: &str) -> RoleBinding {
    const GROUP: &str = "rbac.authorization.k8s.io";
    let mut binding = RoleBinding {
        role_ref: RoleRef {
            api_group: GROUP.to_owned(),
            kind: "Role".to_owned(),
            name: granted.name.clone(),
        },
        subjects: Some(vec![Subject {
            api_group: Some(GROUP.to_owned()),
            kind: "User".to_owned(),
            name: identity.to_owned(),
            namespace: None,
        }]),
        ..RoleBinding::default()
    };
    binding.metadata.name = Some(granted.name.clone());
    binding
}
