//! What policies allow and refuse.

use rstest::rstest;

use super::super::overrides::{Names, read};
use super::*;

fn refusals(policy: &str, variable: &str, value: &str) -> Vec<String> {
    let policy: Policy = serde_saphyr::from_str(policy).unwrap();
    let variables = [(variable.to_owned(), value.to_owned())].into();
    let (requested, errors) = read(&variables, Names::WORKSPACE);
    assert_eq!(errors, []);
    policy
        .refusals(&requested)
        .iter()
        .map(ToString::to_string)
        .collect()
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
fn a_workspace_mounts_only_below_allowed_paths(#[case] path: &str, #[case] expected: bool) {
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

/// The error of a refusal contains the pattern.
#[test]
fn the_document_names_every_pattern_of_the_default() {
    let document = include_str!("../../../../docs/kubernetes-manifest.md");
    for pattern in ANNOTATIONS.iter().chain(MOUNT_PATHS) {
        let pattern = pattern.trim_start_matches('!');
        // Of homes it says which folders are meant.
        let is_told = pattern.starts_with("/home/") || document.contains(&format!("`{pattern}`"));
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
