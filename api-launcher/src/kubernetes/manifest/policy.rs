//! What a workspace may override. The operator's own settings are not subject to it.

use std::collections::BTreeMap;
use std::path::Path;

use job_contract::env;
use serde::Deserialize;

use super::image::Reference;
use super::overrides::{Overrides, Span};
use super::pod_security::{Level, annotation_rule};
use super::problem::{Fault, Problem, Problems, quote};
use super::quantity::Amount;

/// Names that are allowed: patterns in which `*` stands for any text. The longest one that matches a name decides, and a
/// `!` before it takes the name out.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Patterns(Vec<String>);

impl Patterns {
    /// The patterns as they would be written in a policy.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Self {
        Self(patterns.into_iter().map(str::to_owned).collect())
    }

    /// Whether a name is allowed.
    pub fn allow(&self, name: &str) -> bool {
        self.allow_one_of(&[name])
    }

    /// Whether a folder is allowed, by its own path or by that of a folder around it.
    pub fn allow_folder(&self, path: &str) -> bool {
        let around = Path::new(path).ancestors().filter_map(Path::to_str);
        self.allow_one_of(&around.collect::<Vec<_>>())
    }

    fn allow_one_of(&self, names: &[&str]) -> bool {
        let decisive = self.0.iter().filter_map(|pattern| {
            let (takes_out, pattern) = match pattern.strip_prefix('!') {
                Some(pattern) => (true, pattern),
                None => (false, pattern.as_str()),
            };
            let length = pattern.bytes().filter(|byte| *byte != b'*').count();
            let is_meant = names.iter().any(|name| matches(pattern, name));
            is_meant.then_some((length, takes_out))
        });
        // Of two as long the one that takes out is the greater.
        decisive.max().is_some_and(|(_, takes_out)| !takes_out)
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// The policy, as its file holds it. What it does not mention keeps its default.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Policy {
    /// Service accounts.
    pub service_accounts: Patterns,
    /// `ConfigMap`s, mounted or as environment.
    pub config_maps: Patterns,
    /// Claims of plugin caches.
    pub persistent_volume_claims: Patterns,
    /// Keys of node selectors.
    pub node_selector_keys: Patterns,
    /// Keys of tolerated taints; the toleration of every taint is named `:Exists`, as it is written.
    pub toleration_keys: Patterns,
    /// Keys of labels.
    pub label_keys: Patterns,
    /// Keys of annotations, of Jobs and of pods.
    pub annotation_keys: Patterns,
    /// Folders a config map or a plugin cache may be mounted at or in. Those of the system and of the executor are never
    /// among them.
    pub mount_paths: Patterns,
    /// Names in `EPHEMERAL_JOB_ENV_VARS`; `None` is any, of which a stock executor's container gets the harmless ones.
    pub environment: Option<Patterns>,
    /// Registries, or repositories with their registry, of images.
    pub image_registries: Patterns,
    /// Keys of both security contexts.
    pub security_context_keys: Patterns,
    /// The Pod Security Standard every pod keeps to, whoever set what.
    pub pod_security: Level,
    /// Largest requests and limits.
    pub resources: Ceilings,
}

/// Largest amounts a workspace may ask for; `None` is no ceiling.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Ceilings {
    pub cpu: Option<Amount>,
    pub memory: Option<Amount>,
    pub ephemeral_storage: Option<Amount>,
}

/// What annotations of a workspace may say. Its own and those of schedulers, autoscalers and monitors are harmless. Those of
/// Kubernetes, container runtimes, network plug-ins and injectors can loosen the sandbox, change the network, or put
/// other containers, other code or other identities into the pod, so of each such family only what is known to be
/// harmless is left in.
const ANNOTATIONS: &[&str] = &[
    "*",
    // Kubernetes, and projects under its domains.
    "!*kubernetes.io/*",
    "!*k8s.io/*",
    "app.kubernetes.io/*",
    "cluster-autoscaler.kubernetes.io/*",
    "controller.kubernetes.io/*",
    "descheduler.alpha.kubernetes.io/*",
    "kubectl.kubernetes.io/*",
    "kubernetes.io/change-cause",
    "kubernetes.io/description",
    "kueue.x-k8s.io/*",
    "scheduling.k8s.io/*",
    // Container runtimes.
    "!*containerd.io*",
    "!*cri-o.io*",
    "!dev.gvisor.*",
    "!io.containerd.*",
    "!io.katacontainers.*",
    "!io.kubernetes.*",
    "!org.systemd.*",
    "!run.oci.*",
    // Network plug-ins.
    "!*cilium.io/*",
    "!*cncf.io/*",
    "!*ovn.org/*",
    "!*projectcalico.org/*",
    "!cni.*",
    "!networking.gke.io/*",
    "!vpc.amazonaws.com/*",
    // Injectors of containers, code and secrets, and what gives a pod an identity.
    "!*dapr.io/*",
    "!*dynatrace.com/*",
    "!*istio.io/*",
    "!*kuma.io/*",
    "!*linkerd.io/*",
    "!*opentelemetry.io/*",
    "!admission.datadoghq.com/*",
    "!consul.hashicorp.com/*",
    "!iam.amazonaws.com/*",
    "!vault.hashicorp.com/*",
    "linkerd.io/inject",
    "sidecar.istio.io/inject",
];

/// Where a workspace may mount: places for data of one's own. Hidden folders of the home directory hold the settings of
/// git, ssh and the clouds' libraries, which the executor uses too.
const MOUNT_PATHS: &[&str] = &[
    "/cache*",
    "/config*",
    "/data*",
    "/etc/opentofu*",
    "/etc/terraform*",
    "/etc/tofu*",
    "/home/cnb",
    "!/home/cnb/.*",
    "/home/cnb/.terraform*",
    "/home/mayfly",
    "!/home/mayfly/.*",
    "/home/mayfly/.terraform*",
    "/mnt",
    "/opt",
    "/plugin*",
    "/shared*",
    "/srv",
    "/terraform*",
    "/tf*",
    "/tmp",
    "/tofu*",
    "/var/cache",
    "/var/lib/terraform*",
    "/var/opt",
    "/var/tmp",
];

/// As open as the stock launcher, except where that would hand a workspace the platform: no image of its own
/// choice, nothing below the restricted Pod Security Standard, no toleration of every taint, no annotation that changes what the pod is, and no mount outside of places for data.
impl Default for Policy {
    fn default() -> Self {
        let any = || Patterns::new(["*"]);
        Self {
            service_accounts: any(),
            config_maps: any(),
            persistent_volume_claims: any(),
            node_selector_keys: any(),
            toleration_keys: Patterns::new(["*", "!:Exists"]),
            label_keys: any(),
            annotation_keys: Patterns::new(ANNOTATIONS.iter().copied()),
            mount_paths: Patterns::new(MOUNT_PATHS.iter().copied()),
            environment: None,
            image_registries: Patterns::new([]),
            security_context_keys: any(),
            pod_security: Level::Restricted,
            resources: Ceilings::default(),
        }
    }
}

/// Stands for every taint in [`Policy::toleration_keys`].
const EVERY_TAINT: &str = ":Exists";

impl Policy {
    /// What a workspace asks for and may not have.
    pub fn refusals(&self, requested: &Overrides) -> Vec<Problem> {
        let mut refusals = Refusals(Problems::new(Fault::Run));
        self.refuse_names(requested, &mut refusals);
        self.refuse_keys(requested, &mut refusals);
        self.refuse_paths(requested, &mut refusals);
        self.refuse_resources(requested, &mut refusals);
        self.refuse_security(requested, &mut refusals);
        refusals.0.into_vec()
    }

    fn refuse_names(&self, requested: &Overrides, refusals: &mut Refusals) {
        refusals.names(
            env::EPHEMERAL_SERVICE_ACCOUNT,
            &requested.service_account,
            &self.service_accounts,
            "serviceAccounts",
        );
        refusals.names(
            env::EPHEMERAL_CONFIG_MAP,
            &requested.config_map,
            &self.config_maps,
            "configMaps",
        );
        refusals.names(
            env::EPHEMERAL_ENV_CONFIG_MAPS,
            requested.env_config_maps.iter().flatten(),
            &self.config_maps,
            "configMaps",
        );
        refusals.names(
            env::PLUGIN_CACHE_CLAIM,
            &requested.plugin_cache_claim,
            &self.persistent_volume_claims,
            "persistentVolumeClaims",
        );
        if let Some(image) = &requested.image
            && let Ok(reference) = Reference::parse(image)
        {
            let (registry, repository) = reference.origin();
            if !self.image_registries.allow(registry) && !self.image_registries.allow(&repository) {
                refusals.add(env::EPHEMERAL_IMAGE, image, "imageRegistries");
            }
        }
    }

    fn refuse_keys(&self, requested: &Overrides, refusals: &mut Refusals) {
        let keys = BTreeMap::keys;
        refusals.names(
            env::EPHEMERAL_NODE_SELECTOR,
            requested.node_selector.iter().flat_map(keys),
            &self.node_selector_keys,
            "nodeSelectorKeys",
        );
        refusals.names(
            env::EPHEMERAL_LABELS,
            requested.labels.keys(),
            &self.label_keys,
            "labelKeys",
        );
        refusals.names(
            env::EPHEMERAL_ANNOTATIONS,
            requested.annotations.keys(),
            &self.annotation_keys,
            "annotationKeys",
        );
        refusals.names(
            env::EPHEMERAL_POD_ANNOTATIONS,
            requested.pod_annotations.keys(),
            &self.annotation_keys,
            "annotationKeys",
        );
        if let Some(environment) = &self.environment {
            refusals.names(
                env::EPHEMERAL_ENV,
                requested.env.keys(),
                environment,
                "environment",
            );
        }
        for toleration in requested.tolerations.iter().flatten() {
            let key = toleration.key.as_deref();
            if !self.toleration_keys.allow(key.unwrap_or(EVERY_TAINT)) {
                let shown = key.unwrap_or(EVERY_TAINT);
                refusals.add(env::EPHEMERAL_TOLERATIONS, shown, "tolerationKeys");
            }
        }
    }

    fn refuse_paths(&self, requested: &Overrides, refusals: &mut Refusals) {
        for (variable, path) in [
            (env::EPHEMERAL_CONFIG_MAP_PATH, &requested.config_map_path),
            (env::PLUGIN_CACHE_DIR, &requested.plugin_cache_dir),
        ] {
            if let Some(path) = path
                && !self.mount_paths.allow_folder(path)
            {
                refusals.add(variable, path, "mountPaths");
            }
        }
    }

    fn refuse_resources(&self, requested: &Overrides, refusals: &mut Refusals) {
        let resources = &requested.resources;
        refusals.span(
            (env::EPHEMERAL_CPU_REQUEST, env::EPHEMERAL_CPU_LIMIT),
            &resources.cpu,
            self.resources.cpu.as_ref(),
            "resources.cpu",
        );
        refusals.span(
            (env::EPHEMERAL_MEMORY_REQUEST, env::EPHEMERAL_MEMORY_LIMIT),
            &resources.memory,
            self.resources.memory.as_ref(),
            "resources.memory",
        );
        refusals.span(
            (env::EPHEMERAL_STORAGE_REQUEST, env::EPHEMERAL_STORAGE_LIMIT),
            &resources.ephemeral_storage,
            self.resources.ephemeral_storage.as_ref(),
            "resources.ephemeralStorage",
        );
    }

    fn refuse_security(&self, requested: &Overrides, refusals: &mut Refusals) {
        let pod = &requested.pod_security;
        let container = &requested.container_security;
        for (variable, keys) in [
            (env::EPHEMERAL_POD_SECURITY, pod.keys()),
            (env::EPHEMERAL_SECURITY, container.keys()),
        ] {
            refusals.names(
                variable,
                keys,
                &self.security_context_keys,
                "securityContextKeys",
            );
        }
        let unconfined = |profile: &Option<String>| profile.as_deref() == Some("Unconfined");
        let broken = [
            (
                Level::Restricted,
                env::EPHEMERAL_POD_SECURITY,
                "runAsNonRoot=false",
                pod.run_as_non_root == Some(false),
            ),
            (
                Level::Restricted,
                env::EPHEMERAL_POD_SECURITY,
                "runAsUser=0",
                pod.run_as_user == Some(0),
            ),
            (
                Level::Baseline,
                env::EPHEMERAL_POD_SECURITY,
                "seccompProfile=Unconfined",
                unconfined(&pod.seccomp_profile),
            ),
            (
                Level::Restricted,
                env::EPHEMERAL_SECURITY,
                "allowPrivilegeEscalation=true",
                container.allow_privilege_escalation == Some(true),
            ),
            (
                Level::Restricted,
                env::EPHEMERAL_SECURITY,
                "runAsNonRoot=false",
                container.run_as_non_root == Some(false),
            ),
            (
                Level::Restricted,
                env::EPHEMERAL_SECURITY,
                "runAsUser=0",
                container.run_as_user == Some(0),
            ),
            (
                Level::Baseline,
                env::EPHEMERAL_SECURITY,
                "privileged=true",
                container.privileged == Some(true),
            ),
            (
                Level::Baseline,
                env::EPHEMERAL_SECURITY,
                "seccompProfile=Unconfined",
                unconfined(&container.seccomp_profile),
            ),
        ];
        for (key, value) in &requested.pod_annotations {
            if let Some(rule) = annotation_rule(key, value, self.pod_security)
                && self.annotation_keys.allow(key)
            {
                refusals.0.add(
                    env::EPHEMERAL_POD_ANNOTATIONS,
                    format!(
                        "asks for {}, which {rule} by the policy's `podSecurity: {}`",
                        quote(key),
                        self.pod_security
                    ),
                );
            }
        }
        for (forbidden_from, variable, what, asked_for) in broken {
            if asked_for && self.pod_security >= forbidden_from {
                refusals.0.add(
                    variable,
                    format!(
                        "asks for {what}, which the policy's `podSecurity: {}` forbids",
                        self.pod_security
                    ),
                );
            }
        }
    }
}

struct Refusals(Problems);

impl Refusals {
    fn add(&mut self, variable: &str, name: &str, rule: &str) {
        self.0.add(
            variable,
            format!(
                "asks for {}, which the policy's `{rule}` does not allow",
                quote(name)
            ),
        );
    }

    fn names<'a>(
        &mut self,
        variable: &str,
        names: impl IntoIterator<Item = &'a (impl AsRef<str> + ?Sized + 'a)>,
        allowed: &Patterns,
        rule: &str,
    ) {
        for name in names {
            if !allowed.allow(name.as_ref()) {
                self.add(variable, name.as_ref(), rule);
            }
        }
    }

    fn span(&mut self, variables: (&str, &str), span: &Span, ceiling: Option<&Amount>, rule: &str) {
        let Some(ceiling) = ceiling else { return };
        for (variable, amount) in [(variables.0, &span.request), (variables.1, &span.limit)] {
            if let Some(amount) = amount
                && amount > ceiling
            {
                self.0.add(
                    variable,
                    format!("is {amount}, more than the policy's `{rule}` of {ceiling}"),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::overrides::{Names, read};
    use super::*;
    use rstest::rstest;

    fn refusals(policy: &str, variable: &str, value: &str) -> Vec<String> {
        let policy: Policy = serde_saphyr::from_str(policy).unwrap();
        let variables = [(variable.to_owned(), value.to_owned())].into();
        let (requested, problems) = read(&variables, Names::WORKSPACE, Fault::Run);
        assert_eq!(problems, []);
        policy
            .refusals(&requested)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[rstest]
    #[case("*", "", true)]
    #[case("*", "any", true)]
    #[case("a*", "abc", true)]
    #[case("a*c", "abc", true)]
    #[case("a*c", "ab", false)]
    #[case("*b*", "abc", true)]
    #[case("a*b*c", "a-b-b-c", true)]
    #[case("ab*b", "ab", false)]
    #[case("abc", "abc", true)]
    #[case("abc", "abcd", false)]
    #[case("", "a", false)]
    fn patterns_match_whole_names(
        #[case] pattern: &str,
        #[case] name: &str,
        #[case] expected: bool,
    ) {
        assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
    }

    #[rstest]
    #[case(&["*"], "any", true)]
    #[case(&[], "any", false)]
    #[case(&["*", "!secret*"], "secret-a", false)]
    #[case(&["!secret*", "*"], "secret-a", false)]
    #[case(&["*", "!secret*", "secret-but-harmless"], "secret-but-harmless", true)]
    #[case(&["*", "!secret*", "secret-but-harmless"], "secret-a", false)]
    #[case(&["a*", "!*a"], "aa", false)]
    fn the_longest_pattern_that_matches_decides(
        #[case] patterns: &[&str],
        #[case] name: &str,
        #[case] expected: bool,
    ) {
        let patterns = Patterns::new(patterns.iter().copied());
        assert_eq!(patterns.allow(name), expected, "{patterns:?} {name}");
    }

    #[rstest]
    #[case("/data", true)]
    #[case("/var/cache/tf", true)]
    #[case("/terraform-plugins", true)]
    #[case("/etc/terraform-cli", true)]
    #[case("/mnt/cache", true)]
    #[case("/home/mayfly/.terraform.d/plugin-cache", true)]
    #[case("/home/cnb/.terraform.d/plugins", true)]
    #[case("/home/mayfly/plugins", true)]
    #[case("/home/mayfly/.ssh", false)]
    #[case("/home/mayfly/.aws", false)]
    #[case("/home/mayfly/.config/git", false)]
    #[case("/home/somebody", false)]
    #[case("/etc/nsswitch.conf", false)]
    #[case("/etc/acme", false)]
    #[case("/app", false)]
    #[case("/nix/store", false)]
    #[case("/var/log", false)]
    fn a_workspace_mounts_where_data_lies(#[case] path: &str, #[case] expected: bool) {
        for variable in [env::EPHEMERAL_CONFIG_MAP_PATH, env::PLUGIN_CACHE_DIR] {
            let refusals = refusals("{}", variable, path);
            assert_eq!(refusals.is_empty(), expected, "{path}: {refusals:?}");
            let is_named = |refusal: &String| refusal.contains("`mountPaths`");
            assert!(refusals.iter().all(is_named), "{refusals:?}");
        }
    }

    #[test]
    fn a_policy_can_add_places_and_take_places_out() {
        let policy = "mountPaths: [/data, /acme, '!/acme/private']";
        let at = |path| refusals(policy, env::PLUGIN_CACHE_DIR, path).is_empty();
        assert!(at("/acme/cache") && at("/data/x"));
        assert!(!at("/acme/private/x") && !at("/mnt"));
    }

    #[rstest]
    #[case("prometheus.io/scrape", true)]
    #[case("cluster-autoscaler.kubernetes.io/safe-to-evict", true)]
    #[case("karpenter.sh/do-not-disrupt", true)]
    #[case("kubectl.kubernetes.io/default-container", true)]
    #[case("kueue.x-k8s.io/queue-name", true)]
    #[case("linkerd.io/inject", true)]
    #[case("sidecar.istio.io/inject", true)]
    #[case("ad.datadoghq.com/executor.logs", true)]
    #[case("acme.example/owner", true)]
    #[case("owner", true)]
    #[case("container.apparmor.security.beta.kubernetes.io/executor", false)]
    #[case("seccomp.security.alpha.kubernetes.io/pod", false)]
    #[case("container.seccomp.security.alpha.kubernetes.io/executor", false)]
    #[case("kubernetes.io/config.mirror", false)]
    #[case("io.kubernetes.cri-o.Devices", false)]
    #[case("seccomp-profile.kubernetes.cri-o.io/executor", false)]
    #[case("io.katacontainers.config.hypervisor.path", false)]
    #[case("dev.gvisor.flag.network", false)]
    #[case("run.oci.mount_context_type", false)]
    #[case("cdi.k8s.io/gpu", false)]
    #[case("k8s.v1.cni.cncf.io/networks", false)]
    #[case("cni.projectcalico.org/ipAddrs", false)]
    #[case("vault.hashicorp.com/agent-inject", false)]
    #[case("vault.hashicorp.com/role", false)]
    #[case("sidecar.istio.io/userVolume", false)]
    #[case("inject.istio.io/templates", false)]
    #[case("config.linkerd.io/proxy-image", false)]
    #[case("admission.datadoghq.com/python-lib.version", false)]
    #[case("instrumentation.opentelemetry.io/inject-sdk", false)]
    #[case("iam.amazonaws.com/role", false)]
    fn annotations_that_change_what_a_pod_is_are_the_operators(
        #[case] key: &str,
        #[case] expected: bool,
    ) {
        for variable in [env::EPHEMERAL_ANNOTATIONS, env::EPHEMERAL_POD_ANNOTATIONS] {
            let refusals = refusals("{}", variable, &format!("{key}=x"));
            assert_eq!(refusals.is_empty(), expected, "{key}: {refusals:?}");
        }
    }

    #[test]
    fn an_annotation_that_a_policy_allows_keeps_to_its_standard_all_the_same() {
        let key = "container.apparmor.security.beta.kubernetes.io/executor";
        let at = |policy, value: &str| {
            refusals(
                policy,
                env::EPHEMERAL_POD_ANNOTATIONS,
                &format!("{key}={value}"),
            )
        };
        let open = "annotationKeys: ['*']";
        let refused = at(open, "unconfined");
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert!(
            refused[0].contains("podSecurity: restricted"),
            "{refused:?}"
        );
        assert_eq!(at(open, "runtime/default"), [""; 0]);
        assert_eq!(
            at(
                "{annotationKeys: ['*'], podSecurity: privileged}",
                "unconfined"
            ),
            [""; 0]
        );
    }

    #[rstest]
    #[case(
        "serviceAccounts: [runner-*]",
        env::EPHEMERAL_SERVICE_ACCOUNT,
        "admin",
        "serviceAccounts"
    )]
    #[case("configMaps: []", env::EPHEMERAL_CONFIG_MAP, "settings", "configMaps")]
    #[case("configMaps: [a]", env::EPHEMERAL_ENV_CONFIG_MAPS, "a,b", "configMaps")]
    #[case(
        "persistentVolumeClaims: [cache]",
        env::PLUGIN_CACHE_CLAIM,
        "other",
        "persistentVolumeClaims"
    )]
    #[case(
        "nodeSelectorKeys: [pool]",
        env::EPHEMERAL_NODE_SELECTOR,
        "pool=a;gpu=yes",
        "nodeSelectorKeys"
    )]
    #[case(
        "tolerationKeys: [spot]",
        env::EPHEMERAL_TOLERATIONS,
        "spot;dedicated",
        "tolerationKeys"
    )]
    #[case("labelKeys: []", env::EPHEMERAL_LABELS, "a=b", "labelKeys")]
    #[case(
        "annotationKeys: []",
        env::EPHEMERAL_ANNOTATIONS,
        "a=b",
        "annotationKeys"
    )]
    #[case(
        "annotationKeys: []",
        env::EPHEMERAL_POD_ANNOTATIONS,
        "a=b",
        "annotationKeys"
    )]
    #[case("mountPaths: [/data]", env::PLUGIN_CACHE_DIR, "/mnt", "mountPaths")]
    #[case(
        "environment: ['*', '!AWS_*']",
        env::EPHEMERAL_ENV,
        "AWS_REGION=x;A=b",
        "environment"
    )]
    #[case(
        "imageRegistries: [ghcr.io/acme/*]",
        env::EPHEMERAL_IMAGE,
        "ghcr.io/other/x",
        "imageRegistries"
    )]
    #[case(
        "securityContextKeys: [fsGroup]",
        env::EPHEMERAL_POD_SECURITY,
        "fsGroup=5;runAsUser=7",
        "securityContextKeys"
    )]
    #[case(
        "resources: {cpu: 2}",
        env::EPHEMERAL_CPU_LIMIT,
        "2001m",
        "resources.cpu"
    )]
    #[case(
        "resources: {memory: 1Gi}",
        env::EPHEMERAL_MEMORY_REQUEST,
        "2G",
        "resources.memory"
    )]
    #[case(
        "resources: {ephemeralStorage: 1Gi}",
        env::EPHEMERAL_STORAGE_LIMIT,
        "1.5Gi",
        "resources.ephemeralStorage"
    )]
    fn a_refusal_names_the_variable_and_the_rule(
        #[case] policy: &str,
        #[case] variable: &str,
        #[case] value: &str,
        #[case] rule: &str,
    ) {
        let refusals = refusals(policy, variable, value);
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        assert!(refusals[0].contains(variable), "{refusals:?}");
        assert!(refusals[0].contains(rule), "{refusals:?}");
    }

    #[rstest]
    #[case(env::EPHEMERAL_SERVICE_ACCOUNT, "any")]
    #[case(env::EPHEMERAL_TOLERATIONS, "anything:Exists")]
    #[case(env::EPHEMERAL_ENV, "AWS_REGION=eu-central-1;TF_LOG=debug")]
    #[case(env::EPHEMERAL_CPU_LIMIT, "512")]
    #[case(env::EPHEMERAL_POD_SECURITY, "runAsUser=5000;runAsNonRoot=true")]
    #[case(
        env::EPHEMERAL_SECURITY,
        "allowPrivilegeEscalation=false;readOnlyRootFilesystem=false"
    )]
    fn the_default_is_as_open_as_the_stock_launcher(#[case] variable: &str, #[case] value: &str) {
        assert_eq!(refusals("{}", variable, value), [""; 0]);
    }

    #[rstest]
    #[case(env::EPHEMERAL_IMAGE, "evil/x", "imageRegistries")]
    #[case(env::EPHEMERAL_TOLERATIONS, ":Exists", "tolerationKeys")]
    #[case(
        env::EPHEMERAL_POD_SECURITY,
        "runAsNonRoot=false",
        "podSecurity: restricted"
    )]
    #[case(env::EPHEMERAL_POD_SECURITY, "runAsUser=0", "podSecurity: restricted")]
    #[case(
        env::EPHEMERAL_POD_SECURITY,
        "seccompProfile=unconfined",
        "podSecurity: restricted"
    )]
    #[case(
        env::EPHEMERAL_SECURITY,
        "allowPrivilegeEscalation=true",
        "podSecurity: restricted"
    )]
    #[case(env::EPHEMERAL_SECURITY, "privileged=true", "podSecurity: restricted")]
    #[case(env::EPHEMERAL_SECURITY, "runAsUser=0", "podSecurity: restricted")]
    fn the_default_keeps_the_platform_apart(
        #[case] variable: &str,
        #[case] value: &str,
        #[case] rule: &str,
    ) {
        let refusals = refusals("{}", variable, value);
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        assert!(refusals[0].contains(rule), "{refusals:?}");
    }

    /// Whoever looks up why something is refused finds the pattern.
    #[test]
    fn the_document_names_every_pattern_of_the_default() {
        let document = include_str!("../../../../docs/kubernetes-manifest.md");
        for pattern in ANNOTATIONS.iter().chain(MOUNT_PATHS) {
            let pattern = pattern.trim_start_matches('!');
            // Of homes it says which folders are meant.
            let is_told =
                pattern.starts_with("/home/") || document.contains(&format!("`{pattern}`"));
            assert!(is_told, "{pattern}");
        }
    }

    #[test]
    fn a_wider_standard_permits_more() {
        let requested = (env::EPHEMERAL_SECURITY, "allowPrivilegeEscalation=true");
        assert_eq!(
            refusals("podSecurity: baseline", requested.0, requested.1),
            [""; 0]
        );
        let requested = (env::EPHEMERAL_SECURITY, "privileged=true");
        assert_eq!(
            refusals("podSecurity: baseline", requested.0, requested.1).len(),
            1
        );
        assert_eq!(
            refusals("podSecurity: privileged", requested.0, requested.1),
            [""; 0]
        );
    }

    #[test]
    fn a_typing_error_in_the_policy_is_not_ignored() {
        assert!(serde_saphyr::from_str::<Policy>("serviceAcounts: []").is_err());
        assert!(serde_saphyr::from_str::<Policy>("resources: {memory: 2GiB}").is_err());
    }
}
