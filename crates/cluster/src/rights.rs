//! All rights that the launcher uses, and their purpose. `rbac/` grants exactly these.

/// The default name of the Lease. The Role grants this one.
pub const LEASE: &str = "mayfly-launcher";

/// Where a right is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RightScope {
    /// Namespace of the runs.
    Runs,
    /// Namespace of the launcher.
    Launcher,
}

/// When a right is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Always,
    /// Job data travels in a Secret.
    JobDataInSecret,
    /// More than one replica.
    Election,
    /// A plugin cache whose claim does not exist.
    MissingClaim,
}

/// One verb on one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right<'a> {
    pub verb: &'static str,
    pub group: &'a str,
    pub resource: &'a str,
    pub subresource: &'static str,
    pub scope: RightScope,
    pub need: Need,
    /// Whether it is needed only for the Lease. A `create` cannot be limited to a name.
    pub lease_only: bool,
    /// What the launcher does with it.
    pub purpose: &'static str,
}

const fn right(
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
    purpose: &'static str,
) -> Right<'static> {
    Right {
        verb,
        group,
        resource,
        subresource: "",
        scope: RightScope::Runs,
        need: Need::Always,
        lease_only: false,
        purpose,
    }
}

const fn job(verb: &'static str, purpose: &'static str) -> Right<'static> {
    right(verb, "batch", "jobs", purpose)
}

const fn secret(verb: &'static str, purpose: &'static str) -> Right<'static> {
    Right {
        need: Need::JobDataInSecret,
        ..right(verb, "", "secrets", purpose)
    }
}

const fn lease(verb: &'static str, purpose: &'static str) -> Right<'static> {
    Right {
        scope: RightScope::Launcher,
        need: Need::Election,
        ..right(verb, "coordination.k8s.io", "leases", purpose)
    }
}

const fn own_lease(verb: &'static str, purpose: &'static str) -> Right<'static> {
    Right {
        lease_only: true,
        ..lease(verb, purpose)
    }
}

/// The table.
pub const RIGHTS: &[Right<'static>] = &[
    job("create", "start runs"),
    job("get", "continue what an earlier delivery began"),
    job("list", "find every run again after a restart"),
    job("watch", "follow runs"),
    job("patch", "release runs and note what was reported"),
    job("delete", "cancel runs and keep the history short"),
    right("list", "", "pods", "show the state of runs"),
    right("watch", "", "pods", "follow runs"),
    Right {
        subresource: "log",
        ..right("get", "", "pods", "show the log of a run, and recover it")
    },
    right(
        "list",
        "",
        "events",
        "explain why a run waits or ended without a report",
    ),
    secret("create", "store the job data"),
    Right {
        need: Need::MissingClaim,
        ..right(
            "get",
            "",
            "persistentvolumeclaims",
            "give a run an empty folder for a plugin cache whose claim does not exist",
        )
    },
    lease("create", "let one replica watch"),
    own_lease("get", "let one replica watch"),
    own_lease("update", "let one replica watch"),
];

/// Ends a run at once, for an agent.
const END_PODS: Right<'static> = right("delete", "", "pods", "end a run at once");

/// The rights that an agent uses: those on runs without their logs. `rbac/agent.yaml` grants exactly these.
pub fn of_agents() -> impl Iterator<Item = &'static Right<'static>> {
    let of_runs =
        |right: &&Right<'_>| right.scope == RightScope::Runs && right.subresource.is_empty();
    RIGHTS.iter().filter(of_runs).chain([&END_PODS])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    const LAUNCHER: &str = include_str!("../../../rbac/launcher.yaml");
    const AGENT: &str = include_str!("../../../rbac/agent.yaml");
    const EXECUTOR: &str = include_str!("../../../rbac/executor.yaml");
    const SEED: &str = include_str!("../../../rbac/seed.yaml");

    fn documents(yaml: &str) -> Vec<Value> {
        serde_saphyr::from_multiple(yaml).unwrap()
    }

    fn texts(value: &Value) -> impl Iterator<Item = &str> {
        value
            .as_array()
            .unwrap()
            .iter()
            .map(|v| v.as_str().unwrap())
    }

    /// Every `verb resource.group` that a Role grants, and the names it is limited to.
    fn granted(documents: &[Value], role: &str) -> BTreeSet<String> {
        let role = documents
            .iter()
            .find(|d| d["kind"] == "Role" && d["metadata"]["name"] == role)
            .unwrap();
        let mut granted = BTreeSet::new();
        for rule in role["rules"].as_array().unwrap() {
            for group in texts(&rule["apiGroups"]) {
                for resource in texts(&rule["resources"]) {
                    for verb in texts(&rule["verbs"]) {
                        let mut right = format!("{verb} {resource}.{group}");
                        if !rule["resourceNames"].is_null() {
                            let names: Vec<_> = texts(&rule["resourceNames"]).collect();
                            right = format!("{right} {}", names.join(","));
                        }
                        assert!(granted.insert(right.clone()), "{right} is granted twice");
                    }
                }
            }
        }
        granted
    }

    fn used(scope: RightScope) -> BTreeSet<String> {
        names(RIGHTS.iter().filter(|right| right.scope == scope))
    }

    fn names<'r>(rights: impl Iterator<Item = &'r Right<'r>>) -> BTreeSet<String> {
        rights
            .map(|right| {
                let slash = if right.subresource.is_empty() {
                    ""
                } else {
                    "/"
                };
                let name = if right.lease_only {
                    format!(" {LEASE}")
                } else {
                    String::new()
                };
                format!(
                    "{} {}{slash}{}.{}{name}",
                    right.verb, right.resource, right.subresource, right.group
                )
            })
            .collect()
    }

    #[test]
    fn the_manifests_grant_what_is_used_and_nothing_else() {
        let documents = documents(LAUNCHER);
        assert_eq!(
            granted(&documents, "mayfly-launcher"),
            used(RightScope::Runs)
        );
        assert_eq!(
            granted(&documents, "mayfly-launcher-election"),
            used(RightScope::Launcher)
        );
        let roles = documents.iter().filter(|d| d["kind"] == "Role");
        assert_eq!(roles.count(), 2);
        assert!(documents.iter().all(|d| d["kind"] != "ClusterRole"));
    }

    #[test]
    fn the_manifest_of_agents_grants_what_they_use_and_nothing_else() {
        let of_agents = names(of_agents());
        assert_eq!(granted(&documents(AGENT), "mayfly-agent"), of_agents);
    }

    #[test]
    fn every_role_is_bound_to_the_account_beside_it() {
        for documents in [LAUNCHER, AGENT, SEED].map(documents) {
            let account = documents
                .iter()
                .find(|d| d["kind"] == "ServiceAccount")
                .unwrap();
            for role in documents.iter().filter(|d| d["kind"] == "Role") {
                let binding = documents
                    .iter()
                    .find(|d| d["roleRef"]["name"] == role["metadata"]["name"])
                    .unwrap();
                let subject = &binding["subjects"][0];
                assert_eq!(subject["name"], account["metadata"]["name"]);
                assert_eq!(subject["namespace"], account["metadata"]["namespace"]);
            }
        }
    }

    #[test]
    fn the_executor_has_an_account_without_rights_or_token() {
        let documents = documents(EXECUTOR);
        assert_eq!(documents.len(), 1);
        assert_eq!(documents[0]["kind"], "ServiceAccount");
        assert_eq!(documents[0]["automountServiceAccountToken"], false);
    }

    #[test]
    fn the_rights_of_the_documentation_are_on_jobs_alone_and_enough_to_start_runs() {
        let seed = granted(&documents(SEED), "terrakube-api-role");
        let verbs = [
            "get", "list", "watch", "create", "update", "patch", "delete",
        ];
        let expected = verbs.iter().map(|verb| format!("{verb} jobs.batch"));
        assert_eq!(seed, expected.collect());
        let on_jobs = used(RightScope::Runs)
            .into_iter()
            .filter(|right| right.ends_with("jobs.batch"));
        assert!(on_jobs.collect::<BTreeSet<_>>().is_subset(&seed));
    }

    #[test]
    fn no_right_stands_twice() {
        for (at, right) in RIGHTS.iter().enumerate() {
            let same = |other: &&Right| {
                (other.verb, other.group, other.resource, other.subresource)
                    == (right.verb, right.group, right.resource, right.subresource)
            };
            assert!(
                RIGHTS[at + 1..].iter().find(same).is_none(),
                "{right:?} stands twice"
            );
        }
    }
}
