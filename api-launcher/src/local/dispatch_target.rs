//! The target `process`: a durable queue in the data directory, oldest run first, and a limited number of executors. Runs of
//! one workspace may overlap: the lock of the tool protects the state.

mod index;
pub(crate) mod journal;
mod queue;
mod run;
pub(crate) mod settings;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::report::ReportKey;
use job_contract::{Document, Exit, JobData};
use platform::heartbeat::Beat;
use runtime::setting::is_wrong_place;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tracing::{error, info, warn};

use self::index::{Index, Turn};
use self::journal::Journal;
use self::queue::{Queue, RunKey, Stamp};
use self::settings::{ProcessSettings, RunsOnStop};
use crate::data::{DataError, attempt_lock};
use crate::dispatch::response::ResponseSent;
use crate::dispatch::{Acceptance, DispatchError, DispatchTarget, Readiness};
use crate::local::executor::Program;
use crate::local::report_verifier::ReportVerifier;
use crate::metrics::{Load, Metrics};
use crate::reporter::settings::PlatformSetupError;
use crate::reporter::{LocalReporter, PlatformReporter};
use crate::shutdown::Shutdown;

/// How often finished runs that are old enough are removed.
const EXPIRY: Duration = Duration::from_mins(10);

/// Why the target cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Platform(#[from] PlatformSetupError),
    #[error("could not open the queue in `{}`", path.display())]
    Queue {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("another launcher serves from `{}`", path.display())]
    InUse { path: PathBuf },
}

impl OpenError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Data(error) => error.exit(),
            Self::Queue { source, .. } if is_wrong_place(source) => Exit::BadConfiguration,
            Self::Platform(_) | Self::Queue { .. } | Self::InUse { .. } => Exit::Infrastructure,
        }
    }
}

/// The target.
#[derive(Debug)]
pub(crate) struct ProcessTarget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    queue: Queue,
    reporter: Arc<dyn PlatformReporter>,
    /// The data directory of the executors.
    data: PathBuf,
    program: Program,
    verifier: ReportVerifier,
    concurrency: usize,
    on_stop: RunsOnStop,
    index: Mutex<Index>,
    /// The heartbeats of runs that wait or run. An executor sends its own from its start.
    beats: Mutex<HashMap<RunKey, RunHeartbeat>>,
    /// How often in a row the platform has refused a request about a run.
    refusals: Mutex<HashMap<RunKey, usize>>,
    /// What the status page shows.
    journal: Arc<Journal>,
    wake: Notify,
    metrics: Metrics,
    shutdown: Shutdown,
    /// Held so that no other launcher uses the queue.
    _lock: std::fs::File,
}

impl ProcessTarget {
    /// Opens the queue and takes over what a former launcher has left in it.
    pub(crate) fn open(
        settings: ProcessSettings,
        key: Option<ReportKey>,
        metrics: Metrics,
        shutdown: Shutdown,
    ) -> Result<Self, OpenError> {
        let data = settings.data.create()?;
        let reporter: Arc<dyn PlatformReporter> = match settings.platform {
            Some(platform) => Arc::new(platform.open()?),
            None => Arc::new(LocalReporter::new(data.path())),
        };
        let root = data.launcher().join("queue");
        let fail = |source| OpenError::Queue {
            path: root.clone(),
            source,
        };
        let queue = Queue::open(root.clone()).map_err(fail)?;
        let lock = attempt_lock(&queue.lock_path())?.ok_or_else(|| OpenError::InUse {
            path: data.path().to_owned(),
        })?;
        queue.expire(now()).map_err(fail)?;
        let found = queue.scan().map_err(fail)?;
        let mut index = Index::of(&found);
        if !found.waiting.is_empty() {
            info!(runs = found.waiting.len(), "took over unfinished runs");
        }
        let mut beats = HashMap::new();
        let journal = Journal::new(settings.concurrency);
        for (at, key) in found.waiting {
            // A run whose document cannot be read is tried again and again, and the log says so.
            if let Ok(job) = queue.load(&key) {
                journal.accepted(&key, &job, at);
            }
            beats.extend(
                reporter
                    .start_heartbeat(&key.job_id())
                    .map(|beat| (key.clone(), RunHeartbeat::new(beat))),
            );
            index.admit(at, key);
        }
        Ok(Self {
            inner: Arc::new(Inner {
                reporter,
                data: data.path().to_owned(),
                queue,
                program: settings.program,
                verifier: ReportVerifier::new(key),
                concurrency: settings.concurrency,
                on_stop: settings.on_stop,
                index: Mutex::new(index),
                beats: Mutex::new(beats),
                refusals: Mutex::default(),
                journal: Arc::new(journal),
                wake: Notify::new(),
                metrics,
                shutdown,
                _lock: lock,
            }),
        })
    }

    /// What the status page shows.
    pub(crate) fn journal(&self) -> Arc<Journal> {
        Arc::clone(&self.inner.journal)
    }

    /// Stores the document once. A second delivery waits for the first and is a duplicate.
    async fn store(
        &self,
        job: Document,
        response_sent: ResponseSent,
    ) -> Result<Acceptance, DispatchError> {
        let key = RunKey::of(&job)
            .ok_or_else(|| DispatchError::Unavailable("the job has no number".to_owned()))?;
        let (at, begin) = loop {
            let turn = self.inner.index().turn(&key, now());
            match turn {
                Turn::Done => return Ok(Acceptance::Duplicate),
                // An error means that the other side is done, well or not: look again.
                Turn::Wait(mut end) => {
                    let _ = end.changed().await;
                }
                Turn::Write(at, begin) => break (at, begin),
            }
        };
        let (sender, stored) = oneshot::channel();
        let inner = Arc::clone(&self.inner);
        // A task of its own: the document is stored even if the sender hangs up.
        tokio::spawn(async move {
            let kept = inner.keep(&key, at, job).await;
            drop(begin);
            let kept_ok = kept.is_ok();
            if kept_ok {
                inner.start_heartbeat(&key);
            }
            let _ = sender.send(kept);
            if kept_ok {
                response_sent.wait().await;
                inner.admit(at, key).await;
            }
        });
        stored
            .await
            .map_err(|_| io::Error::other("the queue is gone"))
            .flatten()
            .map(|()| Acceptance::New)
            .map_err(|source| {
                error!(error = %source, "a dispatch could not be kept");
                DispatchError::Unavailable(format!("the queue cannot be written: {source}"))
            })
    }

    /// Returns whether a document could be stored now.
    async fn probe(&self) -> Readiness {
        let queue = self.inner.queue.clone();
        match blocking(move || queue.probe()).await {
            Ok(()) => Readiness::Ready,
            Err(error) => Readiness::NotReady(error.to_string()),
        }
    }

    /// Runs the queue until the launcher stops. Returns when no run is followed any more.
    async fn run_queue(&self) {
        let mut runs = JoinSet::new();
        let mut expiry = tokio::time::interval(EXPIRY);
        let inner = &self.inner;
        loop {
            while !inner.shutdown.graceful.is_cancelled()
                && let Some(key) = inner.next()
            {
                let slot = RunSlot {
                    inner: Arc::clone(inner),
                };
                runs.spawn(run::run_to_end(slot, key));
            }
            tokio::select! {
                biased;
                () = inner.shutdown.graceful.cancelled() => break,
                Some(_) = runs.join_next() => {}
                () = inner.wake.notified() => {}
                _ = expiry.tick() => inner.expire(),
            }
        }
        while runs.join_next().await.is_some() {}
    }
}

impl DispatchTarget for ProcessTarget {
    fn accept(
        &self,
        job: Document,
        response_sent: ResponseSent,
    ) -> BoxFuture<'_, Result<Acceptance, DispatchError>> {
        self.store(job, response_sent).boxed()
    }

    fn readiness(&self) -> BoxFuture<'_, Readiness> {
        self.probe().boxed()
    }

    fn load(&self) -> Option<Load> {
        Some(self.inner.index().load(now()))
    }

    fn work(&self) -> BoxFuture<'_, ()> {
        self.run_queue().boxed()
    }

    fn name(&self) -> &'static str {
        "process"
    }
}

/// One of the concurrent runs. Dropping it frees the slot.
#[derive(Debug)]
struct RunSlot {
    inner: Arc<Inner>,
}

/// The heartbeat of a run.
#[derive(Debug)]
struct RunHeartbeat {
    _beat: Beat,
    /// When its executor ended.
    ended: Option<Instant>,
}

impl RunHeartbeat {
    const fn new(beat: Beat) -> Self {
        Self {
            _beat: beat,
            ended: None,
        }
    }
}

impl Drop for RunSlot {
    fn drop(&mut self) {
        self.inner.index().ended();
        self.inner.wake.notify_one();
    }
}

impl Inner {
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beats(&self) -> MutexGuard<'_, HashMap<RunKey, RunHeartbeat>> {
        self.beats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refusals(&self) -> MutexGuard<'_, HashMap<RunKey, usize>> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the heartbeat of a run. It lasts until the platform knows the end.
    fn start_heartbeat(&self, key: &RunKey) {
        let beat = self.reporter.start_heartbeat(&key.job_id());
        self.beats()
            .extend(beat.map(|beat| (key.clone(), RunHeartbeat::new(beat))));
    }

    /// Records that the executor has ended. The platform does not know the end yet.
    fn mark_ended(&self, key: &RunKey) {
        if let Some(kept) = self.beats().get_mut(key) {
            kept.ended.get_or_insert_with(Instant::now);
        }
    }

    /// Records that another executor starts.
    fn mark_restarted(&self, key: &RunKey) {
        if let Some(kept) = self.beats().get_mut(key) {
            kept.ended = None;
        }
    }

    /// Stops the heartbeat of a run if the platform has not taken its end in time. Then the platform is free to end the job
    /// itself.
    fn stop_late_heartbeat(&self, key: &RunKey) {
        let timeout = self.reporter.report_patience();
        let mut beats = self.beats();
        let ended = beats.get(key).and_then(|kept| kept.ended);
        if ended.is_some_and(|ended| ended.elapsed() >= timeout) {
            beats.remove(key);
            warn!(run = %key, "the platform does not accept the report of its end: its heartbeat is stopped");
        }
    }

    fn next(&self) -> Option<RunKey> {
        self.index().start(self.concurrency)
    }

    async fn keep(&self, key: &RunKey, at: Stamp, job: Document) -> io::Result<()> {
        let (queue, name) = (self.queue.clone(), key.clone());
        let data = JobData::clone(&job);
        let stored = blocking(move || queue.store(&name, at, job.json())).await;
        if stored.is_ok() {
            self.journal.accepted(key, &data, at);
        }
        let mut index = self.index();
        match &stored {
            Ok(()) => index.accepted(key),
            Err(_) => index.forget(key),
        }
        stored
    }

    /// Marks the step as queued and lets it start. This happens after the response.
    async fn admit(&self, at: Stamp, key: RunKey) {
        let (queue, reporter, name) = (self.queue.clone(), Arc::clone(&self.reporter), key.clone());
        let queued = blocking(move || {
            let job = queue.load(&name)?;
            reporter.mark_queued(&job).map_err(io::Error::other)
        });
        if let Err(error) = queued.await {
            error!(run = %key, %error, "a queued step could not be shown to the platform");
        }
        self.index().admit(at, key);
        self.wake.notify_one();
    }

    fn expire(&self) {
        match self.queue.expire(now()) {
            Ok(expired) => {
                let mut index = self.index();
                for key in expired {
                    index.forget(&key);
                }
            }
            Err(error) => error!(%error, "finished runs could not be looked through"),
        }
    }
}

fn now() -> Stamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_micros()).unwrap_or(u64::MAX)
}

/// Runs blocking file operations on the threads for them.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)?
}
