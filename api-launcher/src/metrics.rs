//! What the launcher counts, in the Prometheus text format. Names start with `mayfly_`; labels have few values,
//! none of them an id.

use std::time::Duration;

use cluster::watch::RunCounts;
use http_service::MetricsRegistry;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use verdict::VerdictKind;

/// Below two seconds is the goal; the platform gives up after sixty.
const ACCEPT_SECONDS: [f64; 11] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 10.0, 60.0,
];

type Label = [(&'static str, &'static str); 1];

/// How a dispatch was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DispatchResult {
    Accepted,
    Duplicate,
    Forwarded,
    Unauthorized,
    Invalid,
    TooLarge,
    Timeout,
    Unavailable,
}

impl DispatchResult {
    const ALL: [Self; 8] = [
        Self::Accepted,
        Self::Duplicate,
        Self::Forwarded,
        Self::Unauthorized,
        Self::Invalid,
        Self::TooLarge,
        Self::Timeout,
        Self::Unavailable,
    ];

    const fn label(self) -> Label {
        let word = match self {
            Self::Accepted => "accepted",
            Self::Duplicate => "duplicate",
            Self::Forwarded => "forwarded",
            Self::Unauthorized => "unauthorized",
            Self::Invalid => "invalid",
            Self::TooLarge => "too_large",
            Self::Timeout => "timeout",
            Self::Unavailable => "unavailable",
        };
        [("result", word)]
    }
}

/// The launcher's counters. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registry: MetricsRegistry,
    dispatches: Family<Label, Counter>,
    accept_seconds: Histogram,
    runs: Family<Label, Gauge>,
    finished: Family<Label, Counter>,
    watching: Gauge,
    barred: Gauge,
    ended: Family<Label, Counter>,
    report_failures: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let registry = MetricsRegistry::default();
        let version = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.extend(|registry| registry.register("build", "Version of the launcher", version));
        let dispatches: Family<Label, Counter> = registry.add(
            "dispatches",
            "Dispatches by how they were answered",
            Family::default(),
        );
        let accept_seconds = registry.add(
            "accept_duration_seconds",
            "Time from a dispatch's head to its answer",
            Histogram::new(ACCEPT_SECONDS),
        );
        let runs = registry.add(
            "runs",
            "Accepted runs that have not ended, by state",
            Family::default(),
        );
        let finished: Family<Label, Counter> = registry.add(
            "runs_finished",
            "Runs that have ended, by outcome",
            Family::default(),
        );
        // A series that appears with its first event hides that event from rates.
        for result in DispatchResult::ALL {
            drop(dispatches.get_or_create(&result.label()));
        }
        for outcome in [OK, FAILED] {
            drop(finished.get_or_create(&outcome));
        }
        Self {
            registry,
            dispatches,
            accept_seconds,
            runs,
            finished,
            watching: Gauge::default(),
            barred: Gauge::default(),
            ended: Family::default(),
            report_failures: Counter::default(),
        }
    }
}

impl Metrics {
    /// Adds what only a launcher has that watches a cluster.
    pub(crate) fn for_cluster(self) -> Self {
        for kind in VerdictKind::ALL {
            drop(self.ended.get_or_create(&[("verdict", kind.name())]));
        }
        self.stand(RunCounts::default());
        self.registry.extend(|registry| {
            registry.register(
                "watching",
                "Whether this replica watches the runs: it holds the Lease, or may hold none",
                self.watching.clone(),
            );
            registry.register(
                "barred",
                "Whether a missing namespace or right lets this replica start no run",
                self.barred.clone(),
            );
            registry.register(
                "runs_ended",
                "Runs this replica saw end, by verdict",
                self.ended.clone(),
            );
            registry.register(
                "report_failures",
                "Verdicts the platform could not take, by attempt",
                self.report_failures.clone(),
            );
        });
        self
    }

    /// Other parts add what they count.
    pub(crate) const fn registry(&self) -> &MetricsRegistry {
        &self.registry
    }

    /// This replica watches for as long as the value lives.
    pub(crate) fn watch(&self) -> WatchingNow<'_> {
        self.watching.set(1);
        WatchingNow(self)
    }

    /// Whether the cluster lets no run start.
    pub(crate) fn barred(&self, barred: bool) {
        self.barred.set(i64::from(barred));
    }

    /// How many runs of the cluster stand where.
    pub(crate) fn stand(&self, counts: RunCounts) {
        for (state, count) in [
            ("held", counts.held),
            ("queued", counts.queued),
            ("in_flight", counts.in_flight),
        ] {
            self.runs
                .get_or_create(&[("state", state)])
                .set(gauge(count));
        }
    }

    pub(crate) fn ended(&self, kind: VerdictKind) {
        self.ended.get_or_create(&[("verdict", kind.name())]).inc();
        self.finished(kind == VerdictKind::Completed);
    }

    pub(crate) fn report_failed(&self) {
        self.report_failures.inc();
    }

    pub(crate) fn dispatched(&self, result: DispatchResult, took: Duration) {
        self.dispatches.get_or_create(&result.label()).inc();
        self.accept_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn finished(&self, ok: bool) {
        self.finished
            .get_or_create(if ok { &OK } else { &FAILED })
            .inc();
    }

    pub(crate) fn render(&self) -> String {
        self.registry.render()
    }
}

/// What a launcher of a cluster shows before anything has happened: every series it will ever have, with all its labels.
#[must_use]
pub fn at_start() -> String {
    Metrics::default().for_cluster().render()
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Ends with the watching: what another replica watches now is its to tell.
#[derive(Debug)]
pub(crate) struct WatchingNow<'a>(&'a Metrics);

impl Drop for WatchingNow<'_> {
    fn drop(&mut self) {
        self.0.watching.set(0);
        self.0.stand(RunCounts::default());
    }
}

const OK: Label = [("outcome", "done")];
const FAILED: Label = [("outcome", "failed")];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_appear_under_our_prefix() {
        let metrics = Metrics::default();
        metrics.dispatched(DispatchResult::Accepted, Duration::from_millis(30));
        metrics.finished(false);
        let text = metrics.render();
        for line in [
            r#"mayfly_dispatches_total{result="accepted"} 1"#,
            r#"mayfly_dispatches_total{result="duplicate"} 0"#,
            r#"mayfly_accept_duration_seconds_bucket{le="0.05"} 1"#,
            r#"mayfly_runs_finished_total{outcome="failed"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!text.contains("mayfly_watching"), "{text}");
    }

    #[test]
    fn only_a_replica_that_watches_a_cluster_has_its_metrics() {
        let metrics = Metrics::default().for_cluster();
        let watching = metrics.watch();
        metrics.stand(RunCounts {
            held: 3,
            queued: 2,
            in_flight: 25,
        });
        let text = metrics.render();
        for line in [
            "mayfly_watching 1",
            r#"mayfly_runs{state="held"} 3"#,
            r#"mayfly_runs{state="queued"} 2"#,
            r#"mayfly_runs{state="in_flight"} 25"#,
            r#"mayfly_runs_ended_total{verdict="oom_killed"} 0"#,
            "# HELP mayfly_report_failures Verdicts the platform could not take, by attempt.",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        drop(watching);
        let text = metrics.render();
        for line in ["mayfly_watching 0", r#"mayfly_runs{state="in_flight"} 0"#] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
