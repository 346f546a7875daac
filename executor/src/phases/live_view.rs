//! Shows an operation while it runs: in the job context and in the live stream, from beside, once a second at most
//! (contract 6.6, W-22). Whatever does not get through is shown with the next picture, and the last word is the
//! operation's own.

use std::sync::Arc;
use std::time::Duration;

use job_contract::chain;
use platform::live::{LivePhase, LiveState, LiveStream};
use platform::{Platform, StepRef};
use run_log::Redactor;
use serde_json::{Map, Value, json};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use crate::context::RunContext;
use crate::terraform::event_state::EventState;

/// How often at most.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long the end of an operation waits for a picture that is under way.
const FAREWELL: Duration = Duration::from_secs(5);

/// Pictures of one operation, from its beginning to its end.
#[derive(Debug)]
pub(crate) struct Publication {
    phase: LivePhase,
    done: CancellationToken,
    /// Gives the live stream back when it is done.
    task: Option<AbortOnDropHandle<Option<LiveStream>>>,
}

/// What belongs to the phases.
const fn context_key(phase: LivePhase) -> &'static str {
    match phase {
        LivePhase::Plan => "planStructuredOutput",
        LivePhase::Apply => "applyStructuredOutput",
    }
}

fn context_patch(
    phase: LivePhase,
    step_id: &str,
    changes: &Value,
    diagnostics: &Value,
) -> Map<String, Value> {
    [
        (context_key(phase), changes),
        ("jobDiagnostics", diagnostics),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), json!({ step_id: value })))
    .collect()
}

/// The patch without secrets.
pub(crate) fn redacted(redactor: &Redactor, patch: Map<String, Value>) -> Map<String, Value> {
    let mut patch = Value::Object(patch);
    redactor.redact_json(&mut patch);
    match patch {
        Value::Object(patch) => patch,
        _ => unreachable!("redaction keeps the shape"),
    }
}

impl Publication {
    /// Begins to show the state of the events. Nobody looks at a platform of files before the end.
    pub(crate) fn start(run: &RunContext<'_>, events: EventState, phase: LivePhase) -> Self {
        let live = run.connections.live_picture(&run.job);
        let done = CancellationToken::new();
        let is_watched =
            live.is_some() || matches!(run.connections.platform, Platform::Terrakube(_));
        let task = is_watched.then(|| {
            let show = Show {
                live,
                phase,
                events,
                platform: run.connections.platform.clone(),
                step: run.step.clone(),
                redactor: run.log.redactor(),
                failing: false,
            };
            AbortOnDropHandle::new(tokio::spawn(show.until(done.clone())))
        });
        Self { phase, done, task }
    }

    /// The part of the job context that shows these changes.
    pub(crate) fn patch(
        &self,
        step_id: &str,
        changes: &Value,
        diagnostics: &Value,
    ) -> Map<String, Value> {
        context_patch(self.phase, step_id, changes, diagnostics)
    }

    /// Ends with this last picture. One that is under way and takes too long is dropped with its task.
    pub(crate) async fn finish(self, redactor: &Redactor, changes: Value, diagnostics: Value) {
        self.done.cancel();
        let Some(task) = self.task else {
            return;
        };
        match timeout(FAREWELL, task).await {
            Ok(Ok(Some(live))) => {
                live.publish(state(self.phase, redactor, changes, diagnostics));
                live.finish(FAREWELL).await;
            }
            Ok(Ok(None)) => {}
            Ok(Err(error)) => warn!(%error, "the picture of the run ended by a defect"),
            Err(_) => debug!("the last picture of the run was not published in time"),
        }
    }
}

fn state(phase: LivePhase, redactor: &Redactor, changes: Value, diagnostics: Value) -> LiveState {
    let list = |mut value: Value| {
        redactor.redact_json(&mut value);
        match value {
            Value::Array(list) => list,
            _ => Vec::new(),
        }
    };
    LiveState {
        phase,
        changes: list(changes),
        diagnostics: list(diagnostics),
    }
}

struct Show {
    live: Option<LiveStream>,
    phase: LivePhase,
    events: EventState,
    platform: Platform,
    step: StepRef,
    redactor: Arc<Redactor>,
    failing: bool,
}

impl Show {
    async fn until(mut self, done: CancellationToken) -> Option<LiveStream> {
        loop {
            tokio::select! {
                biased;
                () = done.cancelled() => return self.live,
                () = self.events.changed() => {}
            }
            self.show().await;
            tokio::select! {
                () = done.cancelled() => return self.live,
                () = sleep(INTERVAL) => {}
            }
        }
    }

    async fn show(&mut self) {
        let (changes, diagnostics) = self.events.picture();
        if let Some(live) = &self.live {
            let state = state(
                self.phase,
                &self.redactor,
                changes.clone(),
                diagnostics.clone(),
            );
            live.publish(state);
        }
        let patch = context_patch(self.phase, &self.step.step_id, &changes, &diagnostics);
        let patch = redacted(&self.redactor, patch);
        match self.platform.merge_context(&self.step, &patch).await {
            Ok(()) => self.failing = false,
            Err(error) if self.failing => debug!(%error, "the job context is not updated yet"),
            Err(error) => {
                self.failing = true;
                warn!(
                    error = chain(&error),
                    "the job context could not be updated, the next picture is tried again"
                );
            }
        }
    }
}
