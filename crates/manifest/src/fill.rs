//! The Job that fills the store of providers, made out of the pods' own template. It has their image, their place and their security,
//! and nothing of a run: no job data, no Secret, no account, no other container.
//!
//! This module does not know who wants packages, nor how a Job is created.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use job_contract::provider_cache::{CacheMode, MOST_WANTED, WantedPackage};
use job_contract::{env, java_options, labels};
use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{
    Container, EnvVar, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm,
    PodSpec, PodTemplateSpec, Volume,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use runtime::setting::SettingError;
use sha2::{Digest as _, Sha256};

use super::container;
use super::deployment::{Deployment, PluginCache};
use super::executor_kind::ExecutorKind;
use super::{ManifestErrors, Origin};

/// A large provider over a slow line.
const DEADLINE_SECONDS: i64 = 900;
/// So long no other Job is made for the same packages, whether this one could fetch them or not.
const TTL_SECONDS: i32 = 600;
/// The store bears a kill at any time.
const GRACE_SECONDS: i64 = 10;
const CONTAINER_ARGUMENT: &str = "fill";
const NODE_NAME: &str = "metadata.name";
/// What a download reads of the environment: proxies and authorities, folders, the format of diagnostics, the size of the store.
const KEPT: &[&str] = &[
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "all_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    env::SERVICE_BINDING_ROOT,
    "HOME",
    "TMPDIR",
    env::WORK_DIR,
    env::LOG_FORMAT,
    env::LOG_FILTER,
    env::PROVIDER_CACHE_DIR,
    env::PROVIDER_CACHE_MAX_BYTES,
    env::PROVIDER_CACHE_REGISTRIES,
];

/// The prefixes of the virtual machine's options that name proxies.
const PROXY_OPTIONS: [&str; 2] = ["-Dhttp.", "-Dhttps."];
/// The folder of a binding with authorities, as Terrakube calls it.
const AUTHORITIES: &str = "ca-certificates";

/// The Job without its packages.
#[derive(Clone, Debug, PartialEq)]
pub struct FillTemplate {
    namespace: String,
    template: PodTemplateSpec,
    registries: Vec<String>,
    /// The store is on a disk of each node.
    is_of_node: bool,
}

impl FillTemplate {
    /// The template of a deployment. `None` if runs fill its store themselves.
    pub fn of(deployment: &Deployment) -> Result<Option<Self>, ManifestErrors> {
        let Some(store) = &deployment.filled_store else {
            return Ok(None);
        };
        let refused = |text: String| ManifestErrors {
            origin: Origin::Deployment,
            errors: vec![SettingError::new(env::PROVIDER_CACHE_MODE, text)],
        };
        if deployment.plugin_cache == PluginCache::EmptyDir {
            let text = format!(
                "is `fill`, which excludes `{}=empty-dir`",
                env::PLUGIN_CACHE
            );
            return Err(refused(text));
        }
        if deployment.executor_kind_of(&deployment.defaults) == ExecutorKind::Stock {
            let text = "is `fill`, but no other executor than Mayfly's fills a store";
            return Err(refused(text.to_owned()));
        }
        let run = super::any_run(deployment)?;
        let mut template = run.job.spec.unwrap_or_default().template;
        let spec = template.spec.get_or_insert_default();
        let volume = container::volume_at(spec, &store.path);
        let Some(volume) = volume.filter(|volume| is_shared(volume)) else {
            let text = format!(
                "is `fill`, but at `{}` the pods of runs do not have a volume that they share: a claim, NFS or a folder \
                 of the node",
                store.path
            );
            return Err(refused(text));
        };
        let is_of_node = volume.host_path.is_some();
        strip(&mut template, &store.path);
        Ok(Some(Self {
            namespace: deployment.namespace.clone(),
            template,
            registries: store.registries.clone(),
            is_of_node,
        }))
    }

    /// Of what a run says it wants, the packages that may be fetched.
    pub fn allowed<'t>(&self, wanted: impl Iterator<Item = &'t String>) -> BTreeSet<WantedPackage> {
        wanted
            .filter_map(|text| text.parse::<WantedPackage>().ok())
            .filter(|package| self.registries.iter().any(|host| host == package.host()))
            .take(MOST_WANTED)
            .collect()
    }

    /// The Job for these packages. The same packages always get the same name. `node` is where the run was.
    pub fn job(&self, packages: &BTreeSet<WantedPackage>, node: Option<&str>) -> Job {
        let node = node.filter(|_| self.is_of_node);
        let mut template = self.template.clone();
        let spec = template.spec.get_or_insert_default();
        if let Some(executor) = container::executor_mut(spec) {
            let packages = packages.iter().map(WantedPackage::to_string);
            let arguments = [CONTAINER_ARGUMENT.to_owned()].into_iter();
            executor.args = Some(arguments.chain(packages).collect());
        }
        if let Some(node) = node {
            // The scheduler still decides whether there is space, which a pod with a node's name would pass by.
            let affinity = spec.affinity.get_or_insert_default();
            let affinity = affinity.node_affinity.get_or_insert_default();
            *affinity = on_node(node);
        }
        let labels = template.metadata.as_ref();
        let labels = labels.and_then(|metadata| metadata.labels.clone());
        Job {
            metadata: ObjectMeta {
                name: Some(name(packages, node)),
                namespace: Some(self.namespace.clone()),
                labels,
                ..ObjectMeta::default()
            },
            spec: Some(JobSpec {
                active_deadline_seconds: Some(DEADLINE_SECONDS),
                backoff_limit: Some(0),
                completions: Some(1),
                parallelism: Some(1),
                template,
                ttl_seconds_after_finished: Some(TTL_SECONDS),
                ..JobSpec::default()
            }),
            status: None,
        }
    }
}

/// The packages that a Job of this kind fetches.
pub fn packages(job: &Job) -> BTreeSet<WantedPackage> {
    let executor = pod_of(job).and_then(container::executor);
    let arguments = executor.and_then(|executor| executor.args.as_ref());
    let arguments = arguments.into_iter().flatten();
    arguments.filter_map(|text| text.parse().ok()).collect()
}

/// The node whose store it fills. `None`: pods on all nodes have the same store.
pub fn node(job: &Job) -> Option<&str> {
    let affinity = pod_of(job)?.affinity.as_ref()?.node_affinity.as_ref()?;
    let required = affinity
        .required_during_scheduling_ignored_during_execution
        .as_ref()?;
    let fields = required
        .node_selector_terms
        .first()?
        .match_fields
        .as_ref()?;
    let node = fields.iter().find(|field| field.key == NODE_NAME)?;
    node.values.as_ref()?.first().map(String::as_str)
}

fn pod_of(job: &Job) -> Option<&PodSpec> {
    job.spec.as_ref()?.template.spec.as_ref()
}

fn name(packages: &BTreeSet<WantedPackage>, node: Option<&str>) -> String {
    let mut hasher = Sha256::new();
    for text in packages.iter().map(WantedPackage::to_string) {
        hasher.update(text);
        hasher.update(b"\n");
    }
    hasher.update(node.unwrap_or_default());
    let mut name = "fill-".to_owned();
    for byte in &hasher.finalize()[..16] {
        let _ = write!(name, "{byte:02x}");
    }
    name
}

fn on_node(name: &str) -> NodeAffinity {
    let field = NodeSelectorRequirement {
        key: NODE_NAME.to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![name.to_owned()]),
    };
    let term = NodeSelectorTerm {
        match_fields: Some(vec![field]),
        match_expressions: None,
    };
    NodeAffinity {
        required_during_scheduling_ignored_during_execution: Some(NodeSelector {
            node_selector_terms: vec![term],
        }),
        preferred_during_scheduling_ignored_during_execution: None,
    }
}

/// The next pod finds what this one wrote.
const fn is_shared(volume: &Volume) -> bool {
    volume.persistent_volume_claim.is_some()
        || volume.host_path.is_some()
        || volume.nfs.is_some()
        || volume.csi.is_some()
}

/// Removes from the template of a run what is not needed to fetch packages.
fn strip(template: &mut PodTemplateSpec, store: &str) {
    let metadata = template.metadata.get_or_insert_default();
    let labels = metadata.labels.get_or_insert_default();
    labels.retain(|key, _| key == labels::NAME || !labels::is_reserved(key));
    labels.remove(labels::KUEUE_QUEUE);
    let own = (labels::MANAGED_BY, labels::MANAGED_BY_FILL);
    labels.insert(own.0.to_owned(), own.1.to_owned());
    let spec = template.spec.get_or_insert_default();
    let mut executor = container::executor(spec).cloned().unwrap_or_default();
    let volumes = spec.volumes.take().unwrap_or_default();
    keep_for_download(&mut executor, store, &volumes);
    let mounts = executor.volume_mounts.iter().flatten();
    let used: BTreeSet<_> = mounts.map(|mount| mount.name.clone()).collect();
    let volumes = volumes.into_iter();
    spec.volumes = Some(
        volumes
            .filter(|volume| used.contains(&volume.name))
            .collect(),
    );
    spec.containers = vec![executor];
    spec.init_containers = None;
    // An account may bring the credentials of a cloud.
    spec.service_account = None;
    spec.service_account_name = None;
    spec.automount_service_account_token = Some(false);
    spec.termination_grace_period_seconds = Some(GRACE_SECONDS);
    spec.topology_spread_constraints = None;
}

/// What a download needs of a variable. A value that comes from a Secret is a secret.
fn kept(variable: EnvVar) -> Option<EnvVar> {
    if variable.value_from.is_some() {
        return None;
    }
    if variable.name == env::JAVA_TOOL_OPTIONS {
        let options = proxy_options(variable.value.as_deref()?);
        return (!options.is_empty()).then(|| container::literal(&variable.name, &options));
    }
    KEPT.contains(&variable.name.as_str()).then_some(variable)
}

/// The options that name proxies. Others may have passwords of trust stores and databases.
fn proxy_options(options: &str) -> String {
    let words = java_options::words(options).into_iter();
    let proxies = words.filter(|word| PROXY_OPTIONS.iter().any(|prefix| word.starts_with(prefix)));
    let quoted = proxies.map(|word| {
        let quote = if word.contains('"') { '\'' } else { '"' };
        format!("{quote}{word}{quote}")
    });
    quoted.collect::<Vec<_>>().join(" ")
}

fn keep_for_download(executor: &mut Container, store: &str, volumes: &[Volume]) {
    let variables = executor.env.take().unwrap_or_default();
    let variables = variables.into_iter().filter_map(kept);
    let mut variables: Vec<_> = variables.collect();
    let bindings = variables
        .iter()
        .find(|variable| variable.name == env::SERVICE_BINDING_ROOT)
        .and_then(|variable| variable.value.clone());
    container::set_env(
        &mut variables,
        container::literal(env::PROVIDER_CACHE_MODE, CacheMode::Fill.name()),
    );
    let paths: Vec<_> = variables
        .iter()
        .filter_map(|one| one.value.clone())
        .collect();
    executor.env = Some(variables);
    let sources = executor.env_from.take().unwrap_or_default();
    let sources = sources.into_iter();
    executor.env_from = Some(
        sources
            .filter(|source| source.secret_ref.is_none() && source.prefix.is_none())
            .collect(),
    );
    let mounts = executor.volume_mounts.take().unwrap_or_default();
    let mounts = mounts.into_iter().filter_map(|mut mount| {
        let path = mount.mount_path.trim_end_matches('/');
        if path == store {
            mount.read_only = None;
            return Some(mount);
        }
        let is_below = |text: &String| {
            let rest = text.strip_prefix(path);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let is_binding = || {
            let root = Path::new(bindings.as_deref()?);
            let of_root = Path::new(path).strip_prefix(root).ok()?;
            let mut configs = volumes.iter().filter(|volume| volume.config_map.is_some());
            Some(
                of_root == Path::new(AUTHORITIES)
                    || configs.any(|volume| volume.name == mount.name),
            )
        };
        (paths.iter().any(is_below) || is_binding() == Some(true)).then_some(mount)
    });
    executor.volume_mounts = Some(mounts.collect());
    executor.lifecycle = None;
}

#[cfg(test)]
mod tests;
