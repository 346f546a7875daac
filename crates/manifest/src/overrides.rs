//! Parses the `EPHEMERAL_*` variables (contract 3.3) into typed settings.
//!
//! The workspace and the launcher have the same variables. This module parses both. The policy decides what a workspace
//! may set. [`Overrides::over`] decides which of the two values applies.

use std::collections::BTreeMap;
use std::fmt;

use job_contract::env;
use job_contract::labels;
use k8s_openapi::api::core::v1::Toleration;
use runtime::setting::SettingError;
use serde_json::{Map, Value, json};

use super::check;
use super::error::{CollectErrors as _, quote};
use super::quantity::{Amount, SLIP};
use super::tolerations::parse_tolerations;
use job_contract::pairs::{parse_list, parse_pairs};

/// Names of the container's environment that only the launcher may set.
pub const RESERVED_ENV: &[&str] = &[
    env::BATCH,
    env::DEADLINE_SECONDS,
    env::GRACE_PERIOD_SECONDS,
    env::JOB_DATA_DIGEST,
    env::OUTCOME_EXIT_CODE,
    env::POD_NAME,
    env::POD_UID,
    env::RECORDS,
    env::TERMINATION_LOG,
];

/// Whether only the launcher sets the variable: one of these, or one of the job data.
pub(super) fn is_reserved_env(name: &str) -> bool {
    RESERVED_ENV.contains(&name) || env::is_job_data(name)
}

/// Largest size of all annotations of one object, minus a reserve for the launcher's verdict and for annotations of others.
const MAX_ANNOTATION_BYTES: usize = (256 - 32) * 1024;

/// Settings of one level. `None` and an empty collection mean "not set".
#[derive(Clone, Default, PartialEq)]
pub struct Overrides {
    /// Replaces the value of the level below, also if it is empty.
    pub node_selector: Option<BTreeMap<String, String>>,
    /// Replaces the value of the level below, also if it is empty.
    pub tolerations: Option<Vec<Toleration>>,
    pub service_account: Option<String>,
    /// On the Job only, not on its pod.
    pub annotations: BTreeMap<String, String>,
    pub pod_annotations: BTreeMap<String, String>,
    /// On the Job and on its pod.
    pub labels: BTreeMap<String, String>,
    pub config_map: Option<String>,
    pub config_map_path: Option<String>,
    pub env_config_maps: Option<Vec<String>>,
    pub pod_security: SecurityKeys,
    pub container_security: SecurityKeys,
    pub resources: Resources,
    /// Extra environment of the container.
    pub env: BTreeMap<String, String>,
    /// Where the claim of the plugin cache is mounted.
    pub plugin_cache_dir: Option<String>,
    pub plugin_cache_claim: Option<String>,
    pub image: Option<String>,
}

/// The keys of a security context that are set, with their values as Kubernetes has them.
pub type SecurityKeys = Map<String, Value>;

/// Reads the value of a key. The error is the broken rule.
type ReadValue = fn(&str) -> Result<Value, String>;

/// The keys in `EPHEMERAL_CONFIG_POD_SECURITY_CONTEXT`.
const POD_SECURITY: &[(&str, ReadValue)] = &[
    ("fsGroup", id),
    ("fsGroupChangePolicy", |text| {
        choice(text, &["OnRootMismatch", "Always"])
    }),
    ("runAsGroup", id),
    ("runAsNonRoot", truth),
    ("runAsUser", id),
    ("seccompProfile", seccomp_profile),
    ("supplementalGroups", |text| {
        parse_list(text).iter().map(|group| id(group)).collect()
    }),
];

/// The keys in `EPHEMERAL_CONFIG_SECURITY_CONTEXT`.
const CONTAINER_SECURITY: &[(&str, ReadValue)] = &[
    ("allowPrivilegeEscalation", truth),
    ("privileged", truth),
    ("readOnlyRootFilesystem", truth),
    ("runAsGroup", id),
    ("runAsNonRoot", truth),
    ("runAsUser", id),
    ("seccompProfile", seccomp_profile),
];

/// A request and a limit of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    pub request: Option<Amount>,
    pub limit: Option<Amount>,
}

/// The three resources that settings can request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub cpu: Span,
    pub memory: Span,
    pub ephemeral_storage: Span,
}

/// Hides the values of the environment, because they may be secret. The other settings are visible in the objects
/// anyway.
impl fmt::Debug for Overrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Overrides")
            .field("node_selector", &self.node_selector)
            .field("service_account", &self.service_account)
            .field("resources", &self.resources)
            .field("env", &self.env.keys())
            .finish_non_exhaustive()
    }
}

/// Variables whose names differ between the launcher and a workspace.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    pub plugin_cache_dir: &'static str,
    pub plugin_cache_claim: &'static str,
}

impl Names {
    /// As Terrakube reads them from a workspace.
    pub const WORKSPACE: Self = Self {
        plugin_cache_dir: env::PLUGIN_CACHE_DIR,
        plugin_cache_claim: env::PLUGIN_CACHE_CLAIM,
    };
    /// The launcher's names. `TF_PLUGIN_CACHE_DIR` of the launcher's process may come from an operator's shell, so it
    /// is not used.
    pub const DEPLOYMENT: Self = Self {
        plugin_cache_dir: env::DEPLOYMENT_PLUGIN_CACHE_DIR,
        plugin_cache_claim: env::DEPLOYMENT_PLUGIN_CACHE_CLAIM,
    };
}

/// Parses the variables of a level, and returns all errors in them.
pub fn read(variables: &BTreeMap<String, String>, names: Names) -> (Overrides, Vec<SettingError>) {
    let mut reader = Reader {
        variables,
        errors: Vec::new(),
    };
    let overrides = Overrides {
        node_selector: reader.node_selector(),
        tolerations: reader.tolerations(),
        service_account: reader.object_name(env::EPHEMERAL_SERVICE_ACCOUNT),
        annotations: reader.annotations(env::EPHEMERAL_ANNOTATIONS),
        pod_annotations: reader.annotations(env::EPHEMERAL_POD_ANNOTATIONS),
        labels: reader.labels(),
        config_map: reader.object_name(env::EPHEMERAL_CONFIG_MAP),
        config_map_path: reader.mount_path(env::EPHEMERAL_CONFIG_MAP_PATH),
        env_config_maps: reader.object_names(env::EPHEMERAL_ENV_CONFIG_MAPS),
        pod_security: reader.security(env::EPHEMERAL_POD_SECURITY, POD_SECURITY),
        container_security: reader.security(env::EPHEMERAL_SECURITY, CONTAINER_SECURITY),
        resources: reader.resources(),
        env: reader.env(),
        plugin_cache_dir: reader.mount_path(names.plugin_cache_dir),
        plugin_cache_claim: reader.object_name(names.plugin_cache_claim),
        image: reader.image(),
    };
    (overrides, reader.errors)
}

struct Reader<'a> {
    variables: &'a BTreeMap<String, String>,
    errors: Vec<SettingError>,
}

impl<'a> Reader<'a> {
    fn text(&self, name: &str) -> Option<&'a str> {
        self.variables.get(name).map(|text| text.trim())
    }

    /// A blank variable is not set.
    fn filled(&self, name: &str) -> Option<&'a str> {
        self.text(name).filter(|text| !text.is_empty())
    }

    fn pairs(&self, name: &str) -> BTreeMap<String, String> {
        self.text(name).map(parse_pairs).unwrap_or_default()
    }

    /// Keeps the pairs whose key and value are valid. Keys in messages are no secrets.
    fn checked_pairs(
        &mut self,
        name: &str,
        check: impl Fn(&str, &str) -> Result<(), String>,
    ) -> BTreeMap<String, String> {
        let mut kept = BTreeMap::new();
        for (key, value) in self.pairs(name) {
            match check(&key, &value) {
                Ok(()) => {
                    kept.insert(key, value);
                }
                Err(rule) => self
                    .errors
                    .add(name, format!("has a key {} that {rule}", quote(&key))),
            }
        }
        kept
    }

    fn node_selector(&mut self) -> Option<BTreeMap<String, String>> {
        let name = env::EPHEMERAL_NODE_SELECTOR;
        self.text(name)?;
        Some(self.checked_pairs(name, |key, value| {
            check::qualified_name(key)?;
            Ok(check::label_value(value)?)
        }))
    }

    fn labels(&mut self) -> BTreeMap<String, String> {
        let mut labels = self.checked_pairs(env::EPHEMERAL_LABELS, |key, value| {
            check::qualified_name(key)?;
            // The launcher itself sets these two variables. A workspace's value is ignored without a message, as in the
            // stock launcher.
            if matches!(key, labels::ORGANIZATION | labels::WORKSPACE) {
                return Ok(());
            }
            if labels::is_reserved(key) {
                return Err("is reserved".to_owned());
            }
            Ok(check::label_value(value)?)
        });
        labels.retain(|key, _| !labels::is_reserved(key));
        labels
    }

    fn annotations(&mut self, name: &str) -> BTreeMap<String, String> {
        let bytes: usize = self.text(name).map_or(0, str::len);
        if bytes > MAX_ANNOTATION_BYTES {
            self.errors.add(
                name,
                format!("has {bytes} bytes, and annotations may have {MAX_ANNOTATION_BYTES}"),
            );
            return BTreeMap::new();
        }
        self.checked_pairs(name, |key, _| {
            check::qualified_name(&key.to_ascii_lowercase())?;
            if labels::is_reserved(key) {
                return Err("is reserved".to_owned());
            }
            Ok(())
        })
    }

    fn env(&mut self) -> BTreeMap<String, String> {
        self.checked_pairs(env::EPHEMERAL_ENV, |key, value| {
            check::env_name(key)?;
            if is_reserved_env(key) {
                return Err("is set by the launcher and cannot be overridden".to_owned());
            }
            if key.len() + value.len() + 2 > env::MAX_ENV_STRING_BYTES {
                return Err("is larger than one environment string may be".to_owned());
            }
            Ok(())
        })
    }

    fn tolerations(&mut self) -> Option<Vec<Toleration>> {
        let name = env::EPHEMERAL_TOLERATIONS;
        match parse_tolerations(self.text(name)?) {
            Ok(tolerations) => Some(tolerations),
            Err(errors) => {
                for error in errors {
                    self.errors.add(name, error);
                }
                None
            }
        }
    }

    fn object_name(&mut self, name: &str) -> Option<String> {
        let text = self.filled(name)?;
        self.errors.keep(name, check::object_name(text))?;
        Some(text.to_owned())
    }

    fn object_names(&mut self, name: &str) -> Option<Vec<String>> {
        let list = parse_list(self.text(name)?);
        for element in &list {
            if let Err(rule) = check::object_name(element) {
                self.errors
                    .add(name, format!("names {}, which {rule}", quote(element)));
            }
        }
        Some(list)
    }

    fn mount_path(&mut self, name: &str) -> Option<String> {
        let text = self.filled(name)?;
        self.errors.keep(name, check::mount_path(text))
    }

    fn image(&mut self) -> Option<String> {
        let text = self.filled(env::EPHEMERAL_IMAGE)?;
        self.errors
            .keep(env::EPHEMERAL_IMAGE, super::image::check(text))?;
        Some(text.to_owned())
    }

    fn amount(&mut self, name: &str) -> Option<Amount> {
        let text = self.filled(name)?;
        let amount = Amount::parse(text)
            .map_err(|error| format!("is {}, a quantity that {error}", quote(text)));
        self.errors.keep(name, amount)
    }

    fn resources(&mut self) -> Resources {
        let mut span = |names: (&'static str, &'static str)| {
            let span = Span {
                request: self.amount(names.0),
                limit: self.amount(names.1),
            };
            if let (Some(request), Some(limit)) = (&span.request, &span.limit)
                && request > limit
            {
                self.errors.add(
                    names.0,
                    format!("is {request}, more than `{}`, {limit}", names.1),
                );
            }
            span
        };
        let resources = Resources {
            cpu: span((env::EPHEMERAL_CPU_REQUEST, env::EPHEMERAL_CPU_LIMIT)),
            memory: span((env::EPHEMERAL_MEMORY_REQUEST, env::EPHEMERAL_MEMORY_LIMIT)),
            ephemeral_storage: span((env::EPHEMERAL_STORAGE_REQUEST, env::EPHEMERAL_STORAGE_LIMIT)),
        };
        for (name, span) in [
            (env::EPHEMERAL_MEMORY_LIMIT, &resources.memory),
            (env::EPHEMERAL_STORAGE_LIMIT, &resources.ephemeral_storage),
        ] {
            if let Some(limit) = span.limit.as_ref().filter(|limit| limit.is_a_slip()) {
                self.errors.add(name, format!("is {limit}, {SLIP}"));
            }
        }
        resources
    }

    fn security(&mut self, name: &str, known: &[(&str, ReadValue)]) -> SecurityKeys {
        let mut set = SecurityKeys::new();
        for (key, text) in self.pairs(name) {
            let value = if let Some((_, read)) = known.iter().find(|(known, _)| *known == key) {
                read(&text)
            } else {
                let known: Vec<&str> = known.iter().map(|(key, _)| *key).collect();
                Err(format!("is not one of {}", known.join(", ")))
            };
            let value = value.map_err(|rule| format!("has a key {} that {rule}", quote(&key)));
            if let Some(value) = self.errors.keep(name, value) {
                set.insert(key, value);
            }
        }
        set
    }
}

/// A user or group id.
fn id(text: &str) -> Result<Value, String> {
    text.parse::<i64>()
        .ok()
        .filter(|id| (0..=i64::from(i32::MAX)).contains(id))
        .map(Value::from)
        .ok_or_else(|| "must be a whole number from 0 to 2147483647".to_owned())
}

/// The stock launcher takes every text except `true` as false. Here, a typing error is an error, because the setting
/// concerns security.
fn truth(text: &str) -> Result<Value, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" => Ok(Value::Bool(true)),
        "false" => Ok(Value::Bool(false)),
        _ => Err("must be `true` or `false`".to_owned()),
    }
}

fn seccomp_profile(text: &str) -> Result<Value, String> {
    let profile = choice(text, &["RuntimeDefault", "Unconfined"])?;
    Ok(json!({ "type": profile }))
}

fn choice(text: &str, known: &[&str]) -> Result<Value, String> {
    known
        .iter()
        .find(|name| name.eq_ignore_ascii_case(text))
        .map(|name| Value::from(*name))
        .ok_or_else(|| format!("must be one of {}", known.join(", ")))
}

impl Overrides {
    /// Returns these settings, and those of `below` where these are not set. Maps of labels, annotations, environment and
    /// security contexts are merged key by key. Selectors, tolerations and lists are replaced.
    #[must_use]
    pub fn over(self, below: Self) -> Self {
        Self {
            node_selector: self.node_selector.or(below.node_selector),
            tolerations: self.tolerations.or(below.tolerations),
            service_account: self.service_account.or(below.service_account),
            annotations: joined(self.annotations, below.annotations),
            pod_annotations: joined(self.pod_annotations, below.pod_annotations),
            labels: joined(self.labels, below.labels),
            config_map: self.config_map.or(below.config_map),
            config_map_path: self.config_map_path.or(below.config_map_path),
            env_config_maps: self.env_config_maps.or(below.env_config_maps),
            pod_security: joined(self.pod_security, below.pod_security),
            container_security: joined(self.container_security, below.container_security),
            resources: self.resources.over(below.resources),
            env: joined(self.env, below.env),
            plugin_cache_dir: self.plugin_cache_dir.or(below.plugin_cache_dir),
            plugin_cache_claim: self.plugin_cache_claim.or(below.plugin_cache_claim),
            image: self.image.or(below.image),
        }
    }
}

fn joined<M: IntoIterator + Extend<M::Item>>(above: M, mut below: M) -> M {
    below.extend(above);
    below
}

impl Resources {
    /// Each [`Span`] over the one below.
    #[must_use]
    pub fn over(self, below: Self) -> Self {
        Self {
            cpu: self.cpu.over(below.cpu),
            memory: self.memory.over(below.memory),
            ephemeral_storage: self.ephemeral_storage.over(below.ephemeral_storage),
        }
    }
}

impl Span {
    /// If both cannot apply, the upper level decides. Its limit lowers a higher request from below. Its request raises
    /// a lower limit from below.
    #[must_use]
    pub fn over(self, below: Self) -> Self {
        let request = self.request.clone().or_else(|| match &self.limit {
            Some(limit) => below.request.map(|request| request.min(limit.clone())),
            None => below.request,
        });
        let limit = self.limit.or_else(|| match &self.request {
            Some(request) => below.limit.map(|limit| limit.max(request.clone())),
            None => below.limit,
        });
        Self { request, limit }
    }
}
