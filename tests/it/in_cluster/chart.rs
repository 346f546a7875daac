//! What the chart installs, at work: its launcher runs in a pod as the chart makes it, with its configuration and under
//! its Roles, and so do the pods of `helm test`.

mod admitted;
mod dry_run;
mod policy;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use integration_tests::{Repository, Running, job};
use job_contract::JobData;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{
    DeleteParams, DynamicObject, ListParams, LogParams, Patch, PatchParams, PostParams,
};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, ResourceExt};
use manifest::pod_security::{Level, violations};
use serde_json::{Value, json};
use test_chart::programs::{helm_with, output, told};
use test_chart::values::merge;
use test_chart::{Document, Release, values_files};
use test_cluster::{ADMIN, Cluster, State};
use test_peers::port::Port;
use test_peers::wait;
use test_platform::launcher::{Endpoint, READINESS};

use super::Fixture;
use super::rights::everything_it_does;
use crate::chart::{deployments, launchers_rights, singles, values, variable};

#[tokio::test(flavor = "multi_thread")]
async fn everything_the_launcher_does_uses_each_right_the_chart_grants_and_no_other() {
    let mut done = BTreeSet::new();
    for name in ["default", "multi-namespace"] {
        for (_, rules) in launchers_rights(&values(name)) {
            // Launchers with the same rights need no further proof.
            if done.insert(singles(&rules)) {
                everything_it_does(or_skip!(Fixture::of(Cluster::builder(), &rules).await)).await;
            }
        }
    }
    assert!(!done.is_empty());
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
        let folder = folder.join(name);
        fs::create_dir_all(&folder).unwrap();
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
            // The release does not make the others.
            let Some(map) = map else { continue };
            let text = map.value["data"][item["key"].as_str().unwrap()].as_str();
            let text = text.unwrap_or_else(|| panic!("{map} has no {}", item["key"]));
            fs::write(folder.join(item["path"].as_str().unwrap()), text).unwrap();
        }
        mounts.push((mount["mountPath"].as_str().unwrap().to_owned(), folder));
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
            let value = mount.map_or(value.clone(), |(path, fixture)| {
                value.replacen(path, fixture.to_str().unwrap(), 1)
            });
            (variable["name"].as_str().unwrap().to_owned(), value)
        })
        .collect()
}

/// The launchers of a release that make Jobs, and its agent.
fn makers_of_jobs(documents: &[Document]) -> impl Iterator<Item = &Document> {
    let of_kind = |document: &&Document| ["Deployment", "StatefulSet"].contains(&document.kind());
    let found = documents.iter().filter(of_kind);
    found.filter(|document| !variable(document, "ExecutorEphemeralNamespace").is_empty())
}

/// What the launcher makes of a job document with the configuration of a Deployment.
fn rendered(documents: &[Document], deployment: &Document, job: &JobData) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("job.json");
    fs::write(&file, serde_json::to_vec(job).unwrap()).unwrap();
    let mut command = Command::new(crate::LAUNCHER);
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

/// Where objects of a document's kind are.
fn api_of(cluster: &Cluster, document: &Document) -> Api<DynamicObject> {
    let client = cluster.client(ADMIN).unwrap();
    let version = document.text_at("/apiVersion");
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let kind = GroupVersionKind::gvk(group, version, document.kind());
    let kind = ApiResource::from_gvk(&kind);
    Api::namespaced_with(client, document.namespace(), &kind)
}

/// Makes all objects of a release, those of `helm test` that are no pods included.
pub(crate) async fn install(cluster: &Cluster, documents: &[Document]) {
    let is_pod = |document: &&Document| document.kind() == "Pod";
    for document in documents.iter().filter(|document| !is_pod(document)) {
        let object = serde_json::from_value(document.value.clone()).unwrap();
        let api = api_of(cluster, document);
        let made = api.create(&PostParams::default(), &object).await;
        made.unwrap_or_else(|error| panic!("{document}: {error}"));
    }
}

/// A release in a cluster.
struct Installed {
    fixture: Fixture,
    /// What it is installed with.
    values: Value,
    documents: Vec<Document>,
    /// Of the launcher, which listens on it once its pod is made.
    port: Port,
    health_port: Port,
}

impl Installed {
    /// Installs the chart with values over the defaults.
    async fn with(over: Value) -> Option<Self> {
        let installed = Self::prepared(over).await?;
        installed.install().await;
        Some(installed)
    }

    /// A cluster where all is there that the release needs, and nothing of it.
    async fn prepared(over: Value) -> Option<Self> {
        let [port, health_port] = [(); 2].map(|()| Port::take().unwrap());
        let service = json!({"port": port.number(), "healthPort": health_port.number()});
        let mut values = json!({
            "auth": {"internalSecret": {"existingSecret": "internal"}},
            "launcher": {"listenAddress": "127.0.0.1", "service": service},
            // What runs find here is the tool on this machine, and a repository on it.
            "executor": {"cli": {"toolSelection": "installed"}},
            "persistence": {"state": {"enabled": true}},
        });
        merge(&mut values, over);
        let mut release = Release::new().set(values.clone());
        let rights = launchers_rights(&release.documents());
        assert_eq!(rights.len(), 1);
        let fixture = Fixture::of(Cluster::builder(), &rights[0].1).await?;
        // The namespace is known only now, and changes no rule.
        fixture.runs.clone_into(&mut release.namespace);
        let documents = release.documents();
        let installed = Self {
            fixture,
            values,
            documents,
            port,
            health_port,
        };
        installed.prepare().await;
        installed.put_images();
        Some(installed)
    }

    /// Makes all objects of the release, those of `helm test` that are no pods included.
    async fn install(&self) {
        install(&self.fixture.cluster, &self.documents).await;
    }

    /// Where objects of a document's kind are.
    fn api_of(&self, document: &Document) -> Api<DynamicObject> {
        api_of(&self.fixture.cluster, document)
    }

    /// What Helm says as it does this to the release.
    async fn helm(&self, arguments: &[&str]) -> String {
        let kubeconfig = self
            .fixture
            .cluster
            .kubeconfig_file(ADMIN, &self.fixture.runs)
            .unwrap();
        let done = output(helm_with(arguments).arg("--kubeconfig").arg(kubeconfig));
        let [said, complained] =
            [&done.stdout, &done.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        if !done.status.success() {
            let mut logs = String::new();
            for pod in self.pods().list(&ListParams::default()).await.unwrap() {
                for container in &pod.spec.as_ref().unwrap().containers {
                    let log = self.log(&pod.name_any(), &container.name).await;
                    let _ = writeln!(logs, "{} of {}: {log}", container.name, pod.name_any());
                }
            }
            panic!("helm {arguments:?}: {said}{complained}{logs}");
        }
        said
    }

    /// Objects of the release that are there.
    async fn there(&self) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for document in &self.documents {
            let all = ListParams::default().labels("app.kubernetes.io/instance=mayfly");
            let list = self.api_of(document).list(&all).await.unwrap();
            // What a Deployment makes is no object of the release.
            let own = list
                .items
                .iter()
                .filter(|item| item.owner_references().is_empty());
            let names = own.map(ResourceExt::name_any);
            found.extend(names.map(|name| format!("{} {name}", document.kind())));
        }
        found
    }

    /// What is there before: the platform's secret, and behind the claim the folder where this test keeps its records.
    async fn prepare(&self) {
        let secret = test_platform::Secret::long().text();
        let secret: Secret = serde_json::from_value(json!({
            "metadata": {"name": "internal"},
            "stringData": {"InternalSecret": secret},
        }))
        .unwrap();
        let client = self.fixture.cluster.client(ADMIN).unwrap();
        let secrets = Api::<Secret>::namespaced(client, &self.fixture.runs);
        secrets
            .create(&PostParams::default(), &secret)
            .await
            .unwrap();
        let claims = self
            .documents
            .iter()
            .filter(|document| document.kind() == "PersistentVolumeClaim");
        for claim in claims {
            let cluster = &self.fixture.cluster;
            let folder = cluster.claim_dir(claim.namespace(), claim.name());
            fs::create_dir_all(folder.parent().unwrap()).unwrap();
            symlink(self.fixture.machine.data_dir(), folder).unwrap();
        }
    }

    fn put_images(&self) {
        let cluster = &self.fixture.cluster;
        let launcher = self.fixture.program_of_launcher();
        let executor = Path::new(crate::EXECUTOR);
        let deployment = self.deployment();
        let image = deployment.text_at("/spec/template/spec/containers/0/image");
        cluster.image(image, &launcher);
        cluster.image(variable(deployment, "ExecutorEphemeralImage"), executor);
    }

    fn deployment(&self) -> &Document {
        deployments(&self.documents).next().unwrap()
    }

    /// The pods of `helm test` whose names end so.
    fn test(&self, suffix: &str) -> Value {
        let found = self
            .documents
            .iter()
            .filter(|document| document.is_test() && document.kind() == "Pod");
        let mut found = found.filter(|document| document.name().ends_with(suffix));
        found
            .next()
            .unwrap_or_else(|| panic!("no test {suffix}"))
            .value
            .clone()
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(
            self.fixture.cluster.client(ADMIN).unwrap(),
            &self.fixture.runs,
        )
    }

    /// Makes a pod, with the addresses of Services resolved as a cluster's DNS would.
    async fn start(&self, pod: Value) -> String {
        let mut text = pod.to_string();
        for service in self
            .documents
            .iter()
            .filter(|document| document.kind() == "Service")
        {
            let host = format!("{}.{}.svc", service.name(), service.namespace());
            if text.contains(&host) {
                self.assert_leads_to_the_launcher(service);
                text = text.replace(&host, "127.0.0.1");
            }
        }
        assert!(!text.contains(".svc\""), "no Service has this name: {text}");
        let pod: Pod = serde_json::from_str(&text).unwrap();
        let made = self.pods().create(&PostParams::default(), &pod).await;
        made.unwrap_or_else(|error| panic!("{error}: {text}"))
            .name_any()
    }

    fn assert_leads_to_the_launcher(&self, service: &Document) {
        let template = &self.deployment().value["spec"]["template"];
        let selector = service.value["spec"]["selector"].as_object().unwrap();
        assert!(!selector.is_empty(), "{service}");
        for (key, value) in selector {
            assert_eq!(template["metadata"]["labels"][key], *value, "{service}");
        }
        for (index, expected) in [&self.port, &self.health_port].into_iter().enumerate() {
            let port = &service.value["spec"]["ports"][index];
            let of_container = &template["spec"]["containers"][0]["ports"][index];
            assert_eq!(port["targetPort"], of_container["name"], "{service}");
            let expected = json!(expected.number());
            assert_eq!(
                (&port["port"], &of_container["containerPort"]),
                (&expected, &expected)
            );
        }
    }

    /// The launcher's pod.
    async fn pod_of_launcher(&self) -> String {
        let owned = |state: &State| {
            let mut pods = state.pods.iter();
            let pod = pods.find(|pod| !pod.owner_references().is_empty())?;
            Some(pod.name_any())
        };
        self.fixture.until("the Deployment has a pod", owned).await
    }

    /// The launcher's pod once it is ready, and its endpoint.
    async fn launch(&self) -> (String, Endpoint) {
        let name = self.pod_of_launcher().await;
        let endpoint = Endpoint::new(self.port.address(), test_platform::Secret::long());
        let is_ready = async || match endpoint.get(READINESS).await {
            Ok(200) => Ok(()),
            answer => Err(format!("{answer:?}: {}", self.log(&name, "launcher").await)),
        };
        wait::until("the launcher is ready", is_ready).await;
        (name, endpoint)
    }

    /// The end of a container's log.
    async fn log(&self, pod: &str, container: &str) -> String {
        let params = LogParams {
            container: Some(container.to_owned()),
            tail_lines: Some(100),
            ..LogParams::default()
        };
        let log = self.pods().logs(pod, &params).await;
        log.unwrap_or_else(|error| error.to_string())
    }

    /// Runs a pod of `helm test`, which must succeed, and returns its log.
    async fn tested(&self, suffix: &str) -> String {
        let pod = self.test(suffix);
        let container = pod["spec"]["containers"][0]["name"].as_str().unwrap();
        let name = self.start(pod.clone()).await;
        let phase = |state: &State| {
            let pod = state.pods.iter().find(|pod| pod.name_any() == name)?;
            let phase = pod.status.as_ref()?.phase.clone()?;
            ["Succeeded", "Failed"]
                .contains(&phase.as_str())
                .then_some(phase)
        };
        let phase = self.fixture.until(&format!("{name} ends"), phase).await;
        let log = self.log(&name, container).await;
        assert_eq!(phase, "Succeeded", "{name}: {log}");
        log
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_installed_launcher_runs_what_is_dispatched_to_it() {
    let repository = Repository::fixture();
    let plan = job::plan(&repository);
    let canary = canary(&repository);
    let over = json!({"tests": {"canary": {"enabled": true, "jobData": canary}}});
    let installed = or_skip!(Installed::with(over).await);
    let fixture = &installed.fixture;
    let apply = job::apply_after(&plan);
    fixture.machine.queue(&[&plan, &apply]);

    let (launcher, endpoint) = installed.launch().await;
    assert_eq!(endpoint.post(&plan).await.unwrap(), 202);
    fixture.until_over(&plan, "Complete").await;
    assert!(fixture.machine.record(&plan).plan_changes);
    assert_eq!(endpoint.post(&apply).await.unwrap(), 202);
    fixture.until_over(&apply, "Complete").await;
    assert_eq!(
        fixture.machine.resources(&apply),
        ["terraform_data.greeting"]
    );

    let said = installed.tested("-test-http").await;
    assert!(said.contains("readiness: 200"), "{said}");
    let said = installed.tested("-test-rights").await;
    assert!(said.contains("Nothing is missing"), "{said}");
    let said = installed.tested("-test-canary").await;
    assert!(said.contains("the canary sings"), "{said}");

    // What it made is what the API knows, and restricted.
    let state = fixture.state().await;
    assert_eq!(state.jobs.len(), 3);
    for pod in &state.pods {
        let spec = pod.spec.clone().unwrap();
        assert_eq!(
            violations(&spec, Level::Restricted),
            Vec::<String>::new(),
            "{}",
            pod.name_any()
        );
    }

    // It ends in the time its pod has: it is not killed.
    let pod = installed.pods().get(&launcher).await.unwrap();
    installed
        .pods()
        .delete(&launcher, &DeleteParams::default())
        .await
        .unwrap();
    let gone = |state: &State| {
        state
            .pods
            .iter()
            .all(|pod| pod.name_any() != launcher)
            .then_some(())
    };
    fixture.until("the launcher is gone", gone).await;
    let container = &pod.spec.as_ref().unwrap().containers[0].name;
    let log = fixture.cluster.container_log(&pod, container).unwrap();
    assert!(log.contains("stopped"), "{log}");
}

/// A job document the canary runs, in a repository on this machine.
fn canary(repository: &Repository) -> String {
    let mut document = job::plan(repository);
    document.step_type = Some("customScripts".to_owned());
    document.command_list = vec![job::bash(1, "echo the canary sings")];
    "@JOB@".clone_into(&mut document.job_id);
    "@STEP@".clone_into(&mut document.step_id);
    serde_json::to_string(&document).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn helm_itself_installs_tests_changes_and_removes_a_release_and_leaves_nothing_but_claims_and_tests()
 {
    let repository = Repository::fixture();
    let canary = canary(&repository);
    let over = json!({
        // Its pods have no part in this.
        "launcher": {"replicaCount": 0},
        "tests": {"canary": {"enabled": true, "jobData": canary}},
    });
    let installed = or_skip!(Installed::prepared(over).await);
    let folder = tempfile::tempdir().unwrap();
    let values = folder.path().join("values.json");
    fs::write(&values, installed.values.to_string()).unwrap();
    let (chart, values) = (test_chart::chart(), values.to_str().unwrap().to_owned());
    let chart = chart.to_str().unwrap();
    assert_eq!(installed.there().await, BTreeSet::new());

    installed
        .helm(&["install", "mayfly", chart, "--values", &values])
        .await;
    let is_hook =
        |document: &&Document| document.value["metadata"]["annotations"]["helm.sh/hook"] == "test";
    let of_release = installed
        .documents
        .iter()
        .filter(|document| !is_hook(document));
    let wanted: BTreeSet<String> = of_release
        .map(|document| format!("{} {}", document.kind(), document.name()))
        .collect();
    assert!(wanted.len() > 10, "{wanted:?}");
    assert_eq!(installed.there().await, wanted);

    // Its Service leads nowhere without a pod; that test has a journey of its own.
    let filter = "!name=mayfly-test-http";
    let test = ["test", "mayfly", "--filter", filter, "--timeout", "10m"];
    let said = installed
        .helm(&[&test as &[&str], &["--logs"]].concat())
        .await;
    for test in ["rights", "canary"] {
        let suite = format!("TEST SUITE:     mayfly-test-{test}\n");
        assert!(said.contains(&suite), "{said}");
        let log = format!("POD LOGS: mayfly-test-{test}\n");
        assert!(said.contains(&log), "{said}");
    }
    assert!(said.contains("the canary sings"), "{said}");
    assert_eq!(
        said.matches("Phase:          Succeeded").count(),
        2,
        "{said}"
    );
    let pods = ["Pod mayfly-test-canary", "Pod mayfly-test-rights"].map(str::to_owned);
    let tested: BTreeSet<String> = wanted.iter().cloned().chain(pods.clone()).collect();
    assert_eq!(installed.there().await, tested);
    let state = installed.fixture.state().await;
    assert_eq!(state.jobs.len(), 1, "{:?}", state.jobs);

    let deployment = installed.deployment();
    let level = async || {
        let found = installed.api_of(deployment).get(deployment.name()).await;
        let container = &found.unwrap().data["spec"]["template"]["spec"]["containers"][0];
        let variables = container["env"].as_array().unwrap().iter();
        let mut levels = variables.filter(|variable| variable["name"] == "MAYFLY_LOG");
        levels.next().unwrap()["value"].as_str().unwrap().to_owned()
    };
    let before = level().await;
    // As the launcher of the release does.
    let lease = installed
        .documents
        .iter()
        .find(|document| document.kind() == "Lease")
        .unwrap();
    let leases = installed.api_of(lease);
    let held = Patch::Merge(json!({"spec": {"holderIdentity": "mayfly-0"}}));
    let params = PatchParams::default();
    leases.patch(lease.name(), &params, &held).await.unwrap();
    let debug = ["--values", &values, "--set", "log.level=debug"];
    let upgrade = [&["upgrade", "mayfly", chart] as &[&str], &debug].concat();
    installed.helm(&upgrade).await;
    assert_ne!(before, "debug");
    assert_eq!(level().await, "debug");
    installed.helm(&["rollback", "mayfly", "1"]).await;
    assert_eq!(level().await, before);
    let held = leases.get(lease.name()).await.unwrap();
    assert_eq!(held.data["spec"]["holderIdentity"], "mayfly-0");
    assert_eq!(installed.there().await, tested);

    installed
        .helm(&["uninstall", "mayfly", "--wait", "--timeout", "10m"])
        .await;
    let claims = wanted
        .into_iter()
        .filter(|name| name.starts_with("PersistentVolumeClaim "));
    // Helm keeps the pods of tests, for their logs.
    assert_eq!(installed.there().await, claims.chain(pods).collect());
    // Nor does Helm's own record stay, and what ran goes on by itself.
    let state = installed.fixture.state().await;
    let of_helm = |secret: &Secret| secret.type_.as_deref() == Some("helm.sh/release.v1");
    assert!(!state.secrets.iter().any(of_helm), "{:?}", state.secrets);
    assert_eq!(state.jobs.len(), 1);
}

/// Names of metrics in a text of queries. What begins with `mayfly_dev_` is a label, from `mayfly.dev/`.
fn metric_names(text: &str) -> BTreeSet<String> {
    let of_a_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.match_indices("mayfly_")
        .filter(|(at, _)| !text[..*at].ends_with(of_a_name))
        .map(|(at, _)| {
            text[at..]
                .split(|c| !of_a_name(c))
                .next()
                .unwrap()
                .to_owned()
        })
        .filter(|name| !name.starts_with("mayfly_dev_"))
        .collect()
}

/// The series of what a launcher exports, without their values.
fn series(text: &str) -> BTreeSet<&str> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| line.rsplit_once(' ').unwrap().0)
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn alerts_and_dashboard_ask_for_what_the_launcher_counts() {
    let installed = or_skip!(Installed::with(json!({})).await);
    let documents = Release::new()
        .with(&test_chart::chart().join("ci/default-values.yaml"))
        .set(json!({"metrics": {"prometheusRule": {"enabled": true}, "dashboards": {"enabled": true}}}))
        .documents();
    let (_, endpoint) = installed.launch().await;
    let url = format!(
        "http://127.0.0.1:{}/metrics",
        installed.health_port.number()
    );
    let text = endpoint
        .client
        .get(url)
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    // What the rules themselves are tried on.
    assert_eq!(series(&text), series(&api_launcher::metrics::at_start()));
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let mut counted: BTreeSet<String> = samples.flat_map(metric_names).collect();
    // A family shows no sample before its first one.
    let described = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    counted.extend(described.flat_map(|line| {
        match line.split_once(' ') {
            Some((name, "counter")) => vec![format!("{name}_total")],
            Some((name, "histogram")) => ["bucket", "sum", "count"]
                .map(|end| format!("{name}_{end}"))
                .to_vec(),
            Some((name, "info")) => vec![format!("{name}_info")],
            Some((name, _)) => vec![name.to_owned()],
            None => Vec::new(),
        }
    }));
    let mut asked = BTreeSet::new();
    for document in &documents {
        if document.kind() == "PrometheusRule" || document.template.contains("dashboard") {
            let names = metric_names(&document.value["spec"].to_string());
            let names: BTreeSet<_> = names
                .into_iter()
                .chain(metric_names(&document.value["data"].to_string()))
                .collect();
            assert!(!names.is_empty(), "{document}");
            asked.extend(names);
        }
    }
    let unknown: Vec<_> = asked.difference(&counted).collect();
    assert!(unknown.is_empty(), "{unknown:?} of {counted:?}");
}

/// A command of Helm with the chart and a file of values, for the namespace of runs of a fixture.
fn helm_for(fixture: &Fixture, verb: &str, values: &Path) -> Command {
    let kubeconfig = fixture
        .cluster
        .kubeconfig_file(ADMIN, &fixture.runs)
        .unwrap();
    let mut command = helm_with([verb, "mayfly"]);
    command
        .arg(test_chart::chart())
        .arg("--values")
        .arg(values)
        .arg("--kubeconfig")
        .arg(kubeconfig);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn the_notes_of_the_chart_name_addresses_that_exist() {
    let fixture = or_skip!(Fixture::new().await);
    let mut seen = 0;
    for (name, file) in values_files() {
        let mut install = helm_for(&fixture, "install", &file);
        install.arg("--dry-run=client");
        // The cluster has no kinds of the Prometheus operator, and no note speaks of them.
        for kind in ["serviceMonitor", "podMonitor", "prometheusRule"] {
            install.args(["--set", &format!("metrics.{kind}.enabled=false")]);
        }
        let notes = told(&mut install);
        let (_, notes) = notes.split_once("\nNOTES:\n").unwrap();
        let mut release = Release::new().with(&file);
        fixture.runs.clone_into(&mut release.namespace);
        let documents = release.documents();
        for service in documents
            .iter()
            .filter(|document| document.kind() == "Service")
        {
            let port = &service.value["spec"]["ports"][0]["port"];
            let host = format!("{}.{}.svc", service.name(), service.namespace());
            seen += 1;
            if variable(deployments(&documents).next().unwrap(), "MAYFLY_TARGET") == "none" {
                let url = format!("  http://{host}:{port}/pools/eu");
                assert!(
                    notes.lines().any(|line| line == url),
                    "{name}: no {url} in {notes}"
                );
                assert!(!notes.contains("terraform-rs"), "{name}: {notes}");
                continue;
            }
            // Terrakube takes the first as it is, and adds the path to the others.
            for (setting, path) in [
                ("AzBuilderExecutorUrl ", "/api/v1/terraform-rs"),
                ("agent's URL, TERRAKUBE_DEFAULT_EXECUTOR ", ""),
            ] {
                let address = format!("http://{host}:{port}{path}");
                let is_told = notes.lines().any(|line| {
                    let rest = line.trim().strip_prefix(setting);
                    rest.is_some_and(|rest| rest.trim() == address)
                });
                assert!(is_told, "{name}: no {address} for {setting}in {notes}");
            }
        }
        assert!(
            !notes.contains("<no value>") && !notes.contains("%!"),
            "{name}: {notes}"
        );
    }
    assert!(seen > 0);
}
