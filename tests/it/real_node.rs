//! The chart, the launcher and the executor on a node with a real kubelet: Helm installs them of their images, the
//! platform dispatches over the release's Service, and runs are pods of containerd and runc.
//!
//! Every namespace enforces the restricted standard of pod security.

mod crashes;
mod endings;
mod power;
mod release;
mod runs;

use std::fs;
use std::sync::Mutex;
use std::time::Duration;

use cluster::Cluster;
use integration_tests::Repository;
use job_contract::annotations;
use job_contract::keys::ObjectKey;
use job_contract::report::ReportKey;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Namespace, Pod, Secret, Service};
use kube::api::{ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use test_chart::programs::{helm_with, output};
use test_chart::values::merge;
use test_cluster::node::network::LOOPBACK_ADDRESS;
use test_cluster::node::{Folder, REGISTRY, TAG};
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::http::Server;
use test_peers::redis::{self, RedisServer};
use test_peers::s3::{self, S3};
use test_peers::skips::needed;
use test_peers::terraform;
use test_peers::wait::{self, DEADLINE};
use test_platform::{Flow, NewJob, Outputs, Platform, Status, Workspace};
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use verdict::{Verdict, VerdictKind};

/// Of the chart.
const PORT: u16 = 8090;

/// All journeys share the node. One that switches it off has it for itself.
static NODE: RwLock<()> = RwLock::const_new(());

enum Turn {
    Shared(#[expect(dead_code, reason = "held")] RwLockReadGuard<'static, ()>),
    Own(#[expect(dead_code, reason = "held")] RwLockWriteGuard<'static, ()>),
}

/// The cluster, and a namespace of this test in it.
struct Fixture {
    node: Folder,
    client: Client,
    namespace: String,
    _turn: Turn,
}

impl Fixture {
    /// A namespace with the Secrets a release needs. `None` where there is no node.
    async fn new(has_node_for_itself: bool) -> Option<Self> {
        let absent = "there is no node: `cargo xtask test node` starts one";
        let node = needed(Folder::of_this_test().ok_or(absent))?;
        // The client of this test; an earlier one stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let turn = if has_node_for_itself {
            Turn::Own(NODE.write().await)
        } else {
            Turn::Shared(NODE.read().await)
        };
        let file = Kubeconfig::read_from(node.kubeconfig()).unwrap();
        let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.unwrap()).unwrap();
        let restricted = json!({"metadata": {
            "generateName": "runs-",
            "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
        }});
        let restricted: Namespace = serde_json::from_value(restricted).unwrap();
        let all = Api::all(client.clone());
        let made = all.create(&PostParams::default(), &restricted).await;
        Some(Self {
            node,
            client,
            namespace: made.unwrap().name_any(),
            _turn: turn,
        })
    }

    fn all<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn list<K>(&self) -> Vec<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug,
        K::DynamicType: Default,
    {
        let list = self.all::<K>().list(&ListParams::default()).await;
        list.unwrap().items
    }

    async fn create<K>(&self, object: Value)
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + Serialize
            + DeserializeOwned
            + std::fmt::Debug,
        K::DynamicType: Default,
    {
        let object: K = serde_json::from_value(object).unwrap();
        let made = self.all().create(&PostParams::default(), &object).await;
        made.unwrap();
    }

    /// What Helm says as it does this in the namespace.
    fn helm(&self, arguments: &[&str]) -> String {
        let mut command = helm_with(arguments);
        command
            .args(["--namespace", &self.namespace, "--kubeconfig"])
            .arg(self.node.kubeconfig());
        let done = output(&mut command);
        let [said, complained] =
            [&done.stdout, &done.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(done.status.success(), "{command:?}: {said}{complained}");
        said
    }

    /// What `look` finds, at the latest when patience ends.
    async fn until<T>(&self, what: &str, look: impl AsyncFn() -> Option<T>) -> T {
        match wait::within(DEADLINE, what, || look()).await {
            Ok(found) => found,
            Err(late) => {
                let there = json!([self.list::<Job>().await, self.list::<Pod>().await]);
                panic!("{late}, but {there:#}")
            }
        }
    }
}

/// A release of the chart, the platform that dispatches to it, and all that both need.
struct Stage {
    fixture: Fixture,
    platform: Platform,
    store: S3,
    values: Value,
    _redis: RedisServer,
    /// They stay for as long as a run may fetch them.
    sources: Mutex<Vec<(Repository, Server)>>,
}

impl Stage {
    /// Installs the chart with values over the usual ones. `None` where there is no node.
    async fn with(over: Value) -> Option<Self> {
        Some(Self::at(Fixture::new(false).await?, over).await)
    }

    async fn at(fixture: Fixture, over: Value) -> Self {
        let stage = Self::prepare(fixture, over).await;
        stage.install().await;
        stage
    }

    async fn prepare(fixture: Fixture, over: Value) -> Self {
        // Pods are no part of this machine for it.
        let open = redis::Options::default().set("protected-mode", "no");
        let redis = RedisServer::with(open).unwrap();
        let store = S3::start_open().unwrap();
        let (url, host) = (store.url(), LOOPBACK_ADDRESS);
        let objects = store.address();
        let outputs = Outputs::from_fn(move |organization, job, step| {
            let key = ObjectKey::step_output(organization, job, step).in_bucket();
            s3::object_at(objects, &key).ok()?.map(String::into_bytes)
        });
        let platform = Platform::builder()
            .redis(&format!("redis://{}", redis.address()))
            .outputs(outputs)
            // The runs of a dead launcher have no heartbeat for a while, and a busy machine takes its time to find them.
            .grace(Duration::from_mins(5))
            .reached_at(host)
            .start()
            .await
            .unwrap();
        let mut values = json!({
            "global": {"imageRegistry": REGISTRY},
            "auth": {"internalSecret": {"existingSecret": "internal"}},
            "platform": {
                "apiUrl": platform.url(),
                "publicApiUrl": platform.url(),
                "redis": {"host": host, "port": redis.port()},
                "storage": {"type": "aws", "aws": {
                    "bucket": s3::BUCKET, "region": s3::REGION, "useLockfile": true, "existingSecret": "store",
                    "endpoint": url.replace("127.0.0.1", host),
                }},
            },
            // Quick where a deployment takes its time, and small: all journeys share one machine.
            "launcher": {
                "image": {"tag": TAG},
                "shutdown": {"drainSeconds": 1},
                "resources": {"requests": {"cpu": "1m", "memory": "16Mi"}},
            },
            "executor": {
                "image": {"tag": TAG},
                "cli": {"toolSelection": "installed"},
                "resources": {"requests": {"cpu": "1m", "memory": "16Mi", "ephemeral-storage": "1Mi"}},
                "extraEnv": [{"name": "MAYFLY_STATUS_POLL_SECONDS", "value": "1"}],
            },
            "tests": {"resources": {"requests": {"cpu": "1m", "memory": "16Mi"}}},
        });
        merge(&mut values, over);
        let secret =
            |name: &str, data: Value| json!({"metadata": {"name": name}, "stringData": data});
        let internal = json!({"InternalSecret": platform.secret()});
        fixture.create::<Secret>(secret("internal", internal)).await;
        let keys = json!({
            "AwsTerraformStateAccessKey": store.access_key(),
            "AwsTerraformStateSecretKey": store.secret_key(),
        });
        fixture.create::<Secret>(secret("store", keys)).await;
        Self {
            fixture,
            platform,
            store,
            values,
            _redis: redis,
            sources: Mutex::default(),
        }
    }

    /// Returns when the Deployment is ready and the platform dispatches to its Service.
    async fn install(&self) {
        let values = self
            .fixture
            .node
            .path(&format!("{}.json", self.fixture.namespace));
        fs::write(&values, self.values.to_string()).unwrap();
        let (chart, values) = (test_chart::chart(), values.display().to_string());
        let chart = chart.to_str().unwrap();
        let install = ["install", "mayfly", chart, "--values", &values];
        self.fixture
            .helm(&[&install as &[&str], &["--wait", "--timeout", "10m"]].concat());
        let service = self.fixture.all::<Service>().get("mayfly").await.unwrap();
        let address = service.spec.unwrap().cluster_ip.unwrap();
        let (hosts, namespace) = (self.fixture.node.hosts(), &self.fixture.namespace);
        let line = format!("{address} mayfly.{namespace}.svc.cluster.local\n");
        fs::write(hosts.join(namespace), line).unwrap();
        self.platform
            .dispatch_to(&format!("http://{address}:{PORT}/api/v1/terraform-rs"));
    }

    /// A workspace of a repository, which pods fetch over HTTP.
    fn workspace(&self, repository: Repository) -> Workspace {
        let folders = repository.path().parent().unwrap();
        let server = git_http::serve(folders, GitHttpOptions::default()).unwrap();
        let name = repository.path().file_name().unwrap().to_str().unwrap();
        let port = server.address().port();
        let url = format!("http://{LOOPBACK_ADDRESS}:{port}/{name}");
        self.sources.lock().unwrap().push((repository, server));
        Workspace::new(&url)
    }

    /// Starts a job of this template in a new workspace of the repository.
    fn start(&self, repository: Repository, template: Vec<Flow>) -> u32 {
        self.start_in(self.workspace(repository), template)
    }

    fn start_in(&self, workspace: Workspace, template: Vec<Flow>) -> u32 {
        let workspace = self.platform.workspace(workspace);
        self.platform.start_job(NewJob::new(&workspace, template))
    }

    /// Name of the Kubernetes Job of a step of a job.
    fn name(&self, job: u32, kind: &str) -> String {
        let step = self.platform.job(job).step_of(kind).id.clone();
        format!("job-{job}-{step}")
    }

    /// The pods of a Kubernetes Job.
    async fn pods_of(&self, name: &str) -> Vec<Pod> {
        let pods = self.fixture.list::<Pod>().await.into_iter();
        let is_owned = |pod: &Pod| {
            pod.owner_references()
                .iter()
                .any(|owner| owner.name == name)
        };
        pods.filter(is_owned).collect()
    }

    /// Returns when the tool is at work, with the name of its pod.
    async fn at_work(&self, job: u32, kind: &str) -> String {
        self.platform.until_streamed(job, BEGUN).await;
        let pods = self.pods_of(&self.name(job, kind)).await;
        assert_eq!(pods.len(), 1, "{pods:?}");
        pods[0].name_any()
    }

    /// The verdict, once it is on the Kubernetes Job, and what the step's output says of it.
    async fn verdict(&self, job: u32, kind: &str) -> (Verdict, String) {
        let name = self.name(job, kind);
        let look = async || {
            let found = self.fixture.all::<Job>().get_opt(&name).await.unwrap()?;
            let known = [annotations::VERDICT, annotations::REPORTED_AT];
            let noted = found.annotations();
            known
                .iter()
                .any(|name| noted.contains_key(*name))
                .then_some(())
        };
        self.fixture.until("the verdict is recorded", look).await;
        let key = ReportKey::parse(&self.platform.secret()).unwrap();
        let client = self.fixture.client.clone();
        let library =
            Cluster::from_client(client, &self.fixture.namespace).with_report_key(Some(key));
        let verdict = library.explain(&name).await.unwrap().verdict.unwrap();
        (verdict, self.output(job, kind))
    }

    /// The verdict on a step that failed, as the platform shows it too.
    async fn failed(&self, job: u32, kind: &str, expected: VerdictKind) -> Verdict {
        self.platform.until_job(job, Status::Failed).await;
        let (verdict, output) = self.verdict(job, kind).await;
        assert_eq!(verdict.kind, expected, "{verdict:#?}\n{output}");
        verdict
    }

    fn output(&self, job: u32, kind: &str) -> String {
        let step = self.platform.job(job).step_of(kind).id.clone();
        self.platform.step_output(job, &step).unwrap_or_default()
    }

    /// How often the tool made the resource of [`endless`].
    fn times_begun(&self, job: u32, kind: &str) -> usize {
        let output = terraform::whole(&self.output(job, kind), |line| line == BEGUN);
        let is_said = |line: &&str| line.contains("(local-exec):") && line.ends_with(BEGUN);
        output.lines().filter(is_said).count()
    }
}

/// What the tool says once it is at work in an endless apply.
const BEGUN: &str = "apply-begun";

/// An apply that says that it began, and then takes very long.
fn endless() -> Repository {
    provisioned(&format!("echo {BEGUN}; sleep 600"))
}

/// A resource that a shell makes with these words.
fn provisioned(words: &str) -> Repository {
    Repository::module(&format!(
        "resource \"terraform_data\" \"a\" {{\n  provisioner \"local-exec\" {{\n    command = {words:?}\n  }}\n}}\n"
    ))
}
