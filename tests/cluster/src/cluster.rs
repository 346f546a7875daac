//! The cluster as tests see it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod, Secret, ServiceAccount};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::runtime::watcher;
use kube::{Api, Client, Config, ResourceExt};
use serde_json::json;
use tempfile::TempDir;
use tokio::runtime::{Handle, Runtime};
use tokio_util::sync::CancellationToken;

use crate::api_server::authorizer::{ADMIN, Rule};
use crate::api_server::{Server, crud};
use crate::controllers::{garbage, job};
use crate::front::faults::{Fault, Faults};
use crate::front::recorder::Recorded;
use crate::front::upstream::Upstream;
use crate::front::{Backend, Front, token};
use crate::kubelet::nodes::Nodes;
use crate::kubelet::register::{self, Registry};
use crate::kubelet::{self, Image, Order, Runner};
use crate::real;
use crate::target::Target;

const POLL: Duration = Duration::from_millis(20);
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
    /// What `MAYFLY_TEST_CLUSTER` names is no way to a cluster.
    #[error("`MAYFLY_TEST_CLUSTER` names no cluster")]
    Kubeconfig(#[from] KubeconfigError),
}

/// What a cluster holds, in one namespace.
#[derive(Debug, Clone, Default)]
pub struct State {
    /// All Jobs.
    pub jobs: Vec<Job>,
    /// All pods.
    pub pods: Vec<Pod>,
    /// All Secrets.
    pub secrets: Vec<Secret>,
    /// All events.
    pub events: Vec<Event>,
}

impl State {
    /// The Job of this name.
    pub fn job(&self, name: &str) -> Option<&Job> {
        self.jobs.iter().find(|job| job.name_any() == name)
    }

    /// The pods of a Job.
    pub fn pods_of(&self, job: &str) -> Vec<&Pod> {
        let owned = |pod: &&Pod| {
            pod.owner_references()
                .iter()
                .any(|owner| owner.kind == "Job" && owner.name == job)
        };
        self.pods.iter().filter(owned).collect()
    }

    /// Whether a Job has a condition with status `True`.
    pub fn has_condition(&self, job: &str, kind: &str) -> bool {
        let status = self.job(job).and_then(|job| job.status.as_ref());
        let conditions = status
            .into_iter()
            .flat_map(|status| status.conditions.iter().flatten());
        conditions
            .into_iter()
            .any(|condition| condition.type_ == kind && condition.status == "True")
    }

    /// Whether an event with this reason is there.
    pub fn has_event(&self, reason: &str) -> bool {
        self.events
            .iter()
            .any(|event| event.reason.as_deref() == Some(reason))
    }
}

/// What a cluster is made of.
#[derive(Debug, Clone)]
pub struct Builder {
    controllers: bool,
    kubelet: bool,
    target: Option<Target>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            controllers: true,
            kubelet: true,
            target: None,
        }
    }
}

impl Builder {
    /// Only an API server: nothing happens to objects but what clients do. Only the server of this process is that alone.
    #[must_use]
    pub fn api_server_only(mut self) -> Self {
        self.controllers = false;
        self.kubelet = false;
        self
    }

    /// Pods stay pending; tests write their status.
    #[must_use]
    pub fn without_kubelet(mut self) -> Self {
        self.kubelet = false;
        self
    }

    /// On this server, whatever the environment prefers.
    #[must_use]
    pub fn on(mut self, target: Target) -> Self {
        self.target = Some(target);
        self
    }

    /// Starts the cluster.
    pub async fn start(self) -> Result<Cluster, StartError> {
        Cluster::with(self).await
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
    target: Target,
    /// What is this cluster's among all that are in a real one.
    id: String,
    /// Namespaces to delete at the end, where they would stay.
    namespaces: Mutex<Vec<String>>,
}

/// What is behind the front.
async fn backend(target: &Target, stop: CancellationToken) -> Result<Backend, StartError> {
    let Target::Real(file) = target else {
        return Ok(Backend::InProcess(Arc::new(Server::new(stop))));
    };
    let kubeconfig = Kubeconfig::read_from(file)?;
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    Ok(Backend::Real(Upstream::new(config)?))
}

impl Cluster {
    /// A cluster with controllers and a pod runner.
    pub async fn start() -> Result<Self, StartError> {
        Builder::default().start().await
    }

    /// To say what a cluster is made of.
    pub fn builder() -> Builder {
        Builder::default()
    }

    async fn with(parts: Builder) -> Result<Self, StartError> {
        let runtime = Background::start()?;
        let dir = tempfile::tempdir()?;
        let stop = CancellationToken::new();
        let target = parts.target.clone().unwrap_or_else(|| {
            if parts.controllers {
                Target::preferred()
            } else {
                Target::InProcess
            }
        });
        let (of, until) = (target.clone(), stop.clone());
        let start = runtime.handle.spawn(async move {
            let backend = backend(&of, until.clone()).await?;
            Ok::<_, StartError>(Front::start(backend, until).await?)
        });
        let front = start.await.map_err(io::Error::other)??;
        let runner = Arc::new(Runner::new(dir.path(), Some(Arc::clone(&front.logs))));
        let id = uuid::Uuid::new_v4().simple().to_string();
        let cluster = Self {
            runtime,
            front,
            runner,
            stop,
            dir,
            target,
            id: id[..12].to_owned(),
            namespaces: Mutex::default(),
        };
        cluster.run(&parts)?;
        Ok(cluster)
    }

    /// Starts what acts on objects besides the clients of tests.
    fn run(&self, parts: &Builder) -> Result<(), kube::Error> {
        let runtime = &self.runtime.handle;
        let _inside = runtime.enter();
        let client = self.client(crate::CONTROLLERS)?;
        let runner = Arc::clone(&self.runner);
        if let Backend::Real(_) = self.front.backend {
            if parts.kubelet {
                runtime.spawn(Registry::new(client, runner, &self.id).keep());
            }
            return Ok(());
        }
        if parts.controllers {
            runtime.spawn(job::run(client.clone()));
            runtime.spawn(garbage::run(client.clone()));
        }
        if parts.kubelet {
            let pods = Api::<Pod>::all(client.clone());
            runtime.spawn(kubelet::run(
                client,
                runner,
                pods,
                watcher::Config::default(),
            ));
        }
        Ok(())
    }

    /// Where the API server listens.
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

    /// What serves the API.
    pub fn target(&self) -> &Target {
        &self.target
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
        self.inside(async move { front.grant(&identity, &namespace, &rules).await })
            .await
    }

    /// From now on an identity may do nothing until granted.
    pub async fn revoke(&self, identity: &str) -> Result<(), kube::Error> {
        let (front, identity) = (Arc::clone(&self.front), identity.to_owned());
        self.inside(async move { front.revoke(&identity).await })
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

    /// Forgets the history of changes: watches from before get `410 Gone`. A real server, which others use too, forgets when
    /// it likes.
    pub fn compact(&self) {
        if let Backend::InProcess(server) = &self.front.backend {
            server.compact();
        }
    }

    /// Ends every watch but the cluster's own, in the middle of its stream. Together with [`Cluster::compact`], whoever
    /// comes again gets `410 Gone`.
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

    /// Runs `program` for containers of this image.
    pub fn image(&self, name: &str, program: &Path) {
        self.image_with(name, program, &[], &[]);
    }

    /// As [`Cluster::image`], with the arguments and the environment the image sets (`PATH` is this process's own unless set).
    pub fn image_with(&self, name: &str, program: &Path, args: &[&str], env: &[(&str, &str)]) {
        let mut all = vec![("PATH".to_owned(), std::env::var("PATH").unwrap_or_default())];
        for (name, value) in env {
            all.retain(|(known, _)| known != name);
            all.push(((*name).to_owned(), (*value).to_owned()));
        }
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self.runner.set_image(
            name,
            Image {
                program: program.to_owned(),
                args,
                env: all,
            },
        );
    }

    /// Where everything lies that its nodes keep: logs, volumes, termination messages.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// The folder behind a claim.
    pub fn claim_dir(&self, namespace: &str, claim: &str) -> PathBuf {
        self.runner.claim_dir(namespace, claim)
    }

    /// Makes a namespace, if it is not there.
    pub async fn namespace(&self, name: &str) -> Result<(), kube::Error> {
        let mut namespace = Namespace::default();
        namespace.metadata.name = Some(name.to_owned());
        if let Target::Real(_) = self.target {
            let only = format!("{}={}", register::LABEL, self.id);
            namespace.metadata.annotations = Some([(NODE_SELECTOR.to_owned(), only)].into());
            let label = (register::LABEL.to_owned(), self.id.clone());
            namespace.metadata.labels = Some([label].into());
        }
        let client = self.client(ADMIN)?;
        let api = Api::<Namespace>::all(client.clone());
        match api.create(&PostParams::default(), &namespace).await {
            Err(kube::Error::Api(status)) if status.code == 409 => return Ok(()),
            other => other?,
        };
        if let Target::Real(_) = self.target {
            self.to_tidy().push(name.to_owned());
            self.runtime.handle.spawn(real::provide_volumes(
                self.client(crate::CONTROLLERS)?,
                Arc::clone(&self.runner),
                name.to_owned(),
                self.id.clone(),
            ));
            // Without it no pod is admitted, and a controller makes it.
            let accounts = Api::<ServiceAccount>::namespaced(client, name);
            while accounts.get_opt("default").await?.is_none() {
                tokio::time::sleep(POLL).await;
            }
            real::lead_pods(&self.client(ADMIN)?, name, &self.id).await?;
        }
        Ok(())
    }

    /// Makes a namespace that nobody else has. It is gone with the cluster, whichever that is.
    pub async fn fresh_namespace(&self, prefix: &str) -> Result<String, kube::Error> {
        let name = format!("{prefix}-{}", uuid::Uuid::new_v4().simple());
        self.namespace(&name).await?;
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

    /// Looks at a namespace until `look` finds something. What is there at the deadline is the error.
    pub async fn wait_for<T>(
        &self,
        namespace: &str,
        deadline: Duration,
        mut look: impl FnMut(&State) -> Option<T>,
    ) -> Result<T, State> {
        let until = tokio::time::Instant::now() + deadline;
        loop {
            let state = self.state(namespace).await.unwrap_or_default();
            if let Some(found) = look(&state) {
                return Ok(found);
            }
            if tokio::time::Instant::now() >= until {
                return Err(state);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Admission refuses every pod of a namespace, in these words.
    pub async fn refuse_pods(&self, namespace: &str, words: &str) -> Result<(), kube::Error> {
        if let Target::Real(_) = self.target {
            let client = self.client(ADMIN)?;
            return real::refuse_pods(&client, namespace, words, &self.id).await;
        }
        let refusal = Fault::AdmissionRefused(words.to_owned());
        self.faults()
            .next_of(crate::CONTROLLERS, usize::MAX, "create", "pods", refusal);
        Ok(())
    }

    /// The quota of a namespace has no place for a pod.
    pub async fn allow_no_pod(&self, namespace: &str) -> Result<(), kube::Error> {
        if let Target::Real(_) = self.target {
            return real::allow_no_pod(&self.client(ADMIN)?, namespace).await;
        }
        let refusal = Fault::QuotaExceeded;
        self.faults()
            .next_of(crate::CONTROLLERS, usize::MAX, "create", "pods", refusal);
        Ok(())
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
            "type": "Ready", "status": "False", "lastTransitionTime": crud::now(),
        });
        self.patch_status(pod, json!({"status": {"conditions": [condition]}}))
            .await
    }

    /// The node of a pod is lost: it does not answer, the pod is deleted by taint after a while, and nobody confirms it.
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
            "lastTransitionTime": crud::now(),
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
        let Backend::Real(upstream) = &self.front.backend else {
            return;
        };
        let (client, (done, asked)) = (upstream.client(), mpsc::channel());
        let id = self.id.clone();
        self.runtime.handle.spawn(async move {
            real::remove(&client, names, &id).await;
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
