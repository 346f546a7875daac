//! Every label on the objects of a run, and the keys that are reserved for Mayfly. [`annotations`](crate::annotations) are beside them.

use crate::StepType;

/// [`NAME_VALUE`]: the program in the pod.
pub const NAME: &str = "app.kubernetes.io/name";
/// See [`NAME`].
pub const NAME_VALUE: &str = "mayfly-executor";
/// [`MANAGED_BY_VALUE`]: every object of Mayfly has it, and the watcher selects objects by it.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// See [`MANAGED_BY`].
pub const MANAGED_BY_VALUE: &str = "mayfly";
/// [`MANAGED_BY`] of Jobs that fill the store of providers. They are no runs.
pub const MANAGED_BY_FILL: &str = "mayfly-fill";
/// Selects the Jobs that fill the store of providers.
pub const FILL_SELECTOR: &str = "app.kubernetes.io/managed-by=mayfly-fill";
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
/// Selects every object of every run.
pub const SELECTOR: &str = "app.kubernetes.io/managed-by=mayfly";
/// Set by the Job controller on its pods.
pub const JOB_NAME: &str = "batch.kubernetes.io/job-name";
/// The agent that runs the task; without it, a launcher of this cluster does.
pub const AGENT: &str = "mayfly.dev/agent";
/// The task of a hub.
pub const TASK: &str = "mayfly.dev/task-id";
/// The lease on it.
pub const LEASE: &str = "mayfly.dev/lease-id";

/// With this label the queue of the cluster releases the Job, not the launcher.
pub const KUEUE_QUEUE: &str = "kueue.x-k8s.io/queue-name";
/// The value of that label until the Job may be released. Kueue never admits a Job of a queue that does not exist. To a
/// Job without the label, it may give the default queue of the namespace.
pub const NO_QUEUE: &str = "none.mayfly.dev";

/// The value of [`STEP_TYPE`].
pub const fn step_type_value(step_type: StepType) -> &'static str {
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
pub fn step_type(value: &str) -> Option<StepType> {
    let mut all = StepType::ALL.into_iter();
    all.find(|step_type| step_type_value(*step_type) == value)
}

/// Whether the key belongs to the launcher or to the Job controller of Kubernetes.
pub fn is_reserved(key: &str) -> bool {
    let prefix = key.split_once('/').map(|(prefix, _)| prefix);
    matches!(
        prefix,
        Some("mayfly.dev" | "terrakube.io" | "batch.kubernetes.io")
    ) || matches!(key, NAME | MANAGED_BY | "job-name" | "controller-uid")
}

/// Selects the objects of the runs that the launcher watches itself.
pub fn of_launcher() -> String {
    format!("{SELECTOR},!{AGENT}")
}

/// Selects the objects of the runs of an agent.
pub fn of_agent(name: &str) -> String {
    format!("{SELECTOR},{AGENT}={name}")
}
