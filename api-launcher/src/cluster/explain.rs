//! What happened to a run, and when: its verdict and its timeline from accepted to reported.

use k8s_openapi::api::batch::v1::{Job, JobCondition, JobStatus};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::ListParams;
use serde::Serialize;

use super::view::recorded_verdict;
use super::{Cluster, ClusterError, RunKey, annotation, annotations};
use crate::verdict::{
    self, Evidence, Observation, Timeouts, Verdict, VerdictKind, Wait, condition_time,
    executor_state, final_report, newest,
};

/// A run, explained.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    #[serde(flatten)]
    pub key: RunKey,
    /// Why it waits, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait: Option<Wait>,
    /// How it ended, if it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// The executor is at work.
    pub running: bool,
    pub timeline: Vec<Moment>,
}

/// Something that happened to a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Moment {
    pub what: String,
    /// When; a phase's beginning.
    pub at: Timestamp,
    /// How long it took, or how long after the moment before it came.
    pub milliseconds: i64,
    /// A phase of the executor, which lasted for that time. Otherwise a moment, which came after that time.
    pub is_phase: bool,
    /// A phase that failed.
    pub failed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl Cluster {
    /// Explains a run from what the cluster still has of it.
    pub async fn explain(&self, name: &str) -> Result<Explanation, ClusterError> {
        let job = self.job(name).await?;
        let key =
            RunKey::of(&job.metadata).ok_or_else(|| ClusterError::NoSuchRun(name.to_owned()))?;
        let pods = self.pods_of(&job).await?;
        // Events tell more but are kept for an hour only, and may be forbidden.
        let events = self.events_of(&job, &pods).await.unwrap_or_default();
        let mut explained = explanation(key, &job, &pods, &events, self.now());
        if let Some(verdict) = explained.verdict.take() {
            explained.verdict = Some(self.with_lock_holder(verdict).await);
        }
        Ok(explained)
    }
}

/// Where it is said that a run was told from events.
const TRACE: &str = "Job";

impl Cluster {
    /// Explains a run whose Job is gone from the events it left, which a cluster keeps for an hour unless it is set up
    /// otherwise; of several steps of a job the last. `None`: nothing is left.
    pub async fn explain_gone(&self, word: &str) -> Result<Option<Explanation>, ClusterError> {
        let of_jobs = self.events_with("involvedObject.kind=Job").await?;
        let subject = |event: &Event| {
            let name = event.involved_object.name.as_deref()?;
            let key = key_of(name)?;
            key.is_meant_by(word).then_some(key)
        };
        let last = of_jobs.iter().filter(|event| subject(event).is_some());
        let Some(last) = last.max_by_key(|event| verdict::seen(event)) else {
            return Ok(None);
        };
        let Some(key) = subject(last) else {
            return Ok(None);
        };
        // An earlier Job of this name has left its events too.
        let uid = last.involved_object.uid.clone();
        let mut events: Vec<Event> = of_jobs
            .into_iter()
            .filter(|event| event.involved_object.uid == uid)
            .collect();
        let created = events.iter().filter_map(|event| {
            let created = event.reason.as_deref() == Some("SuccessfulCreate");
            let words = event.message.as_deref().filter(|_| created)?;
            words.strip_prefix("Created pod: ")
        });
        for pod in created.map(str::to_owned).collect::<Vec<_>>() {
            let field = format!("involvedObject.name={pod}");
            events.extend(self.events_with(&field).await?);
        }
        Ok(Some(from_events(key, &events)))
    }

    async fn events_with(&self, field: &str) -> Result<Vec<Event>, ClusterError> {
        let api = self.events();
        let params = ListParams::default().fields(field);
        let found = self
            .ask("list what is left of the run", || api.list(&params))
            .await?;
        Ok(found.items)
    }
}

/// The run whose Job has this name, as far as the name tells.
fn key_of(name: &str) -> Option<RunKey> {
    let rest = name.strip_prefix("job-")?;
    let (job_id, step_id) = rest.split_once('-')?;
    Some(RunKey {
        job_id: job_id.to_owned(),
        step_id: step_id.to_owned(),
        name: name.to_owned(),
        organization_id: String::new(),
        workspace_id: String::new(),
        step_type: String::new(),
    })
}

/// What events tell of a run whose objects are gone. The Job controller says in an event what it says in a condition.
fn from_events(key: RunKey, events: &[Event]) -> Explanation {
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
    let begun = events
        .iter()
        .any(|event| event.reason.as_deref() == Some("Started"));
    if let Some(condition) = ended {
        job.status = Some(JobStatus {
            conditions: Some(vec![condition]),
            ..JobStatus::default()
        });
    }
    let mut verdict = verdict::gone(&job, &[], events);
    if verdict.kind == VerdictKind::Deleted && begun {
        verdict.sentence = "the run's Job is gone, and nothing tells how the run ended".into();
        (verdict.kind, verdict.started) = (VerdictKind::Lost, true);
    }
    let advice = "the output of its step at the platform has its log, and what was reported";
    verdict.advice = Some(match verdict.advice {
        Some(known) => format!("{known}; {advice}"),
        None => advice.to_owned(),
    });
    let told = "gone: its time to live is over, or it was deleted; told from the events it left";
    verdict.evidence.insert(0, Evidence::new(TRACE, told));
    Explanation {
        key,
        wait: None,
        verdict: Some(verdict),
        running: false,
        timeline: event_line(events),
    }
}

/// The events in the order they happened.
fn event_line(events: &[Event]) -> Vec<Moment> {
    let mut events: Vec<&Event> = events.iter().collect();
    events.sort_by_key(|event| verdict::seen(event));
    let mut line = Line::default();
    for event in events {
        let what = event.reason.as_deref().unwrap_or("?");
        line.moment(what, verdict::seen(event));
        line.detail(what, event.message.clone().unwrap_or_default());
    }
    line.moments
}

fn explanation(
    key: RunKey,
    job: &Job,
    pods: &[Pod],
    events: &[Event],
    now: Timestamp,
) -> Explanation {
    let observation = recorded_verdict(job).map_or_else(
        || verdict::observe(job, pods, events, now, &Timeouts::default()),
        |verdict| Observation::Ended(Box::new(verdict)),
    );
    let timeline = timeline(job, pods, events);
    let running = observation == Observation::Running;
    let (wait, verdict) = match observation {
        Observation::Waiting(wait) => (Some(wait), None),
        Observation::Running => (None, None),
        Observation::Ended(verdict) => (None, Some(*verdict)),
    };
    Explanation {
        key,
        wait,
        verdict,
        running,
        timeline,
    }
}

/// The moments of a run in the order they happened, as far as they are known. Pure.
pub fn timeline(job: &Job, pods: &[Pod], events: &[Event]) -> Vec<Moment> {
    let mut line = Line::default();
    let meta = &job.metadata;
    line.moment("accepted", meta.creation_timestamp.as_ref().map(|t| t.0));
    let noted = |name| annotation(meta, name).and_then(|at| at.parse::<Timestamp>().ok());
    let started_at = job
        .status
        .as_ref()
        .and_then(|status| status.start_time.as_ref())
        .map(|time| time.0);
    line.moment("released", noted(annotations::RELEASED_AT).or(started_at));
    if let Some(pod) = newest(pods) {
        pod_moments(&mut line, pod, events);
    }
    line.moment("cancelled", noted(annotations::CANCELLED_AT));
    line.moment("reported", noted(annotations::REPORTED_AT));
    line.moments
}

fn pod_moments(line: &mut Line, pod: &Pod, events: &[Event]) {
    line.moment("scheduled", condition_time(pod, "PodScheduled"));
    if let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) {
        line.detail("scheduled", format!("on {node}"));
    }
    let pulled = events
        .iter()
        .filter(|event| event.reason.as_deref() == Some("Pulled"))
        .max_by_key(|event| verdict::seen(event));
    if let Some(pulled) = pulled {
        line.moment("image pulled", verdict::seen(pulled));
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
    line.moment("started", started);
    if let (Some(report), Some(started)) = (final_report(pod), started) {
        let mut at = started;
        for timing in report.phases {
            let lasted =
                SignedDuration::from_millis(i64::try_from(timing.duration_ms).unwrap_or(i64::MAX));
            line.moments.push(Moment {
                what: timing.phase.label().to_owned(),
                at,
                milliseconds: i64::try_from(lasted.as_millis()).unwrap_or(i64::MAX),
                is_phase: true,
                failed: !timing.ok,
                detail: None,
            });
            at = at.checked_add(lasted).unwrap_or(at);
        }
    }
    if let Some(end) = end {
        line.moment("ended", end.finished_at.as_ref().map(|time| time.0));
        line.detail("ended", format!("exit code {}", end.exit_code));
    }
}

/// A timeline in the making.
#[derive(Default)]
struct Line {
    moments: Vec<Moment>,
    last: Option<Timestamp>,
}

impl Line {
    fn moment(&mut self, what: &str, at: Option<Timestamp>) {
        let Some(at) = at else {
            return;
        };
        // The clocks of nodes differ, and times in the API are whole seconds: nothing takes less than no time.
        let after = self
            .last
            .map_or(0, |last| at.duration_since(last).as_millis().max(0));
        self.last = self.last.max(Some(at));
        self.moments.push(Moment {
            what: what.to_owned(),
            at,
            milliseconds: i64::try_from(after).unwrap_or(i64::MAX),
            is_phase: false,
            failed: false,
            detail: None,
        });
    }

    fn detail(&mut self, what: &str, detail: String) {
        if let Some(moment) = self.moments.last_mut().filter(|moment| moment.what == what) {
            moment.detail = Some(detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
        let moments: Vec<(String, i64, bool)> = timeline(&job, &[pod], &[])
            .into_iter()
            .map(|moment| (moment.what, moment.milliseconds, moment.failed))
            .collect();
        let expected = [
            ("accepted", 0, false),
            ("released", 2500, false),
            // Whole seconds: before the release, by the look of it.
            ("scheduled", 0, false),
            ("started", 2500, false),
            ("init", 3000, false),
            ("plan", 1500, true),
            ("ended", 5000, false),
            ("reported", 10_000, false),
        ];
        let expected = expected.map(|(what, ms, failed)| (what.to_owned(), ms, failed));
        assert_eq!(moments, expected);
    }
}
