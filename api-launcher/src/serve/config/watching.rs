//! How target `kubernetes` treats its cluster: how much at once, how patiently, and who watches.

use std::num::ParseIntError;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use job_contract::env;

use super::{Reader, present};
use crate::cluster::limit::RateLimit;
use crate::cluster::rights::LEASE;
use crate::cluster::watch::{HistoryLimits, WatchSettings};
use crate::manifest::check;
use crate::verdict::Timeouts;

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Target `kubernetes`")]
pub struct WatchArgs {
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
}

/// What [`WatchArgs`] come to.
#[derive(Clone, Debug)]
pub(crate) struct Watching {
    pub(crate) max_in_flight: usize,
    pub(crate) watch: WatchSettings,
    pub(crate) rate: Option<RateLimit>,
    pub(crate) lease_name: String,
    /// `None`: that of the runs.
    pub(crate) lease_namespace: Option<String>,
}

impl Default for Watching {
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

/// A limit of the history.
struct Kept(Option<usize>);

impl FromStr for Kept {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.eq_ignore_ascii_case("all") {
            return Ok(Self(None));
        }
        text.parse().map(|number| Self(Some(number)))
    }
}

impl WatchArgs {
    pub(super) fn resolve(&self, reader: &mut Reader) -> Watching {
        let default = Watching::default();
        let max_in_flight = reader.parse(
            env::MAX_JOBS_IN_FLIGHT,
            self.max_jobs_in_flight.as_deref(),
            NUMBER,
        );
        Watching {
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

    fn resolve_watch(&self, reader: &mut Reader) -> WatchSettings {
        let default = WatchSettings::default();
        let usual = default.timeouts;
        let mut seconds = |variable, text: &Option<String>, usual| {
            let seconds = reader.parse(variable, text.as_deref(), "a number of seconds");
            seconds.map_or(usual, Duration::from_secs)
        };
        let explain = &self.no_pod_explain_seconds;
        let timeouts = Timeouts {
            no_pod_explain: seconds(env::NO_POD_EXPLAIN_SECONDS, explain, usual.no_pod_explain),
            no_pod: seconds(env::NO_POD_SECONDS, &self.no_pod_seconds, usual.no_pod),
            unschedulable: seconds(
                env::UNSCHEDULABLE_SECONDS,
                &self.unschedulable_seconds,
                usual.unschedulable,
            ),
            container_error: seconds(
                env::CONTAINER_ERROR_SECONDS,
                &self.container_error_seconds,
                usual.container_error,
            ),
            start: seconds(env::START_SECONDS, &self.start_seconds, usual.start),
            linger: seconds(env::LINGER_SECONDS, &self.linger_seconds, usual.linger),
        };
        let incomplete_after = seconds(
            env::INCOMPLETE_SECONDS,
            &self.incomplete_seconds,
            default.incomplete_after,
        );
        let report_again = seconds(
            env::REPORT_RETRY_SECONDS,
            &self.report_retry_seconds,
            default.report_again,
        );
        if present(explain.as_deref()).is_some() && timeouts.no_pod_explain > timeouts.no_pod {
            let text = format!(
                "is more than the {} s of {}",
                timeouts.no_pod.as_secs(),
                env::NO_POD_SECONDS
            );
            reader.problem(env::NO_POD_EXPLAIN_SECONDS, text);
        }
        // A submitter that is alive needs a moment between the Job and its Secret.
        if incomplete_after < LEAST_HOPE {
            let text = format!("is less than {} s", LEAST_HOPE.as_secs());
            reader.problem(env::INCOMPLETE_SECONDS, text);
        }
        if report_again.is_zero() {
            reader.problem(env::REPORT_RETRY_SECONDS, "is 0, expected at least 1");
        }
        let mut kept = |variable, text: &Option<String>, usual| {
            let kept = reader.parse(variable, text.as_deref(), "a number or `all`");
            kept.map_or(usual, |Kept(kept)| kept)
        };
        let usual = default.history;
        let history = HistoryLimits {
            successful: kept(
                env::HISTORY_SUCCEEDED,
                &self.history_succeeded,
                usual.successful,
            ),
            failed: kept(env::HISTORY_FAILED, &self.history_failed, usual.failed),
        };
        WatchSettings {
            timeouts,
            history,
            incomplete_after,
            report_again,
        }
    }

    fn resolve_rate(&self, reader: &mut Reader) -> Option<RateLimit> {
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
                    reader.problem(env::KUBE_BURST, text);
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
                    reader.problem(variable, format!("must be {expected}"));
                }
                limit
            }
        }
    }
}

/// Deliveries slower than this write to their Job before they answer, so that it is not taken for abandoned.
const LEAST_HOPE: Duration = Duration::from_secs(20);

fn name(
    reader: &mut Reader,
    variable: &'static str,
    text: Option<&str>,
    rule: fn(&str) -> Result<(), &'static str>,
) -> Option<String> {
    let text = present(text)?;
    if let Err(rule) = rule(text) {
        reader.problem(variable, rule);
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
        let mut reader = Reader::default();
        let watching = WatchArgs::default().resolve(&mut reader);
        assert!(reader.problems.is_empty());
        assert_eq!(watching.max_in_flight, 0);
        assert_eq!(watching.watch.timeouts, Timeouts::default());
        let history = watching.watch.history;
        assert_eq!((history.successful, history.failed), (Some(10), Some(10)));
        assert!(watching.rate.is_none(), "fairness is the API server's");
        assert_eq!(watching.lease_name, "mayfly-launcher");
    }

    #[test]
    fn what_is_said_counts() {
        let mut reader = Reader::default();
        let args = WatchArgs {
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
        };
        let watching = args.resolve(&mut reader);
        assert!(reader.problems.is_empty(), "{:?}", reader.problems);
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
        let mut reader = Reader::default();
        let args = WatchArgs {
            history_succeeded: text("all"),
            history_failed: text("ALL"),
            ..WatchArgs::default()
        };
        assert_eq!(args.resolve(&mut reader).watch.history, HistoryLimits::NONE);
        assert!(reader.problems.is_empty(), "{:?}", reader.problems);
    }

    #[test]
    fn every_problem_is_told_by_its_variable() {
        let mut reader = Reader::default();
        let args = WatchArgs {
            max_jobs_in_flight: text("-1"),
            history_succeeded: text("few"),
            no_pod_explain_seconds: text("600"),
            start_seconds: text("5m"),
            incomplete_seconds: text("1"),
            report_retry_seconds: text("0"),
            kube_requests_per_second: text("0"),
            lease_name: text("No Name"),
            lease_namespace: text("a.b"),
            ..WatchArgs::default()
        };
        args.resolve(&mut reader);
        let mut names: Vec<&str> = reader
            .problems
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
        let mut reader = Reader::default();
        let args = WatchArgs {
            kube_burst: text("5"),
            ..WatchArgs::default()
        };
        assert!(args.resolve(&mut reader).rate.is_none());
        assert_eq!(reader.problems[0].variable, "MAYFLY_KUBE_BURST");
    }
}
