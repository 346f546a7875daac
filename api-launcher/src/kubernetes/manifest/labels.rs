//! Every label and annotation that the launcher sets, and the keys that are reserved for it.

/// [`NAME_VALUE`]: the program in the pod.
pub const NAME: &str = "app.kubernetes.io/name";
/// See [`NAME`].
pub const NAME_VALUE: &str = "mayfly-executor";
/// [`MANAGED_BY_VALUE`]: every object of Mayfly has it, and the watcher selects objects by it.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// See [`MANAGED_BY`].
pub const MANAGED_BY_VALUE: &str = "mayfly";
/// The platform's job id.
pub const JOB_ID: &str = "mayfly.dev/job-id";
/// The platform's step id.
pub const STEP_ID: &str = "mayfly.dev/step-id";
/// What the step does, as [`step_type_value`] writes it.
pub const STEP_TYPE: &str = "mayfly.dev/step-type";
/// The platform's organization id; the stock launcher sets it too (contract 3.2).
pub const ORGANIZATION: &str = "terrakube.io/organization";
/// The platform's workspace id; the stock launcher sets it too (contract 3.2).
pub const WORKSPACE: &str = "terrakube.io/workspace";

/// Keeps the cluster autoscaler from removing the node under a run.
pub const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";
/// Keeps Karpenter from disrupting the node under a run.
pub const DO_NOT_DISRUPT: &str = "karpenter.sh/do-not-disrupt";
/// The same for Karpenter before its version 0.32.
pub const DO_NOT_EVICT: &str = "karpenter.sh/do-not-evict";

/// The value of [`STEP_TYPE`].
pub const fn step_type_value(step_type: job_contract::StepType) -> &'static str {
    use job_contract::StepType;
    match step_type {
        StepType::Plan => "plan",
        StepType::PlanDestroy => "plan-destroy",
        StepType::Apply => "apply",
        StepType::Destroy => "destroy",
        StepType::CustomScripts => "custom-scripts",
        StepType::Approval => "approval",
        StepType::PolicyEvaluation => "policy-evaluation",
    }
}

/// Returns the step type of a value of [`STEP_TYPE`].
pub fn step_type(value: &str) -> Option<job_contract::StepType> {
    use job_contract::StepType;
    [
        StepType::Plan,
        StepType::PlanDestroy,
        StepType::Apply,
        StepType::Destroy,
        StepType::CustomScripts,
        StepType::Approval,
        StepType::PolicyEvaluation,
    ]
    .into_iter()
    .find(|step_type| step_type_value(*step_type) == value)
}

/// Whether the key belongs to the launcher or to the Job controller of Kubernetes.
pub fn is_reserved(key: &str) -> bool {
    let prefix = key.split_once('/').map(|(prefix, _)| prefix);
    matches!(
        prefix,
        Some("mayfly.dev" | "terrakube.io" | "batch.kubernetes.io")
    ) || matches!(key, NAME | MANAGED_BY | "job-name" | "controller-uid")
}
