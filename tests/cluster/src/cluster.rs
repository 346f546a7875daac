//! The cluster as tests see it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod, Secret};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::json;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::api_server::authorizer::{ADMIN, Rule};
use crate::api_server::faults::Faults;
use crate::api_server::recorder::Recorded;
use crate::api_server::{Server, crud, token};
use crate::controllers::{garbage, job};
use crate::kubelet::nodes::Nodes;
use crate::kubelet::{self, Image, Order, Runner};

const POLL: Duration = Duration::from_millis(20);

/// Why a cluster did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No port, folder or thread.
    #[error("the test cluster did not start")]
    System(#[from] io::Error),
    /// A client for its server could not be made.
    #[error("no client for the test cluster")]
    Client(#[from] kube::Error),
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
#[derive(Debug, Clone, Copy)]
pub struct Builder {
    controllers: bool,
    kubelet: bool,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            controllers: true,
            kubelet: true,
        }
    }
}

impl Builder {
    /// Only an API server: nothing happens to objects but what clients do.
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

    /// Starts the cluster.
    pub async fn start(self) -> Result<Cluster, StartError> {
        Cluster::with(self).await
    }
}

/// A cluster; everything of it ends when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    runtime: Option<tokio::runtime::Runtime>,
    server: Arc<Server>,
    runner: Arc<Runner>,
    stop: CancellationToken,
    dir: TempDir,
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
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        let dir = tempfile::tempdir()?;
        let stop = CancellationToken::new();
        let start = runtime.spawn(Server::start(stop.clone()));
        let server = start.await.map_err(io::Error::other)??;
        let runner = Arc::new(Runner::new(dir.path(), Some(Arc::clone(&server.logs))));
        let cluster = Self {
            runtime: Some(runtime),
            server,
            runner,
            stop,
            dir,
        };
        if let Some(runtime) = &cluster.runtime {
            let _inside = runtime.enter();
            let client = cluster.client(crate::CONTROLLERS)?;
            if parts.controllers {
                runtime.spawn(job::run(client.clone()));
                runtime.spawn(garbage::run(client.clone()));
            }
            if parts.kubelet {
                runtime.spawn(kubelet::run(client, Arc::clone(&cluster.runner)));
            }
        }
        Ok(cluster)
    }

    /// Where the API server listens.
    pub fn url(&self) -> String {
        self.server.url()
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
        fs::write(&path, config.to_string())?;
        Ok(path)
    }

    /// From now on an identity may do only what it was granted. `namespace` empty: in all of them.
    pub fn grant(&self, identity: &str, namespace: &str, rules: &[Rule]) {
        self.server.authorizer.grant(identity, namespace, rules);
    }

    /// From now on an identity may do nothing until granted.
    pub fn revoke(&self, identity: &str) {
        self.server.authorizer.revoke(identity);
    }

    /// Faults to come.
    pub fn faults(&self) -> &Faults {
        &self.server.faults
    }

    /// The requests so far.
    pub fn recorded(&self) -> Recorded {
        Recorded(self.server.recorder.all())
    }

    /// Where pods may run.
    pub fn nodes(&self) -> &Nodes {
        &self.runner.nodes
    }

    /// Forgets the history of changes: watches from before get `410 Gone`.
    pub fn compact(&self) {
        self.server.compact();
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

    /// The folder behind a claim.
    pub fn claim_dir(&self, namespace: &str, claim: &str) -> PathBuf {
        self.runner.claim_dir(namespace, claim)
    }

    /// Makes a namespace, if it is not there.
    pub async fn namespace(&self, name: &str) -> Result<(), kube::Error> {
        let mut namespace = Namespace::default();
        namespace.metadata.name = Some(name.to_owned());
        let api = Api::<Namespace>::all(self.client(ADMIN)?);
        match api.create(&PostParams::default(), &namespace).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            other => other.map(|_| ()),
        }
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

    /// The kernel kills the container for its memory. Says whether the pod was being run.
    pub fn oom_kill(&self, pod: &Pod) -> bool {
        self.runner
            .order(&pod.uid().unwrap_or_default(), Order::OomKill)
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

    /// The node of a pod is lost: its processes end unseen, the pod is deleted by taint, and nobody confirms it.
    pub async fn lose_node(&self, pod: &Pod) -> Result<(), kube::Error> {
        self.runner
            .order(&pod.uid().unwrap_or_default(), Order::NodeLost);
        self.disrupt(
            pod,
            "DeletionByTaintManager",
            "Taint manager: deleting due to NoExecute taint",
        )
        .await?;
        let message = "Node which was running pod is unresponsive";
        let patch = json!({"status": {"reason": "NodeLost", "message": message}});
        self.patch_status(pod, patch).await?;
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

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        self.runner.groups.end_all();
    }
}
