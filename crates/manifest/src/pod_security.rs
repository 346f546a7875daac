//! Checks a finished pod against the Pod Security Standards. The launcher creates a pod only if it meets the operator's
//! level, wherever its settings come from.

use std::fmt;

use k8s_openapi::api::core::v1::{
    AppArmorProfile, Capabilities, Container, PodSpec, SELinuxOptions, SeccompProfile,
    SecurityContext, Volume, WindowsSecurityContextOptions,
};
use serde::Deserialize;

/// A level of the standards, from the widest to the narrowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// No restrictions.
    Privileged,
    /// No known privilege escalations.
    Baseline,
    /// Hardened.
    Restricted,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Privileged => "privileged",
            Self::Baseline => "baseline",
            Self::Restricted => "restricted",
        })
    }
}

/// Capabilities the baseline lets a container add.
const BASELINE_CAPABILITIES: &[&str] = &[
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];
const BASELINE_SYSCTLS: &[&str] = &[
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
];
const BASELINE_SELINUX_TYPES: &[&str] = &[
    "",
    "container_engine_t",
    "container_init_t",
    "container_kvm_t",
    "container_t",
];

/// Returns the violations of the level. Each names the field and the required value.
pub fn violations(pod: &PodSpec, level: Level) -> Vec<String> {
    let mut found = Vec::new();
    if level >= Level::Baseline {
        baseline_pod(pod, &mut found);
    }
    if level >= Level::Restricted {
        restricted_pod(pod, &mut found);
    }
    for container in containers(pod) {
        let context = container.security_context.clone().unwrap_or_default();
        let mut broken = Vec::new();
        if level >= Level::Baseline {
            baseline_container(container, &context, &mut broken);
        }
        if level >= Level::Restricted {
            restricted_container(pod, &context, &mut broken);
        }
        found.extend(
            broken
                .into_iter()
                .map(|rule| format!("container `{}`: {rule}", container.name)),
        );
    }
    found
}

/// Returns the rule for an annotation of a pod, as a phrase that follows its key. Some annotations replace a field:
/// those of older versions of Kubernetes, and those of CRI-O.
pub fn annotation_rule(key: &str, value: &str, level: Level) -> Option<&'static str> {
    if level < Level::Baseline {
        return None;
    }
    let is_profile =
        value.is_empty() || value == "runtime/default" || value.starts_with("localhost/");
    if key.starts_with("container.apparmor.security.beta.kubernetes.io/") && !is_profile {
        return Some("must be `runtime/default` or a profile of the node");
    }
    let of_seccomp = key.starts_with("container.seccomp.security.alpha.kubernetes.io/")
        || key == "seccomp.security.alpha.kubernetes.io/pod";
    if of_seccomp && !is_profile && value != "docker/default" {
        return Some("must be `runtime/default` or a profile of the node");
    }
    let of_cri_o = key
        .strip_prefix("io.kubernetes.cri-o.")
        .is_some_and(|setting| !HARMLESS_OF_CRI_O.contains(&setting));
    if of_cri_o || key.starts_with("seccomp-profile.kubernetes.cri-o.io") {
        return Some("must not be set");
    }
    None
}

/// Settings of CRI-O that do not weaken the sandbox.
const HARMLESS_OF_CRI_O: &[&str] = &["ShmSize", "umask", "userns-mode"];

fn containers(pod: &PodSpec) -> impl Iterator<Item = &Container> {
    pod.init_containers.iter().flatten().chain(&pod.containers)
}

fn baseline_pod(pod: &PodSpec, found: &mut Vec<String>) {
    for (field, set) in [
        ("hostNetwork", pod.host_network),
        ("hostPID", pod.host_pid),
        ("hostIPC", pod.host_ipc),
    ] {
        if set == Some(true) {
            found.push(format!("{field} must not be true"));
        }
    }
    for volume in pod.volumes.iter().flatten() {
        if volume.host_path.is_some() {
            found.push(format!("volume `{}` must not be a hostPath", volume.name));
        }
    }
    if let Some(context) = &pod.security_context {
        for sysctl in context.sysctls.iter().flatten() {
            if !BASELINE_SYSCTLS.contains(&sysctl.name.as_str()) {
                found.push(format!("sysctl `{}` is not a safe one", sysctl.name));
            }
        }
        shared_rules(
            context.app_armor_profile.as_ref(),
            context.se_linux_options.as_ref(),
            context.seccomp_profile.as_ref(),
            context.windows_options.as_ref(),
            found,
        );
    }
}

/// The rules for what both the pod and each container can set.
fn shared_rules(
    app_armor: Option<&AppArmorProfile>,
    se_linux: Option<&SELinuxOptions>,
    seccomp: Option<&SeccompProfile>,
    windows: Option<&WindowsSecurityContextOptions>,
    found: &mut Vec<String>,
) {
    if seccomp.is_some_and(|p| p.type_ == "Unconfined") {
        found.push("seccompProfile must not be Unconfined".to_owned());
    }
    if app_armor.is_some_and(|p| p.type_ == "Unconfined") {
        found.push("appArmorProfile must not be Unconfined".to_owned());
    }
    if let Some(options) = se_linux {
        let filled = |text: &Option<String>| text.as_deref().is_some_and(|t| !t.is_empty());
        if !BASELINE_SELINUX_TYPES.contains(&options.type_.as_deref().unwrap_or_default())
            || filled(&options.user)
            || filled(&options.role)
        {
            found.push("seLinuxOptions may set only a container type".to_owned());
        }
    }
    if windows.is_some_and(|options| options.host_process == Some(true)) {
        found.push("windowsOptions.hostProcess must not be true".to_owned());
    }
}

fn baseline_container(container: &Container, context: &SecurityContext, found: &mut Vec<String>) {
    if context.privileged == Some(true) {
        found.push("privileged must not be true".to_owned());
    }
    if context
        .proc_mount
        .as_deref()
        .is_some_and(|mount| mount != "Default")
    {
        found.push("procMount must be Default".to_owned());
    }
    for capability in added(context.capabilities.as_ref()) {
        if !BASELINE_CAPABILITIES.contains(&capability) {
            found.push(format!("capability `{capability}` must not be added"));
        }
    }
    for port in container.ports.iter().flatten() {
        if port.host_port.is_some_and(|port| port != 0) {
            found.push("hostPort must not be set".to_owned());
        }
    }
    shared_rules(
        context.app_armor_profile.as_ref(),
        context.se_linux_options.as_ref(),
        context.seccomp_profile.as_ref(),
        context.windows_options.as_ref(),
        found,
    );
}

fn added(capabilities: Option<&Capabilities>) -> impl Iterator<Item = &str> {
    capabilities
        .and_then(|capabilities| capabilities.add.as_ref())
        .into_iter()
        .flatten()
        .map(String::as_str)
}

fn restricted_pod(pod: &PodSpec, found: &mut Vec<String>) {
    for volume in pod.volumes.iter().flatten() {
        if !is_restricted_volume(volume) {
            found.push(format!(
                "volume `{}` must be a configMap, csi, downwardAPI, emptyDir, ephemeral, persistentVolumeClaim, \
                 projected or secret",
                volume.name
            ));
        }
    }
    let context = pod.security_context.clone().unwrap_or_default();
    if context.run_as_user == Some(0) {
        found.push("runAsUser must not be 0".to_owned());
    }
}

fn is_restricted_volume(volume: &Volume) -> bool {
    volume.config_map.is_some()
        || volume.csi.is_some()
        || volume.downward_api.is_some()
        || volume.empty_dir.is_some()
        || volume.ephemeral.is_some()
        || volume.persistent_volume_claim.is_some()
        || volume.projected.is_some()
        || volume.secret.is_some()
}

fn restricted_container(pod: &PodSpec, context: &SecurityContext, found: &mut Vec<String>) {
    let of_pod = pod.security_context.clone().unwrap_or_default();
    if context.allow_privilege_escalation != Some(false) {
        found.push("allowPrivilegeEscalation must be false".to_owned());
    }
    if context.run_as_non_root.or(of_pod.run_as_non_root) != Some(true) {
        found.push("runAsNonRoot must be true".to_owned());
    }
    if context.run_as_user == Some(0) {
        found.push("runAsUser must not be 0".to_owned());
    }
    let profile = context
        .seccomp_profile
        .as_ref()
        .or(of_pod.seccomp_profile.as_ref());
    if !profile.is_some_and(|p| matches!(p.type_.as_str(), "RuntimeDefault" | "Localhost")) {
        found.push("seccompProfile must be RuntimeDefault or Localhost".to_owned());
    }
    let capabilities = context.capabilities.as_ref();
    let drops_all = capabilities
        .and_then(|capabilities| capabilities.drop.as_ref())
        .is_some_and(|dropped| dropped.iter().any(|name| name == "ALL"));
    if !drops_all {
        found.push("capabilities.drop must hold ALL".to_owned());
    }
    for capability in added(capabilities) {
        if capability != "NET_BIND_SERVICE" {
            found.push(format!("capability `{capability}` must not be added"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    fn hardened() -> Value {
        json!({
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "executor",
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        })
    }

    fn with(pointer: &str, value: Value) -> PodSpec {
        let mut pod = hardened();
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        pod.pointer_mut(parent).unwrap()[field] = value;
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn a_hardened_pod_keeps_every_level() {
        let pod: PodSpec = serde_json::from_value(hardened()).unwrap();
        assert_eq!(violations(&pod, Level::Restricted), [""; 0]);
    }

    #[rstest]
    #[case("/hostNetwork", json!(true))]
    #[case("/hostPID", json!(true))]
    #[case("/hostIPC", json!(true))]
    #[case("/volumes", json!([{"name": "v", "hostPath": {"path": "/"}}]))]
    #[case("/securityContext/sysctls", json!([{"name": "kernel.msgmax", "value": "1"}]))]
    #[case("/securityContext/seccompProfile", json!({"type": "Unconfined"}))]
    #[case("/securityContext/appArmorProfile", json!({"type": "Unconfined"}))]
    #[case("/securityContext/seLinuxOptions", json!({"type": "spc_t"}))]
    #[case("/securityContext/seLinuxOptions", json!({"user": "root"}))]
    #[case("/securityContext/windowsOptions", json!({"hostProcess": true}))]
    #[case("/containers/0/securityContext/privileged", json!(true))]
    #[case("/containers/0/securityContext/procMount", json!("Unmasked"))]
    #[case("/containers/0/securityContext/capabilities", json!({"drop": ["ALL"], "add": ["SYS_ADMIN"]}))]
    #[case("/containers/0/securityContext/seccompProfile", json!({"type": "Unconfined"}))]
    #[case("/containers/0/ports", json!([{"containerPort": 1, "hostPort": 1}]))]
    #[case("/initContainers", json!([{"name": "i", "securityContext": {"privileged": true}}]))]
    fn what_the_baseline_forbids_is_found(#[case] pointer: &str, #[case] value: Value) {
        let pod = with(pointer, value);
        assert_ne!(violations(&pod, Level::Baseline), [""; 0]);
        assert_ne!(violations(&pod, Level::Restricted), [""; 0]);
        assert_eq!(violations(&pod, Level::Privileged), [""; 0]);
    }

    #[rstest]
    #[case("/volumes", json!([{"name": "v", "nfs": {"server": "s", "path": "/"}}]))]
    #[case("/securityContext/runAsNonRoot", json!(false))]
    #[case("/securityContext/runAsNonRoot", json!(null))]
    #[case("/securityContext/runAsUser", json!(0))]
    #[case("/securityContext/seccompProfile", json!(null))]
    #[case("/containers/0/securityContext", json!({}))]
    #[case("/containers/0/securityContext/runAsUser", json!(0))]
    #[case("/containers/0/securityContext/runAsNonRoot", json!(false))]
    #[case("/containers/0/securityContext/allowPrivilegeEscalation", json!(true))]
    #[case("/containers/0/securityContext/capabilities", json!({"drop": ["NET_RAW"]}))]
    #[case("/containers/0/securityContext/capabilities", json!({"drop": ["ALL"], "add": ["CHOWN"]}))]
    #[case("/initContainers", json!([{"name": "i"}]))]
    fn what_only_the_restricted_level_forbids_is_found(
        #[case] pointer: &str,
        #[case] value: Value,
    ) {
        let pod = with(pointer, value);
        assert_ne!(violations(&pod, Level::Restricted), [""; 0]);
        assert_eq!(violations(&pod, Level::Baseline), [""; 0]);
    }

    #[rstest]
    #[case(
        "container.apparmor.security.beta.kubernetes.io/executor",
        "unconfined"
    )]
    #[case(
        "container.seccomp.security.alpha.kubernetes.io/executor",
        "unconfined"
    )]
    #[case("seccomp.security.alpha.kubernetes.io/pod", "unconfined")]
    #[case("io.kubernetes.cri-o.Devices", "/dev/kvm")]
    #[case("io.kubernetes.cri-o.cgroup2-mount-hierarchy-rw", "true")]
    #[case(
        "seccomp-profile.kubernetes.cri-o.io/POD",
        "registry.example/profile:1"
    )]
    fn annotations_that_undo_a_field_break_the_baseline(#[case] key: &str, #[case] value: &str) {
        for level in [Level::Baseline, Level::Restricted] {
            assert!(annotation_rule(key, value, level).is_some(), "{key}");
        }
        assert_eq!(annotation_rule(key, value, Level::Privileged), None);
    }

    #[rstest]
    #[case(
        "container.apparmor.security.beta.kubernetes.io/executor",
        "runtime/default"
    )]
    #[case(
        "container.apparmor.security.beta.kubernetes.io/executor",
        "localhost/runs"
    )]
    #[case("seccomp.security.alpha.kubernetes.io/pod", "docker/default")]
    #[case("io.kubernetes.cri-o.userns-mode", "auto")]
    #[case("acme.example/owner", "unconfined")]
    fn annotations_that_undo_nothing_keep_the_level(#[case] key: &str, #[case] value: &str) {
        assert_eq!(annotation_rule(key, value, Level::Restricted), None);
    }

    #[test]
    fn ports_below_1024_may_be_bound() {
        let pod = with(
            "/containers/0/securityContext/capabilities",
            json!({"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
        );
        assert_eq!(violations(&pod, Level::Restricted), [""; 0]);
    }
}
