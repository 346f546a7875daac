//! Every request that was made, to be held against the rules an identity is given.

use std::sync::{Mutex, PoisonError};

use crate::rights::{Action, Rule};

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Who asked.
    pub identity: String,
    /// `get`, `list`, `watch`, `create`, …
    pub verb: String,
    /// API group; empty is core.
    pub group: String,
    /// `jobs`
    pub resource: String,
    /// `log`, or empty.
    pub subresource: String,
    /// Empty: all namespaces, or a resource that has none.
    pub namespace: String,
    /// Empty in lists and creates.
    pub name: String,
    /// Path and query as asked.
    pub path: String,
    /// Whether a test ordered how it went wrong.
    pub ordered: bool,
    /// The answer; 0 when none was given (the connection was dropped, or the request still hangs).
    pub status: u16,
}

impl Request {
    fn action(&self) -> Action<'_> {
        Action {
            verb: &self.verb,
            group: &self.group,
            resource: &self.resource,
            subresource: &self.subresource,
            namespace: &self.namespace,
            name: &self.name,
        }
    }

    /// `get pods/log`, `create jobs.batch`: what a person would look for in a Role.
    pub fn right(&self) -> String {
        let slash = if self.subresource.is_empty() { "" } else { "/" };
        let dot = if self.group.is_empty() { "" } else { "." };
        format!(
            "{} {}{slash}{}{dot}{}",
            self.verb, self.resource, self.subresource, self.group
        )
    }
}

/// The requests of one cluster.
#[derive(Debug, Default)]
pub(crate) struct Recorder(Mutex<Vec<Request>>);

impl Recorder {
    /// Remembers a request; the answer is added when there is one.
    pub(crate) fn begin(&self, request: Request) -> usize {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(request);
        all.len() - 1
    }

    pub(crate) fn answered(&self, at: usize, status: u16) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(request) = all.get_mut(at) {
            request.status = status;
        }
    }

    pub(crate) fn all(&self) -> Vec<Request> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// What was asked of a cluster so far.
#[derive(Debug, Clone)]
pub struct Recorded(pub(crate) Vec<Request>);

impl Recorded {
    /// Only the requests of `identity`.
    #[must_use]
    pub fn of(&self, identity: &str) -> Self {
        Self(
            self.0
                .iter()
                .filter(|request| request.identity == identity)
                .cloned()
                .collect(),
        )
    }

    /// In the order they came.
    pub fn requests(&self) -> &[Request] {
        &self.0
    }

    /// Requests that were answered with 403, other than on order.
    pub fn denied(&self) -> Vec<&Request> {
        self.0
            .iter()
            .filter(|request| request.status == 403 && !request.ordered)
            .collect()
    }

    /// Requests that `rules` do not allow, whatever the server answered.
    pub fn beyond(&self, rules: &[Rule]) -> Vec<&Request> {
        let asks_for_itself = |request: &Request| request.resource == "selfsubjectaccessreviews";
        self.0
            .iter()
            .filter(|request| !request.resource.is_empty() && !asks_for_itself(request))
            .filter(|request| !rules.iter().any(|rule| rule.allows(&request.action())))
            .collect()
    }

    /// Rights in `rules` that no request needed, one entry for each verb of each resource.
    pub fn unused(&self, rules: &[Rule]) -> Vec<String> {
        rules
            .iter()
            .flat_map(Rule::singles)
            .filter(|one| !self.0.iter().any(|request| one.allows(&request.action())))
            .map(|one| {
                let (verb, resource, group) =
                    (&one.verbs[0], &one.resources[0], &one.api_groups[0]);
                let dot = if group.is_empty() { "" } else { "." };
                format!("{verb} {resource}{dot}{group}")
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Recorded, Request};
    use crate::Rule;

    fn asked(verb: &str, group: &str, resource: &str, subresource: &str) -> Request {
        Request {
            identity: "launcher".into(),
            verb: verb.into(),
            group: group.into(),
            resource: resource.into(),
            subresource: subresource.into(),
            namespace: "runs".into(),
            name: String::new(),
            path: String::new(),
            ordered: false,
            status: 200,
        }
    }

    #[test]
    fn rules_are_held_against_requests_both_ways() {
        let rules = [Rule {
            api_groups: vec!["batch".into()],
            resources: vec!["jobs".into()],
            verbs: vec!["create".into(), "update".into()],
            ..Rule::default()
        }];
        let recorded = Recorded(vec![
            asked("create", "batch", "jobs", ""),
            asked("get", "", "pods", "log"),
        ]);
        assert_eq!(recorded.unused(&rules), ["update jobs.batch"]);
        let beyond: Vec<String> = recorded
            .beyond(&rules)
            .into_iter()
            .map(Request::right)
            .collect();
        assert_eq!(beyond, ["get pods/log"]);
    }
}
