//! The settings of target `kubernetes`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use job_contract::{Records, env};
use runtime::setting::{ReadSetting as _, Setting, SettingError, SettingValue, unexpected};

use crate::data::DataDirArgs;
use crate::kubernetes::cluster::limit::RateLimit;
use crate::kubernetes::cluster::rights::LEASE;
use crate::kubernetes::cluster::watch::HistoryLimits;
use crate::kubernetes::cluster::watch::WatchSettings;
use crate::kubernetes::config::{Deployment, DeploymentArgs};
use crate::kubernetes::manifest::job_data::Mode;
use crate::kubernetes::manifest::{self, check};
use crate::kubernetes::verdict::Timeouts;
use crate::reporter::settings::{PlatformArgs, PlatformSettings};

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Target `kubernetes`")]
pub struct KubernetesArgs {
    /// How many released Jobs may be unfinished at a time; the rest wait suspended, oldest first; 0 means no limit
    /// [default: 0]
    #[arg(long, value_name = "N", env = env::MAX_JOBS_IN_FLIGHT)]
    pub max_jobs_in_flight: Option<Setting<usize>>,

    /// How many Jobs that completed are kept, beside their time to live, or `all` [default: 10]
    #[arg(long, value_name = "N", env = env::HISTORY_SUCCEEDED)]
    pub history_succeeded: Option<Setting<HistoryLimit>>,

    /// How many Jobs that failed are kept, beside their time to live, or `all` [default: 10]
    #[arg(long, value_name = "N", env = env::HISTORY_FAILED)]
    pub history_failed: Option<Setting<HistoryLimit>>,

    /// A run without a pod is reported as waiting after this time [default: 30]
    #[arg(long, value_name = "SECONDS", env = env::NO_POD_EXPLAIN_SECONDS)]
    pub no_pod_explain_seconds: Option<Setting<u64>>,

    /// A run without a pod is given up after this time, unless a quota or a queue holds it back [default: 120]
    #[arg(long, value_name = "SECONDS", env = env::NO_POD_SECONDS)]
    pub no_pod_seconds: Option<Setting<u64>>,

    /// A run without a node is given up after this time [default: 900]
    #[arg(long, value_name = "SECONDS", env = env::UNSCHEDULABLE_SECONDS)]
    pub unschedulable_seconds: Option<Setting<u64>>,

    /// A run without its image or its configuration is given up after this time [default: 30]
    #[arg(long, value_name = "SECONDS", env = env::CONTAINER_ERROR_SECONDS)]
    pub container_error_seconds: Option<Setting<u64>>,

    /// A run with a node whose executor has not started is given up after this time [default: 300]
    #[arg(long, value_name = "SECONDS", env = env::START_SECONDS)]
    pub start_seconds: Option<Setting<u64>>,

    /// A container beside the executor that outlives it for this time is ended with its Job [default: 60]
    #[arg(long, value_name = "SECONDS", env = env::LINGER_SECONDS)]
    pub linger_seconds: Option<Setting<u64>>,

    /// A Job without job data is removed after this time [default: 60]
    #[arg(long, value_name = "SECONDS", env = env::INCOMPLETE_SECONDS)]
    pub incomplete_seconds: Option<Setting<u64>>,

    /// A verdict that could not be reported is reported again after this time, then less and less often, for a day
    /// [default: 5]
    #[arg(long, value_name = "SECONDS", env = env::REPORT_RETRY_SECONDS)]
    pub report_retry_seconds: Option<Setting<u64>>,

    /// Requests a second to the Kubernetes API [default: no limit, API Priority and Fairness decides]
    #[arg(long, value_name = "RATE", env = env::KUBE_REQUESTS_PER_SECOND)]
    pub kube_requests_per_second: Option<Setting<f64>>,

    /// Requests that may be made at once before the rate limits them [default: twice the rate]
    #[arg(long, value_name = "N", env = env::KUBE_BURST)]
    pub kube_burst: Option<Setting<u32>>,

    /// Name of the Lease of the replica that watches [default: mayfly-launcher]
    #[arg(long, value_name = "NAME", env = env::LEASE_NAME)]
    pub lease_name: Option<Setting<String>>,

    /// Its namespace [default: that of the runs]
    #[arg(long, value_name = "NAME", env = env::LEASE_NAMESPACE)]
    pub lease_namespace: Option<Setting<String>>,

    #[command(flatten)]
    pub deployment: DeploymentArgs,
}

/// The settings of target `kubernetes`.
#[derive(Debug)]
pub(crate) struct KubernetesSettings {
    pub(crate) deployment: Deployment,
    pub(crate) cluster: ClusterSettings,
    /// The platform that runs are reported to.
    pub(crate) platform: Option<PlatformSettings>,
    /// The records of a local platform, which replace `platform`.
    pub(crate) data_dir: Option<PathBuf>,
}

/// How the launcher uses the cluster.
#[derive(Clone, Debug)]
pub(crate) struct ClusterSettings {
    pub(crate) max_in_flight: usize,
    pub(crate) watch: WatchSettings,
    pub(crate) rate: Option<RateLimit>,
    pub(crate) lease_name: String,
    /// `None`: that of the runs.
    pub(crate) lease_namespace: Option<String>,
}

impl Default for ClusterSettings {
    fn default() -> Self {
        Self {
            max_in_flight: 0,
            watch: WatchSettings::default(),
            rate: None,
            lease_name: LEASE.to_owned(),
            lease_namespace: None,
        }
    }
}

/// A number of Jobs, or `all`.
#[derive(Clone, Copy, Debug)]
pub struct HistoryLimit(Option<usize>);

impl SettingValue for HistoryLimit {
    fn parse(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("all") {
            return Ok(Self(None));
        }
        let number = text.parse().map(|number| Self(Some(number)));
        number.map_err(|_| unexpected(text, "a number or `all`"))
    }
}

impl KubernetesArgs {
    /// Returns the settings of the target, or `None` if one of them is invalid.
    pub(crate) fn resolve(
        &self,
        errors: &mut Vec<SettingError>,
        data: &DataDirArgs,
        platform: &PlatformArgs,
    ) -> Option<KubernetesSettings> {
        let cluster = self.resolve_cluster(errors);
        let api_url = platform.terrakube.api_url();
        let platform = platform.resolve(errors, data.given());
        match self.deployment.resolve(api_url) {
            Ok(deployment) => Some(KubernetesSettings {
                deployment,
                cluster,
                platform,
                data_dir: data.given().map(Path::to_owned),
            }),
            Err(wrong) => {
                errors.extend(wrong.iter().map(SettingError::from));
                None
            }
        }
    }

    /// Returns the settings of an agent. Its executors have a lease of a hub and no secret of the platform.
    pub(crate) fn resolve_leased(
        &self,
        hub: Option<&str>,
        errors: &mut Vec<SettingError>,
    ) -> Option<(Deployment, ClusterSettings)> {
        let cluster = self.resolve_cluster(errors);
        let mut deployment = self
            .deployment
            .resolve(hub)
            .map_err(|wrong| errors.extend(wrong.iter().map(SettingError::from)))
            .ok()?;
        if self.deployment.env_secrets.is_none() {
            deployment.env_secrets.clear();
        }
        // The hub keeps the claims.
        deployment.records = Some(Records::Platform);
        deployment.leased = true;
        let wrong = manifest::deployment_errors(&deployment);
        errors.extend(wrong.iter().map(SettingError::from));
        if deployment.job_data_mode == Mode::Env {
            let text = "is `env`, but the token of a lease has to be in a Secret";
            errors.push(SettingError::new(env::JOB_DATA_MODE, text));
        }
        Some((deployment, cluster))
    }

    fn resolve_cluster(&self, errors: &mut Vec<SettingError>) -> ClusterSettings {
        let default = ClusterSettings::default();
        let max_in_flight = self.max_jobs_in_flight.read(errors);
        let name = self.lease_name.read(errors);
        let namespace = self.lease_namespace.read(errors);
        let mut check = |variable, text: Option<&str>, rule: Rule| {
            if let Some(Err(broken)) = text.map(rule) {
                errors.push(SettingError::new(variable, broken));
            }
        };
        check(env::LEASE_NAME, name.as_deref(), check::object_name);
        check(env::LEASE_NAMESPACE, namespace.as_deref(), check::dns_label);
        ClusterSettings {
            max_in_flight: max_in_flight.unwrap_or(default.max_in_flight),
            watch: self.resolve_watch(errors),
            rate: self.resolve_rate(errors),
            lease_name: name.unwrap_or(default.lease_name),
            lease_namespace: namespace,
        }
    }

    fn resolve_watch(&self, errors: &mut Vec<SettingError>) -> WatchSettings {
        let default = WatchSettings::default();
        let timeouts = self.resolve_timeouts(errors, &default.timeouts);
        let incomplete_after = self
            .incomplete_seconds
            .read(errors)
            .map(Duration::from_secs);
        let report_again = self
            .report_retry_seconds
            .read(errors)
            .map(Duration::from_secs);
        // A launcher that is alive needs a moment between the Job and its Secret.
        if incomplete_after.is_some_and(|after| after < MIN_INCOMPLETE) {
            let text = format!("is less than {} s", MIN_INCOMPLETE.as_secs());
            errors.push(SettingError::new(env::INCOMPLETE_SECONDS, text));
        }
        if report_again.is_some_and(|again| again.is_zero()) {
            let text = "is 0, expected at least 1";
            errors.push(SettingError::new(env::REPORT_RETRY_SECONDS, text));
        }
        WatchSettings {
            selector: default.selector,
            timeouts,
            history: self.resolve_history(errors, default.history),
            incomplete_after: incomplete_after.unwrap_or(default.incomplete_after),
            report_again: report_again.unwrap_or(default.report_again),
        }
    }

    fn resolve_timeouts(&self, errors: &mut Vec<SettingError>, default: &Timeouts) -> Timeouts {
        let timeout = |seconds: Option<u64>, default| seconds.map_or(default, Duration::from_secs);
        let timeouts = Timeouts {
            no_pod_explain: timeout(
                self.no_pod_explain_seconds.read(errors),
                default.no_pod_explain,
            ),
            no_pod: timeout(self.no_pod_seconds.read(errors), default.no_pod),
            unschedulable: timeout(
                self.unschedulable_seconds.read(errors),
                default.unschedulable,
            ),
            container_error: timeout(
                self.container_error_seconds.read(errors),
                default.container_error,
            ),
            start: timeout(self.start_seconds.read(errors), default.start),
            linger: timeout(self.linger_seconds.read(errors), default.linger),
        };
        let explain = self.no_pod_explain_seconds.get();
        if explain.is_some() && timeouts.no_pod_explain > timeouts.no_pod {
            let text = format!(
                "is more than the {} s of {}",
                timeouts.no_pod.as_secs(),
                env::NO_POD_SECONDS
            );
            errors.push(SettingError::new(env::NO_POD_EXPLAIN_SECONDS, text));
        }
        timeouts
    }

    fn resolve_history(
        &self,
        errors: &mut Vec<SettingError>,
        default: HistoryLimits,
    ) -> HistoryLimits {
        let successful = self.history_succeeded.read(errors);
        let failed = self.history_failed.read(errors);
        HistoryLimits {
            successful: successful.map_or(default.successful, |HistoryLimit(limit)| limit),
            failed: failed.map_or(default.failed, |HistoryLimit(limit)| limit),
        }
    }

    fn resolve_rate(&self, errors: &mut Vec<SettingError>) -> Option<RateLimit> {
        let rate = self.kube_requests_per_second.read(errors);
        let burst = self.kube_burst.read(errors);
        let Some(rate) = rate else {
            if burst.is_some() && !self.kube_requests_per_second.is_set() {
                let text = format!("has no effect without {}", env::KUBE_REQUESTS_PER_SECOND);
                errors.push(SettingError::new(env::KUBE_BURST, text));
            }
            return None;
        };
        let limit = RateLimit::new(rate, burst);
        if limit.is_none() {
            let variable = if burst == Some(0) {
                env::KUBE_BURST
            } else {
                env::KUBE_REQUESTS_PER_SECOND
            };
            errors.push(SettingError::new(variable, "must be a number above 0"));
        }
        limit
    }
}

/// A delivery that takes longer writes to its Job before the response, so that the watcher does not take the Job for
/// abandoned.
const MIN_INCOMPLETE: Duration = Duration::from_secs(20);

/// What a name must be.
type Rule = fn(&str) -> Result<(), &'static str>;

#[cfg(test)]
mod tests {
    use runtime::setting::from_variables;

    use super::*;

    #[test]
    fn without_options_the_defaults_apply() {
        let mut errors = Vec::new();
        let watching = KubernetesArgs::default().resolve_cluster(&mut errors);
        assert!(errors.is_empty());
        assert_eq!(watching.max_in_flight, 0);
        assert_eq!(watching.watch.timeouts, Timeouts::default());
        let history = watching.watch.history;
        assert_eq!((history.successful, history.failed), (Some(10), Some(10)));
        assert!(watching.rate.is_none(), "fairness is the API server's");
        assert_eq!(watching.lease_name, "mayfly-launcher");
    }

    #[test]
    fn options_replace_the_defaults() {
        let mut errors = Vec::new();
        let args: KubernetesArgs = from_variables(&[
            (env::MAX_JOBS_IN_FLIGHT, "7"),
            (env::HISTORY_SUCCEEDED, "0"),
            (env::HISTORY_FAILED, "50"),
            (env::NO_POD_EXPLAIN_SECONDS, "1"),
            (env::NO_POD_SECONDS, "2"),
            (env::UNSCHEDULABLE_SECONDS, "3"),
            (env::CONTAINER_ERROR_SECONDS, "4"),
            (env::START_SECONDS, "5"),
            (env::LINGER_SECONDS, "7"),
            (env::INCOMPLETE_SECONDS, "90"),
            (env::REPORT_RETRY_SECONDS, "6"),
            (env::KUBE_REQUESTS_PER_SECOND, "2.5"),
            (env::KUBE_BURST, ""),
            (env::LEASE_NAME, "mine"),
            (env::LEASE_NAMESPACE, "mayfly"),
        ]);
        let watching = args.resolve_cluster(&mut errors);
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(watching.max_in_flight, 7);
        let timeouts = watching.watch.timeouts;
        let seconds = [
            timeouts.no_pod_explain,
            timeouts.no_pod,
            timeouts.unschedulable,
            timeouts.container_error,
            timeouts.start,
            timeouts.linger,
            watching.watch.report_again,
            watching.watch.incomplete_after,
        ]
        .map(|time| time.as_secs());
        assert_eq!(seconds, [1, 2, 3, 4, 5, 7, 6, 90]);
        let history = watching.watch.history;
        assert_eq!((history.successful, history.failed), (Some(0), Some(50)));
        assert_eq!(watching.rate, RateLimit::new(2.5, Some(5)));
        assert_eq!(watching.lease_namespace.as_deref(), Some("mayfly"));
    }

    #[test]
    fn every_ended_job_can_be_kept_for_its_time_to_live() {
        let mut errors = Vec::new();
        let args: KubernetesArgs = from_variables(&[
            (env::HISTORY_SUCCEEDED, "all"),
            (env::HISTORY_FAILED, "ALL"),
        ]);
        assert_eq!(
            args.resolve_cluster(&mut errors).watch.history,
            HistoryLimits::NONE
        );
        assert!(errors.is_empty(), "{errors:?}");
    }

    #[test]
    fn every_error_names_its_variable() {
        let mut errors = Vec::new();
        let args: KubernetesArgs = from_variables(&[
            (env::MAX_JOBS_IN_FLIGHT, "-1"),
            (env::HISTORY_SUCCEEDED, "few"),
            (env::NO_POD_EXPLAIN_SECONDS, "600"),
            (env::START_SECONDS, "5m"),
            (env::INCOMPLETE_SECONDS, "1"),
            (env::REPORT_RETRY_SECONDS, "0"),
            (env::KUBE_REQUESTS_PER_SECOND, "0"),
            (env::LEASE_NAME, "No Name"),
            (env::LEASE_NAMESPACE, "a.b"),
        ]);
        args.resolve_cluster(&mut errors);
        let mut names: Vec<&str> = errors.iter().map(|error| error.variable.as_str()).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "MAYFLY_HISTORY_SUCCEEDED",
                "MAYFLY_INCOMPLETE_SECONDS",
                "MAYFLY_KUBE_REQUESTS_PER_SECOND",
                "MAYFLY_LEASE_NAME",
                "MAYFLY_LEASE_NAMESPACE",
                "MAYFLY_MAX_JOBS_IN_FLIGHT",
                "MAYFLY_NO_POD_EXPLAIN_SECONDS",
                "MAYFLY_REPORT_RETRY_SECONDS",
                "MAYFLY_START_SECONDS",
            ]
        );
        let mut errors = Vec::new();
        let args: KubernetesArgs = from_variables(&[(env::KUBE_BURST, "5")]);
        assert!(args.resolve_cluster(&mut errors).rate.is_none());
        assert_eq!(errors[0].variable, "MAYFLY_KUBE_BURST");
    }
}
