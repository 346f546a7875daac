//! Label and field selectors, in lists and watches.

use serde_json::Value;

use super::resource::ResourceType;
use super::status::ApiError;

#[derive(Debug, Clone)]
enum Requirement {
    Exists(String),
    Absent(String),
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
}

/// What a list or a watch wants to see.
#[derive(Debug, Clone, Default)]
pub(crate) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<(String, String, bool)>,
}

impl Selector {
    pub(crate) fn parse(
        resource: &ResourceType,
        labels: &str,
        fields: &str,
    ) -> Result<Self, ApiError> {
        Ok(Self {
            labels: parse_labels(labels)?,
            fields: parse_fields(resource, fields)?,
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.labels
            .iter()
            .all(|requirement| requirement.matches(labels))
            && self
                .fields
                .iter()
                .all(|(path, value, equal)| (field(object, path) == *value) == *equal)
    }
}

impl Requirement {
    fn matches(&self, labels: &Value) -> bool {
        let has = |key: &str, values: &[String]| {
            labels[key]
                .as_str()
                .is_some_and(|value| values.iter().any(|wanted| wanted == value))
        };
        match self {
            Self::Exists(key) => labels[key].is_string(),
            Self::Absent(key) => !labels[key].is_string(),
            Self::In(key, values) => has(key, values),
            Self::NotIn(key, values) => !has(key, values),
        }
    }
}

fn field(object: &Value, path: &str) -> String {
    let mut at = object;
    for part in path.split('.') {
        at = &at[part];
    }
    match at {
        Value::String(text) => text.clone(),
        Value::Null if path == "status.successful" => "0".to_owned(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn parse_fields(
    resource: &ResourceType,
    text: &str,
) -> Result<Vec<(String, String, bool)>, ApiError> {
    let known: &[&str] = match (resource.group, resource.kind) {
        ("", "Pod") => &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "status.phase",
            "status.nominatedNodeName",
        ],
        ("batch", "Job") => &["status.successful"],
        ("", "Secret") => &["type"],
        ("", "Namespace") => &["status.phase"],
        ("", "Event") => &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ],
        ("events.k8s.io", "Event") => &[
            "regarding.kind",
            "regarding.namespace",
            "regarding.name",
            "regarding.uid",
            "reason",
            "type",
        ],
        _ => &[],
    };
    text.split(',')
        .filter(|term| !term.is_empty())
        .map(|term| {
            let (path, value, equal) = term
                .split_once("!=")
                .map(|(path, value)| (path, value, false))
                .or_else(|| {
                    term.split_once("==")
                        .map(|(path, value)| (path, value, true))
                })
                .or_else(|| {
                    term.split_once('=')
                        .map(|(path, value)| (path, value, true))
                })
                .ok_or_else(|| {
                    ApiError::bad_request(format!(
                        "invalid selector: '{term}'; can't understand '{term}'"
                    ))
                })?;
            if !known.contains(&path) && !matches!(path, "metadata.name" | "metadata.namespace") {
                return Err(ApiError::bad_request(format!(
                    "field label not supported: {path}"
                )));
            }
            Ok((path.to_owned(), value.to_owned(), equal))
        })
        .collect()
}

fn parse_labels(text: &str) -> Result<Vec<Requirement>, ApiError> {
    let bad = |why: &str| ApiError::bad_request(format!("unable to parse requirement: {why}"));
    let mut requirements = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let end = term_end(rest);
        let term = rest[..end].trim();
        rest = rest.get(end + 1..).unwrap_or("").trim();
        requirements.push(requirement(term).ok_or_else(|| bad(&format!("found '{term}'")))?);
    }
    Ok(requirements)
}

/// Where the first term ends: at a comma outside parentheses.
fn term_end(text: &str) -> usize {
    let mut depth = 0;
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => return at,
            _ => {}
        }
    }
    text.len()
}

fn requirement(term: &str) -> Option<Requirement> {
    let key = |text: &str| {
        let text = text.trim();
        super::validation::meta::qualified_name(text)
            .is_empty()
            .then(|| text.to_owned())
    };
    let set = |text: &str| {
        let inner = text.trim().strip_prefix('(')?.strip_suffix(')')?;
        Some(
            inner
                .split(',')
                .map(|value| value.trim().to_owned())
                .collect::<Vec<_>>(),
        )
    };
    if let Some((name, values)) = term.split_once(" notin ") {
        return Some(Requirement::NotIn(key(name)?, set(values)?));
    }
    if let Some((name, values)) = term.split_once(" in ") {
        return Some(Requirement::In(key(name)?, set(values)?));
    }
    if let Some((name, value)) = term.split_once("!=") {
        return Some(Requirement::NotIn(
            key(name)?,
            vec![value.trim().to_owned()],
        ));
    }
    if let Some((name, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        return Some(Requirement::In(key(name)?, vec![value.trim().to_owned()]));
    }
    if let Some(name) = term.strip_prefix('!') {
        return Some(Requirement::Absent(key(name)?));
    }
    Some(Requirement::Exists(key(term)?))
}
