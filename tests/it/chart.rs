//! What the chart installs, without a cluster: the rights it grants, what its launcher makes of a step, and which Jobs its
//! admission policy lets pass.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use api_launcher::kubernetes::manifest::pod_security::{Level, violations};
use integration_tests::{Repository, Running, job};
use job_contract::JobData;
use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Value, json};
use test_chart::admission::Policy;
use test_chart::{Document, Release, api, values_files};
use test_cluster::Rule;

use crate::in_cluster::{ROLES, rules};

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

/// What a launcher's pod has in its environment, with the chart's files in a folder in place of its mounts.
fn environment(
    documents: &[Document],
    deployment: &Document,
    folder: &Path,
) -> Vec<(String, String)> {
    let spec = &deployment.value["spec"]["template"]["spec"];
    let container = &spec["containers"][0];
    let mut mounts = Vec::new();
    for mount in container["volumeMounts"].as_array().unwrap() {
        let name = mount["name"].as_str().unwrap();
        let volumes = spec["volumes"].as_array().unwrap();
        let volume = volumes
            .iter()
            .find(|volume| volume["name"] == name)
            .unwrap();
        let place = folder.join(name);
        fs::create_dir_all(&place).unwrap();
        let map = documents.iter().find(|document| {
            document.kind() == "ConfigMap"
                && document.value["metadata"]["name"] == volume["configMap"]["name"]
                && document.namespace() == deployment.namespace()
        });
        for item in volume["configMap"]["items"]
            .as_array()
            .into_iter()
            .flatten()
        {
            // Others are somebody else's.
            let Some(map) = map else { continue };
            let text = map.value["data"][item["key"].as_str().unwrap()].as_str();
            let text = text.unwrap_or_else(|| panic!("{map} has no {}", item["key"]));
            fs::write(place.join(item["path"].as_str().unwrap()), text).unwrap();
        }
        mounts.push((mount["mountPath"].as_str().unwrap().to_owned(), place));
    }
    let variables = container["env"].as_array().unwrap().iter();
    variables
        .map(|variable| {
            let value = variable["value"]
                .as_str()
                .unwrap_or("placeholder")
                .to_owned();
            let mount = mounts
                .iter()
                .find(|(path, _)| value.starts_with(&format!("{path}/")));
            let value = mount.map_or(value.clone(), |(path, place)| {
                value.replacen(path, place.to_str().unwrap(), 1)
            });
            (variable["name"].as_str().unwrap().to_owned(), value)
        })
        .collect()
}

/// What the launcher makes of a job document with the configuration of a Deployment.
fn rendered(documents: &[Document], deployment: &Document, job: &JobData) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("job.json");
    fs::write(&file, serde_json::to_vec(job).unwrap()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_launcher_under_test"));
    command
        .args(["render", "-o", "json", "-f"])
        .arg(&file)
        .env_clear()
        .envs(environment(documents, deployment, folder.path()));
    let finished = Running::start(&mut command).wait();
    assert_eq!(finished.code(), 0, "{deployment}: {finished}");
    let list: Value = serde_json::from_str(&finished.stdout).unwrap();
    list["items"].as_array().unwrap().clone()
}

/// Names of objects of a kind that a pod's spec refers to.
fn referred(spec: &PodSpec) -> Vec<(&'static str, String)> {
    let mut names = Vec::new();
    let mut add = |kind, name: Option<String>| names.extend(name.map(|name| (kind, name)));
    add("ServiceAccount", spec.service_account_name.clone());
    for volume in spec.volumes.iter().flatten() {
        let map = volume.config_map.as_ref().map(|source| source.name.clone());
        add("ConfigMap", map);
        let claim = volume.persistent_volume_claim.as_ref();
        add(
            "PersistentVolumeClaim",
            claim.map(|source| source.claim_name.clone()),
        );
    }
    names
}

#[test]
fn jobs_made_with_the_charts_configuration_are_restricted_known_to_the_api_and_find_what_they_name()
{
    let repository = Repository::fixture();
    let plan = job::plan(&repository);
    let steps = [
        plan.clone(),
        job::apply_after(&plan),
        job::scripts(&repository, vec![job::bash(1, "true")]),
    ];
    let mut seen = 0;
    for (name, file) in values_files() {
        let documents = Release::new().with(&file).documents();
        for deployment in deployments(&documents) {
            let runs = variable(deployment, "ExecutorEphemeralNamespace");
            for step in &steps {
                let objects = rendered(&documents, deployment, step);
                for object in &objects {
                    assert_eq!(api::check(object), Ok(()), "{name}: {object:#}");
                    assert_eq!(object["metadata"]["namespace"], runs, "{name}");
                    let text = object.to_string();
                    // Argo CD would take the Job for one of its own, and remove it.
                    assert!(
                        !text.contains("app.kubernetes.io/instance"),
                        "{name}: {text}"
                    );
                }
                let job = objects
                    .iter()
                    .find(|object| object["kind"] == "Job")
                    .unwrap();
                let spec = &job["spec"]["template"]["spec"];
                let spec: PodSpec = serde_json::from_value(spec.clone()).unwrap();
                assert_eq!(
                    violations(&spec, Level::Restricted),
                    Vec::<String>::new(),
                    "{name}"
                );
                for (kind, referred) in referred(&spec) {
                    let of_chart = referred.starts_with("mayfly");
                    let is_there = documents.iter().any(|document| {
                        document.kind() == kind
                            && document.name() == referred
                            && document.namespace() == runs
                    });
                    assert!(
                        is_there || !of_chart,
                        "{name}: no {kind} {referred} in {runs}"
                    );
                }
                seen += 1;
            }
        }
    }
    assert!(seen >= 15, "{seen}");
}

/// The policy of a release whose launchers get no Job past it that runs do not need, and the documents around it.
fn policed(file: &Path) -> Vec<Document> {
    let release = Release::new().with(file);
    release
        .set(json!({"admissionPolicy": {"enabled": true}}))
        .documents()
}

fn policy(documents: &[Document]) -> Policy<'_> {
    let is_policy = |document: &&Document| document.kind() == "ValidatingAdmissionPolicy";
    Policy::of(documents.iter().find(is_policy).unwrap())
}

/// Whom the API server takes the launcher of a Deployment for.
fn user(deployment: &Document) -> String {
    let account = deployment.text_at("/spec/template/spec/serviceAccountName");
    format!("system:serviceaccount:{}:{account}", deployment.namespace())
}

fn job_among(objects: Vec<Value>) -> Value {
    let mut objects = objects.into_iter();
    objects.find(|object| object["kind"] == "Job").unwrap()
}

#[test]
fn the_admission_policy_lets_the_launchers_own_jobs_pass() {
    let repository = Repository::fixture();
    let plan = job::plan(&repository);
    let mut unusual = plan.clone();
    // A name of the Job that had to be hashed.
    unusual.step_id = format!("{}End", "Step.".repeat(12));
    let steps = [
        plan.clone(),
        job::apply_after(&plan),
        job::scripts(&repository, vec![job::bash(1, "true")]),
        unusual,
    ];
    let mut with_secret = 0;
    for (name, file) in values_files() {
        let documents = policed(&file);
        for deployment in deployments(&documents) {
            let user = user(deployment);
            for step in &steps {
                let objects = rendered(&documents, deployment, step);
                with_secret += objects.len() - 1;
                let job = job_among(objects);
                let refusals = policy(&documents).refusals(&user, &job);
                assert_eq!(refusals, Some(Vec::new()), "{name}: {job:#}");
                let somebody = policy(&documents).refusals("system:admin", &job);
                assert_eq!(somebody, None, "{name}");
            }
        }
    }
    assert!(with_secret >= 15, "{with_secret}");
}

#[test]
#[allow(clippy::too_many_lines, reason = "each case is a line of one table")]
fn the_admission_policy_refuses_what_no_run_needs() {
    let (_, file) = values_files()
        .into_iter()
        .find(|(name, _)| name == "default")
        .unwrap();
    let release = Release::new().with(&file);
    let documents = release
        .set(json!({"admissionPolicy": {"enabled": true, "secretNames": ["known"]}}))
        .documents();
    let deployment = deployments(&documents).next().unwrap();
    let step = job::plan(&Repository::fixture());
    let job = job_among(rendered(&documents, deployment, &step));
    let refusals = |job: &Value| policy(&documents).refusals(&user(deployment), job).unwrap();
    assert_eq!(refusals(&job), Vec::<String>::new());

    let own = job["metadata"]["name"].as_str().unwrap();
    let spec = "/spec/template/spec";
    let executor = format!("{spec}/containers/0");
    let (environment, volume) = (
        "the environment takes a Secret that is not among admissionPolicy.secretNames",
        "a volume takes a Secret that is not among admissionPolicy.secretNames",
    );
    let pull = "images are pulled with a Secret that is not among admissionPolicy.secretNames";
    let of_environment = |name: &str| json!([{"secretRef": {"name": name}}]);
    let variable = |name: &str| json!([{"name": "A", "valueFrom": {"secretKeyRef": {"name": name, "key": "a"}}}]);
    let mounted = |name: &str| json!([{"name": "v", "secret": {"secretName": name}}]);
    let projected =
        |name: &str| json!([{"name": "v", "projected": {"sources": [{"secret": {"name": name}}]}}]);
    let csi = |name: &str| json!([{"name": "v", "csi": {"driver": "d", "nodePublishSecretRef": {"name": name}}}]);
    let pulled = |name: &str| json!([{"name": name}]);
    let mut bad = vec![
        (
            "/metadata/labels".to_owned(),
            json!({}),
            "the launcher makes runs, and nothing else",
        ),
        (
            format!("{spec}/serviceAccountName"),
            json!("default"),
            "the account is not among admissionPolicy.serviceAccounts",
        ),
        (
            format!("{spec}/hostNetwork"),
            json!(true),
            "a run shares nothing with its node",
        ),
        (
            format!("{spec}/volumes"),
            json!([{"name": "v", "hostPath": {"path": "/"}}]),
            "a volume is of a kind that no run needs",
        ),
        (
            format!("{spec}/volumes"),
            json!([{"name": "v", "rbd": {"monitors": [], "image": "i", "secretRef": {"name": "s"}}}]),
            "a volume is of a kind that no run needs",
        ),
        (format!("{spec}/imagePullSecrets"), json!([{}]), pull),
        (
            format!("{executor}/image"),
            json!("registry.example.com/mayfly-executor:1"),
            "an image is not among admissionPolicy.imagePrefixes",
        ),
    ];
    let others = [
        "terrakube-api-secrets".to_owned(),
        // As the Job, and as another Job's; with too little of an attempt, with too much, with what is none.
        own.to_owned(),
        "job-412-another-0123456789abcdef".to_owned(),
        format!("{own}-0123456789abcde"),
        format!("{own}-0123456789abcdef0"),
        format!("{own}-0123456789abcdeX"),
        format!("{own}-more-0123456789abcdef"),
    ];
    for name in &others {
        bad.push((
            format!("{executor}/envFrom"),
            of_environment(name),
            environment,
        ));
        bad.push((format!("{executor}/env"), variable(name), environment));
        bad.push((format!("{spec}/volumes"), mounted(name), volume));
        bad.push((format!("{spec}/volumes"), projected(name), volume));
        bad.push((format!("{spec}/volumes"), csi(name), volume));
        bad.push((format!("{spec}/imagePullSecrets"), pulled(name), pull));
    }
    let put = |at: &str, value: &Value| {
        let (parent, key) = at.rsplit_once('/').unwrap();
        let mut job = job.clone();
        job.pointer_mut(parent).unwrap()[key] = value.clone();
        job
    };
    for (at, value, why) in &bad {
        assert_eq!(refusals(&put(at, value)), [*why], "{at}: {value}");
    }
    let mine = format!("{own}-0123456789abcdef");
    // It holds job data, with which nobody pulls an image or mounts a volume.
    for (at, value, why) in [
        (format!("{spec}/volumes"), csi(&mine), volume),
        (format!("{spec}/imagePullSecrets"), pulled(&mine), pull),
    ] {
        assert_eq!(refusals(&put(&at, &value)), [why], "{at}");
    }
    for (at, value) in [
        (format!("{spec}/volumes"), csi("known")),
        (format!("{spec}/imagePullSecrets"), pulled("known")),
        (format!("{executor}/envFrom"), of_environment(&mine)),
        (format!("{executor}/env"), variable(&mine)),
        (format!("{spec}/volumes"), mounted(&mine)),
        (format!("{spec}/volumes"), projected(&mine)),
    ] {
        assert_eq!(refusals(&put(&at, &value)), Vec::<String>::new(), "{at}");
    }
}
