//! What happened to a run, and when: its verdict and its timeline from accepted to reported.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::view::recorded_verdict;
use super::{Cluster, ClusterError, RunKey, annotation, annotations};
use crate::verdict::{
    self, Observation, Timeouts, Verdict, Wait, condition_time, executor_state, final_report,
    newest,
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
        let mut explained = explanation(key, &job, &pods, &events, Timestamp::now());
        if let Some(verdict) = explained.verdict.take() {
            explained.verdict = Some(self.with_lock_holder(verdict).await);
        }
        Ok(explained)
    }
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
