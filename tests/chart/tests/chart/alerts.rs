//! The alert rules and the dashboard, as Prometheus itself reads them, over series that the launcher exports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use api_launcher::metrics;
use serde_json::{Value, json};
use test_chart::programs::{promtool, told};
use test_chart::{Document, Release, chart, values_files};

/// What the launcher of the tests is scraped as.
const POD: &str = "mayfly-7c9d8f5b6d-2xk4p";
/// Its second replica.
const OTHER: &str = "mayfly-7c9d8f5b6d-9wq7z";
/// How often, as the chart's monitors say by themselves.
const INTERVAL: &str = "30s";

fn release(values: &str) -> Release {
    let file = chart().join(format!("ci/{values}-values.yaml"));
    Release::new()
        .with(&file)
        .set(json!({"metrics": {"prometheusRule": {"enabled": true}}}))
}

/// The groups of rules of a release, as a file of Prometheus.
fn groups(documents: &[Document]) -> Option<Value> {
    let mut found = documents
        .iter()
        .filter(|document| document.kind() == "PrometheusRule");
    let rules = found.next()?;
    assert_eq!(found.next(), None, "one document holds all rules");
    Some(json!({"groups": rules.value["spec"]["groups"]}))
}

fn write(folder: &Path, name: &str, content: &Value) -> std::path::PathBuf {
    let path = folder.join(name);
    fs::write(&path, content.to_string()).unwrap();
    path
}

#[test]
fn prometheus_reads_the_rules_of_every_release() {
    let folder = tempfile::tempdir().unwrap();
    let (mut as_they_are, mut all) = (0, 0);
    for (name, file) in values_files() {
        let plain = groups(&Release::new().with(&file).documents());
        let asked_for = groups(&release(&name).documents());
        let mut command = promtool();
        command.args(["check", "rules", "--lint=all", "--lint-fatal"]);
        for (kind, rules) in [("plain", &plain), ("asked-for", &asked_for)] {
            if let Some(rules) = rules {
                command.arg(write(folder.path(), &format!("{name}-{kind}.json"), rules));
            }
        }
        as_they_are += usize::from(plain.is_some());
        if asked_for.is_some() {
            told(&mut command);
            all += 1;
        }
    }
    assert!(as_they_are > 0 && all >= 5, "{as_they_are} and {all}");
}

/// What a launcher exports: each series, in the notation of queries.
fn exported() -> Vec<String> {
    let text = metrics::at_start();
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let series: Vec<String> = samples
        .map(|line| line.rsplit_once(' ').unwrap().0.to_owned())
        .collect();
    assert!(series.len() > 40, "{series:?}");
    series
}

/// A launcher that is scraped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Scraped {
    namespace: &'static str,
    release: &'static str,
    pod: &'static str,
    runs_in: &'static str,
}

const FIRST: Scraped = Scraped {
    namespace: "terrakube",
    release: "mayfly",
    pod: POD,
    runs_in: "terrakube",
};

const SECOND: Scraped = Scraped {
    pod: OTHER,
    ..FIRST
};

/// What launchers export over two hours and more: values in Prometheus' notation, by series. `0+1x300` begins at 0 and
/// grows by 1 in each interval.
struct Story {
    series: BTreeMap<(Scraped, String), String>,
}

impl Story {
    /// All is well: runs are dispatched and end, as somebody wanted or as the step said.
    fn of(launchers: &[Scraped]) -> Self {
        let mut story = Self {
            series: BTreeMap::new(),
        };
        for launcher in launchers {
            for series in exported() {
                story.series.insert((*launcher, series), "0x300".to_owned());
            }
            story = story.with(*launcher, "mayfly_build_info", "1x300");
        }
        for launcher in launchers {
            // Of replicas, the first watches.
            let is_second = launchers
                .iter()
                .any(|other| other.runs_in == launcher.runs_in && other.pod < launcher.pod);
            if is_second {
                continue;
            }
            for verdict in ["completed", "step_failed", "cancelled"] {
                let series = format!("mayfly_runs_ended_total{{verdict=\"{verdict}\"}}");
                story = story.with(*launcher, &series, "0+1x300");
            }
            story = story
                .with(*launcher, "mayfly_watching", "1x300")
                .with(*launcher, "mayfly_runs{state=\"in_flight\"}", "3x300")
                .with(
                    *launcher,
                    "mayfly_runs_finished_total{outcome=\"done\"}",
                    "0+1x300",
                )
                .accepting(*launcher, "0.05", "0+100x300", "0+100x300");
        }
        story
    }

    /// With other values of what the launcher exports under this name, or of the one series that is given with labels.
    #[track_caller]
    fn with(mut self, launcher: Scraped, series: &str, values: &str) -> Self {
        let is_meant = |known: &str| {
            known == series
                || known
                    .strip_prefix(series)
                    .is_some_and(|labels| labels.starts_with('{'))
        };
        let mut found = 0;
        for ((of, known), old) in &mut self.series {
            if *of == launcher && is_meant(known) {
                values.clone_into(old);
                found += 1;
            }
        }
        assert!(found > 0, "the launcher exports no {series}");
        self
    }

    /// With dispatches that are answered: `all`, of which `fast` are below a time.
    fn accepting(mut self, launcher: Scraped, below: &str, fast: &str, all: &str) -> Self {
        let below: f64 = below.parse().unwrap();
        for ((of, known), old) in &mut self.series {
            let Some(bound) = known
                .strip_prefix("mayfly_accept_duration_seconds_bucket{le=\"")
                .and_then(|rest| rest.strip_suffix("\"}"))
            else {
                continue;
            };
            if *of != launcher {
                continue;
            }
            let bound: f64 = bound.replace("+Inf", "inf").parse().unwrap();
            let values = match bound {
                bound if bound >= 60.0 => all,
                bound if bound >= below => fast,
                _ => "0x300",
            };
            values.clone_into(old);
        }
        self.with(launcher, "mayfly_accept_duration_seconds_count", all)
            .with(
                launcher,
                "mayfly_dispatches_total{result=\"accepted\"}",
                all,
            )
    }

    /// Without a launcher from the tenth minute on.
    fn without(mut self, launcher: Scraped) -> Self {
        for ((of, series), values) in &mut self.series {
            if *of == launcher {
                let until_then = match series.as_str() {
                    "mayfly_barred" => "0x20 stale",
                    _ => "1x20 stale",
                };
                until_then.clone_into(values);
            }
        }
        self
    }

    fn input(&self) -> Vec<Value> {
        let input = |((launcher, series), values): (&(Scraped, String), &String)| {
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let Scraped {
                namespace,
                release,
                pod,
                runs_in,
            } = launcher;
            let comma = if labels == "}" { "" } else { ", " };
            let series = format!(
                "{name}{{namespace=\"{namespace}\", pod=\"{pod}\", app_kubernetes_io_instance=\"{release}\", \
                 mayfly_dev_runs_in=\"{runs_in}\"{comma}{labels}"
            );
            json!({"series": series, "values": values})
        };
        self.series.iter().map(input).collect()
    }
}

/// An alert that is up, with its labels.
type Up = (&'static str, Value);

/// Rules, and what is to come of them.
struct Judge {
    groups: Value,
    tests: Vec<Value>,
    up: BTreeSet<&'static str>,
}

impl Judge {
    fn of(release: &Release) -> Self {
        Self {
            groups: groups(&release.documents()).unwrap(),
            tests: Vec::new(),
            up: BTreeSet::new(),
        }
    }

    fn rules(&self) -> impl Iterator<Item = (&str, &Value)> {
        let rules = self.groups["groups"][0]["rules"].as_array().unwrap();
        rules
            .iter()
            .map(|rule| (rule["alert"].as_str().unwrap(), rule))
    }

    /// At each of these minutes, these alerts are up and no others.
    fn expect(&mut self, name: &str, story: &Story, at: &[(u32, &[Up])]) {
        let mut expected = Vec::new();
        for (minute, up) in at {
            for (alert, rule) in self.rules() {
                let alerts: Vec<Value> = up
                    .iter()
                    .filter(|(name, _)| *name == alert)
                    .map(|(_, labels)| {
                        json!({"exp_labels": labels, "exp_annotations": rule["annotations"]})
                    })
                    .collect();
                expected.push(json!({"eval_time": format!("{minute}m"), "alertname": alert, "exp_alerts": alerts}));
            }
            for (alert, _) in *up {
                assert!(self.rules().any(|(known, _)| known == *alert), "{alert}");
                self.up.insert(alert);
            }
        }
        let input = story.input();
        self.tests.push(json!({"name": name, "interval": INTERVAL, "input_series": input, "alert_rule_test": expected}));
    }

    /// Lets Prometheus judge.
    #[track_caller]
    fn judge(&self) {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "rules.json", &self.groups);
        let tests = json!({"rule_files": ["rules.json"], "evaluation_interval": INTERVAL, "tests": self.tests});
        let tests = write(folder.path(), "tests.json", &tests);
        told(promtool().args(["test", "rules"]).arg(tests));
    }
}

/// Labels of an alert about the launcher's runs.
fn labels(severity: &str, further: &Value) -> Value {
    let mut labels = json!({"severity": severity, "mayfly_dev_runs_in": "terrakube"});
    let further = further.as_object().unwrap().clone();
    labels.as_object_mut().unwrap().extend(further);
    labels
}

#[test]
fn nothing_is_alerted_of_while_all_is_well() {
    let mut judge = Judge::of(&release("default"));
    let every_minute: Vec<(u32, &[Up])> = (0..=90).map(|minute| (minute, &[] as &[Up])).collect();
    let fine = || Story::of(&[FIRST, SECOND]);
    judge.expect("all is well", &fine(), &every_minute);
    let passing = fine()
        .with(
            FIRST,
            "mayfly_dispatches_total{result=\"unavailable\"}",
            "0x60 1x240",
        )
        .with(
            FIRST,
            "mayfly_dispatches_total{result=\"unauthorized\"}",
            "0x60 1x240",
        )
        .with(FIRST, "mayfly_report_failures_total", "0x60 1x240");
    judge.expect("each trouble once", &passing, &every_minute);
    let slow = fine().accepting(FIRST, "0.05", "0+995x300", "0+1000x300");
    judge.expect("one dispatch of two hundred is slow", &slow, &every_minute);
    let busy = fine().with(FIRST, "mayfly_runs{state=\"held\"}", "5x300");
    judge.expect("runs wait, and others end", &busy, &every_minute);
    let handed_over = fine().with(FIRST, "mayfly_watching", "1x80 0x220").with(
        SECOND,
        "mayfly_watching",
        "0x84 1x216",
    );
    judge.expect("another replica takes over", &handed_over, &every_minute);
    let replaced = fine()
        .with(SECOND, "mayfly_watching", "0x24 1x276")
        .without(FIRST);
    judge.expect("a replica is gone", &replaced, &every_minute);
    judge.judge();
}

/// Verdicts by the alert they raise.
const BY_VERDICT: [(&str, &str, &[&str]); 4] = [
    (
        "MayflyRunsCannotStart",
        "warning",
        &[
            "never_scheduled",
            "image_not_pulled",
            "config_missing",
            "quota_exceeded",
            "admission_refused",
        ],
    ),
    (
        "MayflyRunsLost",
        "critical",
        &[
            "oom_killed",
            "evicted",
            "preempted",
            "node_lost",
            "deadline_exceeded",
            "deleted",
            "signalled",
            "claimed",
            "lost",
        ],
    ),
    (
        "MayflyRunsStopped",
        "warning",
        &["memory_stop", "silence", "state_locked"],
    ),
    (
        "MayflyRunsBroken",
        "warning",
        &["infrastructure", "bad_job_data", "defect"],
    ),
];

#[test]
fn every_alert_is_raised_by_its_own_condition_only() {
    let mut judge = Judge::of(&release("default"));
    let fine = || Story::of(&[FIRST, SECOND]);

    let up = [(
        "MayflyLauncherDown",
        json!({"severity": "critical", "namespace": "terrakube", "app_kubernetes_io_instance": "mayfly"}),
    )];
    let story = fine().without(FIRST).without(SECOND);
    judge.expect("no launcher", &story, &[(14, &[]), (17, &up), (60, &up)]);

    let up = [("MayflyRunsNotWatched", labels("critical", &json!({})))];
    let story = fine().with(FIRST, "mayfly_watching", "1x20 0x100 1x180");
    judge.expect(
        "nobody watches",
        &story,
        &[(14, &[]), (17, &up), (60, &up), (63, &[])],
    );

    let up = [("MayflySeveralWatchers", labels("warning", &json!({})))];
    let story = fine().with(SECOND, "mayfly_watching", "0x20 1x280");
    judge.expect("both watch", &story, &[(14, &[]), (17, &up)]);

    let up = [("MayflyRunsBlocked", labels("critical", &json!({})))];
    let story = fine().with(SECOND, "mayfly_barred", "0x20 1x100 0x180");
    judge.expect(
        "a right is missing",
        &story,
        &[(14, &[]), (17, &up), (60, &up), (63, &[])],
    );

    let up = [(
        "MayflyDispatchesUnavailable",
        labels("critical", &json!({})),
    )];
    let unavailable = "mayfly_dispatches_total{result=\"unavailable\"}";
    let story = fine().with(SECOND, unavailable, "0x20 1+1x40 42x240");
    judge.expect(
        "no Kubernetes API",
        &story,
        &[(14, &[]), (17, &up), (30, &up), (40, &[])],
    );

    let up = [(
        "MayflyDispatchesUnauthorized",
        labels("warning", &json!({})),
    )];
    let unauthorized = "mayfly_dispatches_total{result=\"unauthorized\"}";
    let story = fine().with(FIRST, unauthorized, "0x20 1+1x280");
    judge.expect("another secret", &story, &[(19, &[]), (22, &up)]);

    let up = [("MayflyAcceptSlow", labels("warning", &json!({})))];
    let story = fine().accepting(FIRST, "10", "0+95x300", "0+100x300");
    judge.expect("slow answers", &story, &[(9, &[]), (15, &up)]);

    let held = "mayfly_runs{state=\"held\"}";
    let stuck = |story: Story| {
        let mut story = story;
        for verdict in ["completed", "step_failed", "cancelled"] {
            let series = format!("mayfly_runs_ended_total{{verdict=\"{verdict}\"}}");
            story = story.with(FIRST, &series, "0+1x20 20x280");
        }
        story
    };
    let up = [(
        "MayflyRunsWait",
        labels("warning", &json!({"state": "held"})),
    )];
    let story = stuck(fine()).with(FIRST, held, "0x10 5x290");
    judge.expect("nothing moves", &story, &[(40, &[]), (47, &up)]);
    let up = [(
        "MayflyRunsWait",
        labels("warning", &json!({"state": "queued"})),
    )];
    let story = stuck(fine()).with(FIRST, "mayfly_runs{state=\"queued\"}", "0x10 5x290");
    judge.expect("a queue is stuck", &story, &[(40, &[]), (47, &up)]);

    let up = [("MayflyVerdictsNotReported", labels("warning", &json!({})))];
    let story = fine().with(FIRST, "mayfly_report_failures_total", "0x20 1+1x280");
    judge.expect("the platform is away", &story, &[(24, &[]), (27, &up)]);

    for (alert, severity, verdicts) in BY_VERDICT {
        for verdict in verdicts {
            let up = [(alert, labels(severity, &json!({"verdict": verdict})))];
            let series = format!("mayfly_runs_ended_total{{verdict=\"{verdict}\"}}");
            let story = fine().with(FIRST, &series, "0x20 1x280");
            judge.expect(verdict, &story, &[(9, &[]), (12, &up), (30, &[])]);
        }
    }
    judge.judge();
    let all: BTreeSet<&str> = judge.rules().map(|(alert, _)| alert).collect();
    assert_eq!(judge.up, all);
}

#[test]
fn an_alert_names_the_namespace_of_the_failing_launcher() {
    let mut judge = Judge::of(&release("multi-namespace"));
    let of = |pod, runs_in| Scraped {
        namespace: "mayfly-system",
        release: "mayfly",
        pod,
        runs_in,
    };
    let runs = of("mayfly-7c9d8f5b6d-2xk4p", "runs");
    let team_a = of("mayfly-team-a-6f7b9c4d5-h2j8l", "team-a");
    let team_b = of("mayfly-team-b-5d6c8b7f9-m4n6v", "team-b");
    let fine = || Story::of(&[runs, team_a, team_b]);
    let every_minute: Vec<(u32, &[Up])> = (0..=60).map(|minute| (minute, &[] as &[Up])).collect();
    judge.expect("all is well", &fine(), &every_minute);
    let of_team_a = |severity: &str| json!({"severity": severity, "mayfly_dev_runs_in": "team-a"});

    let mut down = of_team_a("critical");
    down["namespace"] = json!("mayfly-system");
    down["app_kubernetes_io_instance"] = json!("mayfly");
    let up = [("MayflyLauncherDown", down.clone())];
    let story = fine().without(team_a);
    judge.expect("one is gone", &story, &[(14, &[]), (17, &up)]);
    let named = |runs_in: &str| {
        let mut down = down.clone();
        down["mayfly_dev_runs_in"] = json!(runs_in);
        ("MayflyLauncherDown", down)
    };
    let up = [named("runs"), named("team-a"), named("team-b")];
    let story = fine().without(runs).without(team_a).without(team_b);
    judge.expect("all are gone", &story, &[(14, &[]), (17, &up)]);

    let up = [("MayflyRunsNotWatched", of_team_a("critical"))];
    let story = fine().with(team_a, "mayfly_watching", "1x20 0x280");
    judge.expect("one does not watch", &story, &[(14, &[]), (17, &up)]);

    let up = [("MayflyRunsWait", {
        let mut labels = of_team_a("warning");
        labels["state"] = json!("held");
        labels
    })];
    let mut story = fine().with(team_a, "mayfly_runs{state=\"held\"}", "5x300");
    for verdict in ["completed", "step_failed", "cancelled"] {
        let series = format!("mayfly_runs_ended_total{{verdict=\"{verdict}\"}}");
        story = story.with(team_a, &series, "0x300");
    }
    judge.expect("nothing moves for one", &story, &[(29, &[]), (31, &up)]);
    judge.judge();
}

#[test]
fn of_two_releases_in_one_namespace_each_is_alerted_of_by_its_own_rules() {
    // The names of its pods begin like those of the release the rules are of.
    const OTHERS: Scraped = Scraped {
        release: "mayfly-x",
        pod: "mayfly-x-6b7f9d8c4d-k8m2n",
        runs_in: "terrakube-x",
        ..FIRST
    };
    let mut judge = Judge::of(&release("default"));
    let fine = || Story::of(&[FIRST, SECOND, OTHERS]);
    let every_minute: Vec<(u32, &[Up])> = (0..=60).map(|minute| (minute, &[] as &[Up])).collect();
    let story = fine()
        .with(OTHERS, "mayfly_watching", "0x300")
        .with(OTHERS, "mayfly_report_failures_total", "0+1x300")
        .with(
            OTHERS,
            "mayfly_dispatches_total{result=\"unavailable\"}",
            "0+1x300",
        )
        .with(
            OTHERS,
            "mayfly_runs_ended_total{verdict=\"lost\"}",
            "0+1x300",
        );
    judge.expect("the other is in trouble", &story, &every_minute);
    let up = [(
        "MayflyLauncherDown",
        json!({"severity": "critical", "namespace": "terrakube", "app_kubernetes_io_instance": "mayfly"}),
    )];
    let story = fine().without(FIRST).without(SECOND);
    judge.expect("the other is all there is", &story, &[(14, &[]), (17, &up)]);
    judge.judge();
}

/// The queries of a dashboard.
fn queries<'d>(dashboard: &'d Value, found: &mut Vec<&'d str>) {
    match dashboard {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::String(query) if key == "expr" => found.push(query),
                    value => queries(value, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| queries(value, found)),
        _ => {}
    }
}

#[test]
fn every_panel_of_the_dashboard_shows_something_of_a_launcher_at_work() {
    let documents = release("default")
        .set(json!({"metrics": {"dashboards": {"enabled": true}}}))
        .documents();
    let dashboard = documents
        .iter()
        .find_map(|document| document.value["data"]["mayfly.json"].as_str());
    let dashboard: Value = serde_json::from_str(dashboard.unwrap()).unwrap();
    let mut found = Vec::new();
    queries(&dashboard, &mut found);
    assert!(found.len() > 10, "{found:?}");
    let story = Story::of(&[FIRST, SECOND]);
    let shown: Vec<Value> = found
        .iter()
        .map(|query| {
            // As Grafana fills them in.
            let query = query
                .replace("$namespace", "(terrakube)")
                .replace("$release", "(mayfly)")
                .replace("$__rate_interval", "2m");
            assert!(!query.contains('$'), "{query}");
            json!({"expr": format!("absent({query})"), "eval_time": "60m", "exp_samples": []})
        })
        .collect();
    // A query that shows nothing is told from one that shows something.
    let nothing = json!({
        "expr": "absent(mayfly_runs{state=\"nowhere\"})", "eval_time": "60m",
        "exp_samples": [{"labels": "{state=\"nowhere\"}", "value": 1}],
    });
    let shown = [shown, vec![nothing]].concat();
    let tests = json!({"evaluation_interval": INTERVAL, "tests": [
        {"interval": INTERVAL, "input_series": story.input(), "promql_expr_test": shown},
    ]});
    let folder = tempfile::tempdir().unwrap();
    let tests = write(folder.path(), "tests.json", &tests);
    told(promtool().args(["test", "rules"]).arg(tests));
}
