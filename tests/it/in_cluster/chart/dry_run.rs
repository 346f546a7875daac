//! What the API server says of objects that it does not keep: dry runs of server-side apply, strict, in a namespace that is held to
//! the `restricted` standard.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::GroupVersionKind;
use kube::discovery::{Discovery, Scope};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::{Value, json};
use test_cluster::{ADMIN, Cluster};
use test_peers::skips::needed;
use test_peers::wait::{self, DEADLINE};

const MANAGER: &str = "mayfly-test";

pub(super) struct DryRun {
    /// Removes the namespace at its end.
    _cluster: Cluster,
    kubeconfig: PathBuf,
    /// Of the user who installs.
    client: Client,
    discovery: Discovery,
    pub(super) namespace: String,
    /// Of the namespace. By these labels the cluster of the test removes objects at its end.
    pub(super) labels: Value,
    /// The version of Kubernetes.
    pub(super) version: String,
}

impl DryRun {
    /// One in the cluster of this run of tests, or nothing where the test is skipped.
    pub(super) async fn start() -> Option<Self> {
        let kubeconfig = needed(test_cluster::kubeconfig())?;
        // For the clients of this test. An earlier provider stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let cluster = Cluster::builder().without_kubelet();
        let cluster = cluster.start(&kubeconfig).await.unwrap();
        let namespace = cluster.fresh_namespace("dry-run").await.unwrap();
        let client = cluster.client(ADMIN).unwrap();
        let enforced =
            json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
        let labelled = Api::<Namespace>::all(client.clone())
            .patch(&namespace, &PatchParams::default(), &Patch::Merge(enforced))
            .await
            .unwrap();
        Some(Self {
            discovery: Discovery::new(client.clone()).run().await.unwrap(),
            version: client.apiserver_version().await.unwrap().git_version,
            labels: json!(labelled.metadata.labels),
            _cluster: cluster,
            kubeconfig,
            client,
            namespace,
        })
    }

    /// Makes definitions of kinds where the cluster has none, and returns when it takes objects of these kinds.
    pub(super) async fn define(&mut self, definitions: &[CustomResourceDefinition]) {
        let all = Api::<CustomResourceDefinition>::all(self.client.clone());
        for definition in definitions {
            let name = definition.name_any();
            if all.get_opt(&name).await.unwrap().is_none() {
                let mut definition = definition.clone();
                definition.metadata.labels = serde_json::from_value(self.labels.clone()).unwrap();
                all.create(&PostParams::default(), &definition)
                    .await
                    .unwrap();
            }
            let established = await_condition(all.clone(), &name, conditions::is_crd_established());
            tokio::time::timeout(DEADLINE, established)
                .await
                .unwrap()
                .unwrap();
        }
        // It names them when it has time.
        let kinds = definitions.iter().map(|definition| {
            let spec = &definition.spec;
            GroupVersionKind::gvk(&spec.group, &spec.versions[0].name, &spec.names.kind)
        });
        let kinds: Vec<_> = kinds.collect();
        let client = self.client.clone();
        let names_all = async || {
            let found = Discovery::new(client.clone()).run().await.ok()?;
            let knows = |kind| found.resolve_gvk(kind).is_some();
            kinds.iter().all(knows).then_some(found)
        };
        self.discovery = wait::until("the kinds are known", names_all).await;
    }

    /// Whether an object could be made, and each pod of it.
    pub(super) async fn takes(&self, object: &Value) -> Result<(), String> {
        if object["kind"] != "Pod" {
            self.takes_from(&self.client, object).await?;
        }
        let mut pod = match object["kind"].as_str() {
            Some("Pod") => object.clone(),
            Some("Deployment" | "Job" | "StatefulSet") => object["spec"]["template"].clone(),
            _ => return Ok(()),
        };
        pod["apiVersion"] = "v1".into();
        pod["kind"] = "Pod".into();
        pod["metadata"]["name"] = "tried".into();
        // The cluster defines these classes.
        let spec = pod["spec"].as_object_mut().unwrap();
        for class in ["priorityClassName", "runtimeClassName"] {
            spec.remove(class);
        }
        if let Some(account) = spec.get("serviceAccountName") {
            let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}});
            self.make(&account).await?;
        }
        let taken = self.takes_from(&self.client, &pod).await;
        taken.map_err(|why| format!("its pod: {why}"))
    }

    /// Whether a client could make an object.
    pub(super) async fn takes_from(&self, client: &Client, object: &Value) -> Result<(), String> {
        let params = PatchParams::apply(MANAGER).dry_run().validation_strict();
        self.apply(client, object, &params).await
    }

    /// Makes an object.
    pub(super) async fn make(&self, object: &Value) -> Result<(), String> {
        let params = PatchParams::apply(MANAGER).validation_strict();
        self.apply(&self.client, object, &params).await
    }

    /// In the namespace of this dry run, where the kind has namespaces.
    async fn apply(
        &self,
        client: &Client,
        object: &Value,
        params: &PatchParams,
    ) -> Result<(), String> {
        let text = |at: &str| {
            object
                .pointer(at)
                .and_then(Value::as_str)
                .unwrap_or_default()
        };
        let version = text("/apiVersion");
        let (group, version) = version.split_once('/').unwrap_or(("", version));
        let kind = GroupVersionKind::gvk(group, version, text("/kind"));
        let known = self.discovery.resolve_gvk(&kind);
        let (resource, capabilities) = known.ok_or_else(|| format!("no {kind:?} is known"))?;
        let mut object = object.clone();
        let api: Api<DynamicObject> = match capabilities.scope {
            Scope::Cluster => Api::all_with(client.clone(), &resource),
            Scope::Namespaced => {
                object["metadata"]["namespace"] = self.namespace.as_str().into();
                Api::namespaced_with(client.clone(), &self.namespace, &resource)
            }
        };
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let answer = api.patch(name, params, &Patch::Apply(&object)).await;
        answer.map(drop).map_err(|error| error.to_string())
    }

    /// A client that acts as a user. The user may do everything.
    pub(super) async fn client_of(&self, user: &str) -> Client {
        let kubeconfig = Kubeconfig::read_from(&self.kubeconfig).unwrap();
        let options = KubeConfigOptions::default();
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &options)
            .await
            .unwrap();
        config.auth_info.impersonate = Some(user.to_owned());
        config.auth_info.impersonate_groups = Some(vec!["system:masters".to_owned()]);
        Client::try_from(config).unwrap()
    }
}
