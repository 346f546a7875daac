//! The environment of a container: values, references, `$(NAME)`.

use base64::Engine as _;
use k8s_openapi::api::core::v1::{ConfigMap, Container, EnvVar, Pod, Secret};
use kube::{Api, Client, ResourceExt};

/// Why a container cannot be configured yet, in the words of a kubelet.
pub(crate) type Missing = String;

/// The data of a Secret or config map, as text.
type Data = Vec<(String, Vec<u8>)>;

async fn secret(client: &Client, namespace: &str, name: &str) -> Option<Data> {
    let secret = Api::<Secret>::namespaced(client.clone(), namespace)
        .get_opt(name)
        .await
        .ok()??;
    Some(
        secret
            .data
            .unwrap_or_default()
            .into_iter()
            .map(|(key, value)| (key, value.0))
            .collect(),
    )
}

async fn config_map(client: &Client, namespace: &str, name: &str) -> Option<Data> {
    let map = Api::<ConfigMap>::namespaced(client.clone(), namespace)
        .get_opt(name)
        .await
        .ok()??;
    let text = map
        .data
        .unwrap_or_default()
        .into_iter()
        .map(|(key, value)| (key, value.into_bytes()));
    let bytes = map
        .binary_data
        .unwrap_or_default()
        .into_iter()
        .map(|(key, value)| (key, value.0));
    Some(text.chain(bytes).collect())
}

/// The data of a Secret (or config map), or nothing where it may be missing.
pub(crate) async fn data(
    client: &Client,
    namespace: &str,
    kind: &str,
    name: &str,
    optional: bool,
) -> Result<Option<Data>, Missing> {
    let found = match kind {
        "secret" => secret(client, namespace, name).await,
        _ => config_map(client, namespace, name).await,
    };
    if found.is_none() && !optional {
        return Err(format!("{kind} \"{name}\" not found"));
    }
    Ok(found)
}

fn text(value: &[u8]) -> String {
    String::from_utf8(value.to_vec())
        .unwrap_or_else(|_| base64::prelude::BASE64_STANDARD.encode(value))
}

/// Sets or replaces.
fn set(env: &mut Vec<(String, String)>, name: &str, value: String) {
    match env.iter_mut().find(|(known, _)| known == name) {
        Some((_, old)) => *old = value,
        None => env.push((name.to_owned(), value)),
    }
}

/// `$(NAME)` becomes the value of NAME where it is known, `$$(` becomes `$(`.
pub(crate) fn expand(text: &str, env: &[(String, String)]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = rest
            .strip_prefix('(')
            .and_then(|inner| inner.split_once(')'))
        {
            if let Some((_, value)) = env.iter().find(|(known, _)| known == name) {
                out.push_str(value);
            } else {
                out.push_str("$(");
                out.push_str(name);
                out.push(')');
            }
            rest = after;
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    out
}

fn field(pod: &Pod, path: &str) -> String {
    let map_value = |map: Option<&std::collections::BTreeMap<String, String>>, key: &str| {
        map.and_then(|map| map.get(key))
            .cloned()
            .unwrap_or_default()
    };
    let spec = pod.spec.as_ref();
    match path {
        "metadata.name" => pod.name_any(),
        "metadata.namespace" => pod.namespace().unwrap_or_default(),
        "metadata.uid" => pod.uid().unwrap_or_default(),
        "spec.nodeName" => spec
            .and_then(|spec| spec.node_name.clone())
            .unwrap_or_default(),
        "spec.serviceAccountName" => spec
            .and_then(|spec| spec.service_account_name.clone())
            .unwrap_or_default(),
        "status.podIP" | "status.hostIP" => "127.0.0.1".to_owned(),
        other => {
            let key = |prefix: &str| {
                other
                    .strip_prefix(prefix)
                    .and_then(|key| key.strip_suffix("']"))
            };
            if let Some(key) = key("metadata.labels['") {
                map_value(pod.metadata.labels.as_ref(), key)
            } else if let Some(key) = key("metadata.annotations['") {
                map_value(pod.metadata.annotations.as_ref(), key)
            } else {
                String::new()
            }
        }
    }
}

async fn value_of(
    client: &Client,
    pod: &Pod,
    variable: &EnvVar,
) -> Result<Option<String>, Missing> {
    let Some(source) = &variable.value_from else {
        return Ok(None);
    };
    let namespace = pod.namespace().unwrap_or_default();
    if let Some(reference) = &source.field_ref {
        return Ok(Some(field(pod, &reference.field_path)));
    }
    let (kind, shown, name, key, optional) = if let Some(reference) = &source.secret_key_ref {
        (
            "secret",
            "Secret",
            &reference.name,
            &reference.key,
            reference.optional == Some(true),
        )
    } else if let Some(reference) = &source.config_map_key_ref {
        (
            "configmap",
            "ConfigMap",
            &reference.name,
            &reference.key,
            reference.optional == Some(true),
        )
    } else {
        return Ok(None);
    };
    let Some(data) = data(client, &namespace, kind, name, optional).await? else {
        return Ok(None);
    };
    match data.iter().find(|(known, _)| known == key) {
        Some((_, value)) => Ok(Some(text(value))),
        None if optional => Ok(None),
        None => Err(format!(
            "couldn't find key {key} in {shown} {namespace}/{name}"
        )),
    }
}

/// All variables of a container, in order, from `base` (what the image sets).
pub(crate) async fn resolve(
    client: &Client,
    pod: &Pod,
    container: &Container,
    base: Vec<(String, String)>,
) -> Result<Vec<(String, String)>, Missing> {
    let namespace = pod.namespace().unwrap_or_default();
    let mut env = base;
    set(&mut env, "HOSTNAME", pod.name_any());
    for source in container.env_from.iter().flatten() {
        let prefix = source.prefix.as_deref().unwrap_or("");
        let (kind, name, optional) = match (&source.secret_ref, &source.config_map_ref) {
            (Some(reference), _) => ("secret", &reference.name, reference.optional == Some(true)),
            (None, Some(reference)) => (
                "configmap",
                &reference.name,
                reference.optional == Some(true),
            ),
            (None, None) => continue,
        };
        for (key, value) in data(client, &namespace, kind, name, optional)
            .await?
            .into_iter()
            .flatten()
        {
            set(&mut env, &format!("{prefix}{key}"), text(&value));
        }
    }
    for variable in container.env.iter().flatten() {
        let value = match &variable.value {
            Some(value) => Some(expand(value, &env)),
            None if variable.value_from.is_none() => Some(String::new()),
            None => value_of(client, pod, variable).await?,
        };
        if let Some(value) = value {
            set(&mut env, &variable.name, value);
        }
    }
    Ok(env)
}

#[cfg(test)]
mod tests {
    use super::expand;

    #[test]
    fn references_are_expanded_unless_escaped_or_unknown() {
        let env = [("A".to_owned(), "1".to_owned())];
        assert_eq!(expand("$(A)-$$(A)-$(B)-$A-$", &env), "1-$(A)-$(B)-$A-$");
    }
}
