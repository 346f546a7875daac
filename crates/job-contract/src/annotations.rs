//! Annotations that Mayfly writes onto the objects of a run.

/// Keeps the cluster autoscaler from removing the node under a run.
pub const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";
/// Keeps Karpenter from disrupting the node under a run.
pub const DO_NOT_DISRUPT: &str = "karpenter.sh/do-not-disrupt";
/// The same for Karpenter before its version 0.32.
pub const DO_NOT_EVICT: &str = "karpenter.sh/do-not-evict";

/// The Secret of this Job is stored. Every replica may release the Job.
pub const STORED_AT: &str = "mayfly.dev/stored-at";
/// Grows with each lease of the task.
pub const FENCING_TOKEN: &str = "mayfly.dev/fencing-token";
/// The queue of the cluster that the Job enters once its Secret is stored.
pub const QUEUE: &str = "mayfly.dev/queue";
/// The Job was allowed to run.
pub const RELEASED_AT: &str = "mayfly.dev/released-at";
/// The Job never got its job data and is being replaced. No dispatch of it was answered, so its deletion is not reported.
pub const NOT_ACCEPTED: &str = "mayfly.dev/not-accepted";
/// A person or the platform asked for the end of the run.
pub const CANCELLED_AT: &str = "mayfly.dev/cancelled-at";
/// The verdict on a run whose executor did not report, as JSON.
pub const VERDICT: &str = "mayfly.dev/verdict";
/// The step has nothing to run. The replica that accepted it reports it as done. If that fails, the Job runs.
pub const NOTHING_TO_RUN: &str = "mayfly.dev/nothing-to-run";
/// The platform knows how the run ended.
pub const REPORTED_AT: &str = "mayfly.dev/reported-at";
/// Why the platform will never accept the report of how the run ended. The report is not repeated.
pub const REPORT_REFUSED: &str = "mayfly.dev/report-refused";
/// How many seconds the Job is kept once the platform knows how the run ended, or will not.
pub const KEEP_SECONDS: &str = "mayfly.dev/keep-seconds";
