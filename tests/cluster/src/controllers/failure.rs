//! What a Job's `podFailurePolicy` says of a failed pod. Pure.

use k8s_openapi::api::batch::v1::{Job, PodFailurePolicyRule};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;

/// What becomes of the Job when a pod failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    Count,
    Ignore,
    /// The Job fails, with this message.
    FailJob(String),
}

/// The action of the first rule that matches.
pub(crate) fn action(job: &Job, pod: &Pod) -> Action {
    let policy = job
        .spec
        .as_ref()
        .and_then(|spec| spec.pod_failure_policy.as_ref());
    for (index, rule) in policy
        .into_iter()
        .flat_map(|policy| &policy.rules)
        .enumerate()
    {
        let Some(why) = matches(rule, pod) else {
            continue;
        };
        return match rule.action.as_str() {
            "Ignore" => Action::Ignore,
            "FailJob" => Action::FailJob(format!("{why} matching FailJob rule at index {index}")),
            _ => Action::Count,
        };
    }
    Action::Count
}

fn matches(rule: &PodFailurePolicyRule, pod: &Pod) -> Option<String> {
    let shown = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    let status = pod.status.as_ref()?;
    if let Some(codes) = &rule.on_exit_codes {
        let statuses = [&status.init_container_statuses, &status.container_statuses];
        return statuses
            .into_iter()
            .flatten()
            .flatten()
            .find_map(|container| {
                let code = exit_code(container)?;
                let named = codes
                    .container_name
                    .as_ref()
                    .is_none_or(|name| *name == container.name);
                let listed = codes.values.contains(&code);
                let hit = if codes.operator == "In" {
                    listed
                } else {
                    !listed
                };
                // A container that succeeded matches no rule.
                (named && hit && code != 0).then(|| {
                    format!(
                        "Container {} for pod {shown} failed with exit code {code}",
                        container.name
                    )
                })
            });
    }
    let patterns = rule.on_pod_conditions.as_deref().unwrap_or_default();
    patterns.iter().find_map(|pattern| {
        status
            .conditions
            .iter()
            .flatten()
            .any(|condition| condition.type_ == pattern.type_ && condition.status == pattern.status)
            .then(|| format!("Pod {shown} has condition {}", pattern.type_))
    })
}

fn exit_code(container: &ContainerStatus) -> Option<i32> {
    Some(container.state.as_ref()?.terminated.as_ref()?.exit_code)
}
