//! Processes that are killed at each of their calls, and calls that are lost: one run each, which ends once.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::fs;
use std::io::Write as _;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use futures_util::StreamExt as _;
use integration_tests::Running;
use integration_tests::process::{Stream, has_ended};
use job_contract::env;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pool_protocol::path::LeaseCall;
use serde_json::json;
use sqlx::{Connection as _, Row as _};
use test_peers::proxy::{Moment, Proxy};
use test_peers::wait::until;
use test_platform::{Actor, Job, Status};

use super::agent::ends_with;
use super::client::Client;
use super::fixture::{Fixture, Hub};
use test_platform::launcher::Launcher;

/// Runs at a time.
const AT_ONCE: usize = 12;
/// Calls of one class that are tried. Those that follow are made in the same way.
const OF_A_CLASS: usize = 3;
/// The first question of an executor.
const ASK: &str = "GET /api/v1/executor/tasks/{}/leases/{}/platform/api/v1/organization/{}/job/{}";
/// What an agent says of an executor that it has started.
pub(super) const STARTED: &str = "POST /api/v1/executor/tasks/{}/leases/{}/started";
/// The claim of an executor.
pub(super) const ACCEPT: &str = "POST /api/v1/executor/tasks/{}/leases/{}/accept";

/// The process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Victim {
    /// Only the call is lost.
    None,
    Hub,
    Agent,
    Executor,
}

/// The side of the hub on which a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    ToHub,
    ToPlatform,
}

/// A call, and what happens at it.
#[derive(Clone, Debug)]
pub(super) struct Point {
    side: Side,
    class: String,
    number: usize,
    moment: Moment,
    victim: Victim,
}

impl Point {
    /// The class of its call, and its victim.
    pub(super) fn of(&self) -> (Side, String, Victim) {
        (self.side, self.class.clone(), self.victim)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (side, victim, moment) = (self.side, self.victim, self.moment);
        let (class, number) = (&self.class, self.number);
        write!(
            f,
            "{side:?}, {victim:?}, {moment:?}: {class}, call {number}"
        )
    }
}

/// What the platform shows of a run that has ended.
type Changes = Vec<(Option<u32>, Status, Status, Actor)>;

/// A hub and an agent, with proxies between all parts.
pub(super) struct Run {
    pub(super) fixture: Fixture,
    pub(super) to_hub: Proxy,
    pub(super) to_platform: Proxy,
    pub(super) hub: Option<Hub>,
    pub(super) agent: Option<Running>,
    /// The logs of killed processes.
    log: String,
}

impl Run {
    pub(super) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// With these settings of the hub.
    pub(super) async fn start_with(settings: &[(&'static str, &str)]) -> Self {
        let mut fixture = Fixture::new().await;
        for (name, value) in settings {
            fixture = fixture.with(name, value);
        }
        let platform = fixture.platform.url();
        let platform = platform.trim_start_matches("http://").parse().unwrap();
        let to_platform = Proxy::of_calls(&[platform]).unwrap();
        let mut run = Self {
            fixture: fixture.with(env::API_URL, &to_platform.url()),
            to_hub: Proxy::of_calls(&[]).unwrap(),
            to_platform,
            hub: None,
            agent: None,
            log: String::new(),
        };
        run.start_hub();
        run
    }

    pub(super) fn start_hub(&mut self) {
        let command = &mut self.fixture.command();
        let hub = Hub(tokio::task::block_in_place(|| Launcher::start(command)));
        *self.to_hub.servers() = vec![hub.address()];
        let url = format!("{}/pools/eu/api/v1/terraform-rs", self.to_hub.url());
        self.fixture.platform.dispatch_to(&url);
        self.hub = Some(hub);
    }

    pub(super) fn start_agent(&mut self) {
        let agent = Running::start(&mut self.fixture.agent(&self.to_hub.url()));
        self.agent = Some(agent);
    }

    pub(super) fn kill_hub(&mut self) {
        if let Some(hub) = self.hub.take() {
            self.end(hub.0.running);
        }
    }

    pub(super) fn kill_agent(&mut self) {
        if let Some(agent) = self.agent.take() {
            self.end(agent);
        }
    }

    fn end(&mut self, running: Running) {
        running.signal(Signal::SIGKILL);
        let finished = tokio::task::block_in_place(|| running.wait());
        self.log += &finished.stderr;
        self.log += "--- killed\n";
    }

    /// Waits until the agent has registered and asks for tasks.
    pub(super) async fn until_asked_for_tasks(&self) {
        until("a request for a task", async || {
            let calls = self.to_hub.calls();
            calls
                .iter()
                .any(|call| call.class.ends_with("/tasks/request"))
        })
        .await;
    }

    pub(super) fn changes(&self) -> Changes {
        let records = self.fixture.platform.records();
        let changes = records.transitions.iter();
        changes
            .map(|change| (change.step, change.from, change.to, change.by))
            .collect()
    }

    /// Waits for the end of the job, whatever it is.
    pub(super) async fn until_over(&self, job: u32) -> Job {
        let over = |records: &test_platform::Records| {
            let found = records.job(job);
            (found.status.is_terminal() || found.wedged).then(|| found.clone())
        };
        self.fixture.platform.until("the job is over", over).await
    }

    /// Nothing is left of a run that has ended: no process, no folder, no lease, no report that is owed.
    pub(super) async fn assert_nothing_left(&self) {
        let hub = self.hub.as_ref().expect("it was started again");
        for state in ["available", "leased", "running", "orphaned", "unreported"] {
            hub.until_metric(&format!(
                r#"mayfly_pool_tasks{{pool="eu",state="{state}"}} 0"#
            ))
            .await;
        }
        hub.until_metric(r#"mayfly_pool_slots{pool="eu",state="busy"} 0"#)
            .await;
        until("no folder of a run", async || {
            self.fixture.runs().is_empty()
        })
        .await;
        let own = 1 + usize::from(self.agent.is_some());
        until("no process of a run", async || self.processes() == own).await;
        self.fixture.platform.assert_kept().await;
    }

    /// How many processes have the folder of this fixture in their environment.
    pub(super) fn processes(&self) -> usize {
        let folder = self.fixture.path("");
        let folder = folder.as_os_str().as_encoded_bytes();
        let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        let found = entries.filter(|entry| {
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            let mut windows = environment.windows(folder.len());
            windows.any(|part| part == folder) && !has_ended(entry.file_name().to_string_lossy())
        });
        found.count()
    }

    /// The executor, which has just made a call.
    async fn executor(&self) -> Pid {
        let id = async || {
            let runs = self.fixture.runs();
            let id = fs::read_to_string(runs.first()?.join("pid")).ok()?;
            id.trim().parse().ok()
        };
        Pid::from_raw(until("the id of the executor", id).await)
    }

    /// What the hub has stored of tasks, without the times that a restart changes.
    async fn stored(&self) -> Vec<String> {
        let path = self.fixture.path("store/pools.db");
        let url = format!("sqlite:{}", path.display());
        let mut database = sqlx::SqliteConnection::connect(&url).await.unwrap();
        let mut found = Vec::new();
        for (sql, columns) in [
            (
                "SELECT id, state, CAST(fencing_token AS TEXT), lease, end_reason, CAST(reported AS TEXT), \
                 CAST(attempts AS TEXT), CAST(ended_at AS TEXT) FROM tasks ORDER BY id",
                8,
            ),
            (
                "SELECT task, CAST(seq AS TEXT), CAST(at AS TEXT) FROM events ORDER BY task, seq",
                3,
            ),
        ] {
            for row in sqlx::query(sql).fetch_all(&mut database).await.unwrap() {
                let values = (0..columns).map(|at| row.get::<Option<String>, _>(at));
                found.push(format!("{:?}", values.collect::<Vec<_>>()));
            }
        }
        database.close().await.unwrap();
        found
    }

    async fn strike(&mut self, victim: Victim) {
        match victim {
            Victim::None => {}
            Victim::Hub => self.kill_hub(),
            Victim::Agent => self.kill_agent(),
            Victim::Executor => kill(self.executor().await, Signal::SIGKILL).unwrap(),
        }
    }

    /// Starts again what was killed.
    fn recover(&mut self) {
        if self.hub.is_none() {
            self.start_hub();
        }
        if self.agent.is_none() {
            self.start_agent();
        }
    }

    fn logs(&self) -> String {
        let text = |running: Option<&Running>| {
            running.map_or_else(String::new, |running| running.text(Stream::Stderr))
        };
        format!(
            "{}--- hub\n{}--- agent\n{}",
            self.log,
            text(self.hub.as_ref().map(|hub| &hub.0.running)),
            text(self.agent.as_ref())
        )
    }
}

/// A run without a fault: all points that there are, and what the platform shows.
async fn learn() -> (Vec<Point>, Changes) {
    let mut run = Run::start().await;
    run.start_agent();
    run.until_asked_for_tasks().await;
    let job = run.fixture.start_note();
    run.fixture.platform.until_job(job, Status::Completed).await;
    let (to_hub, to_platform) = (run.to_hub.calls(), run.to_platform.calls());
    run.assert_nothing_left().await;
    assert_eq!(run.fixture.times_run(), 1);
    let mut points = Vec::new();
    for (side, calls) in [(Side::ToHub, to_hub), (Side::ToPlatform, to_platform)] {
        let mut counts = BTreeMap::<&str, usize>::new();
        for call in &calls {
            let count = counts.entry(&call.class).or_default();
            *count += 1;
            if *count > OF_A_CLASS {
                continue;
            }
            for moment in [Moment::Sent, Moment::Answered] {
                points.extend(victims(side, &call.class).iter().map(|victim| Point {
                    side,
                    class: call.class.clone(),
                    number: *count,
                    moment,
                    victim: *victim,
                }));
            }
        }
    }
    (points, run.changes())
}

/// What can be killed at a call: those that take part in it, and who waits for what follows.
fn victims(side: Side, class: &str) -> &'static [Victim] {
    let of_executor = class.contains("/platform/")
        || ["/accept", "/complete"]
            .iter()
            .any(|end| class.ends_with(end));
    if side == Side::ToPlatform || class.starts_with("POST /pools/") {
        &[Victim::None, Victim::Hub]
    } else if of_executor {
        &[Victim::None, Victim::Hub, Victim::Agent, Victim::Executor]
    } else {
        &[Victim::None, Victim::Hub, Victim::Agent]
    }
}

/// One run with one fault. Returns whether the call was made.
async fn try_point(run: &mut Run, point: &Point, usual: &Changes) -> bool {
    let proxy = match point.side {
        Side::ToHub => &run.to_hub,
        Side::ToPlatform => &run.to_platform,
    };
    let wanted = point.clone();
    let held = proxy.hold(move |call| call.is(&wanted.class, wanted.number, wanted.moment));
    run.start_agent();
    // The first calls may be the ones that are held.
    let is_early = point.class.contains("/instances/") || point.class.ends_with("/tasks/request");
    if !is_early {
        run.until_asked_for_tasks().await;
    }
    let job = run.fixture.start_note();
    let held = tokio::select! {
        held = held => held.ok(),
        _ = run.until_over(job) => None,
    };
    let was_held = held.is_some();
    if was_held {
        run.strike(point.victim).await;
        drop(held);
        run.recover();
    }
    let found = run.until_over(job).await;
    run.assert_nothing_left().await;
    let times = run.fixture.times_run();
    // Before the claim, another executor gets the task.
    let is_unclaimed = (point.class == ASK && point.number == 1)
        || (point.class == ACCEPT && point.moment == Moment::Sent);
    if point.victim == Victim::Executor && !is_unclaimed {
        // What an executor has begun is not begun again.
        assert!(
            matches!(found.status, Status::Completed | Status::Failed),
            "{found:?}"
        );
        assert_eq!(found.step_statuses(), [found.status]);
        assert!(times <= 1, "it ran {times} times");
        assert!(
            found.status == Status::Failed || times == 1,
            "it did not run"
        );
        for of_step in [false, true] {
            let changes = run.changes();
            let ends = changes
                .iter()
                .filter(|(step, _, to, _)| step.is_some() == of_step && *to == found.status);
            assert_eq!(ends.count(), 1, "{changes:?}");
        }
    } else {
        assert_eq!((found.status, times), (Status::Completed, 1));
        assert_eq!(run.changes(), *usual);
    }
    was_held
}

/// Points that were tried.
#[derive(Debug, Default)]
pub(super) struct Tried {
    /// Those at which the fault happened.
    hit: Vec<Point>,
    /// Those whose call was not made: each run makes other ones.
    missed: Vec<Point>,
}

impl Tried {
    /// Fails unless at least one point of each group was hit. Lists the missed ones, also in the output of a test that passes.
    pub(super) fn assert_hit<K: Ord + Debug>(&self, group: impl Fn(&Point) -> K) {
        let (hit, missed) = (self.hit.len(), self.missed.len());
        let lines = self.missed.iter().map(|point| format!("  {point}\n"));
        let lines: Vec<String> = lines.collect();
        let list = format!(
            "{hit} points were hit, and {missed} missed:\n{}",
            lines.concat()
        );
        std::io::stderr().write_all(list.as_bytes()).unwrap();
        let never = self.never_hit(group);
        assert!(never.is_empty(), "no point was hit of {never:#?}\n{list}");
        assert!(hit > 0, "nothing was tried");
    }

    /// The groups of which no point was hit.
    fn never_hit<K: Ord>(&self, group: impl Fn(&Point) -> K) -> BTreeSet<K> {
        let mut never: BTreeSet<K> = self.missed.iter().map(&group).collect();
        for point in &self.hit {
            never.remove(&group(point));
        }
        never
    }
}

/// Tries the points that are chosen.
pub(super) async fn try_points(choose: impl Fn(usize, &Point) -> bool) -> Tried {
    let (points, usual) = learn().await;
    let chosen = points
        .iter()
        .enumerate()
        .filter(|(at, point)| choose(*at, point));
    let chosen: Vec<Point> = chosen.map(|(_, point)| point.clone()).collect();
    let tried = futures_util::stream::iter(chosen).map(|point| {
        let usual = usual.clone();
        let runtime = tokio::runtime::Handle::current();
        let one = async move |point: Point| {
            let mut run = Run::start().await;
            let tried = try_point(&mut run, &point, &usual);
            let outcome = AssertUnwindSafe(tried).catch_unwind().await;
            let outcome = outcome.map_err(|panic| {
                let words = panic.downcast_ref::<String>().cloned();
                format!("{point}: {}\n{}", words.unwrap_or_default(), run.logs())
            });
            outcome.map(|was_hit| (point, was_hit))
        };
        // A thread of its own, since it blocks while it waits for processes.
        let tried = tokio::task::spawn_blocking(move || runtime.block_on(one(point)));
        tried.map(|joined| joined.unwrap())
    });
    let mut outcomes = tried.buffer_unordered(AT_ONCE);
    let (mut tried, mut failed) = (Tried::default(), Vec::new());
    while let Some(outcome) = outcomes.next().await {
        match outcome {
            Ok((point, true)) => tried.hit.push(point),
            Ok((point, false)) => tried.missed.push(point),
            Err(report) => failed.push(report),
        }
    }
    let count = failed.len();
    assert!(failed.is_empty(), "{count} failed\n{}", failed.join("\n\n"));
    tried
}

#[test]
fn a_group_of_points_of_which_none_was_hit_is_found() {
    let point = |class: &str, victim| Point {
        side: Side::ToHub,
        class: class.to_owned(),
        number: 1,
        moment: Moment::Sent,
        victim,
    };
    let tried = Tried {
        hit: vec![point("a", Victim::Hub), point("b", Victim::Agent)],
        missed: vec![point("a", Victim::Hub), point("a", Victim::Agent)],
    };
    let never = tried.never_hit(Point::of);
    assert_eq!(never, [(Side::ToHub, "a".to_owned(), Victim::Agent)].into());
    tried.assert_hit(|point| point.victim);
    let incomplete = AssertUnwindSafe(|| tried.assert_hit(Point::of));
    assert!(std::panic::catch_unwind(incomplete).is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn a_run_ends_once_at_some_kills_and_losses() {
    // A number without a common divisor with those of moments and victims, so that all of them occur.
    let tried = try_points(|at, _| at % 17 == 5).await;
    tried.assert_hit(|point| point.victim);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_run_that_is_over_before_its_claim_leaves_nothing() {
    let mut run = Run::start().await;
    run.start_agent();
    run.until_asked_for_tasks().await;
    let held = run.to_hub.hold(|call| call.is(ASK, 1, Moment::Sent));
    let job = run.fixture.start_note();
    let held = held.await.unwrap();
    run.fixture.platform.cancel(job).await;
    held.release();
    // Much sooner than the lease would end by itself.
    run.assert_nothing_left().await;
    assert_eq!(run.fixture.times_run(), 0);
    assert_eq!(run.fixture.platform.job(job).status, Status::Cancelled);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn calls_that_come_again_after_the_end_change_nothing() {
    let mut run = Run::start().await;
    let client = Client::new(&run.to_hub.url(), run.fixture.token.reveal());
    let instance = client.register().await;
    let job = run.fixture.start_note();
    let first = client.request(instance).await;
    let decline = json!({"reason": "DRAINING", "diagnostic": "the agent stops"});
    for (call, body) in [
        (LeaseCall::Started, json!({})),
        (LeaseCall::Decline, decline),
    ] {
        client.lease(&first, call, body).await.ok();
    }
    client.remove(instance).await;
    run.start_agent();
    run.fixture.platform.until_job(job, Status::Completed).await;
    run.assert_nothing_left().await;
    let agent = run.agent.take().unwrap();
    agent.signal(Signal::SIGTERM);
    ends_with(agent, 0);
    let calls = run.to_hub.calls();
    run.kill_hub();
    let usual = (run.stored().await, run.changes());
    run.start_hub();
    let old = first.lease_id.to_string();
    for call in &calls {
        let (status, body) = run.to_hub.repeat(call).await.unwrap();
        if call.is_about(&old) {
            assert_eq!(status, 409, "{}: {body}", call.class);
            assert!(
                body.contains("LEASE_SUPERSEDED") || body.contains("TASK_ALREADY_TERMINAL"),
                "{}: {body}",
                call.class
            );
        }
        assert!(status < 500, "{}: {status} {body}", call.class);
    }
    run.kill_hub();
    assert_eq!((run.stored().await, run.changes()), usual);
    assert_eq!(run.fixture.times_run(), 1);
}
