//! The rules of a Role, and which requests they allow.

use serde::{Deserialize, Serialize};

/// The identity that may do everything; without a token a request is its.
pub const ADMIN: &str = "admin";

/// One rule of a Role, as its manifest writes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rule {
    /// API groups; empty text is the core group.
    #[serde(default)]
    pub api_groups: Vec<String>,
    /// `jobs`, `pods/log`.
    #[serde(default)]
    pub resources: Vec<String>,
    /// Empty: every name.
    #[serde(default)]
    pub resource_names: Vec<String>,
    /// `get`, `create`, …
    #[serde(default)]
    pub verbs: Vec<String>,
}

/// What is asked for, in the terms of RBAC.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Action<'a> {
    pub(crate) verb: &'a str,
    pub(crate) group: &'a str,
    pub(crate) resource: &'a str,
    pub(crate) subresource: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
}

impl Rule {
    /// The same in rules of one verb on one resource.
    pub(crate) fn singles(&self) -> impl Iterator<Item = Self> + '_ {
        let all = self.api_groups.iter().flat_map(move |group| {
            let resources = self.resources.iter();
            resources.flat_map(move |resource| {
                self.verbs.iter().map(move |verb| (group, resource, verb))
            })
        });
        all.map(|(group, resource, verb)| Self {
            api_groups: vec![group.clone()],
            resources: vec![resource.clone()],
            resource_names: self.resource_names.clone(),
            verbs: vec![verb.clone()],
        })
    }

    pub(crate) fn allows(&self, action: &Action<'_>) -> bool {
        let has =
            |list: &[String], wanted: &str| list.iter().any(|item| item == wanted || item == "*");
        let full = if action.subresource.is_empty() {
            action.resource.to_owned()
        } else {
            format!("{}/{}", action.resource, action.subresource)
        };
        has(&self.verbs, action.verb)
            && has(&self.api_groups, action.group)
            && (has(&self.resources, &full)
                || self
                    .resources
                    .contains(&format!("*/{}", action.subresource)))
            && (self.resource_names.is_empty()
                || self.resource_names.iter().any(|name| name == action.name))
    }
}

/// The words of an API server for a refusal.
pub(crate) fn sentence(user: &str, action: &Action<'_>) -> String {
    let resource = if action.subresource.is_empty() {
        action.resource.to_owned()
    } else {
        format!("{}/{}", action.resource, action.subresource)
    };
    let place = if action.namespace.is_empty() {
        "at the cluster scope".to_owned()
    } else {
        format!("in the namespace \"{}\"", action.namespace)
    };
    format!(
        "User \"{user}\" cannot {} resource \"{resource}\" in API group \"{}\" {place}",
        action.verb, action.group
    )
}
