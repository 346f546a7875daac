//! From a method and a path to what is asked: verb, resource, namespace, name, options. What is not served is no concern of it.

use std::collections::HashMap;

use axum::http::Method;

use super::status::ApiError;

/// What a method and a path ask for, whether or not it is served.
#[derive(Debug, Clone, Default)]
pub(crate) struct Target {
    pub(crate) verb: &'static str,
    pub(crate) group: String,
    pub(crate) resource: String,
    pub(crate) subresource: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
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

fn percent_decoded(text: &str, plus_is_space: bool) -> String {
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

/// What is asked for, or nothing where the path is not one of resources. The verb is empty where the method has none.
pub(crate) fn target(method: &Method, path: &str, query: &Query) -> Option<Target> {
    let parts: Vec<String> = path
        .split('/')
        .filter(|part| !part.is_empty())
        .map(|part| percent_decoded(part, false))
        .collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let (group, rest) = match parts.as_slice() {
        ["api", _, rest @ ..] if !rest.is_empty() => ("", rest),
        ["apis", group, _, rest @ ..] if !rest.is_empty() => (*group, rest),
        _ => return None,
    };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() && rest[0] != "status" => {
            (*namespace, rest)
        }
        rest => ("", rest),
    };
    let part = |at: usize| rest.get(at).copied().unwrap_or("").to_owned();
    let subresource = rest.get(2..).unwrap_or_default().join("/");
    Some(Target {
        verb: verb(method, &part(1), query),
        group: group.to_owned(),
        resource: part(0),
        subresource,
        namespace: namespace.to_owned(),
        name: part(1),
    })
}

fn verb(method: &Method, name: &str, query: &Query) -> &'static str {
    match (method.as_str(), name.is_empty()) {
        ("GET" | "HEAD", _) if query.flag("watch") => "watch",
        ("GET" | "HEAD", true) => "list",
        ("GET" | "HEAD", false) => "get",
        ("POST", _) => "create",
        ("PUT", false) => "update",
        ("PATCH", false) => "patch",
        ("DELETE", true) => "deletecollection",
        ("DELETE", false) => "delete",
        _ => "",
    }
}
