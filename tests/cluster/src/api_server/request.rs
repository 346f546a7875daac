//! From a method and a path to what is asked: verb, resource, namespace, name, options.

use std::collections::HashMap;

use axum::http::Method;

use super::resource::ResourceType;
use super::status::ApiError;

/// A request for a resource.
#[derive(Debug, Clone)]
pub(crate) struct ApiRequest {
    pub(crate) verb: &'static str,
    pub(crate) resource: &'static ResourceType,
    pub(crate) subresource: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) query: Query,
}

/// The options behind `?`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Query(HashMap<String, String>);

impl Query {
    pub(crate) fn parse(text: &str) -> Self {
        Self(form(text))
    }

    pub(crate) fn get(&self, key: &str) -> &str {
        self.0.get(key).map_or("", String::as_str)
    }

    pub(crate) fn flag(&self, key: &str) -> bool {
        matches!(self.get(key), "true" | "1")
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<u64>, ApiError> {
        let text = self.get(key);
        if text.is_empty() {
            return Ok(None);
        }
        text.parse()
            .map(Some)
            .map_err(|_| ApiError::bad_request(format!("invalid value for `{key}`: \"{text}\"")))
    }
}

fn form(text: &str) -> HashMap<String, String> {
    text.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (percent_decoded(key, true), percent_decoded(value, true))
        })
        .collect()
}

pub(crate) fn percent_decoded(text: &str, plus_is_space: bool) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = (bytes[at] == b'%')
            .then(|| {
                text.get(at + 1..at + 3)
                    .and_then(|digits| u8::from_str_radix(digits, 16).ok())
            })
            .flatten();
        match (hex, bytes[at]) {
            (Some(byte), _) => {
                out.push(byte);
                at += 2;
            }
            (None, b'+') if plus_is_space => out.push(b' '),
            (None, byte) => out.push(byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The resource named by a path, or nothing where the path is not one of resources.
pub(crate) fn parse(
    method: &Method,
    path: &str,
    query: &str,
) -> Result<Option<ApiRequest>, ApiError> {
    let parts: Vec<String> = path
        .split('/')
        .filter(|part| !part.is_empty())
        .map(|part| percent_decoded(part, false))
        .collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let (group, version, rest) = match parts.as_slice() {
        ["api", version, rest @ ..] if !rest.is_empty() => ("", *version, rest),
        ["apis", group, version, rest @ ..] if !rest.is_empty() => (*group, *version, rest),
        _ => return Ok(None),
    };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() && rest[0] != "status" => {
            (*namespace, rest)
        }
        rest => ("", rest),
    };
    let (plural, name, subresource) = match rest {
        [plural] => (*plural, "", ""),
        [plural, name] => (*plural, *name, ""),
        [plural, name, subresource] => (*plural, *name, *subresource),
        _ => return Err(ApiError::no_such_path()),
    };
    let resource = ResourceType::find(group, version, plural).ok_or_else(ApiError::no_such_path)?;
    if resource.namespaced == namespace.is_empty() && !(resource.namespaced && name.is_empty()) {
        return Err(ApiError::no_such_path());
    }
    let query = Query::parse(query);
    let verb = verb(method, name, &query)?;
    let served = resource
        .verbs_of(subresource)
        .ok_or_else(ApiError::no_such_path)?;
    if !served.contains(&verb) {
        return Err(ApiError::method_not_allowed());
    }
    if resource.namespaced && namespace.is_empty() && !matches!(verb, "list" | "watch") {
        return Err(ApiError::method_not_allowed());
    }
    Ok(Some(ApiRequest {
        verb,
        resource,
        subresource: subresource.to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        query,
    }))
}

fn verb(method: &Method, name: &str, query: &Query) -> Result<&'static str, ApiError> {
    Ok(match (method.as_str(), name.is_empty()) {
        ("GET" | "HEAD", true) if query.flag("watch") => "watch",
        ("GET" | "HEAD", true) => "list",
        ("GET" | "HEAD", false) if query.flag("watch") => "watch",
        ("GET" | "HEAD", false) => "get",
        ("POST", _) => "create",
        ("PUT", false) => "update",
        ("PATCH", false) => "patch",
        ("DELETE", true) => "deletecollection",
        ("DELETE", false) => "delete",
        _ => return Err(ApiError::method_not_allowed()),
    })
}
