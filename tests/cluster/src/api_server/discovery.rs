//! What clients ask before they know what is served.

use serde_json::{Value, json};

use super::resource::{RESOURCES, ResourceType};

const MINOR: &str = "33";

/// The answer for a path that names no resource, if it is one of discovery.
pub(crate) fn answer(path: &str, address: &str) -> Option<Value> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    match parts.as_slice() {
        ["version"] => Some(json!({
            "major": "1", "minor": MINOR, "gitVersion": format!("v1.{MINOR}.0"), "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "2025-04-23T00:00:00Z", "goVersion": "go1.24.2", "compiler": "gc", "platform": "linux/amd64",
        })),
        ["api"] => Some(json!({
            "kind": "APIVersions", "versions": ["v1"],
            "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}],
        })),
        ["api", "v1"] => resources("", "v1"),
        ["apis"] => {
            let groups: Vec<Value> = groups().into_iter().map(group).collect();
            Some(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        ["apis", name] => groups()
            .into_iter()
            .find(|group| group == name)
            .map(|name| {
                let mut answer = group(name);
                answer["kind"] = "APIGroup".into();
                answer["apiVersion"] = "v1".into();
                answer
            }),
        ["apis", name, version] => resources(name, version),
        ["openapi", "v3"] => Some(documents()),
        ["openapi", "v3", "api", version] => Some(document("", version)),
        ["openapi", "v3", "apis", group, version] => Some(document(group, version)),
        _ => None,
    }
}

fn groups() -> Vec<&'static str> {
    let mut names: Vec<&str> = RESOURCES
        .iter()
        .map(|resource| resource.group)
        .filter(|group| !group.is_empty())
        .collect();
    names.dedup();
    names
}

/// Where the document of each group is.
fn documents() -> Value {
    let mut paths = json!({});
    for group in groups() {
        paths[format!("apis/{group}/v1")] =
            json!({"serverRelativeURL": format!("/openapi/v3/apis/{group}/v1?hash=1")});
    }
    paths["api/v1"] = json!({"serverRelativeURL": "/openapi/v3/api/v1?hash=1"});
    json!({"paths": paths})
}

/// No types, only that unknown fields are the server's business: clients ask that before they look themselves.
fn document(group: &str, version: &str) -> Value {
    let mut paths = json!({});
    for resource in RESOURCES
        .iter()
        .filter(|resource| resource.group == group && resource.version == version)
    {
        let kind = json!({"group": group, "version": version, "kind": resource.kind});
        paths[format!("/{}/{{name}}", resource.plural)] = json!({"patch": {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "responses": {},
            "x-kubernetes-group-version-kind": kind,
        }});
    }
    json!({"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": format!("v1.{MINOR}.0")}, "paths": paths})
}

fn group(name: &str) -> Value {
    let version = json!({"groupVersion": format!("{name}/v1"), "version": "v1"});
    json!({"name": name, "versions": [version], "preferredVersion": version})
}

fn resources(group: &str, version: &str) -> Option<Value> {
    let served: Vec<Value> = RESOURCES
        .iter()
        .filter(|r| r.group == group && r.version == version)
        .flat_map(entries)
        .collect();
    let name = if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    };
    (!served.is_empty()).then(|| {
        json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": served})
    })
}

fn entries(resource: &ResourceType) -> Vec<Value> {
    let mut entry = json!({
        "name": resource.plural, "singularName": resource.singular, "namespaced": resource.namespaced,
        "kind": resource.kind, "verbs": resource.verbs,
    });
    if !resource.short.is_empty() {
        entry["shortNames"] = json!(resource.short);
    }
    let mut all = vec![entry];
    all.extend(resource.subresources.iter().map(|(name, verbs)| {
        json!({
            "name": format!("{}/{name}", resource.plural), "singularName": "", "namespaced": resource.namespaced,
            "kind": resource.kind, "verbs": verbs,
        })
    }));
    all
}
