//! Feeds the state machine of the watcher and carries out its effects. It decides nothing.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt as _, stream};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use kube::runtime::utils::StreamBackoff;
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio::sync::{Semaphore, mpsc};
use tracing::{info, warn};

use super::WatchSettings;
use super::message::{Diagnostic, Effect, Input, JobRef, Now, ObserverCall, Request};
use super::observer::RunObserver;
use super::state::WatchState;
use crate::{Cluster, report_seal};

/// Changes are gathered for this long before the release queue is reviewed.
const GATHER: Duration = Duration::from_millis(20);
/// Every run is looked at again this often, in case an event was missed.
const RESYNC: Duration = Duration::from_mins(5);
/// Requests at once, beside the two watches. Reports have as many slots of their own: they are as slow as the platform is,
/// and must not keep runs from their release.
pub(super) const AT_ONCE: usize = 25;
/// Objects in one page of a list. A page is decoded as a whole, managed fields and all, before anything of it is left out.
const PAGE: u32 = 50;

type WatchResult<K> = watcher::Result<watcher::Event<K>>;

/// Watches until dropped.
pub(super) async fn watch(
    cluster: &Cluster,
    settings: WatchSettings,
    observer: Arc<dyn RunObserver>,
) {
    let selector = settings.selector.clone();
    let mut state = WatchState::new(settings, cluster.max_in_flight);
    let (responses, mut inbox) = mpsc::unbounded_channel();
    let shell = Shell {
        cluster: cluster.clone(),
        observer,
        responses,
        requests: Arc::new(Semaphore::new(AT_ONCE)),
        reports: Arc::new(Semaphore::new(AT_ONCE)),
    };
    let mut jobs = std::pin::pin!(job_events(cluster, &selector).fuse());
    let mut pods = std::pin::pin!(pod_events(cluster, &selector).fuse());
    let mut resync = tokio::time::interval(RESYNC);
    resync.tick().await;
    let mut review_at: Option<tokio::time::Instant> = None;
    loop {
        let alarm = state.next_alarm().map(|at| {
            let pause = at.duration_since(cluster.now());
            tokio::time::Instant::now() + Duration::try_from(pause).unwrap_or_default()
        });
        let input = tokio::select! {
            Some(input) = jobs.next() => input,
            Some(input) = pods.next() => input,
            Some(input) = inbox.recv() => input,
            () = until(alarm) => Input::Alarm,
            () = until(review_at) => Input::QueueReview,
            _ = resync.tick() => Input::Resync,
        };
        review_at = match input {
            Input::QueueReview => None,
            _ => review_at.or_else(|| Some(tokio::time::Instant::now() + GATHER)),
        };
        let now = Now {
            server: cluster.now(),
            local: Instant::now(),
        };
        for effect in state.advance(input, now) {
            shell.carry_out(effect);
        }
    }
}

async fn until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Lists are consistent ones: for any older state, an API server may send all objects in one page.
fn watch_config(selector: &str) -> watcher::Config {
    watcher::Config::default().labels(selector).page_size(PAGE)
}

/// The watch of Jobs.
fn job_events(cluster: &Cluster, selector: &str) -> impl Stream<Item = Input> + Send + use<> {
    let events = watcher(cluster.jobs(), watch_config(selector)).modify(|job: &mut Job| {
        job.metadata.managed_fields = None;
        if let Some(spec) = &mut job.spec {
            spec.template = PodTemplateSpec::default();
        }
    });
    repeated(events)
        .inspect(log_refusals("Jobs", "no run is watched"))
        .filter_map(|event| {
            let event = event.ok().map(|event| Input::Job(Box::new(event)));
            futures_util::future::ready(event)
        })
}

/// The watch of pods. That pods may not be watched at all is an input.
fn pod_events(cluster: &Cluster, selector: &str) -> impl Stream<Item = Input> + Send + use<> {
    let key = cluster.report_key.clone();
    let events = watcher(cluster.pods(), watch_config(selector)).modify(move |pod: &mut Pod| {
        pod.metadata.managed_fields = None;
        report_seal::mark_unproven(pod, key.as_ref());
    });
    repeated(events)
        .inspect(log_refusals("pods", "runs are judged by their Jobs alone"))
        .filter_map(|event| {
            let input = match event {
                Ok(event) => Some(Input::Pod(Box::new(event))),
                Err(error) => is_forbidden(&error).then_some(Input::PodsForbidden),
            };
            futures_util::future::ready(input)
        })
}

/// Repeats a watch after its errors, with growing pauses. They are short again after the first object. The start of a list
/// is an event too, also of a list that is refused then. So it waits until the list has an answer.
fn repeated<K: Send>(
    events: impl Stream<Item = WatchResult<K>> + Send,
) -> impl Stream<Item = WatchResult<K>> + Send {
    let mut start = None;
    let events = events.map(move |event| match event {
        Ok(watcher::Event::Init) => {
            start = Some(event);
            [None, None]
        }
        Ok(_) => [start.take(), Some(event)],
        Err(_) => [None, Some(event)],
    });
    let events = events.flat_map(|events| stream::iter(events.into_iter().flatten()));
    StreamBackoff::new(events, watcher::DefaultBackoff::default())
}

/// Logs that these objects may not be watched, and what follows, once. Logs when they may be watched again.
fn log_refusals<K>(
    objects: &'static str,
    consequence: &'static str,
) -> impl FnMut(&WatchResult<K>) + Send {
    let mut is_refused = false;
    move |event| match event {
        Ok(_) if mem::take(&mut is_refused) => {
            info!("the right to watch {objects} is there again");
        }
        Err(error) if is_forbidden(error) && !mem::replace(&mut is_refused, true) => {
            warn!(%error, "no right to watch {objects}: {consequence}");
        }
        _ => {}
    }
}

fn is_forbidden(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code == 403,
        _ => false,
    }
}

/// Carries out effects.
struct Shell {
    cluster: Cluster,
    observer: Arc<dyn RunObserver>,
    responses: mpsc::UnboundedSender<Input>,
    requests: Arc<Semaphore>,
    reports: Arc<Semaphore>,
}

impl Shell {
    fn carry_out(&self, effect: Effect) {
        match effect {
            Effect::Call(call) => self.call(call),
            Effect::Request(job, request) => self.spawn(job, request),
            Effect::Diagnostic(line) => log(line),
            Effect::ForgetSecret(uid) => self.cluster.forget_stored(&uid),
        }
    }

    fn call(&self, call: ObserverCall) {
        match call {
            ObserverCall::Held(run) => self.observer.on_held(&run),
            ObserverCall::Forgotten(run) => self.observer.on_forgotten(&run),
            ObserverCall::Observation(run, observation) => {
                self.observer.on_observation(&run, &observation);
            }
            ObserverCall::Running(run, since) => self.observer.on_running(&run, since),
            ObserverCall::Counts(counts) => self.observer.on_counts(counts),
        }
    }

    /// Performs a request beside the others, as soon as there is a slot.
    fn spawn(&self, job: JobRef, request: Request) {
        let (cluster, observer) = (self.cluster.clone(), Arc::clone(&self.observer));
        let responses = self.responses.clone();
        let slots = if request.is_slow() {
            Arc::clone(&self.reports)
        } else {
            Arc::clone(&self.requests)
        };
        let job = Box::new(job);
        tokio::spawn(async move {
            if let Request::Heartbeat { pause } = &request {
                tokio::time::sleep(*pause).await;
            }
            let _slot = slots.acquire_owned().await;
            tokio::select! {
                // The watcher has stopped. The next one does the work.
                () = responses.closed() => {}
                response = request.perform(&job, &cluster, &*observer) => {
                    drop(responses.send(Input::Response(job.clone(), response)));
                }
            }
        });
    }
}

fn log(line: Diagnostic) {
    match line {
        Diagnostic::RunEnded(run, verdict) => info!(
            job = run.name,
            job_id = run.job_id,
            step_id = run.step_id,
            verdict = verdict.kind.name(),
            exit = verdict.outcome.code(),
            executor_reported = verdict.executor_reported(),
            sentence = verdict.sentence,
            "a run has ended"
        ),
        Diagnostic::NeverReported(run) => {
            warn!(%run, "the end of the run was not reported to the platform, and its Job is gone");
        }
        Diagnostic::StaysSuspended { run, error, advice } => {
            warn!(%run, error, advice, "a run stays suspended");
        }
    }
}
