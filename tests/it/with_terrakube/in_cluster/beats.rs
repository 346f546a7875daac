//! The heartbeat of a run: first the launcher writes it, then only the executor, to the end.

use std::time::Duration;

use integration_tests::process::Stream;
use integration_tests::{Gate, Repository};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use platform::heartbeat::{self, HeartbeatState};
use platform::redis::{Redis, RedisArgs};
use serde_json::json;
use test_cluster::{ADMIN, Fault as ClusterFault, State};
use test_peers::wait;
use test_platform::launcher::Launcher;
use test_platform::{Actor, Effect, Fault, Flow, Platform, Records, Status};

use crate::in_cluster::{Fixture, LAUNCHER};
use crate::with_terrakube::{RunTarget, Stage, quick};

/// Longer than any run here takes. A test ends the grace period of its job itself.
const LONG: Duration = Duration::from_hours(1);
/// Held by the launcher that watches.
const LEASE: &str = "mayfly-launcher";
/// Seconds of a heartbeat whose end a test waits for.
const SOON: i64 = 15;
/// Seconds of a heartbeat whose next beat a test waits for. On a busy machine, that may be late.
const COUNTED: i64 = 35;

impl Stage {
    fn leases(&self) -> Api<Lease> {
        let fixture = self.fixture();
        Api::namespaced(fixture.cluster.client(ADMIN).unwrap(), &fixture.runs)
    }

    /// The holder of the Lease.
    async fn watcher(&self) -> String {
        let lease = self.leases().get(LEASE).await.unwrap();
        lease.spec.unwrap().holder_identity.unwrap()
    }

    /// Makes the Lease of a dead holder last longer than any test.
    async fn hold_the_lease(&self) {
        let long = Patch::Merge(json!({"spec": {"leaseDurationSeconds": 3600}}));
        let leases = self.leases();
        let held = leases.patch(LEASE, &PatchParams::default(), &long).await;
        held.unwrap();
    }

    /// The author of the last heartbeat.
    async fn sign(&self, job: u32) -> HeartbeatState {
        let args = RedisArgs {
            redis_hostname: Some("127.0.0.1".into()),
            redis_port: Some(self.redis.as_ref().unwrap().port().to_string().into()),
            ..RedisArgs::default()
        };
        let redis = Redis::new(args.resolve().unwrap().unwrap());
        heartbeat::heartbeat_state(&redis, &job.to_string())
            .await
            .unwrap()
    }

    async fn until_state(&self, job: u32, sign: HeartbeatState) {
        let what = format!("the sign {sign:?}");
        self.until_so(&what, async || self.sign(job).await == sign)
            .await;
    }

    /// Waits until the executor has written several heartbeats.
    async fn until_beaten_by_its_executor(&self, job: u32) {
        self.until_state(job, HeartbeatState::FromExecutor).await;
        let mut beats = 0;
        self.until_so("three beats", async || {
            beats += usize::from(self.shorten(job, COUNTED));
            assert_eq!(self.sign(job).await, HeartbeatState::FromExecutor);
            beats == 3
        })
        .await;
    }

    async fn until_so(&self, what: &str, mut is_so: impl AsyncFnMut() -> bool) {
        let look = async || {
            let so = is_so().await;
            if so {
                Ok(())
            } else {
                Err(self.platform.report())
            }
        };
        wait::until(what, look).await;
    }

    /// Waits for another status, and has heartbeats end soon meanwhile.
    async fn until_no_longer(&self, job: u32, status: Status) {
        let has_changed = async || {
            self.shorten(job, SOON);
            self.platform.job(job).status != status
        };
        self.until_so("another status", has_changed).await;
    }

    /// A run whose executor is at work, with its launcher beside it.
    async fn at_work() -> Option<(Self, Gate, Launcher, u32)> {
        let run_target = RunTarget::Cluster(Box::new(Fixture::new().await?));
        let stage = Self::on(run_target, Platform::builder().grace(LONG)).await;
        let gate = stage.machine().gate();
        let launcher = stage.serve();
        let job = stage.start(gate.repository(), Flow::only("terraformApply"));
        stage.platform.until_streamed(job, "at-the-gate").await;
        Some((stage, gate, launcher, job))
    }

    /// Deletes the heartbeat.
    fn stop_heart(&self, job: u32) {
        let redis = self.redis.as_ref().unwrap();
        let key = platform::heartbeat::key(&job.to_string());
        let mut connection = redis.connect().unwrap();
        redis::cmd("DEL").arg(key).exec(&mut connection).unwrap();
    }

    /// Gives the Lease to a holder that does nothing.
    async fn usurp_lease(&self) {
        let leases = self.leases();
        loop {
            let mut lease = leases.get(LEASE).await.unwrap();
            let spec = lease.spec.as_mut().unwrap();
            spec.holder_identity = Some("somebody".to_owned());
            spec.lease_duration_seconds = Some(3600);
            match leases.replace(LEASE, &PostParams::default(), &lease).await {
                Ok(_) => return,
                // The holder has renewed it meanwhile.
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Leaves the heartbeat no more than these seconds. Beats come every ten seconds and last for 45. Whether one had come
    /// since the last time.
    fn shorten(&self, job: u32, seconds: i64) -> bool {
        let redis = self.redis.as_ref().unwrap();
        let key = platform::heartbeat::key(&job.to_string());
        let mut connection = redis.connect().unwrap();
        let mut left = redis::cmd("TTL");
        let left: i64 = left.arg(&key).query(&mut connection).unwrap();
        let mut shorten = redis::cmd("EXPIRE");
        shorten
            .arg(&key)
            .arg(seconds)
            .arg("LT")
            .exec(&mut connection)
            .unwrap();
        left > seconds
    }

    /// A run whose pod is there and whose executor waits at the gate to be started: the launcher alone keeps its job from
    /// being failed.
    async fn waiting() -> Option<(Self, Gate, Launcher, u32)> {
        let run_target = RunTarget::Cluster(Box::new(Fixture::new().await?));
        let stage = Self::on(run_target, Platform::builder().grace(LONG)).await;
        let gate = stage.machine().gate();
        stage
            .fixture()
            .image_that_first(&format!("{}{}", quick(), gate.words()));
        let launcher = stage.serve();
        let job = stage.start(Repository::fixture(), Flow::only("terraformPlan"));
        stage.platform.until_job(job, Status::Queue).await;
        stage.platform.end_grace(job).await;
        Some((stage, gate, launcher, job))
    }

    async fn until_alive(&self, job: u32) {
        let is_alive = async || self.platform.heartbeat(job).await.is_some();
        self.until_so("a heartbeat", is_alive).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_has_a_heartbeat_from_its_acceptance_to_its_end_however_late_its_pod_is() {
    let (stage, gate, _launcher, job) = or_skip!(Stage::waiting().await);
    let spared = |records: &Records| (records.job(job).spared >= 3).then_some(());
    stage
        .platform
        .until("the sweep finds it alive", spared)
        .await;
    assert_eq!(stage.platform.job(job).status, Status::Queue);
    gate.open().await;
    stage.platform.until_job(job, Status::Completed).await;
    // A run that has ended gets no heartbeat. This is checked too.
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_that_has_lost_the_lease_keeps_no_run_alive() {
    let (stage, gate, _launcher, job) = or_skip!(Stage::waiting().await);
    stage.usurp_lease().await;
    // The new watcher does nothing. So the platform must find the run lost, although the former watcher runs.
    stage.until_no_longer(job, Status::Queue).await;
    stage.platform.until_job(job, Status::Failed).await;
    gate.open().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_run_has_a_heartbeat_while_the_api_server_is_unreachable() {
    let (stage, gate, launcher, job) = or_skip!(Stage::waiting().await);
    let faults = stage.fixture().cluster.faults();
    faults.next_of(LAUNCHER, usize::MAX, "*", "*", ClusterFault::Unavailable);
    // It has let go of the Lease, as far as it knows.
    launcher
        .running
        .wait_for(Stream::Stderr, "the Lease could not be acquired");
    let mut beats = 0;
    stage
        .until_so("three beats", async || {
            beats += usize::from(stage.shorten(job, COUNTED));
            assert_eq!(stage.platform.job(job).status, Status::Queue);
            beats == 3
        })
        .await;
    faults.clear();
    gate.open().await;
    stage.platform.until_job(job, Status::Completed).await;
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_at_work_outlives_the_launcher_that_started_it() {
    let (stage, gate, launcher, job) = or_skip!(Stage::at_work().await);
    stage.platform.end_grace(job).await;
    launcher.crash();
    stage.until_beaten_by_its_executor(job).await;
    gate.open().await;
    stage.platform.until_job(job, Status::Completed).await;
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_sends_no_heartbeat_beside_an_executor() {
    let (stage, gate, _launcher, job) = or_skip!(Stage::at_work().await);
    stage.platform.end_grace(job).await;
    stage.until_beaten_by_its_executor(job).await;
    gate.open().await;
    stage.platform.until_job(job, Status::Completed).await;
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_on_a_dead_node_is_lost_in_a_minute_and_no_other_pod_starts_it() {
    // It is the launcher that ends it, before the platform would.
    let (stage, _gate, _launcher, job) = or_skip!(Stage::at_work().await);
    stage.until_state(job, HeartbeatState::FromExecutor).await;
    let cluster = &stage.fixture().cluster;
    let runs = &stage.fixture().runs;
    let pods = cluster.state(runs).await.unwrap().pods;
    assert_eq!(pods.len(), 1);
    cluster.silence_node(&pods[0]).await.unwrap();
    // What it beat last counts for a shorter time here.
    stage.until_no_longer(job, Status::Running).await;
    stage.platform.until_job(job, Status::Failed).await;
    let step = stage.platform.job(job).steps[0].id.clone();
    let output = stage.platform.step_output(job, &step).unwrap();
    assert!(output.contains("does not answer any more"), "{output}");
    // Its node is removed, as a cloud does with a machine that is gone.
    cluster.remove_node_of(&pods[0]).await.unwrap();
    let over = |state: &State| {
        let job = state.jobs.first()?;
        let conditions = job.status.as_ref()?.conditions.as_ref()?;
        let mut ended = conditions.iter();
        ended.find(|condition| condition.type_ == "Failed" && condition.status == "True")?;
        Some(state.pods.clone())
    };
    let left = stage.fixture().until("the Job has failed", over).await;
    let another = |pod: &Pod| pod.metadata.uid != pods[0].metadata.uid;
    assert!(!left.iter().any(another), "{left:?}");
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approval_survives_launchers_that_crash_before_they_watch() {
    let stage = or_skip!(Stage::in_cluster().await);
    let platform = &stage.platform;
    let first = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::plan_approve_apply());
    platform.until_job(job, Status::WaitingApproval).await;
    // The approval is accepted, and its launcher cannot tell that it is done.
    platform.fault(Fault::always("PATCH", "", Effect::Status(503)));
    platform.approve(job).await;
    platform.until_job(job, Status::Queue).await;
    let watcher = stage.watcher().await;
    first.crash();
    stage.hold_the_lease().await;
    for _ in 0..2 {
        stage.stop_heart(job);
        let next = stage.serve();
        stage.until_alive(job).await;
        assert_eq!(stage.watcher().await, watcher, "the dead one is waited for");
        next.crash();
    }

    stage.stop_heart(job);
    let last = stage.serve();
    stage.until_alive(job).await;
    platform.clear_faults();
    let gone = stage.leases().delete(LEASE, &DeleteParams::default()).await;
    gone.unwrap();
    platform.until_job(job, Status::Completed).await;
    let changes = stage.history(job);
    assert!(
        changes.iter().all(|(_, _, by)| *by != Actor::Sweep),
        "{changes:?}"
    );
    platform.assert_kept().await;
    drop(last);
}
