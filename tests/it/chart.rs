//! The rights that the chart grants, without a cluster.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use test_chart::{Document, Release, values_files};
use test_cluster::Rule;

use crate::in_cluster::{ROLES, rules};

const AGENT: &str = include_str!("../../rbac/agent.yaml");
const SEED: &str = include_str!("../../rbac/seed.yaml");

/// Each right once, whatever rule it stands in.
pub(crate) fn singles(rules: &[Rule]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for rule in rules {
        for (group, resource) in rule
            .api_groups
            .iter()
            .flat_map(|group| rule.resources.iter().map(move |resource| (group, resource)))
        {
            for verb in &rule.verbs {
                all.insert(format!(
                    "{verb} {resource}.{group} {:?}",
                    rule.resource_names
                ));
            }
        }
    }
    all
}

pub(crate) fn deployments(documents: &[Document]) -> impl Iterator<Item = &Document> {
    documents
        .iter()
        .filter(|document| document.kind() == "Deployment")
}

/// What an account may do, by namespace: the Roles that are bound to it.
fn granted(documents: &[Document], namespace: &str, account: &str) -> BTreeMap<String, Vec<Rule>> {
    let mut all = BTreeMap::<String, Vec<Rule>>::new();
    let subject = json!({"kind": "ServiceAccount", "name": account, "namespace": namespace});
    for binding in documents
        .iter()
        .filter(|document| document.kind() == "RoleBinding")
    {
        if !binding.value["subjects"]
            .as_array()
            .unwrap()
            .contains(&subject)
        {
            continue;
        }
        assert_eq!(binding.value["roleRef"]["kind"], "Role", "{binding}");
        let bound = |document: &&Document| {
            document.kind() == "Role"
                && document.value["metadata"]["name"] == binding.value["roleRef"]["name"]
                && document.namespace() == binding.namespace()
        };
        let role = documents
            .iter()
            .find(bound)
            .unwrap_or_else(|| panic!("{binding} binds nothing"));
        let rules: Vec<Rule> = serde_json::from_value(role.value["rules"].clone()).unwrap();
        all.entry(role.namespace().to_owned())
            .or_default()
            .extend(rules);
    }
    all
}

/// The value of a variable of a Deployment's container.
pub(crate) fn variable<'d>(deployment: &'d Document, name: &str) -> &'d str {
    let variables = deployment.value["spec"]["template"]["spec"]["containers"][0]["env"].as_array();
    let found = variables
        .unwrap()
        .iter()
        .find(|variable| variable["name"] == name);
    found.map_or("", |variable| {
        variable["value"].as_str().unwrap_or_default()
    })
}

/// What each launcher of a release may do, in the one namespace it may do anything in.
pub(crate) fn launchers_rights(documents: &[Document]) -> Vec<(String, Vec<Rule>)> {
    let rights = |deployment: &Document| {
        let account = deployment.text_at("/spec/template/spec/serviceAccountName");
        let granted = granted(documents, deployment.namespace(), account);
        let runs = variable(deployment, "ExecutorEphemeralNamespace").to_owned();
        assert_eq!(granted.keys().collect::<Vec<_>>(), [&runs], "{deployment}");
        let rules = granted.into_values().next().unwrap();
        (runs, rules)
    };
    deployments(documents).map(rights).collect()
}

/// What the agent of a release may do, in the one namespace it may do anything in.
pub(crate) fn agents_rights(documents: &[Document]) -> Vec<Rule> {
    let is_set = |document: &&Document| document.kind() == "StatefulSet";
    let agent = documents.iter().find(is_set).unwrap();
    let account = agent.text_at("/spec/template/spec/serviceAccountName");
    let granted = granted(documents, agent.namespace(), account);
    let runs = variable(agent, "ExecutorEphemeralNamespace").to_owned();
    assert_eq!(granted.keys().collect::<Vec<_>>(), [&runs], "{agent}");
    granted.into_values().next().unwrap()
}

pub(crate) fn values(name: &str) -> Vec<Document> {
    let all = values_files();
    let (_, file) = all
        .iter()
        .find(|(known, _)| known == name)
        .unwrap_or_else(|| panic!("no {name}"));
    Release::new().with(file).documents()
}

#[test]
fn the_chart_grants_each_launcher_what_the_plain_manifests_grant() {
    for (name, launchers) in [("default", 1), ("multi-namespace", 2)] {
        let rights = launchers_rights(&values(name));
        assert!(rights.len() >= launchers, "{name}: {rights:?}");
        let namespaces: BTreeSet<&String> = rights.iter().map(|(namespace, _)| namespace).collect();
        assert_eq!(namespaces.len(), rights.len(), "{name}: {namespaces:?}");
        for (namespace, granted) in &rights {
            assert_eq!(
                singles(granted),
                singles(&rules(ROLES)),
                "{name}: {namespace}"
            );
        }
    }
}

#[test]
fn the_chart_grants_an_agent_what_the_plain_manifests_grant() {
    for name in ["agent", "hub-and-agent"] {
        let granted = singles(&agents_rights(&values(name)));
        assert_eq!(granted, singles(&rules(AGENT)), "{name}");
    }
}

#[test]
fn a_hub_alone_may_do_nothing_in_the_cluster() {
    let documents = values("hub");
    let [deployment] = &deployments(&documents).collect::<Vec<_>>()[..] else {
        panic!("{documents:?}");
    };
    let pod = &deployment.value["spec"]["template"]["spec"];
    assert_eq!(pod["automountServiceAccountToken"], false);
    let is_of_rights = |document: &Document| document.kind().starts_with("Role");
    assert!(!documents.iter().any(is_of_rights), "{documents:?}");
}

#[test]
fn with_the_profile_of_terrakube_the_chart_grants_what_its_documentation_grants() {
    let documents = values("terrakube");
    let roles = documents
        .iter()
        .filter(|document| document.kind() == "Role");
    let of_launchers = roles.filter(|role| role.template.contains("launcher-role"));
    let mut seen = 0;
    for role in of_launchers {
        let granted: Vec<Rule> = serde_json::from_value(role.value["rules"].clone()).unwrap();
        assert_eq!(singles(&granted), singles(&rules(SEED)), "{role}");
        seen += 1;
    }
    assert!(seen > 0);
}

#[test]
fn the_chart_grants_the_account_of_runs_nothing() {
    let mut seen = 0;
    for (name, file) in values_files() {
        let documents = Release::new().with(&file).documents();
        let accounts = documents.iter().filter(|document| {
            document.kind() == "ServiceAccount" && document.template.contains("executor-")
        });
        let with_rules = ["full"].contains(&name.as_str());
        for account in accounts {
            let granted = granted(&documents, account.namespace(), account.name());
            assert_eq!(
                granted.is_empty(),
                !with_rules,
                "{name}: {account}: {granted:?}"
            );
            assert_eq!(
                account.value["automountServiceAccountToken"], false,
                "{name}: {account}"
            );
            seen += 1;
        }
    }
    assert!(seen > 0);
}
