//! The settings of target `kubernetes`.

use std::num::ParseIntError;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use job_contract::env;
use runtime::setting::present;

use crate::cluster::limit::RateLimit;
use crate::cluster::rights::LEASE;
use crate::cluster::watch::HistoryLimits;
use crate::cluster::watch::WatchSettings;
use crate::data::DataDirArgs;
use crate::kubernetes::config::{Deployment, DeploymentArgs};
use crate::manifest::check;
use crate::reporter::settings::{PlatformArgs, PlatformSettings};
use crate::settings::{InvalidSetting, SettingsReader};
use crate::verdict::Timeouts;

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Target `kubernetes`")]
pub struct KubernetesArgs {
    /// How many Jobs are released and not over at a time; the rest wait suspended, oldest first; 0 means no limit
    /// [default: 0]
    #[arg(long, value_name = "N", env = env::MAX_JOBS_IN_FLIGHT)]
    pub max_jobs_in_flight: Option<String>,

    /// How many Jobs that completed are kept, beside their time to live, or `all` [default: 10]
    #[arg(long, value_name = "N", env = env::HISTORY_SUCCEEDED)]
    pub history_succeeded: Option<String>,

    /// How many Jobs that failed are kept, beside their time to live, or `all` [default: 10]
    #[arg(long, value_name = "N", env = env::HISTORY_FAILED)]
    pub history_failed: Option<String>,

    /// A run without a pod says so after this time [default: 30]
    #[arg(long, value_name = "SECONDS", env = env::NO_POD_EXPLAIN_SECONDS)]
    pub no_pod_explain_seconds: Option<String>,

    /// A run without a pod is given up after this time, unless a quota or a queue holds it back [default: 120]
    #[arg(long, value_name = "SECONDS", env = env::NO_POD_SECONDS)]
    pub no_pod_seconds: Option<String>,

    /// A run without a node is given up after this time [default: 900]
    #[arg(long, value_name = "SECONDS", env = env::UNSCHEDULABLE_SECONDS)]
    pub unschedulable_seconds: Option<String>,

    /// A run without its image or its configuration is given up after this time [default: 30]
    #[arg(long, value_name = "SECONDS", env = env::CONTAINER_ERROR_SECONDS)]
    pub container_error_seconds: Option<String>,

    /// A run with a node whose executor has not started is given up after this time [default: 300]
    #[arg(long, value_name = "SECONDS", env = env::START_SECONDS)]
    pub start_seconds: Option<String>,

    /// A container beside the executor that outlives it for this time is ended with its Job [default: 60]
    #[arg(long, value_name = "SECONDS", env = env::LINGER_SECONDS)]
    pub linger_seconds: Option<String>,

    /// A Job whose job data never came is removed after this time [default: 60]
    #[arg(long, value_name = "SECONDS", env = env::INCOMPLETE_SECONDS)]
    pub incomplete_seconds: Option<String>,

    /// A verdict the platform could not take is reported again after this time, then less and less often, for a day
    /// [default: 5]
    #[arg(long, value_name = "SECONDS", env = env::REPORT_RETRY_SECONDS)]
    pub report_retry_seconds: Option<String>,

    /// Requests a second to the Kubernetes API [default: no limit, API Priority and Fairness decides]
    #[arg(long, value_name = "RATE", env = env::KUBE_REQUESTS_PER_SECOND)]
    pub kube_requests_per_second: Option<String>,

    /// Requests that may be made at once before the rate counts [default: twice the rate]
    #[arg(long, value_name = "N", env = env::KUBE_BURST)]
    pub kube_burst: Option<String>,

    /// The Lease of the replica that watches [default: mayfly-launcher]
    #[arg(long, value_name = "NAME", env = env::LEASE_NAME)]
    pub lease_name: Option<String>,

    /// Its namespace [default: that of the runs]
    #[arg(long, value_name = "NAME", env = env::LEASE_NAMESPACE)]
    pub lease_namespace: Option<String>,

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

const NUMBER: &str = "a number";

/// A number of Jobs, or `all`.
struct HistoryLimit(Option<usize>);

impl FromStr for HistoryLimit {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.eq_ignore_ascii_case("all") {
            return Ok(Self(None));
        }
        text.parse().map(|number| Self(Some(number)))
    }
}

impl KubernetesArgs {
    /// Returns the settings of the target, or `None` if one of them is invalid.
    pub(crate) fn resolve(
        &self,
        reader: &mut SettingsReader,
        data: &DataDirArgs,
        platform: &PlatformArgs,
    ) -> Option<KubernetesSettings> {
        let cluster = self.resolve_cluster(reader);
        let api_url = platform.terrakube.api_url();
        let platform = platform.resolve(reader, data.given());
        match self.deployment.resolve(api_url) {
            Ok(deployment) => Some(KubernetesSettings {
                deployment,
                cluster,
                platform,
                data_dir: data.given().map(Path::to_owned),
            }),
            Err(problems) => {
                reader
                    .invalid
                    .extend(problems.iter().map(InvalidSetting::from));
                None
            }
        }
    }

    fn resolve_cluster(&self, reader: &mut SettingsReader) -> ClusterSettings {
        let default = ClusterSettings::default();
        let max_in_flight = reader.parse(
            env::MAX_JOBS_IN_FLIGHT,
            self.max_jobs_in_flight.as_deref(),
            NUMBER,
        );
        ClusterSettings {
            max_in_flight: max_in_flight.unwrap_or(default.max_in_flight),
            watch: self.resolve_watch(reader),
            rate: self.resolve_rate(reader),
            lease_name: name(
                reader,
                env::LEASE_NAME,
                self.lease_name.as_deref(),
                check::object_name,
            )
            .unwrap_or(default.lease_name),
            lease_namespace: name(
                reader,
                env::LEASE_NAMESPACE,
                self.lease_namespace.as_deref(),
                check::dns_label,
            ),
        }
    }

    fn resolve_watch(&self, reader: &mut SettingsReader) -> WatchSettings {
        let default = WatchSettings::default();
        let timeouts = self.resolve_timeouts(reader, &default.timeouts);
        let incomplete_after = seconds(
            reader,
            env::INCOMPLETE_SECONDS,
            self.incomplete_seconds.as_deref(),
            default.incomplete_after,
        );
        let report_again = seconds(
            reader,
            env::REPORT_RETRY_SECONDS,
            self.report_retry_seconds.as_deref(),
            default.report_again,
        );
        // A launcher that is alive needs a moment between the Job and its Secret.
        if incomplete_after < MIN_INCOMPLETE {
            let text = format!("is less than {} s", MIN_INCOMPLETE.as_secs());
            reader.reject(env::INCOMPLETE_SECONDS, text);
        }
        if report_again.is_zero() {
            reader.reject(env::REPORT_RETRY_SECONDS, "is 0, expected at least 1");
        }
        WatchSettings {
            timeouts,
            history: self.resolve_history(reader, default.history),
            incomplete_after,
            report_again,
        }
    }

    fn resolve_timeouts(&self, reader: &mut SettingsReader, default: &Timeouts) -> Timeouts {
        let mut timeout = |variable, text: &Option<String>, default| {
            seconds(reader, variable, text.as_deref(), default)
        };
        let explain = &self.no_pod_explain_seconds;
        let timeouts = Timeouts {
            no_pod_explain: timeout(env::NO_POD_EXPLAIN_SECONDS, explain, default.no_pod_explain),
            no_pod: timeout(env::NO_POD_SECONDS, &self.no_pod_seconds, default.no_pod),
            unschedulable: timeout(
                env::UNSCHEDULABLE_SECONDS,
                &self.unschedulable_seconds,
                default.unschedulable,
            ),
            container_error: timeout(
                env::CONTAINER_ERROR_SECONDS,
                &self.container_error_seconds,
                default.container_error,
            ),
            start: timeout(env::START_SECONDS, &self.start_seconds, default.start),
            linger: timeout(env::LINGER_SECONDS, &self.linger_seconds, default.linger),
        };
        if present(explain.as_deref()).is_some() && timeouts.no_pod_explain > timeouts.no_pod {
            let text = format!(
                "is more than the {} s of {}",
                timeouts.no_pod.as_secs(),
                env::NO_POD_SECONDS
            );
            reader.reject(env::NO_POD_EXPLAIN_SECONDS, text);
        }
        timeouts
    }

    fn resolve_history(
        &self,
        reader: &mut SettingsReader,
        default: HistoryLimits,
    ) -> HistoryLimits {
        let mut limit = |variable, text: &Option<String>, default| {
            let limit = reader.parse(variable, text.as_deref(), "a number or `all`");
            limit.map_or(default, |HistoryLimit(limit)| limit)
        };
        HistoryLimits {
            successful: limit(
                env::HISTORY_SUCCEEDED,
                &self.history_succeeded,
                default.successful,
            ),
            failed: limit(env::HISTORY_FAILED, &self.history_failed, default.failed),
        }
    }

    fn resolve_rate(&self, reader: &mut SettingsReader) -> Option<RateLimit> {
        let expected = "a number above 0";
        let rate: Option<f64> = reader.parse(
            env::KUBE_REQUESTS_PER_SECOND,
            self.kube_requests_per_second.as_deref(),
            expected,
        );
        let burst: Option<u32> =
            reader.parse(env::KUBE_BURST, self.kube_burst.as_deref(), expected);
        match (rate, burst) {
            (None, None) => None,
            (None, Some(_)) => {
                if present(self.kube_requests_per_second.as_deref()).is_none() {
                    let text = format!("means nothing without {}", env::KUBE_REQUESTS_PER_SECOND);
                    reader.reject(env::KUBE_BURST, text);
                }
                None
            }
            (Some(rate), burst) => {
                let limit = RateLimit::new(rate, burst);
                if limit.is_none() {
                    let variable = if burst == Some(0) {
                        env::KUBE_BURST
                    } else {
                        env::KUBE_REQUESTS_PER_SECOND
                    };
                    reader.reject(variable, format!("must be {expected}"));
                }
                limit
            }
        }
    }
}

/// A delivery that takes longer writes to its Job before the response, so that the watcher does not take the Job for
/// abandoned.
const MIN_INCOMPLETE: Duration = Duration::from_secs(20);

fn seconds(
    reader: &mut SettingsReader,
    variable: &str,
    text: Option<&str>,
    default: Duration,
) -> Duration {
    let seconds = reader.parse(variable, text, "a number of seconds");
    seconds.map_or(default, Duration::from_secs)
}

fn name(
    reader: &mut SettingsReader,
    variable: &'static str,
    text: Option<&str>,
    rule: fn(&str) -> Result<(), &'static str>,
) -> Option<String> {
    let text = present(text)?;
    if let Err(rule) = rule(text) {
        reader.reject(variable, rule);
        return None;
    }
    Some(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::unnecessary_wraps, reason = "as clap hands values over")]
    fn text(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn nothing_said_leaves_the_usual() {
        let mut reader = SettingsReader::default();
        let watching = KubernetesArgs::default().resolve_cluster(&mut reader);
        assert!(reader.invalid.is_empty());
        assert_eq!(watching.max_in_flight, 0);
        assert_eq!(watching.watch.timeouts, Timeouts::default());
        let history = watching.watch.history;
        assert_eq!((history.successful, history.failed), (Some(10), Some(10)));
        assert!(watching.rate.is_none(), "fairness is the API server's");
        assert_eq!(watching.lease_name, "mayfly-launcher");
    }

    #[test]
    fn what_is_said_counts() {
        let mut reader = SettingsReader::default();
        let args = KubernetesArgs {
            max_jobs_in_flight: text("7"),
            history_succeeded: text("0"),
            history_failed: text("50"),
            no_pod_explain_seconds: text("1"),
            no_pod_seconds: text("2"),
            unschedulable_seconds: text("3"),
            container_error_seconds: text("4"),
            start_seconds: text("5"),
            linger_seconds: text("7"),
            incomplete_seconds: text("90"),
            report_retry_seconds: text("6"),
            kube_requests_per_second: text("2.5"),
            kube_burst: text(""),
            lease_name: text("mine"),
            lease_namespace: text("mayfly"),
            deployment: DeploymentArgs::default(),
        };
        let watching = args.resolve_cluster(&mut reader);
        assert!(reader.invalid.is_empty(), "{:?}", reader.invalid);
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
        let mut reader = SettingsReader::default();
        let args = KubernetesArgs {
            history_succeeded: text("all"),
            history_failed: text("ALL"),
            ..KubernetesArgs::default()
        };
        assert_eq!(
            args.resolve_cluster(&mut reader).watch.history,
            HistoryLimits::NONE
        );
        assert!(reader.invalid.is_empty(), "{:?}", reader.invalid);
    }

    #[test]
    fn every_problem_is_told_by_its_variable() {
        let mut reader = SettingsReader::default();
        let args = KubernetesArgs {
            max_jobs_in_flight: text("-1"),
            history_succeeded: text("few"),
            no_pod_explain_seconds: text("600"),
            start_seconds: text("5m"),
            incomplete_seconds: text("1"),
            report_retry_seconds: text("0"),
            kube_requests_per_second: text("0"),
            lease_name: text("No Name"),
            lease_namespace: text("a.b"),
            ..KubernetesArgs::default()
        };
        args.resolve_cluster(&mut reader);
        let mut names: Vec<&str> = reader
            .invalid
            .iter()
            .map(|problem| problem.variable.as_str())
            .collect();
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
        let mut reader = SettingsReader::default();
        let args = KubernetesArgs {
            kube_burst: text("5"),
            ..KubernetesArgs::default()
        };
        assert!(args.resolve_cluster(&mut reader).rate.is_none());
        assert_eq!(reader.invalid[0].variable, "MAYFLY_KUBE_BURST");
    }
}
