//! The operator's settings for every run.

use std::collections::BTreeMap;

use job_contract::{Records, StepType};

use super::executor_kind::{ExecutorKind, ExecutorKindSetting};
use super::job_data::{Compression, Mode};
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
    /// Registry, or registry and path, that takes the place of images' own.
    pub image_registry: Option<String>,
    /// `imagePullPolicy`; `None` leaves it to Kubernetes, which pulls `latest` every time.
    pub image_pull_policy: Option<String>,
    pub image_pull_secrets: Vec<String>,
    /// Secrets that become environment.
    pub env_secrets: Vec<String>,
    /// `ConfigMap`s that become environment.
    pub env_config_maps: Vec<String>,
    /// What the same variables say on the launcher; a workspace's own win.
    pub defaults: Overrides,
    pub job_data_mode: Mode,
    pub job_data_compression: Compression,
    pub active_deadline_seconds: i64,
    /// For steps that change infrastructure.
    pub apply_grace_seconds: i64,
    /// For all others.
    pub grace_seconds: i64,
    pub ttl_seconds_after_finished: i32,
    /// `None`: 2 where an executor finds the claim of the pod before it, else 0.
    pub backoff_limit: Option<i32>,
    /// Where executors keep their records; `None`: what they are given tells.
    pub records: Option<Records>,
    /// The launcher itself knows the platform's API.
    pub reports_to_platform: bool,
    pub priority_class: Option<String>,
    pub plugin_cache: PluginCache,
    pub work_size_limit: Amount,
    pub tmp_size_limit: Amount,
    /// A pod template laid over the one that is built.
    pub overlay: Option<Overlay>,
    pub policy: Policy,
    /// Settings that count otherwise than they were made.
    pub warnings: Vec<String>,
}

/// What is mounted where a plugin cache is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PluginCache {
    /// The claim. A pod whose claim does not exist waits, and says so.
    #[default]
    Claim,
    /// An empty folder, for clusters without such claims: the path exists, and nothing is shared.
    EmptyDir,
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
            job_data_compression: Compression::default(),
            active_deadline_seconds: 21_600,
            apply_grace_seconds: 300,
            grace_seconds: 60,
            ttl_seconds_after_finished: 600,
            backoff_limit: None,
            records: None,
            reports_to_platform: false,
            priority_class: None,
            plugin_cache: PluginCache::default(),
            work_size_limit: amount("10Gi"),
            tmp_size_limit: amount("1Gi"),
            overlay: None,
            policy: Policy::default(),
            warnings: Vec::new(),
        }
    }
}

impl Deployment {
    /// The default requests: never best effort, and no limit on CPU, because it only slows a run.
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

    /// The image of a run whose settings are `merged`, before it is looked for in another registry. The operator's pod
    /// template is laid over what is built, and its image with it.
    pub(super) fn image_of<'a>(&'a self, merged: &'a Overrides) -> &'a str {
        self.overlay
            .as_ref()
            .and_then(Overlay::image)
            .or(merged.image.as_deref())
            .unwrap_or(&self.image)
    }

    /// The executor of a run whose settings are `merged`.
    pub fn executor_kind_of(&self, merged: &Overrides) -> ExecutorKind {
        self.executor_kind.of(self.image_of(merged))
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

/// Annotations that keep a node under its runs; any level may say otherwise.
pub(super) fn default_pod_annotations() -> BTreeMap<String, String> {
    use super::labels::{DO_NOT_DISRUPT, DO_NOT_EVICT, SAFE_TO_EVICT};
    [
        (SAFE_TO_EVICT, "false"),
        (DO_NOT_DISRUPT, "true"),
        (DO_NOT_EVICT, "true"),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .collect()
}
