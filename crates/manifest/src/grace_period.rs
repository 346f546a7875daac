//! Checks the time that the executor has to stop: the pod's grace period without the time of a `preStop` hook.

use k8s_openapi::api::core::v1::{Container, PodSpec};

use super::container;

/// The shortest time in which the executor can stop its tool, store the state and report.
pub const MIN_GRACE_SECONDS: i64 = 30;

/// Seconds between the executor's SIGTERM and its SIGKILL. The grace period starts before a `preStop` hook, but the
/// kubelet sends SIGTERM only after the hook.
pub(super) fn executor_grace(pod_grace: i64, executor: &Container) -> i64 {
    pod_grace - pre_stop_sleep(executor).unwrap_or_default()
}

/// Returns what shortens the executor's time to stop, as phrases that follow the name of the setting.
pub(super) fn violations(spec: &PodSpec) -> Vec<String> {
    let pod_grace = spec.termination_grace_period_seconds.unwrap_or_default();
    let Some(executor) = container::executor(spec) else {
        return Vec::new();
    };
    let mut violations = Vec::new();
    if pre_stop_sleep(executor).is_none() {
        violations.push(format!(
            "gives the executor a `preStop` hook other than `sleep`: it would take an unknown part of the {pod_grace} s \
             of grace from it"
        ));
    }
    let grace = executor_grace(pod_grace, executor);
    if grace < MIN_GRACE_SECONDS {
        let hook = pod_grace - grace;
        let less = match hook {
            0 => String::new(),
            hook => format!(" ({pod_grace} s, less {hook} s of its `preStop` hook)"),
        };
        violations.push(format!(
            "leaves {grace} s of grace{less}, less than the {MIN_GRACE_SECONDS} s the executor needs to stop and save"
        ));
    }
    for (name, probe) in [
        ("livenessProbe", &executor.liveness_probe),
        ("startupProbe", &executor.startup_probe),
    ] {
        let own = probe
            .as_ref()
            .and_then(|probe| probe.termination_grace_period_seconds);
        if let Some(own) = own.filter(|own| *own < pod_grace) {
            violations.push(format!(
                "gives the executor {own} s of grace when its `{name}` fails, less than the {pod_grace} s it divides up"
            ));
        }
    }
    violations
}

/// Returns how long the executor's hook sleeps. `None`: the hook does something else, whose duration is unknown.
fn pre_stop_sleep(executor: &Container) -> Option<i64> {
    let hook = executor
        .lifecycle
        .as_ref()
        .and_then(|lifecycle| lifecycle.pre_stop.as_ref());
    match hook {
        None => Some(0),
        Some(hook) => hook.sleep.as_ref().map(|sleep| sleep.seconds),
    }
}
