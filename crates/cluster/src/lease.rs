//! Ensures that only one of several replicas watches: the holder of the Lease.
//!
//! Times in the Lease are never compared with this machine's clock. A holder counts as gone when its Lease has not
//! changed for the whole duration, measured here. So the clocks of replicas may differ.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;
use tokio::time::Instant;
use tracing::warn;

use super::{Cluster, ClusterError};

/// The settings of the Lease.
#[derive(Clone, Debug)]
pub struct LeaseSettings {
    pub name: String,
    /// Namespace of the launcher. It can differ from the namespace of the runs.
    pub namespace: String,
    /// The identity of this replica, for example the name of its pod.
    pub identity: String,
    /// A holder that does not renew the Lease for so long has lost it.
    pub duration: Duration,
    /// How often the holder renews the Lease, and how often the others read it.
    pub renew: Duration,
}

impl LeaseSettings {
    /// The usual times: 15 s, renewed every 5 s.
    pub fn new(
        namespace: impl Into<String>,
        name: impl Into<String>,
        identity: impl Into<String>,
    ) -> Self {
        Self {
            name: name.into(),
            namespace: namespace.into(),
            identity: identity.into(),
            duration: Duration::from_secs(15),
            renew: Duration::from_secs(5),
        }
    }
}

/// The state of the Lease, for the health checks of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// This replica holds it and watches, or is about to.
    Holder,
    /// Another replica holds it, and this one can take over.
    StandsBy,
    /// This replica has no right to hold it, and watches without it.
    NotAllowed,
    /// It could not be acquired for its whole duration, for this reason. Possibly no replica watches.
    OutOfReach(String),
}

/// The result of an attempt to get the Lease.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Acquired {
    Ours,
    /// The launcher's Role has no rights on Leases, like the Role in Terrakube's documentation.
    NotAllowed,
}

/// The result of reading the Lease once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    Ours,
    /// It was free, and another replica acquired it first. The next read shows that replica.
    Missed,
    /// Another holds it.
    Another,
}

impl Look {
    fn of(written: bool) -> Self {
        if written { Self::Ours } else { Self::Missed }
    }
}

/// The last observed Lease, and since when it has not changed.
struct Observed {
    version: Option<String>,
    at: Instant,
}

impl Cluster {
    /// Runs `work` while this replica holds the Lease, until `stop`. Then it gives the Lease back, so that another
    /// replica takes over at once. It drops the work when the Lease is lost, or may be lost because the API server does
    /// not answer. `on_state` gets the state of the Lease after each read that shows it.
    pub async fn lead<F>(
        &self,
        settings: &LeaseSettings,
        stop: impl Future<Output = ()>,
        mut work: impl FnMut() -> F,
        mut on_state: impl FnMut(LeaseState),
    ) where
        F: Future<Output = ()>,
    {
        let mut stop = std::pin::pin!(stop);
        let mut observed = None;
        loop {
            let acquired = tokio::select! {
                () = &mut stop => return,
                acquired = self.acquire(settings, &mut observed, &mut on_state) => acquired,
            };
            if acquired == Acquired::NotAllowed {
                on_state(LeaseState::NotAllowed);
                warn!(
                    lease = settings.name,
                    "no right to hold a Lease: this replica watches without one, so run a single replica"
                );
                tokio::select! {
                    () = &mut stop => return,
                    () = work() => return,
                    () = self.until_allowed(settings) => {}
                }
                warn!(
                    lease = settings.name,
                    "another replica may have the Lease by now: watching only while this replica holds it"
                );
                continue;
            }
            on_state(LeaseState::Holder);
            let stopped = tokio::select! {
                () = &mut stop => true,
                () = work() => true,
                () = self.keep(settings) => false,
            };
            if stopped {
                // A Lease that is not given back expires.
                let _ = self.give_back(settings).await;
                return;
            }
            observed = None;
        }
    }

    /// Returns when the Lease is free, or another replica holds it. The pauses between attempts grow.
    async fn until_allowed(&self, settings: &LeaseSettings) {
        let longest = settings.duration * 4;
        let pauses = ExponentialBuilder::default()
            .with_min_delay(settings.renew)
            .with_max_delay(longest)
            .without_max_times()
            .build();
        for pause in pauses {
            tokio::time::sleep(pause).await;
            // A replica that may read the Lease but not write it watches without it.
            if self.try_acquire(settings, &mut None).await.is_ok() {
                return;
            }
        }
    }

    fn leases(&self, settings: &LeaseSettings) -> Api<Lease> {
        Api::namespaced(self.client.clone(), &settings.namespace)
    }

    async fn acquire(
        &self,
        settings: &LeaseSettings,
        observed: &mut Option<Observed>,
        on_state: &mut impl FnMut(LeaseState),
    ) -> Acquired {
        let mut said = String::new();
        let mut failing: Option<Instant> = None;
        // A refusal can be temporary, for example while a Role is being bound. Only a lasting refusal shows a missing
        // right.
        let mut refused: Option<Instant> = None;
        loop {
            let look = self.try_acquire(settings, observed).await;
            let is_refused = look.as_ref().is_err_and(ClusterError::is_forbidden);
            refused = is_refused.then(|| refused.unwrap_or_else(Instant::now));
            failing = look.is_err().then(|| failing.unwrap_or_else(Instant::now));
            let lasts = |since: Option<Instant>| {
                since.is_some_and(|since| since.elapsed() >= settings.duration)
            };
            match look {
                Ok(Look::Ours) => return Acquired::Ours,
                Ok(Look::Another) => on_state(LeaseState::StandsBy),
                Ok(Look::Missed) => {}
                Err(_) if lasts(refused) => return Acquired::NotAllowed,
                Err(error) => {
                    let cause = job_contract::chain(&error);
                    if lasts(failing) {
                        on_state(LeaseState::OutOfReach(cause.clone()));
                    }
                    if cause != said {
                        warn!(
                            lease = settings.name,
                            cause, "the Lease could not be acquired; trying again"
                        );
                        said = cause;
                    }
                }
            }
            tokio::time::sleep(settings.renew).await;
        }
    }

    /// Acquires the Lease if it is free, if this replica holds it, or if its holder has not renewed it for the whole
    /// duration.
    async fn try_acquire(
        &self,
        settings: &LeaseSettings,
        observed: &mut Option<Observed>,
    ) -> Result<Look, ClusterError> {
        let Some(lease) = self.read_lease(settings).await? else {
            return self.write(settings, None).await.map(Look::of);
        };
        let version = lease.metadata.resource_version.clone();
        if observed.as_ref().is_none_or(|seen| seen.version != version) {
            *observed = Some(Observed {
                version,
                at: Instant::now(),
            });
        }
        let holder = holder(&lease);
        let free = holder.is_empty() || holder == settings.identity;
        let silent = observed
            .as_ref()
            .is_some_and(|seen| seen.at.elapsed() >= duration_of(&lease, settings));
        if free || silent {
            return self.write(settings, Some(lease)).await.map(Look::of);
        }
        Ok(Look::Another)
    }

    /// Renews the Lease until another replica holds it, or may hold it because the Lease was deleted or the renewals failed for
    /// too long.
    async fn keep(&self, settings: &LeaseSettings) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(settings.renew).await;
            // This replica gives up the Lease a little before others would take it.
            let left = settings
                .duration
                .saturating_sub(settings.renew / 2)
                .saturating_sub(renewed.elapsed());
            let begun = Instant::now();
            match tokio::time::timeout(left, self.renew(settings)).await {
                Ok(Ok(true)) => renewed = begun,
                // With a timeout of zero, an immediate response still counts.
                Ok(Err(_)) if !left.is_zero() => {}
                Ok(_) | Err(_) => return,
            }
        }
    }

    async fn renew(&self, settings: &LeaseSettings) -> Result<bool, ClusterError> {
        match self.own_lease(settings).await? {
            Some(lease) => self.write(settings, Some(lease)).await,
            None => Ok(false),
        }
    }

    async fn read_lease(&self, settings: &LeaseSettings) -> Result<Option<Lease>, ClusterError> {
        let leases = self.leases(settings);
        let found = leases.get_opt(&settings.name).await;
        found.map_err(|error| ClusterError::from_kube("read the Lease", error))
    }

    /// The Lease, if this replica holds it.
    async fn own_lease(&self, settings: &LeaseSettings) -> Result<Option<Lease>, ClusterError> {
        let found = self.read_lease(settings).await?;
        Ok(found.filter(|lease| holder(lease) == settings.identity))
    }

    /// Writes this replica as the holder. `false`: another replica was faster.
    async fn write(
        &self,
        settings: &LeaseSettings,
        lease: Option<Lease>,
    ) -> Result<bool, ClusterError> {
        let leases = self.leases(settings);
        let params = PostParams::default();
        let now = Timestamp::now();
        let written = match lease {
            None => {
                let lease = taken(Lease::default(), settings, now);
                leases.create(&params, &lease).await
            }
            Some(lease) => {
                let lease = taken(lease, settings, now);
                leases.replace(&settings.name, &params, &lease).await
            }
        };
        match written.map_err(|error| ClusterError::from_kube("write the Lease", error)) {
            Ok(_) => Ok(true),
            Err(error) if error.is_already_exists() || error.is_conflict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn give_back(&self, settings: &LeaseSettings) -> Result<(), ClusterError> {
        let Some(mut lease) = self.own_lease(settings).await? else {
            return Ok(());
        };
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            spec.renew_time = Some(MicroTime(Timestamp::now()));
        }
        self.leases(settings)
            .replace(&settings.name, &PostParams::default(), &lease)
            .await
            .map(drop)
            .map_err(|error| ClusterError::from_kube("give the Lease back", error))
    }
}

fn holder(lease: &Lease) -> &str {
    lease
        .spec
        .as_ref()
        .and_then(|spec| spec.holder_identity.as_deref())
        .unwrap_or_default()
}

fn duration_of(lease: &Lease, settings: &LeaseSettings) -> Duration {
    lease
        .spec
        .as_ref()
        .and_then(|spec| u64::try_from(spec.lease_duration_seconds?).ok())
        .map_or(settings.duration, Duration::from_secs)
}

/// Returns the Lease with this replica as its holder. Pure.
fn taken(mut lease: Lease, settings: &LeaseSettings, now: Timestamp) -> Lease {
    let renewal = holder(&lease) == settings.identity;
    if lease.metadata.name.is_none() {
        lease.metadata = ObjectMeta {
            name: Some(settings.name.clone()),
            namespace: Some(settings.namespace.clone()),
            ..ObjectMeta::default()
        };
    }
    let before = lease.spec.take().unwrap_or_default();
    let transitions = before.lease_transitions.unwrap_or(0);
    let first = before.holder_identity.is_none();
    lease.spec = Some(LeaseSpec {
        holder_identity: Some(settings.identity.clone()),
        lease_duration_seconds: Some(
            i32::try_from(settings.duration.as_secs().max(1)).unwrap_or(i32::MAX),
        ),
        acquire_time: if renewal {
            before.acquire_time
        } else {
            Some(MicroTime(now))
        },
        renew_time: Some(MicroTime(now)),
        lease_transitions: Some(if renewal || first {
            transitions
        } else {
            transitions + 1
        }),
        ..before
    });
    lease
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use http::StatusCode;
    use platform::heartbeat::EXPIRY;
    use test_peers::wait::until;

    use super::super::RetryPolicy;
    use super::super::fake_server::{Crash, Server, refusal};
    use super::*;

    /// A cluster that refuses every read of a Lease while a flag is set.
    fn refusing(server: &Arc<Server>) -> (Cluster, Arc<AtomicBool>) {
        let refuses = Arc::new(AtomicBool::new(true));
        let told = Arc::clone(&refuses);
        let cluster = server.faulty(move |line, _| {
            let refusal = || refusal(StatusCode::FORBIDDEN, "Forbidden", "no Leases for you");
            (line.contains("/leases") && told.load(Ordering::SeqCst)).then(refusal)
        });
        (cluster, refuses)
    }

    fn settings(identity: &str) -> LeaseSettings {
        LeaseSettings::new("mayfly", "launcher-leader", identity)
    }

    #[test]
    fn the_heartbeat_of_a_dead_launcher_outlives_the_change_of_watchers() {
        let lease = settings("next");
        let succession = lease.duration + lease.renew;
        assert!(succession < EXPIRY);
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    #[test]
    fn a_renewal_keeps_when_it_was_acquired_and_a_change_of_holder_counts() {
        let first = taken(Lease::default(), &settings("a"), at(1));
        let spec = first.spec.clone().unwrap();
        assert_eq!(spec.lease_transitions, Some(0));
        assert_eq!(spec.lease_duration_seconds, Some(15));
        let renewed = taken(first, &settings("a"), at(6));
        let spec = renewed.spec.clone().unwrap();
        assert_eq!(spec.acquire_time, Some(MicroTime(at(1))));
        assert_eq!(spec.renew_time, Some(MicroTime(at(6))));
        let stolen = taken(renewed, &settings("b"), at(30)).spec.unwrap();
        assert_eq!(stolen.lease_transitions, Some(1));
        assert_eq!(stolen.acquire_time, Some(MicroTime(at(30))));
        assert_eq!(stolen.holder_identity.as_deref(), Some("b"));
    }

    /// Silent for so long, a holder is succeeded.
    const SOON: Duration = Duration::from_secs(1);

    /// Checks that the silence of a whole duration was waited for, and not that of a second one.
    #[track_caller]
    fn assert_once_silent(begun: Instant) {
        let took = begun.elapsed();
        assert!((SOON..2 * SOON).contains(&took), "{took:?}");
    }

    /// A replica that leads until a flag stops it.
    fn replica(
        cluster: Cluster,
        identity: &'static str,
        duration: Duration,
        at_work: &Arc<Mutex<Vec<&'static str>>>,
        successions: &Arc<AtomicUsize>,
    ) -> (
        tokio::sync::oneshot::Sender<()>,
        tokio::task::JoinHandle<()>,
    ) {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (at_work, successions) = (Arc::clone(at_work), Arc::clone(successions));
        let settings = LeaseSettings {
            duration,
            renew: Duration::from_millis(30),
            ..settings(identity)
        };
        let task = tokio::spawn(async move {
            let stop = async {
                // A dropped sender stops as well.
                let _ = stopped.await;
            };
            let on_state = |state| {
                if state == LeaseState::StandsBy {
                    successions.fetch_add(1, Ordering::SeqCst);
                }
            };
            cluster
                .lead(
                    &settings,
                    stop,
                    || {
                        // Held by whoever works.
                        let working = Arc::clone(&at_work);
                        at_work.lock().unwrap().push(identity);
                        async move {
                            std::future::pending::<()>().await;
                            drop(working);
                        }
                    },
                    on_state,
                )
                .await;
        });
        (stop, task)
    }

    #[tokio::test(start_paused = true)]
    async fn one_replica_leads_and_another_takes_over_at_once_when_it_stops() {
        let server = Server::start();
        let (at_work, successions) = <_>::default();
        let never = Duration::from_hours(1);
        let (stop_a, a) = replica(server.cluster(), "a", never, &at_work, &successions);
        until("a leads", async || *at_work.lock().unwrap() == ["a"]).await;
        let (stop_b, b) = replica(server.cluster(), "b", never, &at_work, &successions);
        let seen = server.requests().len();
        until("both have looked", async || {
            server.requests().len() > seen + 6
        })
        .await;
        assert_eq!(*at_work.lock().unwrap(), ["a"]);
        stop_a.send(()).unwrap();
        a.await.unwrap();
        until("b leads", async || *at_work.lock().unwrap() == ["a", "b"]).await;
        drop(stop_b);
        b.await.unwrap();
        let lease = server.object("leases", "launcher-leader").unwrap();
        assert_eq!(lease["spec"]["holderIdentity"], "");
    }

    /// A standby may create it at any time.
    #[tokio::test(start_paused = true)]
    async fn a_holder_whose_lease_is_deleted_stops_and_takes_it_anew() {
        let server = Server::start();
        let (at_work, successions) = <_>::default();
        let never = Duration::from_hours(1);
        let (stop, task) = replica(server.cluster(), "a", never, &at_work, &successions);
        until("a leads", async || *at_work.lock().unwrap() == ["a"]).await;
        server.remove("leases", "launcher-leader");
        until("a leads anew", async || {
            *at_work.lock().unwrap() == ["a", "a"]
        })
        .await;
        drop(stop);
        task.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_that_is_never_answered_is_asked_again() {
        let server = Server::start();
        let cluster = server
            .crashing(Crash::Hanging(1))
            .with_retry_policy(RetryPolicy {
                answer: Duration::from_millis(50),
                ..RetryPolicy::default()
            });
        let settings = LeaseSettings {
            renew: Duration::from_millis(30),
            ..settings("a")
        };
        let (working, at_work) = tokio::sync::oneshot::channel();
        let stop = async {
            at_work.await.unwrap();
        };
        let mut working = Some(working);
        cluster
            .lead(
                &settings,
                stop,
                || {
                    working.take().unwrap().send(()).unwrap();
                    std::future::pending()
                },
                |state| assert_eq!(state, LeaseState::Holder),
            )
            .await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_holder_that_stops_renewing_is_replaced_whatever_its_clock_shows() {
        let server = Server::start();
        // Renewed, by a clock that is far ahead.
        server.put(
            "leases",
            serde_json::json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": "launcher-leader", "namespace": "mayfly"},
                "spec": {"holderIdentity": "gone", "leaseDurationSeconds": 1, "leaseTransitions": 3,
                    "renewTime": "2099-01-01T00:00:00.000000Z"}}),
        );
        let (at_work, successions) = <_>::default();
        let begun = Instant::now();
        let (stop, task) = replica(server.cluster(), "a", SOON, &at_work, &successions);
        until("a leads", async || *at_work.lock().unwrap() == ["a"]).await;
        assert_once_silent(begun);
        let lease = server.object("leases", "launcher-leader").unwrap();
        assert_eq!(lease["spec"]["leaseTransitions"], 4);
        drop(stop);
        task.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_replica_that_cannot_get_the_lease_for_long_logs_the_reason() {
        let server = Server::start();
        for (code, reason, state) in [
            (StatusCode::FORBIDDEN, "Forbidden", None),
            (StatusCode::NOT_FOUND, "NotFound", Some("no such namespace")),
        ] {
            let cluster = server.faulty(move |line, _| {
                (line.starts_with("POST") && line.contains("/leases"))
                    .then(|| refusal(code, reason, "no such namespace"))
            });
            let settings = LeaseSettings {
                duration: SOON,
                renew: Duration::from_millis(30),
                ..settings("a")
            };
            let begun = Instant::now();
            let told = std::cell::RefCell::new(None);
            let stop = until("it tells", async || told.borrow().is_some());
            let work = std::future::pending::<()>;
            let tell = |state| drop(told.replace(Some(state)));
            cluster.lead(&settings, stop, work, tell).await;
            assert_once_silent(begun);
            match (told.take().unwrap(), state) {
                (LeaseState::NotAllowed, None) => {}
                (LeaseState::OutOfReach(why), Some(words)) => assert!(why.contains(words), "{why}"),
                (other, _) => panic!("{other:?}"),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_holder_whose_lease_was_taken_stops_its_work() {
        let server = Server::start();
        let (at_work, successions) = <_>::default();
        let (stop, task) = replica(server.cluster(), "a", SOON, &at_work, &successions);
        until("a leads", async || *at_work.lock().unwrap() == ["a"]).await;
        server.put(
            "leases",
            serde_json::json!({"metadata": {"name": "launcher-leader"}, "spec": {"holderIdentity": "b"}}),
        );
        // It works again only after b was silent for a whole duration.
        let begun = Instant::now();
        until("a leads again", async || {
            *at_work.lock().unwrap() == ["a", "a"]
        })
        .await;
        assert_once_silent(begun);
        assert!(successions.load(Ordering::SeqCst) > 0);
        drop(stop);
        task.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_holder_that_cannot_reach_the_api_server_stops_its_work() {
        let server = Server::start();
        let away = Arc::new(AtomicBool::new(false));
        let is_away = Arc::clone(&away);
        let cluster = server.faulty(move |_, _| {
            let refusal = || refusal(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", "");
            is_away.load(Ordering::SeqCst).then(refusal)
        });
        let (at_work, successions) = <_>::default();
        let (stop, task) = replica(cluster, "a", SOON, &at_work, &successions);
        until("a leads", async || *at_work.lock().unwrap() == ["a"]).await;
        away.store(true, Ordering::SeqCst);
        until("a lets go", async || Arc::strong_count(&at_work) == 2).await;
        away.store(false, Ordering::SeqCst);
        until("a leads again", async || {
            *at_work.lock().unwrap() == ["a", "a"]
        })
        .await;
        assert_eq!(successions.load(Ordering::SeqCst), 0);
        drop(stop);
        task.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_that_passes_makes_no_second_watcher() {
        let server = Server::start();
        let (at_work, successions) = <_>::default();
        let never = Duration::from_hours(1);
        let (stop_a, a) = replica(server.cluster(), "a", never, &at_work, &successions);
        until("a leads", async || *at_work.lock().unwrap() == ["a"]).await;
        let (cluster, refuses) = refusing(&server);
        let (stop_b, b) = replica(cluster, "b", never, &at_work, &successions);
        let seen = successions.load(Ordering::SeqCst);
        refuses.store(false, Ordering::SeqCst);
        until("b has looked", async || {
            successions.load(Ordering::SeqCst) > seen + 2
        })
        .await;
        assert_eq!(*at_work.lock().unwrap(), ["a"]);
        for (stop, task) in [(stop_a, a), (stop_b, b)] {
            drop(stop);
            task.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_watcher_without_a_lease_stops_once_it_may_read_the_lease() {
        let server = Server::start();
        let (at_work, successions) = <_>::default();
        let (cluster, refuses) = refusing(&server);
        let begun = Instant::now();
        let (stop_b, b) = replica(cluster, "b", SOON, &at_work, &successions);
        until("b watches on its own", async || {
            *at_work.lock().unwrap() == ["b"]
        })
        .await;
        assert_once_silent(begun);
        // Held by one that was never refused, for longer than this test takes.
        server.put(
            "leases",
            serde_json::json!({"metadata": {"name": "launcher-leader"},
                "spec": {"holderIdentity": "a", "leaseDurationSeconds": 3600}}),
        );
        refuses.store(false, Ordering::SeqCst);
        until("b gives way", async || Arc::strong_count(&at_work) == 2).await;
        assert_eq!(*at_work.lock().unwrap(), ["b"]);
        drop(stop_b);
        b.await.unwrap();
    }
}
