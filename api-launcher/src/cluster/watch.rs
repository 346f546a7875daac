//! The watcher: follows every run by the events of its Job and pods, says where it stands, releases what waits,
//! completes or removes what a crash left, and reports the end of runs that cannot.
//!
//! Only one replica does this at a time ([`super::lease`]). It keeps no record: everything it must not forget
//! stands on the Jobs, and after a restart the first list tells it all again.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, Stream, StreamExt as _};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, Preconditions};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde_json::json;
use tokio::sync::{Semaphore, mpsc};
use tracing::{debug, info, warn};

use super::cache::{Change, JobFeed, Packed, Pods, trimmed_job};
use super::history::{EndedRun, HistoryLimits, surplus};
use super::reconcile::{Held, LOOK_AGAIN, REPORTERS_TURN, SUBMITTERS_TURN, next};
use super::submit::{KEPT_UNREPORTED, Settled, is_queued_by_cluster, trial_advice};
use super::{Cluster, ClusterError, RunKey, annotation, annotations, labels, testimony};
use crate::verdict::{
    self, Observation, Timeouts, Verdict, executor_started, is_suspended, newest, terminal,
};

/// Changes are gathered for so long before the queue is looked at.
const GATHER: Duration = Duration::from_millis(20);
/// Everything is looked at again this often, in case an event was missed.
const RESYNC: Duration = Duration::from_mins(5);
/// Requests the watcher makes at once, beside its two watches; and so many reports, which are slow when the platform is
/// and must not keep runs from their release.
const AT_ONCE: usize = 25;
/// Waiting that is no news may last so long before events are asked for.
const EVENTS_AFTER: SignedDuration = SignedDuration::from_secs(5);
/// Events of a run that still waits are asked for again after this long, then twice as long.
const EVENTS_AGAIN: Duration = Duration::from_secs(10);
/// Objects in one page of a list. A page is decoded as a whole, managed fields and all, before anything of it is left out.
const PAGE: u32 = 50;
/// A report that failed again and again is tried once in so long.
const REPORT_AT_LEAST: Duration = Duration::from_mins(1);
/// An executor on a node that may be lost is listened for so often.
const LISTEN_AGAIN: Duration = Duration::from_secs(5);
/// One that is not heard for so long after its last sign of life has expired is not there. A stock one shows one as often.
const SILENCE: Duration = Duration::from_secs(15);

/// What became of a report to the platform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// The platform knows.
    Yes,
    /// Not yet: another attempt may succeed.
    Later,
    /// It will not take the report, however often it is asked, and says why.
    Refused(String),
}

/// Whether an executor shows signs of life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Seen,
    /// None, where there would be some.
    None,
    /// It cannot be told here, or not at the moment.
    Unknown,
}

/// Who hears about runs.
pub trait RunObserver: Send + Sync + 'static {
    /// A suspended Job is there that was never released. Whether its run has to wait, and for what, is said later, and
    /// whoever accepted it may be dead.
    fn on_held(&self, _run: &RunKey) {}

    /// Nothing more will be said of a run that was held: its Job is gone, and nobody was told that it was accepted.
    fn on_forgotten(&self, _run: &RunKey) {}

    /// A run stands elsewhere than before. Called once for each change, and once for each run after a restart.
    fn on_observation(&self, run: &RunKey, observation: &Observation);

    /// The executor of a run is at work, for so long as far as that is known. Called after the observation says so.
    fn on_running(&self, _run: &RunKey, _since: Option<Duration>) {}

    /// Whether anything is heard of the executor of a run, whose node may be lost.
    fn listen<'a>(&'a self, _run: &'a RunKey) -> BoxFuture<'a, Life> {
        futures_util::future::ready(Life::Unknown).boxed()
    }

    /// A run ended and its executor did not say how: tell the platform, unless it knows already. This is called again
    /// later, one call after the other, until it is done or refused.
    ///
    /// A verdict may be `Completed`: an executor of another make ends with 0 only after it has reported.
    fn on_ended<'a>(&'a self, run: &'a RunKey, verdict: &'a Verdict) -> BoxFuture<'a, Told>;

    /// An executor has told the platform how its run ended, and there is more than it could know or deliver.
    fn on_more<'a>(&'a self, _run: &'a RunKey, _verdict: &'a Verdict) -> BoxFuture<'a, ()> {
        futures_util::future::ready(()).boxed()
    }

    /// How many runs stand where. Called after every change.
    fn on_counts(&self, _standings: RunCounts) {}
}

/// How many runs that are not over stand where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Suspended until the launcher releases them.
    pub held: usize,
    /// Suspended until a queue of the cluster does.
    pub queued: usize,
    /// Released.
    pub in_flight: usize,
}

/// How the watcher behaves.
#[derive(Clone, Debug)]
pub struct WatchSettings {
    pub timeouts: Timeouts,
    pub history: HistoryLimits,
    /// A Job whose job data is missing for so long after it was first seen has lost its submitter.
    pub hopeless_after: Duration,
    /// A report that failed is tried again after this long, and less and less often from then on.
    pub report_again: Duration,
}

impl Default for WatchSettings {
    fn default() -> Self {
        Self {
            timeouts: Timeouts::default(),
            history: HistoryLimits::default(),
            hopeless_after: Duration::from_mins(1),
            report_again: Duration::from_secs(5),
        }
    }
}

/// What a request of the watcher came to.
enum Message {
    /// Events, and after the end of a run its pods as they are now.
    Told(String, String, Vec<Event>, Vec<Pod>),
    Settled(String, String, Result<Settled, ClusterError>),
    Reported(String, String, Told),
    GoneReported(String, Told),
    /// The Job may go now, or could not be told so.
    Expires(String, String),
    PodEvent(String, String, Life),
    /// The Job ends with what outlived its executor, or could not be told so.
    Stopped(String, String, bool),
    Removed(String),
}

/// A run whose Job is gone before its end was reported.
struct GoneRun {
    key: RunKey,
    verdict: Verdict,
    /// Not before this is it reported; `None` while it is being reported.
    due: Option<Timestamp>,
    pauses: Box<ExponentialBackoff>,
    since: Instant,
}

/// Listening for the executor of a run whose node may be lost.
#[derive(Default)]
struct Listening {
    /// It is listened for, or will be in a moment.
    asking: bool,
    heard: Option<Life>,
    silent_since: Option<Instant>,
}

/// Pauses between attempts to report: further and further apart, and not those of many runs at the same time.
fn pauses(first: Duration) -> ExponentialBackoff {
    ExponentialBuilder::default()
        .with_min_delay(first)
        .with_max_delay(REPORT_AT_LEAST.max(first))
        .with_jitter()
        .without_max_times()
        .build()
}

/// What is known of one run.
struct TrackedRun {
    key: RunKey,
    uid: String,
    job: Packed,
    standing: JobStage,
    created: Timestamp,
    first_seen: Instant,
    /// When it was first seen released, by the API server's clock.
    seen_released: Option<Timestamp>,
    /// What the observer was told last.
    told: Option<Observation>,
    events: Vec<Packed>,
    events_asked: u32,
    /// Events are being fetched; `true`: nothing is said before they are there.
    asking: Option<bool>,
    /// The events after the end have been asked for.
    events_final: bool,
    events_due: Option<Instant>,
    /// The platform knows how it ended.
    reported: bool,
    reporting: bool,
    /// There is one series of attempts to report a run, whatever else makes the watcher look at it: this is its next.
    report_due: Option<Timestamp>,
    report_pauses: Option<Box<ExponentialBackoff>>,
    /// How long the Job is to be kept once its end is reported, while it is still set to be kept for longer.
    keep_seconds: Option<i32>,
    listening: Option<Box<Listening>>,
    /// What outlived the executor is stopped.
    stopping: bool,
    /// Not before this is a suspended Job without job data looked at again.
    settle_due: Option<Instant>,
    /// Why it stays suspended stands in the log.
    stuck: bool,
    /// Its launcher reports it done; see [`annotations::NOTHING_TO_RUN`].
    nothing_to_run: bool,
    outcome: Option<(bool, Timestamp)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum JobStage {
    /// Suspended, never released.
    Held,
    /// For the cluster's queue to release.
    Queued,
    InFlight,
    Over,
}

impl Cluster {
    /// Watches until dropped.
    pub async fn watch(&self, settings: WatchSettings, observer: Arc<dyn RunObserver>) {
        let jobs = events_of(watcher(self.jobs(), watch_config()).modify(|job| {
            job.metadata.managed_fields = None;
            if let Some(spec) = &mut job.spec {
                spec.template = PodTemplateSpec::default();
            }
        }));
        let key = self.report_key.clone();
        let pods = heard_of(watcher(self.pods(), watch_config()).modify(|pod| {
            pod.metadata.managed_fields = None;
            testimony::weigh(pod, key.as_ref());
        }));
        let (notes, inbox) = mpsc::unbounded_channel();
        let mut state = Watch {
            cluster: self.clone(),
            settings,
            observer,
            feed: JobFeed::default(),
            pods: Pods::default(),
            runs: HashMap::new(),
            due: BTreeSet::new(),
            settling: HashSet::new(),
            removing: HashSet::new(),
            orphans: HashMap::new(),
            listed: false,
            sight: PodAccess::NotYet,
            notes,
            slots: Arc::new(Semaphore::new(AT_ONCE)),
            reports: Arc::new(Semaphore::new(AT_ONCE)),
        };
        Box::pin(state.follow(jobs, pods, inbox)).await;
    }
}

/// Lists are consistent ones: for any older state, an API server may send all objects in one page.
fn watch_config() -> watcher::Config {
    watcher::Config::default()
        .labels(labels::SELECTOR)
        .page_size(PAGE)
}

/// Errors of a watch are retried by it, with growing pauses.
fn events_of<K>(
    events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
) -> impl Stream<Item = watcher::Event<K>> + Send
where
    K: Send + Sync + Clone + fmt::Debug,
{
    events
        .default_backoff()
        .filter_map(|event| futures_util::future::ready(event.ok()))
}

/// What the watch of pods says.
enum PodEvent {
    Event(Box<watcher::Event<Pod>>),
    /// The launcher's Role has no pods, as the one of Terrakube's documentation.
    Refused,
}

/// As [`events_of`], but whether pods may be watched at all is not for the watch alone to know.
fn heard_of(
    events: impl Stream<Item = watcher::Result<watcher::Event<Pod>>> + Send,
) -> impl Stream<Item = PodEvent> + Send {
    events.default_backoff().filter_map(|event| {
        let heard = match event {
            Ok(event) => Some(PodEvent::Event(Box::new(event))),
            Err(error) => is_forbidden(&error).then_some(PodEvent::Refused),
        };
        futures_util::future::ready(heard)
    })
}

fn is_forbidden(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code == 403,
        _ => false,
    }
}

/// What can be seen of pods.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PodAccess {
    /// The first list is not complete: no run can be judged.
    NotYet,
    /// Pods may not be looked at: runs are judged by their Jobs alone.
    Refused,
    Listed,
}

struct Watch {
    cluster: Cluster,
    settings: WatchSettings,
    observer: Arc<dyn RunObserver>,
    feed: JobFeed,
    pods: Pods,
    /// Boxed, so that the room a growing table keeps free costs little.
    runs: HashMap<String, Box<TrackedRun>>,
    /// When runs are to be looked at though nothing happened.
    due: BTreeSet<(Timestamp, String)>,
    /// Jobs whose release is under way.
    settling: HashSet<String>,
    /// Jobs that the history limits remove.
    removing: HashSet<String>,
    /// Runs whose Job is gone and whose end has still to be reported, by UID.
    orphans: HashMap<String, GoneRun>,
    /// The first list of Jobs is complete: before, nothing is known about slots.
    listed: bool,
    sight: PodAccess,
    notes: mpsc::UnboundedSender<Message>,
    slots: Arc<Semaphore>,
    reports: Arc<Semaphore>,
}

impl Watch {
    async fn follow(
        &mut self,
        jobs: impl Stream<Item = watcher::Event<Job>>,
        pods: impl Stream<Item = PodEvent>,
        mut inbox: mpsc::UnboundedReceiver<Message>,
    ) {
        let mut jobs = std::pin::pin!(jobs.fuse());
        let mut pods = std::pin::pin!(pods.fuse());
        let mut resync = tokio::time::interval(RESYNC);
        resync.tick().await;
        let mut gathered: Option<tokio::time::Instant> = None;
        loop {
            let alarm = self.alarm();
            let gathering = async {
                match gathered {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(event) = jobs.next() => self.on_job_event(event),
                Some(heard) = pods.next() => match heard {
                    PodEvent::Event(event) => self.on_pod_event(*event),
                    PodEvent::Refused => self.on_pods_refused(),
                },
                Some(note) = inbox.recv() => self.on_note(note),
                () = alarm => self.on_alarm(),
                () = gathering => {
                    gathered = None;
                    self.release_next();
                    self.trim_history();
                    continue;
                }
                _ = resync.tick() => self.look_at_all(),
            }
            gathered.get_or_insert_with(|| tokio::time::Instant::now() + GATHER);
        }
    }

    /// Sleeps until the first run is due.
    fn alarm(&self) -> BoxFuture<'static, ()> {
        let Some((at, _)) = self.due.first() else {
            return std::future::pending().boxed();
        };
        let pause = at.duration_since(self.cluster.now());
        tokio::time::sleep(Duration::try_from(pause).unwrap_or_default()).boxed()
    }

    fn on_alarm(&mut self) {
        let now = self.cluster.now();
        while self.due.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, name)) = self.due.pop_first() else {
                break;
            };
            self.look(&name);
        }
        let orphans: Vec<String> = self
            .orphans
            .iter()
            .filter(|(_, orphan)| orphan.due.is_some_and(|due| due <= now))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in orphans {
            self.report_orphan(&uid);
        }
    }

    /// The moment after a pause; one beyond all time is the last there is.
    fn after(&self, pause: Duration) -> Timestamp {
        SignedDuration::try_from(pause)
            .ok()
            .and_then(|pause| self.cluster.now().checked_add(pause).ok())
            .unwrap_or(Timestamp::MAX)
    }

    fn wake(&mut self, name: &str, pause: Duration) {
        let at = self.after(pause);
        self.due.insert((at, name.to_owned()));
    }

    fn look_at_all(&mut self) {
        let names: Vec<String> = self.runs.keys().cloned().collect();
        for name in names {
            self.look(&name);
        }
    }

    fn on_job_event(&mut self, event: watcher::Event<Job>) {
        let done = matches!(event, watcher::Event::InitDone);
        for change in self.feed.changes(event) {
            match change {
                Change::Seen(job) => self.on_job(&job),
                Change::Gone(name) => self.on_gone(&name),
            }
        }
        if done && !self.listed {
            self.listed = true;
            self.look_at_all();
        }
    }

    fn on_pod_event(&mut self, event: watcher::Event<Pod>) {
        let done = matches!(event, watcher::Event::InitDone);
        for job in self.pods.apply(event) {
            self.look(&job);
        }
        if done && self.sight != PodAccess::Listed {
            self.sight = PodAccess::Listed;
            self.look_at_all();
        }
    }

    fn on_pods_refused(&mut self) {
        if self.sight != PodAccess::Refused {
            warn!("no right to look at pods: runs are judged by their Jobs alone");
            self.sight = PodAccess::Refused;
            self.look_at_all();
        }
    }

    fn on_job(&mut self, job: &Job) {
        let (Some(key), Some(uid)) = (RunKey::of(&job.metadata), job.metadata.uid.clone()) else {
            return;
        };
        let name = key.name.clone();
        let trimmed = trimmed_job(job);
        let packed = Packed::of(&trimmed);
        let mut entry = self
            .runs
            .remove(&name)
            .map(|entry| *entry)
            .filter(|entry| entry.uid == uid)
            .unwrap_or_else(|| TrackedRun::new(key, uid, packed.clone()))
            .with(&trimmed, packed);
        if entry.standing == JobStage::Held {
            self.observer.on_held(&entry.key);
        }
        if is_suspended(&trimmed) {
            entry.seen_released = None;
        } else {
            entry
                .seen_released
                .get_or_insert_with(|| self.cluster.now());
        }
        self.runs.insert(name.clone(), Box::new(entry));
        self.look(&name);
    }

    fn on_gone(&mut self, name: &str) {
        let Some(entry) = self.runs.remove(name) else {
            return;
        };
        let pods = self.pods.of(name, &entry.uid);
        self.pods.forget(name);
        self.removing.remove(&entry.uid);
        self.cluster.forget_stored(&entry.uid);
        // A Job that never got its job data was never accepted: nobody waits for it.
        let unaccepted = entry.standing == JobStage::Held && self.settling.remove(&entry.uid);
        if entry.reported || unaccepted {
            self.observer.on_forgotten(&entry.key);
            return;
        }
        let job: Job = entry.job.open();
        let events: Vec<Event> = entry.events.iter().map(Packed::open).collect();
        let verdict = verdict::gone(&job, &pods, &events);
        let observation = Observation::Ended(Box::new(verdict.clone()));
        self.observer.on_observation(&entry.key, &observation);
        if verdict.spoke() {
            return;
        }
        if self.is_stale(&entry) {
            warn!(run = %entry.key, "the platform was never told how the run ended, and its Job is gone");
            self.observer.on_forgotten(&entry.key);
            return;
        }
        let first = self.settings.report_again;
        let due = entry.report_due.filter(|due| *due > self.cluster.now());
        let orphan = GoneRun {
            key: entry.key,
            verdict,
            due,
            pauses: entry
                .report_pauses
                .unwrap_or_else(|| Box::new(pauses(first))),
            since: Instant::now(),
        };
        self.orphans.insert(entry.uid.clone(), orphan);
        match due {
            // What is under way comes back as a note.
            _ if entry.reporting => {}
            Some(due) => drop(self.due.insert((due, String::new()))),
            None => self.report_orphan(&entry.uid),
        }
    }

    /// Whether the Job has gone because it had been kept for its report for as long as that may take.
    fn is_stale(&self, entry: &TrackedRun) -> bool {
        let kept = SignedDuration::try_from(KEPT_UNREPORTED).unwrap_or(SignedDuration::MAX);
        entry
            .outcome
            .is_some_and(|(_, finished)| self.cluster.now().duration_since(finished) >= kept)
    }

    /// Looks at a run, tells what is new, and does what its standing asks for.
    fn look(&mut self, name: &str) {
        if !self.listed || self.sight == PodAccess::NotYet {
            return;
        }
        let Some(entry) = self.runs.get(name) else {
            return;
        };
        let job = entry.released_job();
        let pods = self.pods.of(name, &entry.uid);
        let events: Vec<Event> = entry.events.iter().map(Packed::open).collect();
        let now = self.cluster.now();
        let observation = recorded(&job)
            .or_else(|| self.unseen(&job))
            .unwrap_or_else(|| {
                verdict::observe(&job, &pods, &events, now, &self.settings.timeouts)
            });
        let observation = self.while_in_touch(name, observation, &pods, now);
        if self.ask_for_events(name, &observation, &pods, now) {
            return;
        }
        let Some(entry) = self.runs.get_mut(name) else {
            return;
        };
        // Whether it has to wait for its turn is known when the queue was looked at.
        if entry.standing == JobStage::Held && !matches!(observation, Observation::Ended(_)) {
            return;
        }
        if entry.tell(&observation, &*self.observer) && observation == Observation::Running {
            let started = newest(&pods).and_then(executor_started);
            let since = started.map(|at| Duration::try_from(now.duration_since(at)));
            let since = since.map(Result::unwrap_or_default);
            self.observer.on_running(&entry.key, since);
        }
        match observation {
            Observation::Waiting(wait) => {
                if let Some(until) = wait.until {
                    self.due.insert((until.max(now), name.to_owned()));
                }
            }
            Observation::Running => {}
            Observation::Ended(verdict) => {
                self.stop_what_lingers(name, &verdict, &pods, now);
                self.on_end(name, *verdict);
            }
        }
    }

    /// Ends the Job of a run that is over, whoever has been told of that, once a container has outlived its executor for too
    /// long. With its pod the Job loses what tells how the run ended, which is therefore written onto it.
    fn stop_what_lingers(&mut self, name: &str, verdict: &Verdict, pods: &[Pod], now: Timestamp) {
        let Some(entry) = self.runs.get_mut(name) else {
            return;
        };
        let is_over = entry.standing == JobStage::Over;
        let lingers = verdict::lingers(pods, &self.settings.timeouts);
        let Some((until, fact)) = lingers.filter(|_| verdict.job_over && !is_over) else {
            return;
        };
        if until > now {
            self.due.insert((until, name.to_owned()));
            return;
        }
        if std::mem::replace(&mut entry.stopping, true) {
            return;
        }
        let mut verdict = verdict.clone();
        if !verdict.evidence.contains(&fact) {
            verdict.evidence.push(fact);
        }
        let (name, uid, cluster) = (name.to_owned(), entry.uid.clone(), self.cluster.clone());
        self.spawn(async move {
            let stopped = cluster.stop(&name, &uid, &verdict).await;
            if let Err(error) = &stopped {
                warn!(run = name, %error, "what outlived an executor could not be stopped, trying again");
            }
            Message::Stopped(name, uid, stopped.is_ok())
        });
    }

    fn on_stopped(&mut self, name: &str, uid: &str, done: bool) {
        let entry = self.runs.get_mut(name).filter(|entry| entry.uid == uid);
        if let Some(entry) = entry.filter(|_| !done) {
            entry.stopping = false;
            self.wake(name, LOOK_AGAIN);
        }
    }

    /// A run whose pods may not be looked at is at work from its release until its Job is over: that no pod is seen says
    /// nothing, and nobody may be given up for it.
    fn unseen(&self, job: &Job) -> Option<Observation> {
        let at_work = terminal(job).is_none() && !is_suspended(job);
        (self.sight == PodAccess::Refused && at_work).then_some(Observation::Running)
    }

    /// What is observed of a run, unless its node is lost. Kubernetes then shows a run that goes on, for minutes or for
    /// ever. A node that only cannot be reached may have an executor at work: it is listened for, where it can be heard;
    /// elsewhere it has the time until Kubernetes gives its pod up.
    fn while_in_touch(
        &mut self,
        name: &str,
        observation: Observation,
        pods: &[Pod],
        now: Timestamp,
    ) -> Observation {
        let Some(entry) = self.runs.get_mut(name) else {
            return observation;
        };
        let over = matches!(observation, Observation::Ended(_));
        let may_be = !over && entry.standing == JobStage::InFlight;
        // One that is gone looks like one that is overdue.
        let there = if may_be && verdict::suspect(pods).is_some() {
            self.pods.present_of(name, &entry.uid)
        } else {
            Vec::new()
        };
        let suspect = verdict::suspect(&there);
        let Some(suspect) = suspect else {
            entry.listening = None;
            return observation;
        };
        let overdue = suspect.is_overdue(now);
        if let Some(from) = suspect.overdue_from.filter(|from| *from > now) {
            self.due.insert((from, name.to_owned()));
        }
        if !overdue && !suspect.is_unready() {
            entry.listening = None;
            return observation;
        }
        let listening = entry.listening.get_or_insert_default();
        let silent = listening
            .silent_since
            .is_some_and(|since| since.elapsed() >= SILENCE);
        if silent || (overdue && listening.heard == Some(Life::Unknown)) {
            return Observation::Ended(Box::new(suspect.verdict(&entry.job.open())));
        }
        if !std::mem::replace(&mut listening.asking, true) {
            let pause = listening.heard.map_or(Duration::ZERO, |_| LISTEN_AGAIN);
            let (observer, key) = (Arc::clone(&self.observer), entry.key.clone());
            let (name, uid) = (name.to_owned(), entry.uid.clone());
            self.spawn_within(&self.reports, pause, async move {
                let life = observer.listen(&key).await;
                Message::PodEvent(name, uid, life)
            });
        }
        observation
    }

    fn on_heard(&mut self, name: &str, uid: &str, life: Life) {
        let Some(entry) = self.runs.get_mut(name).filter(|entry| entry.uid == uid) else {
            return;
        };
        let Some(listening) = &mut entry.listening else {
            return;
        };
        listening.asking = false;
        listening.heard = Some(life);
        listening.silent_since = match life {
            Life::None => listening.silent_since.or_else(|| Some(Instant::now())),
            Life::Seen | Life::Unknown => None,
        };
        self.look(name);
    }

    /// Whether the next step has to wait for events.
    fn ask_for_events(
        &mut self,
        name: &str,
        observation: &Observation,
        pods: &[Pod],
        now: Timestamp,
    ) -> bool {
        let Some(entry) = self.runs.get_mut(name) else {
            return false;
        };
        if entry.reported || !verdict::wants_events(observation) {
            return false;
        }
        if let Observation::Waiting(wait) = observation
            && !wait.reason.is_news()
            && now.duration_since(wait.since) < EVENTS_AFTER
        {
            // The same moment, however often the run is looked at until then.
            let at = wait.since.checked_add(EVENTS_AFTER).unwrap_or(now);
            self.due.insert((at, name.to_owned()));
            return false;
        }
        let over = matches!(observation, Observation::Ended(_));
        if let Some(hold) = entry.asking {
            return hold || over;
        }
        let due = entry.events_due.is_none_or(|due| due <= Instant::now());
        if (over && entry.events_final) || (!over && !due) {
            return false;
        }
        let hold = over || entry.events_asked == 0;
        entry.asking = Some(hold);
        entry.events_final = over;
        let pause = EVENTS_AGAIN.saturating_mul(1 << entry.events_asked.min(5));
        entry.events_asked += 1;
        entry.events_due = Some(Instant::now() + pause);
        let job: Job = entry.job.open();
        let (uid, name) = (entry.uid.clone(), name.to_owned());
        if !over {
            self.wake(&name, pause);
        }
        let known: Vec<Pod> = pods.to_vec();
        let cluster = self.cluster.clone();
        self.spawn(async move {
            // The two watches are not in step: the Job may be seen to be over before the end of its pod is.
            let pods = if over {
                cluster.pods_of(&job).await.unwrap_or_default()
            } else {
                Vec::new()
            };
            let events = cluster.events_of(&job, &known).await.unwrap_or_default();
            Message::Told(name, uid, events, pods)
        });
        hold
    }

    fn spawn(&self, work: impl Future<Output = Message> + Send + 'static) {
        self.spawn_within(&self.slots, Duration::ZERO, work);
    }

    fn spawn_report(&self, work: impl Future<Output = Message> + Send + 'static) {
        self.spawn_within(&self.reports, Duration::ZERO, work);
    }

    fn spawn_within(
        &self,
        slots: &Arc<Semaphore>,
        pause: Duration,
        work: impl Future<Output = Message> + Send + 'static,
    ) {
        let (slots, notes) = (Arc::clone(slots), self.notes.clone());
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            let _slot = slots.acquire_owned().await;
            tokio::select! {
                // Whoever watched has stopped: the next one does the work.
                () = notes.closed() => {}
                note = work => drop(notes.send(note)),
            }
        });
    }

    fn on_end(&mut self, name: &str, verdict: Verdict) {
        let now = self.cluster.now();
        let Some(entry) = self.runs.get_mut(name) else {
            return;
        };
        if entry.reporting {
            return;
        }
        let (cluster, observer) = (self.cluster.clone(), Arc::clone(&self.observer));
        let (key, uid, name) = (entry.key.clone(), entry.uid.clone(), name.to_owned());
        let keep = entry.time_to_live(now);
        if entry.reported {
            // Its verdict was noted in one request with the time the Job is kept, which may have failed. The verdict on a run
            // that was given up still says that its Job is not over.
            let is_over = verdict.job_over || entry.standing == JobStage::Over;
            if keep.is_some() && is_over {
                entry.reporting = true;
                self.spawn(async move {
                    cluster.note_reported(&key, &uid, keep).await;
                    Message::Expires(name, uid)
                });
            }
            return;
        }
        if let Some(due) = entry.report_due.filter(|due| *due > now) {
            self.due.insert((due, name));
            return;
        }
        entry.reporting = true;
        if verdict.spoke() && verdict.job_over {
            if verdict.wants_more() {
                self.spawn_report(async move {
                    let verdict = cluster.with_lock_holder(verdict).await;
                    observer.on_more(&key, &verdict).await;
                    cluster.note_verdict(&key, &uid, &verdict, keep).await;
                    Message::Reported(name, uid, Told::Yes)
                });
                return;
            }
            // With a pod that is going its words go too, and nobody could be told any more.
            let going = self.pods.are_going(&name, &uid);
            self.spawn(async move {
                if going {
                    cluster.note_verdict(&key, &uid, &verdict, keep).await;
                } else {
                    cluster.note_reported(&key, &uid, keep).await;
                }
                Message::Reported(name, uid, Told::Yes)
            });
            return;
        }
        self.spawn_report(async move {
            let told = cluster
                .conclude(&key, &uid, &verdict, keep, &*observer)
                .await;
            Message::Reported(name, uid, told)
        });
    }

    fn report_orphan(&mut self, uid: &str) {
        let Some(orphan) = self.orphans.get_mut(uid) else {
            return;
        };
        orphan.due = None;
        let observer = Arc::clone(&self.observer);
        let (key, verdict) = (orphan.key.clone(), orphan.verdict.clone());
        let uid = uid.to_owned();
        let cluster = self.cluster.clone();
        self.spawn_report(async move {
            let verdict = cluster.with_lock_holder(verdict).await;
            let told = observer.on_ended(&key, &verdict).await;
            Message::GoneReported(uid, told)
        });
    }

    fn on_note(&mut self, note: Message) {
        match note {
            Message::Told(name, uid, events, pods) => {
                for pod in pods {
                    self.pods.apply(watcher::Event::Apply(pod));
                }
                if let Some(entry) = self.runs.get_mut(&name).filter(|entry| entry.uid == uid) {
                    entry.asking = None;
                    entry.events = events.iter().map(Packed::of).collect();
                    self.look(&name);
                }
            }
            Message::Reported(name, uid, told) => self.on_reported(&name, &uid, &told),
            Message::GoneReported(uid, told) => self.on_orphan_reported(&uid, &told),
            Message::Expires(name, uid) => self.on_reported(&name, &uid, &Told::Yes),
            Message::PodEvent(name, uid, life) => self.on_heard(&name, &uid, life),
            Message::Stopped(name, uid, done) => self.on_stopped(&name, &uid, done),
            Message::Settled(name, uid, settled) => self.on_settled(&name, &uid, settled),
            Message::Removed(uid) => {
                self.removing.remove(&uid);
            }
        }
    }

    fn on_reported(&mut self, name: &str, uid: &str, told: &Told) {
        let first = self.settings.report_again;
        let Some(entry) = self.runs.get_mut(name).filter(|entry| entry.uid == uid) else {
            // Its Job went meanwhile.
            self.on_orphan_reported(uid, told);
            return;
        };
        entry.reporting = false;
        if *told != Told::Later {
            entry.reported = true;
            // Unless the Job is seen to have its own time to live by then, it is told again.
            if entry.keep_seconds.is_some() {
                self.wake(name, LOOK_AGAIN);
            }
            return;
        }
        let pauses = entry
            .report_pauses
            .get_or_insert_with(|| Box::new(pauses(first)));
        let pause = pauses.next().unwrap_or(REPORT_AT_LEAST);
        let due = self.after(pause);
        if let Some(entry) = self.runs.get_mut(name) {
            entry.report_due = Some(due);
        }
        self.due.insert((due, name.to_owned()));
    }

    fn on_orphan_reported(&mut self, uid: &str, told: &Told) {
        let Some(orphan) = self.orphans.get_mut(uid) else {
            return;
        };
        let lasted = orphan.since.elapsed() >= KEPT_UNREPORTED;
        if lasted && *told == Told::Later {
            warn!(run = %orphan.key, "the platform was never told how the run ended, and its Job is gone");
            self.observer.on_forgotten(&orphan.key);
        }
        if lasted || *told != Told::Later {
            self.orphans.remove(uid);
            return;
        }
        let pause = orphan.pauses.next().unwrap_or(REPORT_AT_LEAST);
        let due = self.after(pause);
        if let Some(orphan) = self.orphans.get_mut(uid) {
            orphan.due = Some(due);
        }
        self.due.insert((due, String::new()));
    }

    fn on_settled(&mut self, name: &str, uid: &str, settled: Result<Settled, ClusterError>) {
        // A removed Job is let go of without a word when its deletion is seen.
        if !matches!(settled, Ok(Settled::Removed)) {
            self.settling.remove(uid);
        }
        let Some(entry) = self.runs.get_mut(name).filter(|entry| entry.uid == uid) else {
            self.settling.remove(uid);
            return;
        };
        match settled {
            // The watch will say so too; until then it takes a slot.
            Ok(Settled::Released) => entry.standing = JobStage::InFlight,
            Ok(Settled::Removed) => {}
            settled => {
                if let Err(error) = settled
                    && let Some(advice) = trial_advice(&error)
                    && !std::mem::replace(&mut entry.stuck, true)
                {
                    warn!(run = %entry.key, %error, advice, "a run stays suspended");
                }
                entry.settle_due = Some(Instant::now() + LOOK_AGAIN);
                self.wake(name, LOOK_AGAIN);
            }
        }
    }

    fn release_next(&mut self) {
        if !self.listed {
            return;
        }
        let limit = self.cluster.max_in_flight;
        let now = Instant::now();
        let (mut in_flight, mut queued) = (0, 0);
        let mut held = Vec::new();
        let mut later = Vec::new();
        for (name, entry) in &self.runs {
            match entry.standing {
                JobStage::InFlight => in_flight += 1,
                JobStage::Held if self.settling.contains(&entry.uid) => in_flight += 1,
                JobStage::Held => {
                    let due = entry.settle_due(limit);
                    if due > now {
                        later.push((name.clone(), due - now));
                    } else {
                        held.push(Held {
                            created: entry.created,
                            name,
                        });
                    }
                }
                JobStage::Queued => queued += 1,
                JobStage::Over => {}
            }
        }
        let waiting: Vec<String> = held.iter().map(|held| held.name.to_owned()).collect();
        let names: Vec<String> = next(held, in_flight, limit)
            .into_iter()
            .map(str::to_owned)
            .collect();
        self.observer.on_counts(RunCounts {
            held: waiting.len() + later.len() - names.len(),
            queued,
            in_flight: in_flight + names.len(),
        });
        let chosen: HashSet<&String> = names.iter().collect();
        for name in waiting.iter().filter(|name| !chosen.contains(name)) {
            self.tell_queued(name);
        }
        for (name, pause) in later {
            if !self.due.iter().any(|(_, due)| *due == name) {
                self.wake(&name, pause);
            }
        }
        for name in names {
            self.settle(name);
        }
    }

    fn tell_queued(&mut self, name: &str) {
        let Some(entry) = self.runs.get_mut(name) else {
            return;
        };
        if entry.told.is_some() {
            return;
        }
        let job: Job = entry.job.open();
        let now = self.cluster.now();
        let observation = verdict::observe(&job, &[], &[], now, &self.settings.timeouts);
        entry.tell(&observation, &*self.observer);
    }

    fn settle(&mut self, name: String) {
        let Some(entry) = self.runs.get(&name) else {
            return;
        };
        let hopeless = entry.first_seen.elapsed() >= self.settings.hopeless_after;
        let uid = entry.uid.clone();
        self.settling.insert(uid.clone());
        let cluster = self.cluster.clone();
        self.spawn(async move {
            let settled = cluster.settle(&name, hopeless).await;
            Message::Settled(name, uid, settled)
        });
    }

    fn trim_history(&mut self) {
        let limits = self.settings.history;
        if limits == HistoryLimits::NONE || !self.listed {
            return;
        }
        let ended = self
            .runs
            .iter()
            .filter(|(_, entry)| entry.reported && !self.removing.contains(&entry.uid))
            .filter_map(|(name, entry)| {
                let (successful, finished) = entry.outcome?;
                Some(EndedRun {
                    name: name.clone(),
                    successful,
                    finished,
                })
            })
            .collect();
        for name in surplus(ended, limits) {
            let Some(entry) = self.runs.get(&name) else {
                continue;
            };
            let uid = entry.uid.clone();
            self.removing.insert(uid.clone());
            let cluster = self.cluster.clone();
            self.spawn(async move {
                // What cannot be removed now is found again at the next change.
                let _ = cluster.remove_ended(&name, &uid).await;
                Message::Removed(uid)
            });
        }
    }
}

impl TrackedRun {
    fn new(key: RunKey, uid: String, job: Packed) -> Self {
        Self {
            key,
            uid,
            job,
            standing: JobStage::InFlight,
            created: Timestamp::UNIX_EPOCH,
            first_seen: Instant::now(),
            seen_released: None,
            told: None,
            events: Vec::new(),
            events_asked: 0,
            asking: None,
            events_final: false,
            events_due: None,
            reported: false,
            reporting: false,
            report_due: None,
            report_pauses: None,
            keep_seconds: None,
            listening: None,
            stopping: false,
            settle_due: None,
            stuck: false,
            nothing_to_run: false,
            outcome: None,
        }
    }

    fn with(mut self, job: &Job, packed: Packed) -> Self {
        let meta = &job.metadata;
        self.job = packed;
        self.standing = if terminal(job).is_some() {
            JobStage::Over
        } else if !is_suspended(job) || annotation(meta, annotations::RELEASED_AT).is_some() {
            JobStage::InFlight
        } else if is_queued_by_cluster(job) {
            JobStage::Queued
        } else {
            JobStage::Held
        };
        if let Some(created) = &meta.creation_timestamp {
            self.created = created.0;
        }
        self.nothing_to_run = annotation(meta, annotations::NOTHING_TO_RUN).is_some();
        self.reported |= annotation(meta, annotations::REPORTED_AT).is_some()
            || annotation(meta, annotations::REPORT_REFUSED).is_some();
        let set = job
            .spec
            .as_ref()
            .and_then(|spec| spec.ttl_seconds_after_finished);
        let is_kept = set.is_some_and(|set| u64::try_from(set) == Ok(KEPT_UNREPORTED.as_secs()));
        self.keep_seconds = annotation(meta, annotations::KEEP_SECONDS)
            .and_then(|text| text.parse().ok())
            .filter(|_| is_kept);
        self.outcome = terminal(job).map(|condition| {
            let finished = condition.last_transition_time.as_ref();
            (
                condition.type_ == "Complete",
                finished.map_or(self.created, |time| time.0),
            )
        });
        self
    }

    /// The Job, with the time of its release where nobody wrote that down: a launcher of an earlier release did not, and
    /// the Job controller may not have come to it.
    fn released_job(&self) -> Job {
        let mut job: Job = self.job.open();
        if let Some(seen) = self.seen_released
            && verdict::released(&job).is_none()
        {
            let noted = job.metadata.annotations.get_or_insert_default();
            noted.insert(annotations::RELEASED_AT.to_owned(), seen.to_string());
        }
        job
    }

    /// Tells the observer, if it is news. Whether it was.
    fn tell(&mut self, observation: &Observation, observer: &dyn RunObserver) -> bool {
        let is_news = !is_same(self.told.as_ref(), observation);
        if is_news {
            // The same end in other words, or one that an earlier watcher has reported.
            let is_known = self.reported || matches!(self.told, Some(Observation::Ended(_)));
            if let Observation::Ended(verdict) = observation
                && !is_known
            {
                info!(
                    job = self.key.name,
                    job_id = self.key.job_id,
                    step_id = self.key.step_id,
                    verdict = verdict.kind.name(),
                    exit = verdict.outcome.code(),
                    spoke = verdict.spoke(),
                    sentence = verdict.sentence,
                    "a run has ended"
                );
            }
            observer.on_observation(&self.key, observation);
            self.told = Some(observation.clone());
        }
        is_news
    }

    /// The Job's time to live from now on, while it is still the long one. Kubernetes counts from the Job's end.
    fn time_to_live(&self, now: Timestamp) -> Option<i32> {
        let ended = self.outcome.map_or(now, |(_, finished)| finished);
        let age = now.duration_since(ended).as_secs().max(0);
        let age = i32::try_from(age).unwrap_or(i32::MAX);
        self.keep_seconds.map(|keep| keep.saturating_add(age))
    }

    /// From when on the watcher may bring this Job to its release.
    fn settle_due(&self, limit: usize) -> Instant {
        let turn = if self.nothing_to_run {
            REPORTERS_TURN
        } else if limit == 0 {
            SUBMITTERS_TURN
        } else {
            Duration::ZERO
        };
        let first = self.first_seen + turn;
        self.settle_due.map_or(first, |due| due.max(first))
    }
}

/// The verdict that was written onto the Job. A run that was given up is then ended by its deadline, which would
/// hide why.
fn recorded(job: &Job) -> Option<Observation> {
    let text = annotation(&job.metadata, annotations::VERDICT)?;
    let verdict: Verdict = serde_json::from_str(text).ok()?;
    Some(Observation::Ended(Box::new(verdict)))
}

/// Whether the observer would learn nothing new.
fn is_same(told: Option<&Observation>, now: &Observation) -> bool {
    match (told, now) {
        (Some(Observation::Waiting(told)), Observation::Waiting(now)) => {
            told.reason == now.reason && told.sentence == now.sentence
        }
        (Some(Observation::Running), Observation::Running) => true,
        (Some(Observation::Ended(told)), Observation::Ended(now)) => told.kind == now.kind,
        _ => false,
    }
}

impl Cluster {
    /// Events about a run's Job and its pods. A pod that is gone is known by its name, where the Job still tells it.
    pub(super) async fn events_of(
        &self,
        job: &Job,
        pods: &[Pod],
    ) -> Result<Vec<Event>, ClusterError> {
        const DOING: &str = "list the events of the run";
        let of = |meta: &ObjectMeta| {
            meta.uid
                .as_ref()
                .map(|uid| format!("involvedObject.uid={uid}"))
        };
        let mut found = Vec::new();
        for subject in of(&job.metadata)
            .into_iter()
            .chain(pods.iter().filter_map(|pod| of(&pod.metadata)))
        {
            found.extend(self.events_with(&subject, DOING).await?);
        }
        let is_there = |name: &&str| {
            !pods
                .iter()
                .any(|pod| pod.metadata.name.as_deref() == Some(name))
        };
        let named = verdict::created_pods(&found)
            .chain(verdict::failure_of_pod(job).map(|(name, _)| name))
            .filter(is_there);
        let gone: BTreeSet<String> = named.map(str::to_owned).collect();
        for name in gone {
            let subject = format!("involvedObject.name={name}");
            found.extend(self.events_with(&subject, DOING).await?);
        }
        Ok(found)
    }

    /// Stops a run that was given up, has its end reported, and writes both onto the Job.
    async fn conclude(
        &self,
        key: &RunKey,
        uid: &str,
        verdict: &Verdict,
        keep: Option<i32>,
        observer: &dyn RunObserver,
    ) -> Told {
        let verdict = &self.with_lock_holder(verdict.clone()).await;
        if !verdict.job_over {
            match self.stop(&key.name, uid, verdict).await {
                // Its pod may still start, so that the platform must not hear of an end: at the latest the Job's own
                // deadline brings it. What is gone starts nothing.
                Err(error) if !error.is_not_found() => {
                    warn!(run = %key, %error, "a run without hope could not be stopped, trying again");
                    return Told::Later;
                }
                _ => {}
            }
        }
        if verdict.spoke() {
            self.note_verdict(key, uid, verdict, keep).await;
            return Told::Yes;
        }
        let told = observer.on_ended(key, verdict).await;
        match &told {
            Told::Yes => self.note_verdict(key, uid, verdict, keep).await,
            Told::Refused(why) => {
                let noted = (annotations::REPORT_REFUSED, why.clone());
                self.note_end(key, uid, verdict, noted, keep).await;
            }
            Told::Later => {}
        }
        told
    }

    /// Ends a Job and writes the verdict onto it. A deadline that has passed keeps it, so that the run can be explained and a
    /// late duplicate of its delivery still finds it.
    async fn stop(&self, name: &str, uid: &str, verdict: &Verdict) -> Result<(), ClusterError> {
        let text = serde_json::to_string(verdict).unwrap_or_default();
        let stop = json!({
            "metadata": {"uid": uid, "annotations": {annotations::VERDICT: text}},
            "spec": {"activeDeadlineSeconds": 1},
        });
        self.patch_job("stop the run", name, &stop).await.map(drop)
    }

    /// Writes the verdict onto the Job, and that the platform knows it. Should this be lost, a later watcher finds
    /// the same again, and the platform knows already.
    async fn note_verdict(&self, key: &RunKey, uid: &str, verdict: &Verdict, keep: Option<i32>) {
        let noted = (annotations::REPORTED_AT, self.now().to_string());
        self.note_end(key, uid, verdict, noted, keep).await;
    }

    /// Writes onto the Job how the run ended and that nobody is to be told any more, and lets the Job go in its time.
    async fn note_end(
        &self,
        key: &RunKey,
        uid: &str,
        verdict: &Verdict,
        (name, text): (&str, String),
        keep: Option<i32>,
    ) {
        let verdict = serde_json::to_string(verdict).unwrap_or_default();
        let mut patch = json!({"metadata": {"uid": uid, "annotations": {
            annotations::VERDICT: verdict, name: text}}});
        if let Some(seconds) = keep {
            patch["spec"] = json!({"ttlSecondsAfterFinished": seconds});
        }
        let noted = self
            .patch_job("note the report of the run", &key.name, &patch)
            .await;
        if let Err(error) = noted {
            debug!(run = %key, %error, "the verdict could not be written onto the Job");
        }
    }

    /// Writes onto the Job that the platform knows how the run ended, so that no later watcher takes that for news, and lets
    /// the Job go in its time.
    async fn note_reported(&self, key: &RunKey, uid: &str, keep: Option<i32>) {
        let noted = json!({annotations::REPORTED_AT: self.now().to_string()});
        let mut patch = json!({"metadata": {"uid": uid, "annotations": noted}});
        if let Some(seconds) = keep {
            patch["spec"] = json!({"ttlSecondsAfterFinished": seconds});
        }
        let noted = self
            .patch_job("note that the platform knows", &key.name, &patch)
            .await;
        if let Err(error) = noted {
            debug!(run = %key, %error, "it could not be noted that the platform knows how the run ended");
        }
    }

    async fn remove_ended(&self, name: &str, uid: &str) -> Result<(), ClusterError> {
        let jobs = self.jobs();
        let params = DeleteParams::background().preconditions(Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        });
        self.ask("remove an ended run", || jobs.delete(name, &params))
            .await
            .map(drop)
    }
}

#[cfg(test)]
mod tests;
