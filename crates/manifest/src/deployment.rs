//! The operator's settings for every run.

use std::collections::BTreeMap;

use job_contract::identity::Identities;
use job_contract::{Records, StepType};

use super::executor_kind::{ExecutorKind, ExecutorKindSetting};
use super::job_data::Mode;
use super::overlay::Overlay;
use super::overrides::{Overrides, Resources, Span};
use super::policy::Policy;
use super::quantity::Amount;

/// The image used when none is configured: the executor of the same release.
pub const DEFAULT_IMAGE: &str = concat!("mayfly-executor:", env!("CARGO_PKG_VERSION"));
/// Namespace used when none is configured (contract 3.1).
pub const DEFAULT_NAMESPACE: &str = "terrakube";
/// Secret used when none is configured (contract 3.1).
pub const DEFAULT_ENV_SECRET: &str = "terrakube-executor-secrets";
/// `imagePullPolicy` used when none is configured.
const DEFAULT_PULL_POLICY: &str = "IfNotPresent";

/// Everything the manifest needs beside the job data.
#[derive(Clone, Debug, PartialEq)]
pub struct Deployment {
    /// Namespace of every object.
    pub namespace: String,
    /// The executor's image.
    pub image: String,
    /// Which executor an image holds.
    pub executor_kind: ExecutorKindSetting,
    /// Registry, or registry and path, that replaces the registry of images.
    pub image_registry: Option<String>,
    /// `imagePullPolicy`. `None`: Kubernetes decides, and pulls `latest` every time.
    pub image_pull_policy: Option<String>,
    pub image_pull_secrets: Vec<String>,
    /// Secrets that become environment.
    pub env_secrets: Vec<String>,
    /// `ConfigMap`s that become environment.
    pub env_config_maps: Vec<String>,
    /// The launcher's values of the same variables. A workspace's own values replace them.
    pub defaults: Overrides,
    pub job_data_mode: Mode,
    pub active_deadline_seconds: i64,
    /// For steps that change infrastructure.
    pub apply_grace_seconds: i64,
    /// For all others.
    pub grace_seconds: i64,
    pub ttl_seconds_after_finished: i32,
    /// `None`: 2 if an executor finds the claim of an earlier pod, else 0.
    pub backoff_limit: Option<i32>,
    /// Where executors keep their records. `None`: the pod's environment decides.
    pub records: Option<Records>,
    /// The launcher has a platform to report to.
    pub reports_to_platform: bool,
    /// Whether runs have leases of a hub. Only Mayfly's executor accepts one.
    pub leased: bool,
    pub priority_class: Option<String>,
    pub plugin_cache: PluginCache,
    /// Whom runs are at the clouds. Only Mayfly's executor knows them.
    pub identities: Identities,
    /// The store of providers that runs only read. `None`: runs fill their plugin cache themselves.
    pub filled_store: Option<FilledStore>,
    pub work_size_limit: Amount,
    pub tmp_size_limit: Amount,
    /// A pod template that is merged over the built one.
    pub overlay: Option<Overlay>,
    pub policy: Policy,
    /// Notes about settings whose effect differs from their value.
    pub warnings: Vec<String>,
}

/// What is mounted at the path of a plugin cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PluginCache {
    /// The claim. If it does not exist, the pod waits and shows the reason.
    #[default]
    Claim,
    /// An empty folder, for clusters without such claims. The path exists, but pods do not share it.
    EmptyDir,
}

/// A store of providers that only Jobs of the operator fill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilledStore {
    /// Its path in pods, without a slash at the end.
    pub path: String,
    /// Hosts of the registries of which packages are fetched.
    pub registries: Vec<String>,
}

fn amount(text: &'static str) -> Amount {
    Amount::parse(text).expect("the defaults are quantities")
}

impl Default for Deployment {
    fn default() -> Self {
        Self {
            namespace: DEFAULT_NAMESPACE.to_owned(),
            image: DEFAULT_IMAGE.to_owned(),
            executor_kind: ExecutorKindSetting::default(),
            image_registry: None,
            image_pull_policy: Some(DEFAULT_PULL_POLICY.to_owned()),
            image_pull_secrets: Vec::new(),
            env_secrets: vec![DEFAULT_ENV_SECRET.to_owned()],
            env_config_maps: Vec::new(),
            defaults: Overrides::default(),
            job_data_mode: Mode::default(),
            active_deadline_seconds: 21_600,
            apply_grace_seconds: 300,
            grace_seconds: 60,
            ttl_seconds_after_finished: 600,
            backoff_limit: None,
            records: None,
            reports_to_platform: false,
            leased: false,
            priority_class: None,
            plugin_cache: PluginCache::default(),
            identities: Identities::default(),
            filled_store: None,
            work_size_limit: amount("10Gi"),
            tmp_size_limit: amount("1Gi"),
            overlay: None,
            policy: Policy::default(),
            warnings: Vec::new(),
        }
    }
}

impl Deployment {
    /// The default requests. A pod is never best effort. CPU has no limit, because a limit only slows a run.
    pub(super) fn default_resources() -> Resources {
        Resources {
            cpu: Span {
                request: Some(amount("250m")),
                limit: None,
            },
            memory: Span {
                request: Some(amount("512Mi")),
                limit: Some(amount("2Gi")),
            },
            ephemeral_storage: Span {
                request: Some(amount("2Gi")),
                limit: None,
            },
        }
    }

    /// Returns the image of a run with these `merged` settings, before its registry is replaced. The operator's pod
    /// template and its image come first.
    pub(super) fn image_of<'a>(&'a self, merged: &'a Overrides) -> &'a str {
        self.overlay
            .as_ref()
            .and_then(Overlay::image)
            .or(merged.image.as_deref())
            .unwrap_or(&self.image)
    }

    /// Returns the kind of executor of a run with these `merged` settings.
    pub fn executor_kind_of(&self, merged: &Overrides) -> ExecutorKind {
        self.executor_kind.of(self.image_of(merged))
    }

    /// The store that a run with these settings reads. A run with a claim of its own, or with another executor, does not read it.
    pub(super) fn filled_store_for(
        &self,
        requested: &Overrides,
        kind: ExecutorKind,
    ) -> Option<&FilledStore> {
        let reads = kind == ExecutorKind::Mayfly && requested.plugin_cache_claim.is_none();
        self.filled_store.as_ref().filter(|_| reads)
    }

    /// Seconds between SIGTERM and SIGKILL for this type of step.
    pub const fn grace_for(&self, step_type: StepType) -> i64 {
        if step_type.changes_infrastructure() {
            self.apply_grace_seconds
        } else {
            self.grace_seconds
        }
    }
}

/// Annotations that prevent the removal of a node with runs. Every level can replace them.
pub(super) fn default_pod_annotations() -> BTreeMap<String, String> {
    use job_contract::annotations::{DO_NOT_DISRUPT, DO_NOT_EVICT, SAFE_TO_EVICT};
    [
        (SAFE_TO_EVICT, "false"),
        (DO_NOT_DISRUPT, "true"),
        (DO_NOT_EVICT, "true"),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .collect()
}
