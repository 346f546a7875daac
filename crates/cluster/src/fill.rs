//! Creates the Jobs that fill the store of providers, and no more of them than a hostile run may cause.

use job_contract::labels;
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt as _;
use kube::api::ListParams;
use manifest::fill;
use tracing::{debug, info, warn};
use verdict::terminal;

use super::submit::post;
use super::{Cluster, ClusterError, RunRef};

/// Unfinished Jobs at a time.
pub(super) const MOST_AT_A_TIME: usize = 4;
/// Jobs that are there, also ended ones. Each stays for its time to live, so this limits how many are made in that time.
const MOST_KEPT: usize = 40;

/// What became of a Job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FillJob {
    Created,
    /// An earlier run wanted the same packages.
    AlreadyThere,
    /// It is there, and could not fetch them.
    HasFailed,
    /// There are enough. A later run asks again.
    TooMany,
}

impl FillJob {
    pub(super) fn log(self, run: &RunRef, job: &Job) {
        let name = job.name_any();
        let packages = || {
            let packages: Vec<_> = fill::packages(job)
                .iter()
                .map(ToString::to_string)
                .collect();
            packages.join(", ")
        };
        match self {
            Self::Created => info!(
                %run,
                job = name,
                packages = packages(),
                "a Job fetches providers that the run lacked in the store"
            ),
            Self::AlreadyThere => debug!(%run, job = name, "a Job for the same providers is there"),
            Self::HasFailed => warn!(
                %run,
                job = name,
                packages = packages(),
                "a Job could not fetch providers that the run lacked in the store; `api-launcher explain` shows why"
            ),
            Self::TooMany => warn!(
                %run,
                "no Job was made for the providers that the run lacked in the store: there are too many such Jobs"
            ),
        }
    }
}

impl Cluster {
    pub(super) async fn create_fill_job(&self, job: &Job) -> Result<FillJob, ClusterError> {
        // Otherwise the end of many runs at a time would pass the limits.
        let _one_at_a_time = self.fills.lock().await;
        let (jobs, name) = (self.jobs(), job.name_any());
        let params = ListParams::default().labels(labels::FILL_SELECTOR);
        let there = self
            .request_with_retries("list the Jobs that fill the store", || jobs.list(&params))
            .await?;
        if let Some(known) = there.items.iter().find(|known| known.name_any() == name) {
            let has_failed = terminal(known).is_some_and(|end| end.type_ == "Failed");
            return Ok(if has_failed {
                FillJob::HasFailed
            } else {
                FillJob::AlreadyThere
            });
        }
        let unfinished = there.items.iter().filter(|job| terminal(job).is_none());
        if unfinished.count() >= MOST_AT_A_TIME || there.items.len() >= MOST_KEPT {
            return Ok(FillJob::TooMany);
        }
        let params = post();
        let created = self
            .request_with_retries("create a Job that fills the store", || {
                jobs.create(&params, job)
            })
            .await;
        match created {
            Ok(_) => Ok(FillJob::Created),
            Err(error) if error.is_already_exists() => Ok(FillJob::AlreadyThere),
            Err(error) => Err(error),
        }
    }
}
