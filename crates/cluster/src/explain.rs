//! Explains a run: its verdict, and its timeline from accepted to reported.

mod filling;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use job_contract::{annotations, labels};
use k8s_openapi::api::batch::v1::{Job, JobCondition, JobStatus};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::ListParams;
use serde::Serialize;
use verdict::{
    self, Evidence, Observation, Started, Verdict, Wait, condition_time, executor_state,
    final_report, in_order,
};

use super::view::observe;
use super::{Cluster, ClusterError, RunRef, annotation, label};

pub use filling::{FillJobView, StoreFilling};

/// A run, explained.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    #[serde(flatten)]
    pub key: RunRef,
    /// Type of the step, if its Job still exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_type: Option<String>,
    /// Why it waits. `None`: it does not wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait: Option<Wait>,
    /// How it ended. `None`: it is not over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// The executor runs.
    pub running: bool,
    /// Its pods, in the order of their creation.
    pub pods: Vec<RunPod>,
    /// What it lacked in a store of providers that it only reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_filling: Option<StoreFilling>,
    pub timeline: Vec<TimelineEntry>,
}

/// One of the pods of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RunPod {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Whether it started the step.
    pub started: Started,
    /// How it ended. `None`: it has not ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<String>,
}

/// Something that happened to a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TimelineEntry {
    pub what: String,
    /// When it happened or, for a phase, began. In whole seconds, like all times in Kubernetes.
    pub at: Timestamp,
    /// The duration of a phase, or the time since the previous moment.
    pub milliseconds: i64,
    /// Whether this is a phase of the executor. Otherwise it is a moment.
    pub is_phase: bool,
    /// A phase that failed.
    pub failed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl Cluster {
    /// Explains a run from its objects in the cluster.
    pub async fn explain(&self, name: &str) -> Result<Explanation, ClusterError> {
        let job = self.job(name).await?;
        let key =
            RunRef::of(&job.metadata).ok_or_else(|| ClusterError::NoSuchRun(name.to_owned()))?;
        let pods = self.pods_of(&job).await?;
        // Events add details. They are kept for an hour only, and reading them may be forbidden.
        let events = self.events_of(&job, &pods).await.unwrap_or_default();
        let mut explained = explanation(key, &job, &pods, &events, self.now());
        if let Some(verdict) = explained.verdict.take() {
            explained.verdict = Some(self.with_lock_holder(verdict).await);
        }
        explained.store_filling = self.filling(&pods).await?;
        Ok(explained)
    }
}

/// The action of requests for events.
const LEFT: &str = "list what is left of the run";

/// The source of the evidence that a run is known only from events.
const EVENTS_SOURCE: &str = "Job";

impl Cluster {
    /// Explains runs whose Jobs are gone, from their events. A cluster keeps events for an hour by default. The newest
    /// step of a job comes first. An empty list: no events are left.
    pub async fn explain_gone(&self, word: &str) -> Result<Vec<Explanation>, ClusterError> {
        let of_jobs = self.events_with("involvedObject.kind=Job", LEFT).await?;
        let subject = |event: &Event| {
            let key = key_of(event.involved_object.name.as_deref()?)?;
            key.is_meant_by(word).then_some(key)
        };
        let mut last_of: BTreeMap<RunRef, &Event> = BTreeMap::new();
        for event in &of_jobs {
            let Some(key) = subject(event) else { continue };
            let last = last_of.entry(key).or_insert(event);
            if verdict::seen(event) >= verdict::seen(last) {
                *last = event;
            }
        }
        let mut runs: Vec<(RunRef, &Event)> = last_of.into_iter().collect();
        runs.sort_by_key(|(_, last)| Reverse(verdict::seen(last)));
        let mut explained = Vec::new();
        for (key, last) in runs {
            // An earlier Job of this name has events too.
            let uid = last.involved_object.uid.as_ref();
            let of_run = of_jobs
                .iter()
                .filter(|event| event.involved_object.uid.as_ref() == uid);
            let mut events: Vec<Event> = of_run.cloned().collect();
            let pods: Vec<String> = verdict::created_pods(&events).map(str::to_owned).collect();
            for pod in pods {
                let field = format!("involvedObject.name={pod}");
                events.extend(self.events_with(&field, LEFT).await?);
            }
            explained.push(from_events(key, &events));
        }
        Ok(explained)
    }

    pub(super) async fn events_with(
        &self,
        field: &str,
        doing: &'static str,
    ) -> Result<Vec<Event>, ClusterError> {
        let api = self.events();
        let params = ListParams::default().fields(field).match_any();
        let found = self
            .request_with_retries(doing, || api.list(&params))
            .await?;
        Ok(found.items)
    }
}

/// Returns the run whose Job has this name.
fn key_of(name: &str) -> Option<RunRef> {
    let rest = name.strip_prefix("job-")?;
    let (job_id, step_id) = rest.split_once('-')?;
    Some(RunRef {
        job_id: job_id.to_owned(),
        step_id: step_id.to_owned(),
        name: name.to_owned(),
        ..RunRef::default()
    })
}

/// Builds an explanation from events. The event of the Job controller has the same content as its condition.
fn from_events(key: RunRef, events: &[Event]) -> Explanation {
    let mut job = Job::default();
    job.metadata.name = Some(key.name.clone());
    let of_job = |event: &&Event| event.involved_object.kind.as_deref() == Some("Job");
    let ended = events.iter().filter(of_job).find_map(|event| {
        let type_ = match event.reason.as_deref()? {
            "Completed" => "Complete",
            "BackoffLimitExceeded" | "DeadlineExceeded" | "PodFailurePolicy" => "Failed",
            _ => return None,
        };
        let mut condition = JobCondition {
            type_: type_.to_owned(),
            status: "True".to_owned(),
            reason: event.reason.clone(),
            message: event.message.clone(),
            ..JobCondition::default()
        };
        condition.last_transition_time = verdict::seen(event).map(Time);
        Some(condition)
    });
    if let Some(condition) = ended {
        job.status = Some(JobStatus {
            conditions: Some(vec![condition]),
            ..JobStatus::default()
        });
    }
    let mut verdict = verdict::from_events(&job, events);
    let advice = "the output of its step at the platform has its log, and what was reported";
    verdict.advice = Some(match verdict.advice {
        Some(known) => format!("{known}; {advice}"),
        None => advice.to_owned(),
    });
    let told = "gone: its time to live is over, or it was deleted; known from its events";
    verdict
        .evidence
        .insert(0, Evidence::new(EVENTS_SOURCE, told));
    Explanation {
        key,
        step_type: None,
        wait: None,
        verdict: Some(verdict),
        running: false,
        pods: pods_of_run(&[], events),
        store_filling: None,
        timeline: event_line(events),
    }
}

/// The events in the order they happened.
fn event_line(events: &[Event]) -> Vec<TimelineEntry> {
    let mut events: Vec<&Event> = events.iter().collect();
    events.sort_by_key(|event| verdict::seen(event));
    let mut line = Line::default();
    for event in events {
        let what = event.reason.as_deref().unwrap_or("?");
        line.entry(what, verdict::seen(event));
        line.detail(what, event.message.clone().unwrap_or_default());
    }
    line.entries
}

fn explanation(
    key: RunRef,
    job: &Job,
    pods: &[Pod],
    events: &[Event],
    now: Timestamp,
) -> Explanation {
    let observation = observe(job, pods, events, now);
    let timeline = timeline(job, pods, events);
    let step_type = label(&job.metadata, labels::STEP_TYPE).map(str::to_owned);
    let pods = pods_of_run(pods, events);
    let running = observation == Observation::InProgress;
    let (wait, verdict) = match observation {
        Observation::Waiting(wait) => (Some(wait), None),
        Observation::InProgress => (None, None),
        Observation::Ended(verdict) => (None, Some(*verdict)),
    };
    Explanation {
        key,
        step_type,
        wait,
        verdict,
        running,
        pods,
        store_filling: None,
        timeline,
    }
}

/// Pods whose objects are gone come first, because a replacement is created after their end.
fn pods_of_run(pods: &[Pod], events: &[Event]) -> Vec<RunPod> {
    let gone = verdict::gone_pods(pods, events).map(|(name, started)| RunPod {
        name: name.to_owned(),
        node: None,
        started,
        end: Some("it is gone".to_owned()),
    });
    let present = in_order(pods).into_iter().map(|pod| RunPod {
        name: pod.metadata.name.clone().unwrap_or_default(),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        started: verdict::started_by(pod, events),
        end: verdict::end_of_pod(pod, events),
    });
    gone.chain(present).collect()
}

/// Returns the known moments of a run in their order. Pure.
pub fn timeline(job: &Job, pods: &[Pod], events: &[Event]) -> Vec<TimelineEntry> {
    let mut line = Line::default();
    let meta = &job.metadata;
    line.entry("accepted", meta.creation_timestamp.as_ref().map(|t| t.0));
    let noted = |name| annotation(meta, name).and_then(|at| at.parse::<Timestamp>().ok());
    let started_at = job
        .status
        .as_ref()
        .and_then(|status| status.start_time.as_ref())
        .map(|time| time.0);
    line.entry("released", noted(annotations::RELEASED_AT).or(started_at));
    for pod in in_order(pods) {
        if pods.len() > 1 {
            let created = pod.metadata.creation_timestamp.as_ref();
            line.entry("pod created", created.map(|time| time.0));
            line.detail("pod created", pod.metadata.name.clone().unwrap_or_default());
        }
        pod_entries(&mut line, pod, events);
    }
    line.entry("cancelled", noted(annotations::CANCELLED_AT));
    line.entry("reported", noted(annotations::REPORTED_AT));
    line.entries
}

fn pod_entries(line: &mut Line, pod: &Pod, events: &[Event]) {
    line.entry("scheduled", condition_time(pod, "PodScheduled"));
    if let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) {
        line.detail("scheduled", format!("on {node}"));
    }
    let pulled = events
        .iter()
        .filter(|event| event.reason.as_deref() == Some("Pulled") && verdict::is_about(event, pod))
        .max_by_key(|event| verdict::seen(event));
    if let Some(pulled) = pulled {
        line.entry("image pulled", verdict::seen(pulled));
        line.detail("image pulled", pulled.message.clone().unwrap_or_default());
    }
    let Some(state) = executor_state(pod) else {
        return;
    };
    let end = state.terminated.as_ref();
    let started = state
        .running
        .as_ref()
        .and_then(|running| running.started_at.as_ref())
        .or_else(|| end.and_then(|end| end.started_at.as_ref()))
        .map(|time| time.0);
    line.entry("started", started);
    if let (Some(report), Some(started)) = (final_report(pod), started) {
        let mut at = started;
        for timing in report.phases {
            let lasted =
                SignedDuration::from_millis(i64::try_from(timing.duration_ms).unwrap_or(i64::MAX));
            line.entries.push(TimelineEntry {
                what: timing.phase.label().to_owned(),
                at: whole_second(at),
                milliseconds: i64::try_from(lasted.as_millis()).unwrap_or(i64::MAX),
                is_phase: true,
                failed: !timing.ok,
                detail: None,
            });
            at = at.checked_add(lasted).unwrap_or(at);
        }
    }
    if let Some(end) = end {
        line.entry("ended", end.finished_at.as_ref().map(|time| time.0));
        line.detail("ended", format!("exit code {}", end.exit_code));
    }
}

fn whole_second(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

#[derive(Default)]
struct Line {
    entries: Vec<TimelineEntry>,
    last: Option<Timestamp>,
}

impl Line {
    fn entry(&mut self, what: &str, at: Option<Timestamp>) {
        let Some(at) = at else {
            return;
        };
        // The launcher's own times are more exact than those of the API. Comparing the two would mislead.
        let at = whole_second(at);
        // The clocks of nodes differ. A negative duration becomes zero.
        let after = self
            .last
            .map_or(0, |last| at.duration_since(last).as_millis().max(0));
        self.last = self.last.max(Some(at));
        self.entries.push(TimelineEntry {
            what: what.to_owned(),
            at,
            milliseconds: i64::try_from(after).unwrap_or(i64::MAX),
            is_phase: false,
            failed: false,
            detail: None,
        });
    }

    fn detail(&mut self, what: &str, detail: String) {
        if let Some(entry) = self.entries.last_mut().filter(|entry| entry.what == what) {
            entry.detail = Some(detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use verdict::VerdictKind;

    #[test]
    fn the_timeline_goes_from_accepted_to_reported_with_the_phases_in_their_place() {
        let job: Job = serde_json::from_value(json!({"metadata": {"name": "job-1-a",
            "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": {
                "mayfly.dev/released-at": "2026-01-01T00:00:02.5Z",
                "mayfly.dev/reported-at": "2026-01-01T00:00:20Z"}}}))
        .unwrap();
        let report = r#"{"jobId":"1","outcome":1,"phases":[
            {"phase":"init","durationMs":3000,"ok":true},{"phase":"plan","durationMs":1500,"ok":false}]}"#;
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"},
            "spec": {"nodeName": "node-1", "containers": []},
            "status": {"conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:02Z"}],
                "containerStatuses": [{"name": "executor", "image": "", "imageID": "", "ready": false,
                    "restartCount": 0, "state": {"terminated": {"exitCode": 1, "message": report,
                        "startedAt": "2026-01-01T00:00:05Z", "finishedAt": "2026-01-01T00:00:10Z"}}}]}}))
        .unwrap();
        let entries = timeline(&job, &[pod], &[]);
        let is_whole = |entry: &TimelineEntry| entry.at.subsec_nanosecond() == 0;
        assert!(entries.iter().all(is_whole), "{entries:?}");
        let entries: Vec<(String, i64, bool)> = entries
            .into_iter()
            .map(|entry| (entry.what, entry.milliseconds, entry.failed))
            .collect();
        let expected = [
            ("accepted", 0, false),
            // Noted with fractions, which no other time has.
            ("released", 2000, false),
            ("scheduled", 0, false),
            ("started", 3000, false),
            ("init", 3000, false),
            ("plan", 1500, true),
            ("ended", 5000, false),
            ("reported", 10_000, false),
        ];
        let expected = expected.map(|(what, ms, failed)| (what.to_owned(), ms, failed));
        assert_eq!(entries, expected);
    }

    fn event(reason: &str, message: &str, second: u8, of: &Value) -> Event {
        let at = format!("2026-01-01T00:00:{second:02}Z");
        serde_json::from_value(json!({"metadata": {"name": format!("{reason}.{second}")}, "involvedObject": of,
            "type": "Normal", "reason": reason, "message": message, "firstTimestamp": at, "lastTimestamp": at}))
        .unwrap()
    }

    fn of_job() -> Value {
        json!({"kind": "Job", "name": "job-1-a", "uid": "j"})
    }

    fn of_executor() -> Value {
        json!({"kind": "Pod", "name": "job-1-a-x", "uid": "p", "fieldPath": "spec.containers{executor}"})
    }

    /// As after `cancel` and after the Job was deleted by others.
    #[test]
    fn a_run_known_from_events_alone_is_not_advised_to_be_started_again() {
        let created = event("SuccessfulCreate", "Created pod: job-1-a-x", 1, &of_job());
        let started = event("Started", "Container started", 2, &of_executor());
        let key = || key_of("job-1-a").unwrap();
        for (events, started, words) in [
            (
                vec![created.clone(), started],
                Started::Yes,
                "some changes may have been made",
            ),
            (
                vec![created],
                Started::Unknown,
                "it is not known whether the step had begun",
            ),
        ] {
            let told = from_events(key(), &events);
            let pods: Vec<_> = told
                .pods
                .iter()
                .map(|pod| (pod.name.as_str(), pod.started))
                .collect();
            assert_eq!(pods, [("job-1-a-x", started)]);
            let verdict = told.verdict.unwrap();
            assert_eq!(
                (verdict.kind, verdict.started),
                (VerdictKind::Lost, started)
            );
            let advice = verdict.advice.unwrap();
            assert!(advice.contains(words), "{advice}");
            assert!(!advice.contains("start the run again"), "{advice}");
        }
    }

    /// A pod that the node stopped, and its replacement.
    #[test]
    fn all_pods_of_a_run_are_shown() {
        let job: Job = serde_json::from_value(json!({"metadata": {"name": "job-1-a", "uid": "j",
            "labels": {"mayfly.dev/step-type": "apply"}, "creationTimestamp": "2026-01-01T00:00:00Z"}}))
        .unwrap();
        let pod = |name: &str, second: u8, status: Value| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": name, "uid": name,
                "creationTimestamp": format!("2026-01-01T00:00:{second:02}Z")},
                "spec": {"nodeName": "node-1", "containers": []}, "status": status}))
            .unwrap()
        };
        let first = pod(
            "first",
            1,
            json!({"phase": "Failed", "reason": "NodeShutdown", "message": "rejected"}),
        );
        let second = pod(
            "second",
            5,
            json!({"phase": "Running", "containerStatuses": [{"name": "executor",
            "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "state": {"running": {"startedAt": "2026-01-01T00:00:07Z"}}}]}),
        );
        let told = explanation(
            key_of("job-1-a").unwrap(),
            &job,
            &[second, first],
            &[],
            Timestamp::UNIX_EPOCH,
        );
        assert_eq!(told.step_type.as_deref(), Some("apply"));
        let pods: Vec<_> = told
            .pods
            .iter()
            .map(|pod| (pod.name.as_str(), pod.started))
            .collect();
        assert_eq!(pods, [("first", Started::No), ("second", Started::Yes)]);
        assert!(told.pods[0].end.as_ref().unwrap().contains("shut down"));
        assert_eq!(told.pods[1].end, None);
        let created = told
            .timeline
            .iter()
            .filter(|entry| entry.what == "pod created");
        let names: Vec<_> = created
            .filter_map(|entry| entry.detail.as_deref())
            .collect();
        assert_eq!(names, ["first", "second"]);
    }
}
