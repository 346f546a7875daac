//! Names, labels, annotations, owners and finalizers.

use serde_json::{Value, json};

use super::{Errors, items};
use crate::api_server::resource::ResourceType;

const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', \
     and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
     '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
     start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
     '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const NAME_PART: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end \
     with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
     '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or \
     '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex \
     used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const ANNOTATIONS: usize = 256 * 1024;

fn is_label(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    !bytes.is_empty()
        && bytes.iter().all(|byte| inner(*byte) || *byte == b'-')
        && inner(bytes[0])
        && inner(bytes[bytes.len() - 1])
}

/// Why `text` is no DNS label.
pub(crate) fn dns_label(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if text.len() > 63 {
        problems.push("must be no more than 63 bytes".to_owned());
    }
    if !is_label(text) {
        problems.push(LABEL.to_owned());
    }
    problems
}

/// Why `text` is no DNS subdomain.
pub(crate) fn dns_subdomain(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if text.len() > 253 {
        problems.push("must be no more than 253 bytes".to_owned());
    }
    if !text.split('.').all(is_label) {
        problems.push(SUBDOMAIN.to_owned());
    }
    problems
}

fn is_name_part(text: &str) -> bool {
    let bytes = text.as_bytes();
    !bytes.is_empty()
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
        && bytes[0].is_ascii_alphanumeric()
        && bytes[bytes.len() - 1].is_ascii_alphanumeric()
}

/// Why `text` is no `prefix/name`.
pub(crate) fn qualified_name(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let name = match text.split_once('/') {
        None => text,
        Some(("", _)) => {
            problems.push("prefix part must be non-empty".to_owned());
            return problems;
        }
        Some((prefix, name)) => {
            problems.extend(
                dns_subdomain(prefix)
                    .into_iter()
                    .map(|why| format!("prefix part {why}")),
            );
            name
        }
    };
    if name.is_empty() {
        problems.push("name part must be non-empty".to_owned());
    } else if name.len() > 63 {
        problems.push("name part must be no more than 63 bytes".to_owned());
    }
    if !is_name_part(name) {
        problems.push(NAME_PART.to_owned());
    }
    problems
}

/// Why `text` is no label value.
pub(crate) fn label_value(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if text.len() > 63 {
        problems.push("must be no more than 63 bytes".to_owned());
    }
    if !text.is_empty() && !is_name_part(text) {
        problems.push(LABEL_VALUE.to_owned());
    }
    problems
}

/// Checks a map of labels at `path`.
pub(crate) fn labels(labels: &Value, path: &str, errors: &mut Errors) {
    for (key, value) in labels.as_object().into_iter().flatten() {
        for why in qualified_name(key) {
            errors.invalid(path, &json!(key), &why);
        }
        for why in label_value(value.as_str().unwrap_or("")) {
            errors.invalid(path, value, &why);
        }
    }
}

/// Checks a map of annotations at `path`.
pub(crate) fn annotations(annotations: &Value, path: &str, errors: &mut Errors) {
    let mut size = 0;
    for (key, value) in annotations.as_object().into_iter().flatten() {
        for why in qualified_name(&key.to_lowercase()) {
            errors.invalid(path, &json!(key), &why);
        }
        size += key.len() + value.as_str().map_or(0, str::len);
    }
    if size > ANNOTATIONS {
        errors.too_long(path, ANNOTATIONS);
    }
}

/// Checks the metadata of an object.
pub(crate) fn validate(
    resource: &ResourceType,
    new: &Value,
    old: Option<&Value>,
    errors: &mut Errors,
) {
    let meta = &new["metadata"];
    match meta["name"].as_str().unwrap_or("") {
        "" => errors.required("metadata.name", "name or generateName is required"),
        name => {
            let problems = if resource.kind == "Namespace" {
                dns_label(name)
            } else {
                dns_subdomain(name)
            };
            let problems = if resource.group == "rbac.authorization.k8s.io" {
                Vec::new()
            } else {
                problems
            };
            for why in problems {
                errors.invalid("metadata.name", &meta["name"], &why);
            }
        }
    }
    labels(&meta["labels"], "metadata.labels", errors);
    annotations(&meta["annotations"], "metadata.annotations", errors);
    owners(meta, errors);
    for (index, finalizer) in items(&meta["finalizers"]).iter().enumerate() {
        let text = finalizer.as_str().unwrap_or("");
        for why in qualified_name(text) {
            errors.invalid(format!("metadata.finalizers[{index}]"), finalizer, &why);
        }
    }
    if let Some(old) = old {
        unchanged(meta, &old["metadata"], errors);
    }
}

fn owners(meta: &Value, errors: &mut Errors) {
    let mut controllers = 0;
    for (index, owner) in items(&meta["ownerReferences"]).iter().enumerate() {
        let path = format!("metadata.ownerReferences[{index}]");
        if owner["apiVersion"].as_str().unwrap_or("").is_empty() {
            errors.invalid(
                format!("{path}.apiVersion"),
                &owner["apiVersion"],
                "version must not be empty",
            );
        }
        for field in ["kind", "name", "uid"] {
            if owner[field].as_str().unwrap_or("").is_empty() {
                errors.invalid(format!("{path}.{field}"), &json!(""), "must not be empty");
            }
        }
        controllers += usize::from(owner["controller"] == true);
    }
    if controllers > 1 {
        errors.invalid(
            "metadata.ownerReferences",
            &meta["ownerReferences"],
            "Only one reference can have Controller set to true",
        );
    }
}

fn unchanged(new: &Value, old: &Value, errors: &mut Errors) {
    for field in ["name", "namespace", "uid", "creationTimestamp"] {
        if new[field] != old[field] {
            errors.invalid(
                format!("metadata.{field}"),
                &new[field],
                "field is immutable",
            );
        }
    }
    if !old["deletionTimestamp"].is_null() {
        let before = items(&old["finalizers"]);
        let added: Vec<&Value> = items(&new["finalizers"])
            .iter()
            .filter(|f| !before.contains(f))
            .collect();
        if !added.is_empty() {
            errors.forbidden(
                "metadata.finalizers",
                &format!("no new finalizers can be added if the object is being deleted, found new finalizers {added:?}"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{dns_label, dns_subdomain, label_value, qualified_name};

    #[test]
    fn names_follow_the_rules_of_dns() {
        assert!(dns_label("job-1").is_empty());
        assert!(dns_subdomain("job-1.plan").is_empty());
        for wrong in ["", "Job", "-a", "a-", "a_b", "a.b"] {
            assert!(!dns_label(wrong).is_empty(), "{wrong}");
        }
        for wrong in ["a..b", ".a", "a.", "a/b"] {
            assert!(!dns_subdomain(wrong).is_empty(), "{wrong}");
        }
        assert!(!dns_label(&"a".repeat(64)).is_empty());
    }

    #[test]
    fn label_keys_have_an_optional_prefix_and_values_are_short() {
        assert!(qualified_name("mayfly.dev/job-id").is_empty());
        assert!(!qualified_name("/a").is_empty());
        assert!(!qualified_name("a/b/c").is_empty());
        assert!(label_value("").is_empty());
        assert!(!label_value("has space").is_empty());
        assert!(!label_value(&"a".repeat(64)).is_empty());
    }
}
