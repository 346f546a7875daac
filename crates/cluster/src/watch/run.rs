//! What the watcher knows of one run. Pure.

use std::time::Instant;

use job_contract::annotations;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::jiff::Timestamp;
use verdict::{Observation, is_queued_by_cluster, is_suspended, terminal};

use super::events::RunEvents;
use super::heartbeat::HeartbeatCheck;
use super::message::{JobRef, Now};
use super::release::ReleaseProgress;
use super::report::ReportProgress;
use crate::annotation;
use crate::cache::Packed;
use crate::submit::{KEPT_UNREPORTED, awaited_queue};

/// A run whose Job is there.
#[derive(Debug)]
pub(super) struct TrackedRun {
    pub(super) job_ref: JobRef,
    pub(super) job: Packed,
    pub(super) stage: JobStage,
    pub(super) created: Timestamp,
    pub(super) first_seen: Instant,
    /// When it was first seen released, by the API server's clock.
    seen_released: Option<Timestamp>,
    pub(super) end: Option<JobEnd>,
    /// The last observation that the observer got.
    pub(super) announced: Option<Observation>,
    pub(super) events: RunEvents,
    pub(super) heartbeat: Option<Box<HeartbeatCheck>>,
    pub(super) report: ReportProgress,
    pub(super) release: ReleaseProgress,
    /// A request stops the containers that outlived the executor.
    pub(super) is_stopping: bool,
    /// A Job for what the run lacked in the store of providers was asked for.
    pub(super) is_filling: bool,
}

/// Where a Job is between its creation and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobStage {
    /// Suspended and never released.
    Held,
    /// Suspended until a queue of the cluster releases it.
    Queued,
    InFlight,
    Over,
}

/// How and when a Job ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct JobEnd {
    pub(super) is_successful: bool,
    pub(super) finished: Timestamp,
}

impl TrackedRun {
    pub(super) fn new(job_ref: JobRef, job: &Job, now: Now) -> Self {
        Self {
            job_ref,
            job: Packed::of(job),
            stage: JobStage::InFlight,
            created: Timestamp::UNIX_EPOCH,
            first_seen: now.local,
            seen_released: None,
            end: None,
            announced: None,
            events: RunEvents::default(),
            heartbeat: None,
            report: ReportProgress::default(),
            release: ReleaseProgress::default(),
            is_stopping: false,
            is_filling: false,
        }
    }

    /// Takes in the Job as it is now.
    pub(super) fn update(&mut self, job: &Job, now: Now) {
        let meta = &job.metadata;
        self.job = Packed::of(job);
        self.stage = stage_of(job);
        if let Some(created) = &meta.creation_timestamp {
            self.created = created.0;
        }
        if is_suspended(job) {
            self.seen_released = None;
        } else {
            self.seen_released.get_or_insert(now.server);
        }
        self.release.has_nothing_to_run = annotation(meta, annotations::NOTHING_TO_RUN).is_some();
        self.release.awaits_queue = awaited_queue(job).is_some();
        self.report.is_done |= annotation(meta, annotations::REPORTED_AT).is_some()
            || annotation(meta, annotations::REPORT_REFUSED).is_some();
        self.report.keep_seconds = keep_seconds(job);
        self.end = terminal(job).map(|condition| {
            let finished = condition.last_transition_time.as_ref();
            JobEnd {
                is_successful: condition.type_ == "Complete",
                finished: finished.map_or(self.created, |time| time.0),
            }
        });
    }

    /// The Job with the time of its release. If the time was not written down, it is when the Job was first seen released: a
    /// launcher of an earlier release did not write it, and the Job controller may not have come to the Job.
    pub(super) fn released_job(&self) -> Job {
        let mut job: Job = self.job.open();
        if let Some(seen) = self.seen_released
            && verdict::released(&job).is_none()
        {
            let noted = job.metadata.annotations.get_or_insert_default();
            noted.insert(annotations::RELEASED_AT.to_owned(), seen.to_string());
        }
        job
    }

    /// The Job's time to live from now on, while it is still the long one. Kubernetes counts from the Job's end.
    pub(super) fn time_to_live(&self, now: Timestamp) -> Option<i32> {
        let ended = self.end.map_or(now, |end| end.finished);
        let age = now.duration_since(ended).as_secs().max(0);
        let age = i32::try_from(age).unwrap_or(i32::MAX);
        let keep = self.report.keep_seconds;
        keep.map(|keep| keep.saturating_add(age))
    }
}

fn stage_of(job: &Job) -> JobStage {
    if terminal(job).is_some() {
        JobStage::Over
    } else if !is_suspended(job) || annotation(&job.metadata, annotations::RELEASED_AT).is_some() {
        JobStage::InFlight
    } else if is_queued_by_cluster(job) {
        JobStage::Queued
    } else {
        JobStage::Held
    }
}

/// How long the Job is to be kept once its end is reported, while it is set to be kept for longer.
fn keep_seconds(job: &Job) -> Option<i32> {
    let spec = job.spec.as_ref()?;
    let set = u64::try_from(spec.ttl_seconds_after_finished?).ok()?;
    let keep = annotation(&job.metadata, annotations::KEEP_SECONDS)?;
    keep.parse()
        .ok()
        .filter(|_| set == KEPT_UNREPORTED.as_secs())
}
