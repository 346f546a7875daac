//! The cluster as tests see it.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::json;
use tempfile::TempDir;
use test_peers::wait::{self, NotInTime};
use tokio::runtime::{Handle, Runtime};
use tokio_util::sync::CancellationToken;

use crate::clock::now;
use crate::front::faults::Faults;
use crate::front::recorder::Recorded;
use crate::front::upstream::Upstream;
use crate::front::{Front, token};
use crate::kubelet::nodes::Nodes;
use crate::kubelet::register::{self, Registry};
use crate::kubelet::{Image, Order, Runner};
use crate::provision::{self, Refused};
use crate::rights::{ADMIN, Rule};
use crate::state::{Seen, State};

/// What the admission plugin `PodNodeSelector` adds to the node selectors of pods.
const NODE_SELECTOR: &str = "scheduler.alpha.kubernetes.io/node-selector";
/// How long the end of a cluster may take to have namespaces deleted that would outlive it.
const TIDY: Duration = Duration::from_secs(30);

/// Why a cluster did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No port, folder or thread.
    #[error("the test cluster did not start")]
    System(#[from] io::Error),
    /// A client for its server could not be made.
    #[error("no client for the test cluster")]
    Client(#[from] kube::Error),
    /// The kubeconfig leads to no cluster.
    #[error("the kubeconfig leads to no cluster")]
    Kubeconfig(#[from] KubeconfigError),
}

/// What a cluster is made of.
#[derive(Debug, Clone)]
pub struct Builder {
    has_nodes: bool,
    address: IpAddr,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            has_nodes: true,
            address: Ipv4Addr::LOCALHOST.into(),
        }
    }
}

impl Builder {
    /// Pods stay pending; tests write their status.
    #[must_use]
    pub fn without_kubelet(mut self) -> Self {
        self.has_nodes = false;
        self
    }

    /// The API server listens at this address of the machine.
    #[must_use]
    pub fn listening_at(mut self, address: IpAddr) -> Self {
        self.address = address;
        self
    }

    /// Starts the cluster on the control plane to which a kubeconfig leads ([`crate::kubeconfig`]).
    pub async fn start(self, kubeconfig: &Path) -> Result<Cluster, StartError> {
        let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
        Cluster::with(&self, kubeconfig).await
    }
}

/// A runtime that may end within another one.
#[derive(Debug)]
struct Background {
    handle: Handle,
    runtime: Option<Runtime>,
}

impl Background {
    fn start() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        Ok(Self {
            handle: runtime.handle().clone(),
            runtime: Some(runtime),
        })
    }

    fn end(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.end();
    }
}

/// A cluster; everything of it ends when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    runtime: Background,
    front: Arc<Front>,
    runner: Arc<Runner>,
    stop: CancellationToken,
    dir: TempDir,
    /// What is this cluster's among all that share the control plane.
    id: String,
    /// Namespaces to delete at the end.
    namespaces: Mutex<Vec<String>>,
}

/// What is behind the front.
async fn upstream(kubeconfig: Kubeconfig) -> Result<Upstream, StartError> {
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    Ok(Upstream::new(config)?)
}

impl Cluster {
    /// To say what a cluster is made of.
    pub fn builder() -> Builder {
        Builder::default()
    }

    async fn with(parts: &Builder, kubeconfig: Kubeconfig) -> Result<Self, StartError> {
        let runtime = Background::start()?;
        let dir = tempfile::tempdir()?;
        let stop = CancellationToken::new();
        let (until, address) = (stop.clone(), parts.address);
        let start = runtime.handle.spawn(async move {
            let upstream = upstream(kubeconfig).await?;
            Ok::<_, StartError>(Front::start(upstream, address, until).await?)
        });
        let front = start.await.map_err(io::Error::other)??;
        test_peers::evidence::keep_files(dir.path(), &[".log"]);
        let runner = Arc::new(Runner::new(dir.path(), Arc::clone(&front.logs)));
        let id = uuid::Uuid::new_v4().simple().to_string();
        let cluster = Self {
            runtime,
            front,
            runner,
            stop,
            dir,
            id: id[..12].to_owned(),
            namespaces: Mutex::default(),
        };
        if parts.has_nodes {
            cluster.run_nodes()?;
        }
        Ok(cluster)
    }

    fn run_nodes(&self) -> Result<(), kube::Error> {
        let runtime = &self.runtime.handle;
        let _inside = runtime.enter();
        let client = self.client(crate::CONTROLLERS)?;
        let nodes = Registry::new(client, Arc::clone(&self.runner), &self.id);
        runtime.spawn(nodes.keep());
        Ok(())
    }

    /// From now on, the API server's clock is ahead by so much, as clients see it. Times in objects stay as they are.
    pub fn set_clock_ahead(&self, by: Duration) {
        self.front.set_ahead(by);
    }

    /// Where the API server listens.
    pub fn address(&self) -> SocketAddr {
        self.front.address()
    }

    /// The same, for clients of HTTP.
    pub fn url(&self) -> String {
        self.front.url()
    }

    /// A client for an identity, on the runtime of the caller.
    pub fn client(&self, identity: &str) -> Result<Client, kube::Error> {
        let url = self
            .url()
            .parse()
            .map_err(|error| kube::Error::Service(Box::new(error) as _))?;
        let mut config = Config::new(url);
        config.auth_info.token = Some(token(identity).into());
        Client::try_from(config)
    }

    /// A kubeconfig for an identity, for programs; `namespace` is the one of its context.
    pub fn kubeconfig_file(&self, identity: &str, namespace: &str) -> io::Result<PathBuf> {
        let path = self
            .dir
            .path()
            .join(format!("kubeconfig-{identity}-{namespace}"));
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url()}}],
            "users": [{"name": identity, "user": {"token": token(identity)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": identity, "namespace": namespace}}],
        });
        // A program that was started with it before may be reading it.
        let new = path.with_extension("new");
        fs::write(&new, config.to_string())?;
        fs::rename(new, &path)?;
        Ok(path)
    }

    /// From now on an identity may do only what it was granted. One that was granted nothing yet may do everything.
    pub async fn grant(
        &self,
        identity: &str,
        namespace: &str,
        rules: &[Rule],
    ) -> Result<(), kube::Error> {
        let (identity, namespace) = (identity.to_owned(), namespace.to_owned());
        let (front, rules) = (Arc::clone(&self.front), rules.to_vec());
        self.inside(async move { front.upstream.grant(&identity, &namespace, &rules).await })
            .await
    }

    /// From now on an identity may do nothing until granted.
    pub async fn revoke(&self, identity: &str) -> Result<(), kube::Error> {
        let (front, identity) = (Arc::clone(&self.front), identity.to_owned());
        self.inside(async move { front.upstream.revoke(&identity).await })
            .await
    }

    /// Faults to come.
    pub fn faults(&self) -> &Faults {
        &self.front.faults
    }

    /// The requests so far.
    pub fn recorded(&self) -> Recorded {
        Recorded(self.front.recorder.all())
    }

    /// Where pods may run.
    pub fn nodes(&self) -> &Nodes {
        &self.runner.nodes
    }

    /// Ends every watch but the cluster's own, in the middle of its stream.
    pub fn cut_watches(&self) {
        self.front.cut_watches();
    }

    /// What every container of a pod run here has written so far, also of pods that are gone.
    pub fn container_logs(&self) -> Vec<String> {
        let texts = self.front.logs.texts().into_iter();
        texts.map(|(_, text)| text).collect()
    }

    /// What a container of a pod has written so far.
    pub fn container_log(&self, pod: &Pod, container: &str) -> Option<String> {
        self.front
            .logs
            .text(&pod.uid().unwrap_or_default(), container)
    }

    /// Runs `program` for containers of this image, with the `PATH` of this process.
    pub fn image(&self, name: &str, program: &Path) {
        let path = std::env::var("PATH").unwrap_or_default();
        let image = Image {
            program: program.to_owned(),
            env: vec![("PATH".to_owned(), path)],
        };
        self.runner.set_image(name, image);
    }

    /// Where everything lies that its nodes keep: logs, volumes, termination messages.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// The folder behind a claim.
    pub fn claim_dir(&self, namespace: &str, claim: &str) -> PathBuf {
        self.runner.claim_dir(namespace, claim)
    }

    /// Makes a namespace for this test alone. It is deleted with the cluster.
    pub async fn fresh_namespace(&self, prefix: &str) -> Result<String, kube::Error> {
        let name = format!("{prefix}-{}", uuid::Uuid::new_v4().simple());
        let mut namespace = Namespace::default();
        namespace.metadata.name = Some(name.clone());
        let only = format!("{}={}", register::LABEL, self.id);
        namespace.metadata.annotations = Some([(NODE_SELECTOR.to_owned(), only)].into());
        let label = (register::LABEL.to_owned(), self.id.clone());
        namespace.metadata.labels = Some([label].into());
        let client = self.client(ADMIN)?;
        let api = Api::<Namespace>::all(client.clone());
        api.create(&PostParams::default(), &namespace).await?;
        self.to_tidy().push(name.clone());
        self.runtime.handle.spawn(provision::provide_volumes(
            self.client(crate::CONTROLLERS)?,
            Arc::clone(&self.runner),
            name.clone(),
            self.id.clone(),
        ));
        // Without it no pod is admitted, and a controller makes it.
        let accounts = Api::<ServiceAccount>::namespaced(client.clone(), &name);
        let found = wait::within(wait::DEADLINE, "the account of pods", || async {
            accounts.get("default").await
        });
        found
            .await
            .map_err(|late| provision::error(io::Error::other(late)))?;
        provision::lead_pods(&client, &name, &self.id).await?;
        Ok(name)
    }

    fn to_tidy(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.namespaces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// What a namespace holds now.
    pub async fn state(&self, namespace: &str) -> Result<State, kube::Error> {
        let client = self.client(ADMIN)?;
        let all = ListParams::default();
        Ok(State {
            jobs: Api::namespaced(client.clone(), namespace)
                .list(&all)
                .await?
                .items,
            pods: Api::namespaced(client.clone(), namespace)
                .list(&all)
                .await?
                .items,
            secrets: Api::namespaced(client.clone(), namespace)
                .list(&all)
                .await?
                .items,
            events: Api::namespaced(client, namespace).list(&all).await?.items,
        })
    }

    /// Looks at a namespace until `look` finds something. A namespace that cannot be read is no state: it is read again.
    pub async fn wait_for<T>(
        &self,
        namespace: &str,
        deadline: Duration,
        what: &str,
        look: impl Fn(&State) -> Option<T>,
    ) -> Result<T, NotInTime<Seen>> {
        wait::within(deadline, what, || async {
            let state = self.state(namespace).await.map_err(Seen::Unread)?;
            look(&state).ok_or(Seen::State(state))
        })
        .await
    }

    /// Admission refuses every pod of a namespace, in these words.
    pub async fn refuse_pods(&self, namespace: &str, words: &str) -> Result<(), kube::Error> {
        let client = self.client(ADMIN)?;
        provision::refuse(&client, Refused::Pods, namespace, words, &self.id).await
    }

    /// Admission refuses every Job of a namespace, in these words.
    pub async fn refuse_jobs(&self, namespace: &str, words: &str) -> Result<(), kube::Error> {
        let client = self.client(ADMIN)?;
        provision::refuse(&client, Refused::Jobs, namespace, words, &self.id).await
    }

    /// The quota of a namespace has no place for a pod.
    pub async fn allow_no_pod(&self, namespace: &str) -> Result<(), kube::Error> {
        provision::allow_no_pod(&self.client(ADMIN)?, namespace).await
    }

    /// The kernel kills the container for its memory. Says whether the pod was being run.
    pub fn oom_kill(&self, pod: &Pod) -> bool {
        self.runner
            .order(&pod.uid().unwrap_or_default(), Order::OomKill)
    }

    /// The node of the pod is started anew. Says whether the pod was being run.
    pub fn reboot(&self, pod: &Pod) -> bool {
        self.runner
            .order(&pod.uid().unwrap_or_default(), Order::Reboot)
    }

    /// The kubelet evicts the pod for want of memory. Says whether the pod was being run.
    pub fn evict(&self, pod: &Pod) -> bool {
        self.runner
            .order(&pod.uid().unwrap_or_default(), Order::Evict)
    }

    /// The scheduler needs the place for another pod.
    pub async fn preempt(&self, pod: &Pod) -> Result<(), kube::Error> {
        let message = "default-scheduler: preempting to accommodate a higher priority pod";
        self.disrupt(pod, "PreemptionByScheduler", message).await?;
        self.pods(pod)?
            .delete(&pod.name_any(), &DeleteParams::default())
            .await
            .map(|_| ())
    }

    /// The node of a pod does not answer any more: its processes end unseen, the pod is called unready, and its containers
    /// are shown as they were.
    pub async fn silence_node(&self, pod: &Pod) -> Result<(), kube::Error> {
        self.runner
            .order(&pod.uid().unwrap_or_default(), Order::NodeLost);
        let condition = json!({
            "type": "Ready", "status": "False", "lastTransitionTime": now(),
        });
        self.patch_status(pod, json!({"status": {"conditions": [condition]}}))
            .await
    }

    /// The node of a pod is lost: it does not answer, the pod is deleted by taint after a while, and no kubelet confirms it.
    pub async fn lose_node(&self, pod: &Pod) -> Result<(), kube::Error> {
        self.silence_node(pod).await?;
        self.disrupt(
            pod,
            "DeletionByTaintManager",
            "Taint manager: deleting due to NoExecute taint",
        )
        .await?;
        self.pods(pod)?
            .delete(&pod.name_any(), &DeleteParams::default())
            .await
            .map(|_| ())
    }

    /// The node object is removed: the pod garbage collector fails the pod and removes it.
    pub async fn remove_node_of(&self, pod: &Pod) -> Result<(), kube::Error> {
        self.disrupt(pod, "DeletionByPodGC", "PodGC: node no longer exists")
            .await?;
        self.patch_status(pod, json!({"status": {"phase": "Failed"}}))
            .await?;
        let options = DeleteParams {
            grace_period_seconds: Some(0),
            ..DeleteParams::default()
        };
        self.pods(pod)?
            .delete(&pod.name_any(), &options)
            .await
            .map(|_| ())
    }

    fn pods(&self, pod: &Pod) -> Result<Api<Pod>, kube::Error> {
        Ok(Api::namespaced(
            self.client(crate::CONTROLLERS)?,
            &pod.namespace().unwrap_or_default(),
        ))
    }

    async fn disrupt(&self, pod: &Pod, reason: &str, message: &str) -> Result<(), kube::Error> {
        let condition = json!({
            "type": "DisruptionTarget", "status": "True", "reason": reason, "message": message,
            "lastTransitionTime": now(),
        });
        self.patch_status(pod, json!({"status": {"conditions": [condition]}}))
            .await
    }

    async fn patch_status(&self, pod: &Pod, patch: serde_json::Value) -> Result<(), kube::Error> {
        let patch = Patch::Strategic(patch);
        self.pods(pod)?
            .patch_status(&pod.name_any(), &PatchParams::default(), &patch)
            .await
            .map(|_| ())
    }
}

impl Cluster {
    /// Does work on the cluster's own runtime, whose connections outlive the caller's.
    async fn inside<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, kube::Error>> + Send + 'static,
    ) -> Result<T, kube::Error> {
        let done = self.runtime.handle.spawn(work).await;
        done.map_err(|error| kube::Error::Service(Box::new(error)))?
    }

    /// Removes what would be left in a cluster that goes on without us.
    fn tidy(&self) {
        let names = std::mem::take(&mut *self.to_tidy());
        let (client, (done, asked)) = (self.front.upstream.client(), mpsc::channel());
        let id = self.id.clone();
        self.runtime.handle.spawn(async move {
            provision::remove(&client, names, &id).await;
            let _ = done.send(());
        });
        let _ = asked.recv_timeout(TIDY);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.tidy();
        self.stop.cancel();
        self.runtime.end();
        self.runner.groups.end_all();
    }
}
