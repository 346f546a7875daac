//! Decides whether Kubernetes may replace a failed pod, and for which failures.
//!
//! The second executor must find the claim of the first one. Otherwise it would run a started step again. So Kubernetes
//! replaces a pod only if the executor is Mayfly's and its claims outlive its pod.

use job_contract::{Exit, Records, env};
use k8s_openapi::api::batch::v1::{
    PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement,
    PodFailurePolicyOnPodConditionsPattern, PodFailurePolicyRule,
};
use k8s_openapi::api::core::v1::{Container, PodSpec, Volume};

use super::container;
use super::deployment::Deployment;
use super::executor_kind::ExecutorKind;

/// How often Kubernetes replaces a pod that failed before its step started, if the operator does not set it.
const DEFAULT_BACKOFF_LIMIT: i32 = 2;

/// Returns where the executor keeps its records, if the pod's specification shows it.
///
/// The launcher does not read Secrets and config maps. If the pod takes variables from one, and the launcher reports to a
/// platform, the launcher assumes that the executor reports to the same platform. The executor checks that it has one.
pub(super) fn records(spec: &PodSpec, deployment: &Deployment) -> Option<Records> {
    if deployment.records.is_some() {
        return deployment.records;
    }
    let executor = container::executor(spec)?;
    match (
        is_given(executor, env::API_URL),
        is_given(executor, env::DATA_DIR),
    ) {
        (Some(true), _) => Some(Records::Platform),
        (_, Some(true)) => is_data_dir_shared(spec, executor).then_some(Records::Shared),
        (None, _) if deployment.reports_to_platform && has_unread_environment(executor) => {
            Some(Records::Platform)
        }
        _ => None,
    }
}

/// Returns whether the executor of a second pod finds what the first one has claimed.
pub(super) fn finds_claims(kind: ExecutorKind, records: Option<Records>) -> bool {
    kind == ExecutorKind::Mayfly && records.is_some_and(Records::outlive_the_pod)
}

/// Returns the `backoffLimit` of the run.
pub(super) fn backoff_limit(
    kind: ExecutorKind,
    records: Option<Records>,
    deployment: &Deployment,
) -> i32 {
    if finds_claims(kind, records) {
        deployment.backoff_limit.unwrap_or(DEFAULT_BACKOFF_LIMIT)
    } else {
        0
    }
}

/// Explains why the operator's `backoffLimit` cannot be used. The phrase follows the name of the setting.
pub(super) fn refusal(limit: i32, kind: ExecutorKind) -> String {
    format!(
        "is {limit}, and must be 0: a second pod could apply what the first has applied, since {}",
        reason(kind)
    )
}

/// Explains why the Job may not wait in a queue of the cluster. The phrase follows the label. A queue that suspends a Job
/// again ends its pod, which is no failure to Kubernetes, and later makes another.
pub(super) fn queue_refusal(kind: ExecutorKind) -> String {
    format!(
        "must not be set: its queue may end a pod and start another, which could apply what the first has applied, since {}",
        reason(kind)
    )
}

fn reason(kind: ExecutorKind) -> String {
    match kind {
        ExecutorKind::Stock => format!(
            "the image does not hold Mayfly's executor, and no other one claims its step ({}=mayfly says that it does)",
            env::EXECUTOR_KIND
        ),
        ExecutorKind::Mayfly => format!(
            "the claims of executors end with their pods: give them the platform's {}, or a {} on a volume that all pods \
             share, or say with {} where they keep their records",
            env::API_URL,
            env::DATA_DIR,
            env::RECORDS
        ),
    }
}

/// Whether the container has a value for this variable. `None`: `env` of the container does not name it.
fn is_given(executor: &Container, name: &str) -> Option<bool> {
    let mut variables = executor.env.iter().flatten();
    let variable = variables.find(|variable| variable.name == name)?;
    let value = variable.value.as_deref().unwrap_or_default();
    Some(variable.value_from.is_some() || !value.trim().is_empty())
}

fn has_unread_environment(executor: &Container) -> bool {
    let mut sources = executor.env_from.iter().flatten();
    sources.any(|source| {
        ![env::FOR_CHILDREN_PREFIX, env::FOR_HOOKS_PREFIX]
            .map(Some)
            .contains(&source.prefix.as_deref())
    })
}

/// Whether the data folder is on a volume that every pod of the step mounts, on every node.
fn is_data_dir_shared(spec: &PodSpec, executor: &Container) -> bool {
    let variables = executor.env.iter().flatten();
    let folder = variables
        .filter(|variable| variable.name == env::DATA_DIR)
        .find_map(|variable| variable.value.as_deref())
        .unwrap_or_default();
    let mounts = executor.volume_mounts.iter().flatten();
    // Kubernetes replaces `$(NAME)`, for example with the pod's name. Then each pod has its own folder.
    if folder.contains("$(") {
        return false;
    }
    let mount = mounts
        .filter(|mount| std::path::Path::new(folder).starts_with(&mount.mount_path))
        .max_by_key(|mount| mount.mount_path.len());
    let mut volumes = spec.volumes.iter().flatten();
    mount
        .filter(|mount| mount.sub_path_expr.is_none() && mount.read_only != Some(true))
        .and_then(|mount| volumes.find(|volume| volume.name == mount.name))
        .is_some_and(is_shared)
}

/// A folder of the node is not shared: the next pod may run on another node.
fn is_shared(volume: &Volume) -> bool {
    volume.persistent_volume_claim.is_some() || volume.nfs.is_some()
}

/// Decides which failed pods Kubernetes replaces. The first rule that matches applies:
///
/// 1. The executor ended with a code of its own, other than [`Exit::Infrastructure`]: the Job fails. It may have started the
///    step.
/// 2. The pod was disrupted: Kubernetes replaces it and does not count the failure. This includes a killed executor. If it
///    had started the step, its claim stops the next executor.
/// 3. The executor was killed for another reason, for example for its memory: the Job fails. The next one would be killed
///    too.
///
/// All other failures count against the `backoffLimit`.
pub(super) fn failure_policy() -> PodFailurePolicy {
    let infrastructure = i32::from(Exit::Infrastructure.code());
    let killed = i32::from(Exit::Signal(9).code());
    PodFailurePolicy {
        rules: vec![
            fail_on_exit_codes("NotIn", vec![infrastructure, killed]),
            ignore_disruptions(),
            fail_on_exit_codes("In", vec![killed]),
        ],
    }
}

fn fail_on_exit_codes(operator: &str, values: Vec<i32>) -> PodFailurePolicyRule {
    PodFailurePolicyRule {
        action: "FailJob".to_owned(),
        on_exit_codes: Some(PodFailurePolicyOnExitCodesRequirement {
            container_name: Some(container::CONTAINER.to_owned()),
            operator: operator.to_owned(),
            values,
        }),
        on_pod_conditions: None,
    }
}

fn ignore_disruptions() -> PodFailurePolicyRule {
    PodFailurePolicyRule {
        action: "Ignore".to_owned(),
        on_exit_codes: None,
        on_pod_conditions: Some(vec![PodFailurePolicyOnPodConditionsPattern {
            status: "True".to_owned(),
            type_: "DisruptionTarget".to_owned(),
        }]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overlay::Overlay;
    use crate::{build, deployment_errors};
    use job_contract::{Document, JobData, StepType};
    use k8s_openapi::api::batch::v1::JobSpec;
    use rstest::rstest;

    fn run(deployment: &Deployment) -> JobSpec {
        let job = JobData {
            step_type: Some(StepType::Apply.name().to_owned()),
            organization_id: "o".to_owned(),
            workspace_id: "w".to_owned(),
            job_id: "1".to_owned(),
            step_id: "s".to_owned(),
            ..JobData::default()
        };
        build(&Document::written(&job), deployment)
            .unwrap()
            .job
            .spec
            .unwrap()
    }

    /// Returns the executor's setting for its records, and how often its pod is replaced.
    fn records_and_limit(deployment: &Deployment) -> (Option<String>, Option<i32>) {
        let spec = run(deployment);
        let pod = spec.template.spec.unwrap();
        let variables = pod.containers[0].env.iter().flatten();
        let records = variables
            .filter(|variable| variable.name == env::RECORDS)
            .find_map(|variable| variable.value.clone());
        let rules = spec.pod_failure_policy.map(|policy| policy.rules);
        let ignores = rules
            .into_iter()
            .flatten()
            .any(|rule| rule.action == "Ignore");
        assert_eq!(ignores, spec.backoff_limit > Some(0));
        assert_eq!(spec.pod_replacement_policy.as_deref(), Some("Failed"));
        (records, spec.backoff_limit)
    }

    fn with_template(template: &str) -> Deployment {
        Deployment {
            overlay: Some(Overlay::parse(template).unwrap()),
            // For volumes that no restricted pod has.
            policy: serde_saphyr::from_str("podSecurity: privileged").unwrap(),
            ..Deployment::default()
        }
    }

    fn of(records: Records) -> (Option<String>, Option<i32>) {
        (Some(records.name().to_owned()), Some(2))
    }

    const NONE: (Option<String>, Option<i32>) = (None, Some(0));

    #[test]
    fn a_pod_without_records_of_its_claims_is_not_replaced() {
        assert_eq!(records_and_limit(&Deployment::default()), NONE);
    }

    #[rstest]
    #[case(
        "{name: AzBuilderApiUrl, value: 'http://api'}",
        "emptyDir: {}",
        Some(Records::Platform)
    )]
    #[case(
        "{name: AzBuilderApiUrl, valueFrom: {configMapKeyRef: {name: c, key: k}}}",
        "emptyDir: {}",
        Some(Records::Platform)
    )]
    #[case("{name: AzBuilderApiUrl, value: ' '}", "emptyDir: {}", None)]
    #[case(
        "{name: MAYFLY_DATA_DIR, value: /state/x}",
        "persistentVolumeClaim: {claimName: c}",
        Some(Records::Shared)
    )]
    #[case(
        "{name: MAYFLY_DATA_DIR, value: /state}",
        "nfs: {server: s, path: /p}",
        Some(Records::Shared)
    )]
    #[case("{name: MAYFLY_DATA_DIR, value: /state}", "emptyDir: {}", None)]
    #[case(
        "{name: MAYFLY_DATA_DIR, value: /state/$(MAYFLY_POD_NAME)}",
        "persistentVolumeClaim: {claimName: c}",
        None
    )]
    #[case(
        "{name: MAYFLY_DATA_DIR, value: /state}",
        "hostPath: {path: /state}",
        None
    )]
    #[case(
        "{name: MAYFLY_DATA_DIR, value: /statement}",
        "persistentVolumeClaim: {claimName: c}",
        None
    )]
    #[case("{name: TerrakubeRedisHostname, value: redis}", "emptyDir: {}", None)]
    fn the_environment_in_the_pod_template_decides_about_records(
        #[case] variable: &str,
        #[case] volume: &str,
        #[case] records: Option<Records>,
    ) {
        let deployment = with_template(&format!(
            "spec: {{volumes: [{{name: state, {volume}}}], containers: [{{name: executor, env: [{variable}], \
             volumeMounts: [{{name: state, mountPath: /state}}]}}]}}"
        ));
        assert_eq!(records_and_limit(&deployment), records.map_or(NONE, of));
    }

    #[test]
    fn settings_in_a_secret_are_taken_to_name_the_launchers_platform_and_the_executor_checks_it() {
        let reporting = Deployment {
            reports_to_platform: true,
            ..Deployment::default()
        };
        assert_eq!(records_and_limit(&reporting), of(Records::Platform));
        let without_secrets = Deployment {
            env_secrets: Vec::new(),
            ..reporting.clone()
        };
        assert_eq!(records_and_limit(&without_secrets), NONE);
        let without_platform =
            "spec: {containers: [{name: executor, env: [{name: AzBuilderApiUrl, value: ''}]}]}";
        let switched_off = Deployment {
            overlay: Some(Overlay::parse(without_platform).unwrap()),
            ..reporting
        };
        assert_eq!(records_and_limit(&switched_off), NONE);
    }

    #[test]
    fn the_operators_setting_for_records_is_passed_on_and_applies() {
        for records in [Records::Platform, Records::Shared] {
            let deployment = Deployment {
                records: Some(records),
                ..Deployment::default()
            };
            assert_eq!(records_and_limit(&deployment), of(records));
        }
        let of_the_pod = Deployment {
            records: Some(Records::Pod),
            reports_to_platform: true,
            ..Deployment::default()
        };
        assert_eq!(
            records_and_limit(&of_the_pod),
            (Some("pod".to_owned()), Some(0))
        );
    }

    #[test]
    fn a_stock_executor_is_never_started_twice_and_gets_no_setting_for_records() {
        let stock = Deployment {
            image: "azbuilder/executor:2.22.0".to_owned(),
            records: Some(Records::Platform),
            ..Deployment::default()
        };
        assert_eq!(records_and_limit(&stock), NONE);
    }

    #[test]
    fn a_backoff_limit_of_the_operator_needs_claims_that_outlive_the_pod() {
        let limited = |image: &str, records| Deployment {
            image: image.to_owned(),
            records,
            backoff_limit: Some(3),
            ..Deployment::default()
        };
        let ours = Deployment::default().image;
        let durable = limited(&ours, Some(Records::Shared));
        assert_eq!(deployment_errors(&durable), []);
        assert_eq!(run(&durable).backoff_limit, Some(3));
        for (deployment, reason) in [
            (limited(&ours, None), env::RECORDS),
            (limited("acme/executor:1", None), env::EXECUTOR_KIND),
        ] {
            let errors: Vec<String> = deployment_errors(&deployment)
                .iter()
                .map(ToString::to_string)
                .collect();
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(
                errors[0].contains(env::BACKOFF_LIMIT) && errors[0].contains(reason),
                "{errors:?}"
            );
        }
        let never = Deployment {
            backoff_limit: Some(0),
            ..limited(&ours, None)
        };
        assert_eq!(deployment_errors(&never), []);
    }
}
