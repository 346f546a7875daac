//! Shows an operation while it runs, in the job context and in the live stream. It does so in parallel with the
//! operation, at most once a second (contract 6.6, W-22). If an update fails, the next one contains its changes. The
//! operation itself publishes the last update.
//!
//! This module knows the tool's events, but not their effect.

use std::sync::Arc;
use std::time::Duration;

use job_contract::chain;
use platform::live::{LivePhase, LiveState, LiveViewPublisher};
use platform::{Platform, StepRef};
use run_log::Redactor;
use serde_json::{Map, Value, json};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use crate::context::RunContext;
use crate::terraform::event_state::EventState;
use crate::terraform::structured::Structured;

/// The minimum time between two updates.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// How long the end of an operation waits for an update in progress.
const LAST_UPDATE_TIMEOUT: Duration = Duration::from_secs(5);

/// The live view of one operation, from its beginning to its end.
#[derive(Debug)]
pub(crate) struct LiveView {
    phase: LivePhase,
    done: CancellationToken,
    /// It returns the live stream when it has ended.
    task: Option<AbortOnDropHandle<Option<LiveViewPublisher>>>,
}

/// The key of the job context for this phase.
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

/// Removes the secrets from the patch.
fn redacted(redactor: &Redactor, patch: Map<String, Value>) -> Map<String, Value> {
    let mut patch = Value::Object(patch);
    redactor.redact_json(&mut patch);
    match patch {
        Value::Object(patch) => patch,
        _ => unreachable!("redaction keeps the shape"),
    }
}

impl LiveView {
    /// Starts to show the state of the events. With a platform of files there is no update before the end. Without structured
    /// output there is none: a plan has no events then, and its empty list would look like a plan without changes.
    pub(crate) fn start(run: &RunContext<'_>, events: EventState, phase: LivePhase) -> Self {
        let is_shown = run.config.run.structured_output;
        let live = is_shown
            .then(|| run.connections.live_view_publisher(&run.job))
            .flatten();
        let done = CancellationToken::new();
        let is_terrakube = matches!(run.connections.platform, Platform::Terrakube(_));
        let needs_updates = live.is_some() || is_shown && is_terrakube;
        let task = needs_updates.then(|| {
            let show = Publisher {
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
    fn patch(&self, step_id: &str, changes: &Value, diagnostics: &Value) -> Map<String, Value> {
        context_patch(self.phase, step_id, changes, diagnostics)
    }

    /// Ends the view. One update of the job context contains the results of the step: the changes and the diagnostics,
    /// if the platform shows them, and the `additions` of this kind of step. An error is only logged, because the
    /// platform still shows the log.
    pub(crate) async fn publish(
        self,
        run: &RunContext<'_>,
        structured: &Structured,
        additions: Map<String, Value>,
    ) {
        let step = &run.step;
        let redactor = run.log.redactor();
        let (changes, diagnostics) = (structured.changes(), structured.diagnostics());
        let mut patch = additions;
        if run.config.run.structured_output {
            patch.extend(self.patch(&step.step_id, &changes, &diagnostics));
        }
        let patch = redacted(&redactor, patch);
        let publish = async {
            self.finish(&redactor, changes, diagnostics).await;
            run.connections.platform.merge_context(step, &patch).await
        };
        // The time after that is reserved for the log and the report.
        let deadline = run.while_saving(Duration::MAX);
        let published = tokio::select! {
            biased;
            published = publish => published.map_err(|error| chain(&error)),
            () = deadline.over() => Err("the time for saving is over".to_owned()),
        };
        if let Err(error) = published {
            warn!(error, "the job context could not be updated");
        }
    }

    /// Ends with this last update. An update in progress that takes too long is dropped with its task.
    async fn finish(self, redactor: &Redactor, changes: Value, diagnostics: Value) {
        self.done.cancel();
        let Some(task) = self.task else {
            return;
        };
        match timeout(LAST_UPDATE_TIMEOUT, task).await {
            Ok(Ok(Some(live))) => {
                live.publish(state(self.phase, redactor, changes, diagnostics));
                live.finish(LAST_UPDATE_TIMEOUT).await;
            }
            Ok(Ok(None)) => {}
            Ok(Err(error)) => warn!(%error, "the view of the run ended because of a defect"),
            Err(_) => debug!("the last view of the run was not published in time"),
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

struct Publisher {
    live: Option<LiveViewPublisher>,
    phase: LivePhase,
    events: EventState,
    platform: Platform,
    step: StepRef,
    redactor: Arc<Redactor>,
    failing: bool,
}

impl Publisher {
    async fn until(mut self, done: CancellationToken) -> Option<LiveViewPublisher> {
        loop {
            tokio::select! {
                biased;
                () = done.cancelled() => return self.live,
                () = self.events.changed() => {}
            }
            self.show().await;
            tokio::select! {
                () = done.cancelled() => return self.live,
                () = sleep(MIN_INTERVAL) => {}
            }
        }
    }

    async fn show(&mut self) {
        let (changes, diagnostics) = self.events.snapshot();
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
                    "the job context could not be updated, trying again with the next update"
                );
            }
        }
    }
}
