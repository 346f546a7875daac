//! What the chart says of itself and of the programs is so.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use api_launcher::cli::Args;
use clap::CommandFactory as _;
use serde_json::{Value, json};
use test_chart::programs::{helm_with, told};
use test_chart::render;
use test_chart::values::{rows, table};
use test_chart::{Document, Release, chart, files, root, values_files};
use verdict::VerdictKind;

use crate::documents;

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(path: &str) -> Value {
    serde_saphyr::from_str(&read(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The command that writes the table anew is in `CONTRIBUTING.md`.
#[test]
fn the_readme_of_the_chart_has_the_table_of_its_values() {
    const BEGIN: &str = "<!-- values:begin -->\n";
    const END: &str = "<!-- values:end -->";
    let text = read("helm/mayfly/README.md");
    let (before, rest) = text.split_once(BEGIN).expect("the table has a beginning");
    let (_, after) = rest.split_once(END).expect("the table has an end");
    let wanted = format!("{before}{BEGIN}\n{}\n{END}{after}", table(&rows().unwrap()));
    if std::env::var_os("UPDATE_CHART_README").is_some() {
        fs::write(chart().join("README.md"), wanted).unwrap();
    } else {
        assert!(text == wanted, "run this test with UPDATE_CHART_README=1");
    }
}

#[test]
fn the_chart_is_of_the_version_of_the_programs() {
    let manifest = yaml("helm/mayfly/Chart.yaml");
    assert_eq!(manifest["appVersion"], env!("CARGO_PKG_VERSION"));
    let images = manifest["annotations"]["artifacthub.io/images"]
        .as_str()
        .unwrap();
    let rendered = Release::new()
        .with(&chart().join("ci/default-values.yaml"))
        .text()
        .unwrap();
    for line in images
        .lines()
        .filter_map(|line| line.trim().strip_prefix("image: "))
    {
        assert!(rendered.contains(line), "{line} is not what is installed");
        assert!(line.ends_with(env!("CARGO_PKG_VERSION")), "{line}");
    }
}

/// Names of the environment in `job-contract`.
fn names_of_the_contract() -> BTreeSet<String> {
    let names = read("crates/job-contract/src/env.rs");
    let names = names
        .lines()
        .filter(|line| line.starts_with("pub const") && line.contains(": &str"));
    names
        .map(|line| line.split('"').nth(1).unwrap().to_owned())
        .collect()
}

/// What other programs in the pods read: the system's libraries, and tools a run starts.
const OF_OTHERS: &[&str] = &[
    "CURL_CA_BUNDLE",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NODE_EXTRA_CA_CERTS",
    "NO_PROXY",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
    "http_proxy",
    "https_proxy",
    "no_proxy",
];

/// The environment of every container of ours, that of executors included, as the chart sets it.
fn environments(documents: &[Document]) -> Vec<(String, Vec<Value>)> {
    let mut found = Vec::new();
    let mut add = |of: String, spec: &Value| {
        for container in spec["containers"].as_array().into_iter().flatten() {
            let variables = container["env"].as_array().cloned().unwrap_or_default();
            found.push((format!("{} of {of}", container["name"]), variables));
        }
    };
    for document in documents {
        match document.kind() {
            "Deployment" | "StatefulSet" => add(
                document.to_string(),
                &document.value["spec"]["template"]["spec"],
            ),
            "Pod" => add(document.to_string(), &document.value["spec"]),
            "ConfigMap" => {
                let Some(text) = document.value["data"]["pod-template.yaml"].as_str() else {
                    continue;
                };
                let template: Value = serde_saphyr::from_str(text).unwrap();
                add(document.to_string(), &template["spec"]);
            }
            _ => {}
        }
    }
    found
}

/// Names that values themselves put into environments, which are the user's business.
fn names_of_values(values: &Value, found: &mut BTreeSet<String>) {
    for (key, value) in values.as_object().into_iter().flatten() {
        if ["env", "extraEnv"].contains(&key.as_str()) {
            let variables = value.as_array().into_iter().flatten();
            found.extend(
                variables.filter_map(|variable| Some(variable["name"].as_str()?.to_owned())),
            );
        }
        names_of_values(value, found);
    }
    for value in values.as_array().into_iter().flatten() {
        names_of_values(value, found);
    }
}

#[test]
fn every_variable_that_the_chart_sets_is_read_by_a_program() {
    let known = names_of_the_contract();
    let mut of_users = BTreeSet::new();
    for (_, file) in values_files() {
        let values: Value = serde_saphyr::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        names_of_values(&values, &mut of_users);
    }
    let mut seen = BTreeSet::new();
    for (name, documents) in documents() {
        for (container, variables) in environments(&documents) {
            for variable in &variables {
                let variable = variable["name"].as_str().unwrap().to_owned();
                // Kubernetes puts it into another variable.
                let of_others = format!("$({variable})");
                let is_part = variables
                    .iter()
                    .filter_map(|other| other["value"].as_str())
                    .any(|value| value.contains(&of_others));
                // The test's own script reads these.
                let of_script = container.contains("http")
                    && ["HOST", "PORT", "HEALTH_PORT"].contains(&variable.as_str());
                let read = known.contains(&variable)
                    || known
                        .iter()
                        .any(|name| name.ends_with('_') && variable.starts_with(name))
                    || OF_OTHERS.contains(&variable.as_str())
                    || of_users.contains(&variable)
                    || is_part
                    || of_script;
                assert!(read, "{name}: nobody reads {variable} in {container}");
                seen.insert(variable);
            }
        }
    }
    let ours = seen.iter().filter(|name| known.contains(*name)).count();
    assert!(ours > 50, "only {ours} of {seen:?}");
    let unused: Vec<_> = OF_OTHERS
        .iter()
        .filter(|name| !seen.contains(**name))
        .collect();
    assert!(unused.is_empty(), "{unused:?}");
}

/// Defaults in the help of `api-launcher serve` and `agent`.
fn defaults_in_the_help() -> BTreeMap<String, String> {
    let mut command = Args::command();
    command.build();
    let default = |argument: &clap::Arg| {
        let name = argument.get_env()?.to_str()?.to_owned();
        let help = argument
            .get_long_help()
            .or(argument.get_help())?
            .to_string();
        let (_, default) = help.split_once("[default: ")?;
        let default = default
            .split([']', ',', ';'])
            .next()?
            .trim_matches('`')
            .to_owned();
        Some((name, default))
    };
    let arguments = ["serve", "agent"].map(|name| command.find_subcommand(name).unwrap());
    let arguments = arguments.iter().flat_map(|command| command.get_arguments());
    arguments.filter_map(default).collect()
}

/// Defaults in the tables of variables of our documents.
fn defaults_in_the_documents() -> BTreeMap<String, String> {
    let mut texts = vec![read("README.md")];
    texts.extend(
        files(&root().join("docs"), ".md")
            .iter()
            .map(|path| fs::read_to_string(path).unwrap()),
    );
    let mut found = BTreeMap::new();
    for text in texts {
        let tables = text.split("\n| Variable | Default |").skip(1);
        for row in tables.flat_map(|table| {
            table
                .lines()
                .skip(2)
                .take_while(|line| line.starts_with('|'))
        }) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            found.insert(
                cells[1].trim_matches('`').to_owned(),
                cells[2].trim_matches('`').to_owned(),
            );
        }
    }
    found
}

/// Where the chart says something else than the programs would without it, and why.
const OTHERWISE: &[(&str, &str)] = &[
    (
        "ExecutorEphemeralNamespace",
        "runs are in the release's namespace",
    ),
    (
        "ExecutorEphemeralSecret",
        "a Secret that is not there would keep every run from starting",
    ),
    (
        "ExecutorEphemeralTerminationGracePeriodSeconds",
        "the chart has a key for each of the two",
    ),
    (
        "MAYFLY_APPLY_GRACE_PERIOD_SECONDS",
        "the chart has a key for each of the two",
    ),
    (
        "MAYFLY_SHUTDOWN_SECONDS",
        "the chart sets the pod's grace period too, which can hold the longest dispatch",
    ),
    ("MAYFLY_POD_NAME", "the pod's name is the host's"),
    ("MAYFLY_AGENT_ON_STOP", "the help names both targets"),
    ("MAYFLY_AGENT_SERVICE_URL", "it is required"),
    ("MAYFLY_AGENT_LISTEN", "the kubelet asks for the health"),
    (
        "MAYFLY_HEALTH_LISTEN",
        "the kubelet and Prometheus ask on a port that runs do not reach",
    ),
    ("MAYFLY_POOLS_FILE", "one of them is a hub"),
    (
        "MAYFLY_POOL_STORE",
        "the claim of the hub is not its data directory",
    ),
    (
        "ExecutorEphemeralImage",
        "by its tag, which the version of the chart is held to",
    ),
];

#[test]
fn defaults_of_the_chart_are_those_of_the_programs() {
    let mut known = defaults_in_the_documents();
    known.extend(defaults_in_the_help());
    let of = |name: &str| Release::new().with(&chart().join(format!("ci/{name}-values.yaml")));
    let hub = json!({
        "hub": {"enabled": true, "config": {"pools": {"eu": {}}}},
        "launcher": {"extraEnvFrom": [{"secretRef": {"name": "platform"}}]},
    });
    let mut documents = [of("default").set(hub).documents(), of("agent").documents()].concat();
    // The pods of `helm test` look at single parts, and leave the others out.
    documents.retain(|document| !document.is_test());
    let mut compared = BTreeSet::new();
    for (container, variables) in environments(&documents) {
        for variable in variables {
            let name = variable["name"].as_str().unwrap();
            if OTHERWISE.iter().any(|(known, _)| *known == name) {
                compared.insert(name.to_owned());
                continue;
            }
            let (Some(value), Some(default)) = (variable["value"].as_str(), known.get(name)) else {
                continue;
            };
            if !default.is_empty() {
                assert_eq!(value, default, "{name} of {container}");
                compared.insert(name.to_owned());
            }
        }
    }
    assert!(compared.len() >= 25, "{compared:?}");
    for (name, why) in OTHERWISE {
        assert!(
            compared.contains(*name),
            "{name} is not set any more: {why}"
        );
    }
    let resources = rows().unwrap();
    let resources = resources
        .iter()
        .find(|row| row.key == "executor.resources")
        .unwrap();
    let resources: Value = serde_json::from_str(&resources.default).unwrap();
    for (variable, at) in [
        ("EPHEMERAL_CPU_REQUEST", "/requests/cpu"),
        ("EPHEMERAL_MEMORY_REQUEST", "/requests/memory"),
        ("EPHEMERAL_STORAGE_REQUEST", "/requests/ephemeral-storage"),
        ("EPHEMERAL_MEMORY_LIMIT", "/limits/memory"),
    ] {
        let value = resources.pointer(at).and_then(Value::as_str);
        assert_eq!(value, known.get(variable).map(String::as_str), "{variable}");
    }
}

/// Verdicts nobody has to be woken for, and why. The readme names them.
const WITHOUT_AN_ALERT: &[(VerdictKind, &str)] = &[
    (VerdictKind::Completed, "the step did what it was asked to"),
    (
        VerdictKind::StepFailed,
        "the tool or a script failed, to whoever wrote it",
    ),
    (VerdictKind::Cancelled, "somebody wanted it so"),
    (
        VerdictKind::AgentForced,
        "whoever stopped the agent wanted it so",
    ),
];

#[test]
fn every_verdict_that_fails_a_run_raises_an_alert_or_is_left_out_for_a_reason() {
    let rules = Release::new()
        .with(&chart().join("ci/default-values.yaml"))
        .set(serde_json::json!({"metrics": {"prometheusRule": {"enabled": true}}}))
        .documents();
    let rules = rules
        .iter()
        .find(|document| document.kind() == "PrometheusRule")
        .unwrap();
    let rules = rules.value["spec"]["groups"][0]["rules"]
        .as_array()
        .unwrap();
    let expressions = rules.iter().map(|rule| rule["expr"].as_str().unwrap());
    let mut named = Vec::new();
    for expression in expressions {
        for matched in expression.split("verdict=~\"").skip(1) {
            let (verdicts, _) = matched.split_once('"').unwrap();
            named.extend(verdicts.split('|').map(str::to_owned));
        }
    }
    let left_out = WITHOUT_AN_ALERT
        .iter()
        .map(|(kind, _)| kind.name().to_owned());
    let mut told: Vec<String> = named.into_iter().chain(left_out).collect();
    let mut all = VerdictKind::ALL.map(|kind| kind.name().to_owned());
    told.sort();
    all.sort();
    assert_eq!(told, all, "each verdict in one alert");
    let readme = read("helm/mayfly/README.md");
    let (_, sentence) = readme.split_once("Verdicts without an alert are ").unwrap();
    let (sentence, _) = sentence.split_once('.').unwrap();
    for (kind, why) in WITHOUT_AN_ALERT {
        assert!(sentence.contains(&format!("`{kind}`")), "{kind}: {why}");
    }
}

/// What the charts and agents this one stands in for can be told: each key of their documentation. Below one that takes
/// a map of Kubernetes' own, one key stands for all.
const OF_OTHER_CHARTS: &[(&str, &[&str])] = &[
    (
        "Terrakube",
        &[
            "ExecutorEphemeralNamespace",
            "ExecutorEphemeralImage",
            "ExecutorEphemeralSecret",
            "ExecutorEphemeralPodAnnotations",
            "ExecutorEphemeralConfigMap",
            "EphemeralFlagBatch",
            "EphemeralJobData",
            "JAVA_TOOL_OPTIONS",
            "TERRAKUBE_ENABLE_EPHEMERAL_EXECUTOR",
            "EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS",
            "EPHEMERAL_CONFIG_SERVICE_ACCOUNT",
            "EPHEMERAL_CONFIG_ANNOTATIONS",
            "EPHEMERAL_CONFIG_TOLERATIONS",
            "EPHEMERAL_CONFIG_MAP_NAME",
            "EPHEMERAL_CONFIG_MAP_MOUNT_PATH",
            "TF_PLUGIN_CACHE_DIR",
            "PVC_CLAIM_NAME",
            "api.serviceAccountName",
            "api.env",
        ],
    ),
    (
        "Scalr",
        &[
            "automount_service_account_token",
            "ca_cert",
            "container_task_acquire_timeout",
            "container_task_ca_cert",
            "container_task_cpu_limit",
            "container_task_cpu_request",
            "container_task_image_registry",
            "container_task_mem_limit",
            "container_task_mem_request",
            "container_task_scheduling_timeout",
            "data_home",
            "debug",
            "disconnect_on_stop",
            "gc_plugins_global_size_limit",
            "grace_shutdown_timeout",
            "kubernetes_task_annotations",
            "kubernetes_task_labels",
            "log_format",
            "token",
            "tokenExistingSecret",
            "tokenExistingSecretKey",
            "url",
            "worker_drain_timeout",
            "worker_on_stop_action",
            "controllerNodeSelector",
            "controllerPodAnnotations",
            "controllerTolerations",
            "efsMountOptions",
            "efsVolumeHandle",
            "extraEnv",
            "fullnameOverride",
            "image.pullPolicy",
            "image.repository",
            "image.tag",
            "imagePullSecrets",
            "nameOverride",
            "podAnnotations",
            "podSecurityContext",
            "resources.limits.cpu",
            "resources.limits.memory",
            "resources.requests.cpu",
            "resources.requests.memory",
            "restrictMetadataService",
            "securityContext",
            "securityContext.capabilities",
            "securityContext.privileged",
            "securityContext.procMount",
            "serviceAccount.annotations",
            "serviceAccount.automountToken",
            "serviceAccount.create",
            "serviceAccount.labels",
            "serviceAccount.name",
            "terminationGracePeriodSeconds",
            "workerNodeSelector",
            "workerPodAnnotations",
            "workerTolerations",
        ],
    ),
    (
        "env0",
        &[
            "dockerImage",
            "agentImagePullSecret",
            "infracostApiKeyEncoded",
            "assumerKeyIdEncoded",
            "assumerSecretEncoded",
            "limits.cpu",
            "limits.memory",
            "requests.cpu",
            "requests.memory",
            "tolerations",
            "affinity.nodeAffinity",
            "customerAwsAccessKeyIdEncoded",
            "customerAwsSecretAccessKeyEncoded",
            "awsSecretsRegion",
            "customerGoogleProject",
            "customerGoogleCredentials",
            "customerAzureClientId",
            "customerAzureClientSecret",
            "customerAzureTenantId",
            "customerVaultTokenEncoded",
            "customerVaultUrl",
            "bitbucketServerCredentialsEncoded",
            "gitlabEnterpriseCredentialsEncoded",
            "githubEnterpriseAppId",
            "githubEnterpriseAppClientId",
            "githubEnterpriseAppInstallationId",
            "githubEnterpriseAppClientSecretEncoded",
            "githubEnterpriseAppPrivateKeyEncoded",
            "allowedVcsUrlRegex",
            "storageClassName",
            "deploymentJobServiceAccountName",
            "jobHistoryLimitFailure",
            "jobHistoryLimitSuccess",
            "strictSecurityContext",
            "customCertificates",
            "env0StateEncryptionKey",
            "podAdditionalLabels",
            "customSecretMounts",
            "providerInstallation",
            "gitSslNoVerify",
            "httpProxy",
            "httpsProxy",
            "deploymentPodWarmPoolSize",
        ],
    ),
    (
        "Pulumi",
        &[
            "token",
            "shared_volume_directory",
            "working_directory",
            "service_url",
            "single_run",
            "pull_image",
            "syslog",
            "organization_name",
            "runner_pool_id",
            "token_expiration",
            "oidc_token_file",
            "env_forward_allowlist",
            "deploy_target",
            "PULUMI_AGENT_IMAGE_PULL_POLICY",
            "PULUMI_AGENT_NUM_CPUS",
            "PULUMI_AGENT_MEM_QUANTITY",
            "PULUMI_AGENT_SERVICE_ACCOUNT_NAME",
            "agentReplicas",
            "worker-pod.json",
        ],
    ),
];

/// Keys of a product in the first cells of a table: those of its own table, and what follows its name in those of keys
/// without a counterpart.
fn keys_of(product: &str, section: &str) -> BTreeSet<String> {
    let (mut of, mut found) = ("", BTreeSet::new());
    for row in section.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert!(!cells[2].is_empty(), "nothing is said of {row}");
        if ["Here", "Why"].contains(&cells[2]) {
            of = cells[1];
            continue;
        }
        let groups = cells[1].split("; ");
        let meant = groups.filter(|group| {
            if of.starts_with("No counterpart") {
                group.starts_with(&format!("{product}: "))
            } else {
                of.split([' ', ',']).next() == Some(product)
            }
        });
        let words = meant.flat_map(|group| group.split('`').skip(1).step_by(2));
        found.extend(words.map(str::to_owned));
    }
    found
}

#[test]
fn every_key_of_the_charts_one_comes_from_has_its_line_in_the_readme() {
    let readme = read("helm/mayfly/README.md");
    let (_, section) = readme.split_once("\n## Coming from elsewhere\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    for (product, keys) in OF_OTHER_CHARTS {
        let lines = keys_of(product, section);
        let is_meant = |line: &str, key: &str| match line.strip_suffix('*') {
            Some(beginning) => key.starts_with(beginning),
            None => line == key,
        };
        for key in *keys {
            let of = lines.iter().filter(|line| is_meant(line, key)).count();
            assert_eq!(of, 1, "{product}: `{key}` among {lines:?}");
        }
        let unknown: Vec<_> = lines
            .iter()
            .filter(|line| !keys.iter().any(|key| is_meant(line, key)))
            .collect();
        assert!(unknown.is_empty(), "{product}: {unknown:?}");
    }
}

/// Words in code marks that look like keys of values: their first part is a key at the top.
fn keys_named(text: &str, top: &BTreeSet<String>) -> BTreeSet<String> {
    let words = text.split('`').skip(1).step_by(2);
    let mut found = BTreeSet::new();
    for word in words {
        let of_a_key = |c: char| c.is_ascii_alphanumeric() || ".-_*".contains(c);
        let Some((first, _)) = word.split_once('.') else {
            continue;
        };
        let is_file = Path::new(word).extension().is_some_and(|end| end == "yaml");
        if top.contains(first) && !is_file && word.chars().all(of_a_key) {
            found.insert(word.to_owned());
        }
    }
    found
}

#[test]
fn keys_named_in_documents_are_there() {
    let defaults = yaml("helm/mayfly/values.yaml");
    let top: BTreeSet<String> = defaults.as_object().unwrap().keys().cloned().collect();
    let mut texts: Vec<PathBuf> = files(&root().join("docs"), ".md");
    texts.extend(files(&chart(), ".md"));
    texts.extend(["README.md", "CHANGELOG.md", "rbac/README.md"].map(|path| root().join(path)));
    texts.push(chart().join("values.yaml"));
    texts.push(chart().join("templates/NOTES.txt"));
    let mut count = 0;
    for path in texts {
        let text = fs::read_to_string(&path).unwrap();
        for key in keys_named(&text, &top) {
            let mut place = &defaults;
            for part in key.split('.').filter(|part| *part != "*") {
                // Below an empty map, or a fragment of Kubernetes' own, anything may stand.
                if place.as_object().is_some_and(serde_json::Map::is_empty) {
                    break;
                }
                place = place
                    .get(part)
                    .unwrap_or_else(|| panic!("{}: no value `{key}`", path.display()));
            }
            count += 1;
        }
    }
    assert!(count > 40, "only {count} keys were found");
}

#[test]
fn the_readme_of_the_plain_manifests_lists_every_right() {
    let text = read("rbac/README.md");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&read("rbac/launcher.yaml")).unwrap();
    let rules = documents
        .iter()
        .filter(|document| document["kind"] == "Role");
    let texts = |value: &Value| -> Vec<String> {
        let list = value.as_array().unwrap().iter();
        list.map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let mut seen = 0;
    for rule in rules.flat_map(|role| role["rules"].as_array().unwrap()) {
        for resource in texts(&rule["resources"]) {
            let row = text
                .lines()
                .find(|line| line.starts_with(&format!("| `{resource}` ")));
            let row = row.unwrap_or_else(|| panic!("no row for {resource}"));
            let cell = row.split('|').nth(1).unwrap();
            for verb in texts(&rule["verbs"]) {
                assert!(cell.contains(&verb), "{resource}: no {verb} in {cell}");
                seen += 1;
            }
        }
    }
    assert!(seen > 10, "only {seen} rights were found");
}

/// The command of the readme for Terrakube's own launcher: Helm does not take over an account that is there.
#[test]
fn rights_alone_are_bound_to_an_existing_account() {
    const ACCOUNT: &str = "terrakube-api-service-account";
    let readme = read("helm/mayfly/README.md");
    let (_, told_to) = readme.split_once("**Rights alone**").unwrap();
    let (_, command) = told_to
        .split_once("helm install mayfly ./helm/mayfly ")
        .unwrap();
    let (command, _) = command.split_once("\n\n").unwrap();
    let arguments = command.split_whitespace().filter(|word| *word != "\\");
    let mut helm = helm_with(["template", "mayfly"]);
    let text = told(helm.arg(chart()).args(arguments));
    let documents = render::documents(&text);
    let is_account = |document: &&Document| document.kind() == "ServiceAccount";
    let made: Vec<&str> = documents
        .iter()
        .filter(is_account)
        .map(Document::name)
        .collect();
    assert_eq!(made, ["mayfly-executor"]);
    let subject = "/subjects/0/name";
    let is_bound = |document: &Document| {
        document.kind() == "RoleBinding" && document.text_at(subject) == ACCOUNT
    };
    assert!(documents.iter().any(is_bound), "{text}");
}
