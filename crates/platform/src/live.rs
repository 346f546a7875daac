//! The live picture of a plan or an apply in Redis (contract 7.4): the latest state wins, at most once a second, off
//! the path of the tool's output, in a stream that expires (W-24). Losing one is no fault: the job context has the
//! whole list in the end.

use std::sync::Arc;
use std::time::Duration;

use job_contract::chain;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::{debug, warn};

use crate::java;
use crate::redis::{Entry, Redis, Retention};

/// How often at most.
const INTERVAL: Duration = Duration::from_secs(1);
/// Each entry is the whole picture, so readers need the newest ones alone.
const ENTRIES: u64 = 20;
/// As long as the platform lets a job live.
const EXPIRY: Duration = Duration::from_hours(6);
/// More than this is not for a live picture.
const MAX_BYTES: usize = 8 * 1024 * 1024;

/// Which operation is seen. A destroy is an apply to its readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LivePhase {
    Plan,
    Apply,
}

/// One picture.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveState {
    pub phase: LivePhase,
    /// Changes as in the job context.
    pub changes: Vec<Value>,
    /// Diagnostics that belong to no change.
    pub diagnostics: Vec<Value>,
}

/// Publishes pictures of one step.
#[derive(Debug)]
pub struct LiveStream {
    latest: watch::Sender<Option<Arc<LiveState>>>,
    publisher: JoinHandle<()>,
}

impl LiveStream {
    /// Starts to publish, from a task of the present runtime.
    pub fn start(redis: Redis, job_id: &str, step_id: &str) -> Self {
        let (latest, pictures) = watch::channel(None);
        let stream = Stream {
            redis,
            key: java::encode(&format!("{job_id}-context")),
            job_id: job_id.to_owned(),
            step_id: step_id.to_owned(),
        };
        Self {
            latest,
            publisher: tokio::spawn(stream.publish_all(pictures)),
        }
    }

    /// The picture is this now. Never waits.
    pub fn publish(&self, state: LiveState) {
        self.latest.send_replace(Some(Arc::new(state)));
    }

    /// Publishes the last picture, if that is possible within `limit`, and ends.
    pub async fn finish(self, limit: Duration) {
        let Self { latest, publisher } = self;
        drop(latest);
        let abort = publisher.abort_handle();
        match timeout_at(Instant::now() + limit, publisher).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "the live view of the run ended because of a defect"),
            Err(_) => {
                abort.abort();
                debug!("the last live view of the run was not published in time");
            }
        }
    }
}

struct Stream {
    redis: Redis,
    key: Vec<u8>,
    job_id: String,
    step_id: String,
}

impl Stream {
    async fn publish_all(self, mut pictures: watch::Receiver<Option<Arc<LiveState>>>) {
        let mut failing = false;
        let mut due = Instant::now();
        // The end does not wait for its turn: `changed` fails once the sender is gone and its last value is seen.
        while pictures.changed().await.is_ok() {
            tokio::select! {
                () = sleep_until(due) => {}
                () = closed(&pictures) => {}
            }
            let Some(state) = pictures.borrow_and_update().clone() else {
                continue;
            };
            due = Instant::now() + INTERVAL;
            match self.add(&state).await {
                Ok(()) => failing = false,
                Err(error) => {
                    if !failing {
                        warn!(%error, "the live view of the run does not reach Redis");
                    }
                    failing = true;
                }
            }
        }
    }

    async fn add(&self, state: &LiveState) -> Result<(), String> {
        let output = self.render(state);
        if output.len() > MAX_BYTES {
            return Err(format!("it takes {} bytes", output.len()));
        }
        let field = |name: &str, value: &str| (java::encode(name), java::encode(value));
        let entry = Entry(vec![
            field("jobId", &self.job_id),
            field("stepId", &self.step_id),
            field("output", &output),
        ]);
        let retention = Retention {
            entries: Some(ENTRIES),
            expiry: Some(EXPIRY),
        };
        self.redis
            .append(&self.key, &[entry], retention)
            .await
            .map(drop)
            .map_err(|error| chain(&error))
    }

    fn render(&self, state: &LiveState) -> String {
        let step = &self.step_id;
        serde_json::json!({
            "phase": state.phase,
            "changes": { step: state.changes },
            "jobDiagnostics": { step: state.diagnostics },
        })
        .to_string()
    }
}

/// Waits until no more pictures will come.
async fn closed(pictures: &watch::Receiver<Option<Arc<LiveState>>>) {
    let mut pictures = pictures.clone();
    while pictures.changed().await.is_ok() {}
}
