//! Publishes the live view of a plan or an apply to Redis (contract 7.4), or to the hub before it.
//!
//! A task of its own writes the latest state, at most once a second, to a stream that expires (W-24). A lost state is no
//! error: the job context has all changes in the end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use job_contract::chain;
use runtime::Deadline;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::{debug, warn};

use crate::java;
use crate::redis::{Redis, Retention};
use crate::terrakube::Terrakube;

/// The shortest time between two states.
const INTERVAL: Duration = Duration::from_secs(1);
/// Each entry has the whole state, so readers need only the newest ones.
const ENTRIES: u64 = 20;
/// The longest time that the platform lets a job run.
const EXPIRY: Duration = Duration::from_hours(6);
/// The largest state that is published.
const MAX_BYTES: usize = 8 * 1024 * 1024;
/// The largest one that a hub takes.
pub const MAX_RELAYED_BYTES: usize = 512 * 1024;
/// What a document has besides its lists, at most.
const KEYS: usize = 1024;
/// How long a hub may take. Then the next state is due.
const RELAY_TIMEOUT: Duration = Duration::from_secs(10);

/// The operation. Readers see a destroy as an apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LivePhase {
    Plan,
    Apply,
}

/// The state of an operation.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveState {
    pub phase: LivePhase,
    /// Changes, written as in the job context.
    pub changes: Vec<Value>,
    pub diagnostics: Vec<Value>,
}

/// The same as text, as a hub gets it.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LiveDocument {
    phase: LivePhase,
    changes: Box<RawValue>,
    diagnostics: Box<RawValue>,
}

impl LiveDocument {
    fn new(state: &LiveState) -> serde_json::Result<Self> {
        Ok(Self {
            phase: state.phase,
            changes: to_raw_value(&state.changes)?,
            diagnostics: to_raw_value(&state.diagnostics)?,
        })
    }

    /// Whether changes and diagnostics are lists.
    pub fn is_whole(&self) -> bool {
        [&self.changes, &self.diagnostics]
            .iter()
            .all(|list| list.get().starts_with('['))
    }
}

/// What the stream has of it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry<'d> {
    phase: LivePhase,
    changes: BTreeMap<&'d str, &'d RawValue>,
    job_diagnostics: BTreeMap<&'d str, &'d RawValue>,
}

/// Publishes the live view of one step.
#[derive(Debug)]
pub struct LiveViewPublisher {
    latest: watch::Sender<Option<Arc<LiveState>>>,
    publisher: JoinHandle<()>,
}

impl LiveViewPublisher {
    /// Starts the publishing task in the current runtime.
    pub fn start(stream: LiveStream) -> Self {
        Self::to(Destination::Redis(stream))
    }

    /// The same, through a hub's relay.
    pub fn relayed(terrakube: Terrakube) -> Self {
        Self::to(Destination::Hub(terrakube))
    }

    fn to(destination: Destination) -> Self {
        let (latest, states) = watch::channel(None);
        Self {
            latest,
            publisher: tokio::spawn(destination.publish_all(states)),
        }
    }

    /// Replaces the state to publish. Never waits.
    pub fn publish(&self, state: LiveState) {
        self.latest.send_replace(Some(Arc::new(state)));
    }

    /// Publishes the last state if that takes no longer than `limit`, and ends.
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

enum Destination {
    Redis(LiveStream),
    Hub(Terrakube),
}

impl Destination {
    async fn publish_all(self, mut states: watch::Receiver<Option<Arc<LiveState>>>) {
        let mut failing = false;
        let mut due = Instant::now();
        // The last state does not wait for the interval. `changed` fails when the sender is dropped and its last value was
        // seen.
        while states.changed().await.is_ok() {
            tokio::select! {
                () = sleep_until(due) => {}
                () = closed(&states) => {}
            }
            let Some(state) = states.borrow_and_update().clone() else {
                continue;
            };
            due = Instant::now() + INTERVAL;
            match self.add(&state).await {
                Ok(()) => failing = false,
                Err(error) => {
                    if !failing {
                        warn!(%error, "the live view of the run does not reach the platform");
                    }
                    failing = true;
                }
            }
        }
    }

    async fn add(&self, state: &LiveState) -> Result<(), String> {
        let document = LiveDocument::new(state).map_err(|error| chain(&error))?;
        match self {
            Self::Redis(stream) => stream.add(&document).await,
            Self::Hub(terrakube) => {
                let size = document.changes.get().len() + document.diagnostics.get().len();
                if size > MAX_RELAYED_BYTES - KEYS {
                    return Err(too_large(size));
                }
                let deadline = Deadline::after(RELAY_TIMEOUT);
                let shown = terrakube.show_changes(&document, &deadline).await;
                shown.map_err(|error| chain(&error))
            }
        }
    }
}

/// The stream of one step's live view in Redis.
#[derive(Debug)]
pub struct LiveStream {
    redis: Redis,
    key: Vec<u8>,
    job_id: String,
    step_id: String,
}

impl LiveStream {
    /// The stream of a step. Nothing is sent yet.
    pub fn new(redis: Redis, job_id: &str, step_id: &str) -> Self {
        Self {
            redis,
            key: java::encode(&format!("{job_id}-context")),
            job_id: job_id.to_owned(),
            step_id: step_id.to_owned(),
        }
    }

    /// Adds a state. Returns why that was not possible.
    pub async fn add(&self, state: &LiveDocument) -> Result<(), String> {
        let output = self.render(state).map_err(|error| chain(&error))?;
        if output.len() > MAX_BYTES {
            return Err(too_large(output.len()));
        }
        let field = |name: &str, value: &str| (java::encode(name), java::encode(value));
        let entry = vec![
            field("jobId", &self.job_id),
            field("stepId", &self.step_id),
            field("output", &output),
        ];
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

    fn render(&self, state: &LiveDocument) -> serde_json::Result<String> {
        let step = self.step_id.as_str();
        serde_json::to_string(&Entry {
            phase: state.phase,
            changes: BTreeMap::from([(step, &*state.changes)]),
            job_diagnostics: BTreeMap::from([(step, &*state.diagnostics)]),
        })
    }
}

fn too_large(bytes: usize) -> String {
    format!("it takes {bytes} bytes")
}

/// Waits until the sender is dropped.
async fn closed(states: &watch::Receiver<Option<Arc<LiveState>>>) {
    let mut states = states.clone();
    while states.changed().await.is_ok() {}
}
