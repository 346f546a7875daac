//! Executors with the lease of a hub: they reach the platform through its relay alone, and have no secret of the platform.

use flate2::Compression;
use flate2::write::GzEncoder;
use integration_tests::machine::{RunningExecutor, files_below};
use integration_tests::process::Stream;
use integration_tests::repository::ROOT_MODULE;
use integration_tests::{ExecutorRun, FakeTool, Gate, Outcome, Repository};
use job_contract::keys::ObjectKey;
use job_contract::report::StateStatus;
use job_contract::{JobData, env};
use pool_protocol::id::InstanceId;
use pool_protocol::path::{self, LeaseCall};
use pool_protocol::problem::{Code, Problem};
use pool_protocol::task::LeasedTask;
use pool_protocol::token::PoolToken;
use serde_json::{Value, json};
use test_peers::http::{Response, Server};
use test_peers::proxy::{Call, Fate, Moment, Proxy};
use test_platform::{Actor, Flow, NewJob, Platform, Release, Status, Workspace};

use super::Stage;
use crate::in_pools::client::{Client, executor_of};
use crate::machine;
use test_platform::launcher::{self, Launcher};

/// As executors know the platform. They cannot reach it.
const PUBLIC: &str = "https://terrakube.example.test";
/// A call for a lease.
const LEASE: &str = "POST /api/v1/executor/tasks/{}/leases/{}";

/// A platform, a hub before it, a proxy before the hub, and a machine in another network.
struct Pool {
    stage: Stage,
    folder: tempfile::TempDir,
    proxy: Proxy,
    hub: Option<Launcher>,
    lost_seconds: &'static str,
    agent: Client,
    instance: InstanceId,
}

impl Pool {
    async fn new() -> Self {
        Self::that_gives_up_after("600").await
    }

    /// Under a platform with the rules of this release.
    async fn under(release: Release) -> Self {
        Self::of(Stage::under(release).await, "600").await
    }

    async fn that_gives_up_after(lost_seconds: &'static str) -> Self {
        Self::of(Stage::on_this_machine().await, lost_seconds).await
    }

    /// A hub before this platform.
    async fn of(stage: Stage, lost_seconds: &'static str) -> Self {
        let token = PoolToken::new("eu".parse().unwrap());
        let proxy = Proxy::of_calls(&[]).unwrap();
        let agent = Client::new(&proxy.url(), token.reveal());
        let mut pool = Self {
            stage,
            folder: tempfile::tempdir().unwrap(),
            hub: None,
            lost_seconds,
            agent,
            instance: InstanceId::new(),
            proxy,
        };
        let pools = json!({"pools": {"eu": {
            "organizations": ["*"],
            "tokens": [{"id": "t", "sha256": token.digest()}],
        }}});
        std::fs::write(pool.folder.path().join("pools.yaml"), pools.to_string()).unwrap();
        pool.start_hub();
        pool.instance = pool.agent.register().await;
        pool
    }

    fn start_hub(&mut self) {
        let mut command = launcher::hub(crate::LAUNCHER, self.folder.path());
        for (name, value) in self.stage.settings() {
            command.env(name, value);
        }
        command.env(env::POOL_LOST_SECONDS, self.lost_seconds);
        // The stage looks for states and outputs there.
        command.env(env::DATA_DIR, self.stage.machine().data_dir());
        let hub = tokio::task::block_in_place(|| Launcher::start(&mut command));
        *self.proxy.servers() = vec![hub.endpoint.address];
        let url = hub.endpoint.url("/pools/eu/api/v1/terraform-rs");
        self.stage.platform.dispatch_to(&url);
        self.hub = Some(hub);
    }

    fn platform(&self) -> &Platform {
        &self.stage.platform
    }

    /// The executor of an agent.
    fn executor(&self, lease: &LeasedTask) -> ExecutorRun<'_> {
        let payload = lease.task.payload.get();
        let job: JobData = serde_json::from_str(payload).unwrap();
        let relay = path::relay(lease.task_id, lease.lease_id);
        let url = format!(
            "{}{}",
            self.proxy.url(),
            relay.trim_end_matches("/platform")
        );
        self.stage
            .machine()
            .executor(&job)
            .without(env::STATE_TYPE)
            .env(env::LEASE_URL, url)
            .env(env::LEASE_TOKEN, &lease.job_token)
            .env(env::PUBLIC_API_URL, PUBLIC)
            .env(env::POD_NAME, "agent-pod")
            .env(env::POD_UID, "uid-of-the-pod")
            .env(env::STATUS_POLL_SECONDS, "1")
    }

    fn run(&self, lease: &LeasedTask) -> Outcome {
        tokio::task::block_in_place(|| self.executor(lease).run())
    }

    /// Waits for the next step.
    async fn next_step(&self) -> LeasedTask {
        self.agent.request(self.instance).await
    }

    /// An apply that waits at the gate, and its job.
    async fn at_the_gate(&self, gate: &Gate) -> (u32, LeasedTask, RunningExecutor) {
        let job = self
            .stage
            .start(gate.repository(), Flow::only("terraformApply"));
        let lease = self.next_step().await;
        let executor = self.executor(&lease).start();
        self.platform().until_streamed(job, "at-the-gate").await;
        (job, lease, executor)
    }

    /// The calls for a lease with this end of their class.
    fn calls(&self, lease: &LeasedTask, end: &str) -> Vec<Call> {
        let calls = self.proxy.calls().into_iter();
        let lease = lease.lease_id.to_string();
        calls
            .filter(|call| call.class.ends_with(end) && call.is_about(&lease))
            .collect()
    }

    /// Requests that would change something at the platform.
    fn changes(&self) -> Vec<String> {
        let calls = self.proxy.calls().into_iter().map(|call| call.class);
        let is_change = |class: &String| class.contains("/platform/") && !class.starts_with("GET ");
        calls.filter(is_change).collect()
    }

    #[track_caller]
    fn assert_nothing_refused(&self) {
        let calls = self.proxy.calls().into_iter();
        let refused: Vec<_> = calls
            .filter(|call| call.class.contains("/platform/") && matches!(call.status, 400..500))
            // The platform itself takes no context of a job that was cancelled.
            .filter(|call| !call.class.contains("/context/v1/") || call.status != 409)
            .map(|call| (call.class, call.status))
            .collect();
        assert!(refused.is_empty(), "{refused:#?}");
    }

    /// The executor has ended its task by this call, once.
    #[track_caller]
    fn assert_ended(&self, lease: &LeasedTask, call: LeaseCall, exit_code: i32) {
        let ends = [LeaseCall::Complete, LeaseCall::Fail, LeaseCall::Cancelled];
        let made: Vec<_> = ends
            .into_iter()
            .flat_map(|end| self.calls(lease, &format!("/{}", end.name())))
            .filter(|call| call.status == 200)
            .collect();
        assert_eq!(made.len(), 1, "{made:#?}");
        assert!(made[0].class.ends_with(call.name()), "{made:#?}");
        let end: Value = serde_json::from_str(&made[0].body()).unwrap();
        assert_eq!(
            (&end["reported"], &end["exitCode"]),
            (&json!(true), &json!(exit_code))
        );
    }
}

fn wait(executor: RunningExecutor) -> Outcome {
    tokio::task::block_in_place(|| executor.wait())
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_plan_and_apply_need_no_secret_of_the_platform_and_show_none_of_the_lease() {
    let pool = Pool::new().await;
    let (platform, repository) = (pool.platform(), Repository::fixture());
    let script = "env; tr '\\0' '\\n' < /proc/self/environ; echo \"token=[$terrakubeToken] at $terrakubeApi\"";
    let mut template = vec![Flow::new("customScripts", 50).with_script(script)];
    template.extend(Flow::plan_apply());
    let workspace = platform.workspace(Workspace::new(&repository.url()));
    let job = platform.start_job(NewJob::new(&workspace, template));
    for _ in 0..3 {
        let lease = pool.next_step().await;
        let outcome = pool.run(&lease).expect_code(0);
        pool.assert_ended(&lease, LeaseCall::Complete, 0);
        let token = &lease.job_token;
        assert!(!outcome.to_string().contains(token), "{outcome}");
        assert!(!outcome.log().contains(env::LEASE_TOKEN), "{outcome}");
        for path in files_below(pool.stage.machine().folder()) {
            let text = std::fs::read(&path).unwrap();
            let mut windows = text.windows(token.len());
            let found = windows.any(|part| part == token.as_bytes());
            assert!(!found, "the token is in {}", path.display());
        }
    }
    let job = platform.until_job(job, Status::Completed).await;
    assert_eq!(job.step_statuses(), [Status::Completed; 3]);
    assert_eq!(pool.stage.resources(job.id), ["greeting"]);
    assert_eq!(platform.records().histories.len(), 1);

    // Records name the address that the hub has, and not the one of the executor.
    let step = job.step_of("terraformPlan");
    let output = step.output.as_deref().unwrap_or_default();
    let own = format!("{}/tfoutput/v1/", platform.url());
    assert!(output.starts_with(&own), "{output}");
    let output = pool.stage.output(job.id, "customScripts");
    // The token is a password of the run, and is masked.
    let of_run = "token=[***] at http://127.0.0.1:";
    assert!(output.contains(of_run), "{output}");
    let lines = platform.streamed(job.id).await;
    assert!(
        lines
            .iter()
            .any(|line| line.output.contains("Apply complete!")),
        "{lines:#?}"
    );
    pool.assert_nothing_refused();
}

/// Interfaces show an empty list as a plan without changes.
#[tokio::test(flavor = "multi_thread")]
async fn without_structured_output_the_job_context_never_has_a_list_of_changes() {
    let pool = Pool::new().await;
    let platform = pool.platform();
    let job = pool.stage.start(Repository::fixture(), Flow::plan_apply());
    for _ in 0..2 {
        let lease = pool.next_step().await;
        let run = pool.executor(&lease).env(env::STRUCTURED_OUTPUT, "false");
        tokio::task::block_in_place(|| run.run()).expect_code(0);
    }
    platform.until_job(job, Status::Completed).await;
    let ledger = platform.ledger();
    let contexts = ledger.of("POST", "/context/v1/").into_iter();
    let contexts: Vec<_> = contexts.map(|request| &request.body).collect();
    let lists = ["planStructuredOutput", "applyStructuredOutput"];
    let has_list = |context: &&Value| lists.iter().any(|list| context.get(list).is_some());
    assert!(
        !contexts.is_empty() && !contexts.iter().any(has_list),
        "{contexts:#?}"
    );
    let records = platform.records();
    let context = &records.contexts[&job];
    let stored = json!({"state": "PERSISTED"});
    assert_eq!(context["structuredOutputStatus"], stored, "{context:#?}");
    pool.assert_nothing_refused();
}

#[tokio::test(flavor = "multi_thread")]
async fn uploaded_content_comes_through_the_relay() {
    for release in Release::ALL {
        let pool = Pool::under(release).await;
        let platform = pool.platform();
        let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        let mut head = tar::Header::new_gnu();
        head.set_size(ROOT_MODULE.len() as u64);
        head.set_mode(0o644);
        archive
            .append_data(&mut head, "main.tf", ROOT_MODULE.as_bytes())
            .unwrap();
        let archive = archive.into_inner().unwrap().finish().unwrap();
        let upload = platform.upload(archive);
        let workspace = platform.workspace(Workspace::new("https://git.example.test/none.git"));
        let template = Flow::only("terraformPlan");
        let job = platform.start_job(NewJob::new(&workspace, template).from_upload(&upload));
        let lease = pool.next_step().await;
        // Its content is at the address of the platform that the executor knows.
        let run = pool
            .executor(&lease)
            .env(env::PUBLIC_API_URL, platform.url());
        tokio::task::block_in_place(|| run.run()).expect_code(0);
        platform.until_job(job, Status::Completed).await;
        let content = pool.calls(&lease, "/terraformContent.tar.gz");
        assert_eq!(content.len(), 1, "{content:#?}");
        pool.assert_nothing_refused();
    }
}

/// Of a plan too, which could be run twice.
#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_is_not_the_holder_ends_with_76_and_changes_nothing() {
    let pool = Pool::new().await;
    for kind in ["terraformPlan", "terraformApply"] {
        let job = pool.stage.start(Repository::fixture(), Flow::only(kind));
        let lease = pool.next_step().await;
        let other = executor_of(&pool.agent, &lease);
        other.accept(&lease, "another-pod").await.ok();
        let outcome = pool.run(&lease).expect_code(76);
        assert!(
            outcome
                .error()
                .contains("a later lease, or another holder, has the task"),
            "{outcome}"
        );
        assert_eq!(pool.changes(), Vec::<String>::new());
        assert_eq!(pool.platform().job(job).step_statuses(), [Status::Pending]);
        assert!(pool.calls(&lease, "/heartbeat").is_empty());
        // The task is still the other's.
        let end = json!({"exitCode": 1, "reported": true});
        other.lease(&lease, LeaseCall::Fail, end).await.ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_whose_lease_was_given_to_another_ends_with_76_and_changes_nothing() {
    let pool = Pool::new().await;
    let job = pool
        .stage
        .start(Repository::fixture(), Flow::only("terraformApply"));
    let first = pool.next_step().await;
    let decline = json!({"reason": "QUOTA", "delaySeconds": 0});
    let declined = pool.agent.lease(&first, LeaseCall::Decline, decline).await;
    declined.ok();
    let second = pool.next_step().await;
    assert_eq!(second.task_id, first.task_id);
    let outcome = pool.run(&first).expect_code(76);
    assert!(
        outcome
            .error()
            .contains("a later lease, or another holder, has the task"),
        "{outcome}"
    );
    assert_eq!(pool.changes(), Vec::<String>::new());
    assert_eq!(pool.platform().job(job).step_statuses(), [Status::Pending]);
    executor_of(&pool.agent, &second)
        .accept(&second, "pod")
        .await
        .ok();
}

/// No hub of another version exists yet.
#[test]
fn a_hub_of_other_versions_is_an_error_of_the_configuration_with_both() {
    let hub = Server::start(|_| {
        let problem = Problem::new(Code::ExecutorProtocolVersionUnsupported, "too old");
        let problem = problem.with_versions(2..=3, Some(1));
        Response::new(problem.status, serde_json::to_vec(&problem).unwrap())
    });
    let hub = hub.unwrap();
    let (machine, repository) = (machine(), Repository::fixture());
    let outcome = machine
        .executor(&integration_tests::job::plan(&repository))
        .env(env::LEASE_URL, hub.url())
        .env(env::LEASE_TOKEN, "mfr_token")
        .env(env::PUBLIC_API_URL, PUBLIC)
        .run()
        .expect_code(64);
    let both = "the hub speaks versions 2 to 3 of the protocol, this executor version 1";
    assert!(outcome.error().contains(both), "{outcome}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancellation_of_the_job_is_seen_through_the_relay_and_the_state_is_stored() {
    let pool = Pool::new().await;
    let gate = pool.stage.machine().gate();
    let (job, lease, executor) = pool.at_the_gate(&gate).await;
    pool.platform().cancel(job).await;
    let outcome = wait(executor).expect_code(1);
    assert!(outcome.log().contains("Interrupt received"), "{outcome}");
    let resources = pool.stage.resources(job);
    assert!(resources.contains(&"first".to_owned()), "{outcome}");
    pool.assert_ended(&lease, LeaseCall::Cancelled, 1);
    assert_eq!(pool.platform().job(job).status, Status::Cancelled);
    assert_eq!(pool.platform().records().histories.len(), 1);
    pool.assert_nothing_refused();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_the_hub_has_given_up_stores_its_state_and_leaves_all_statuses_alone() {
    let pool = Pool::that_gives_up_after("40").await;
    let gate = pool.stage.machine().gate();
    let (job, lease, executor) = pool.at_the_gate(&gate).await;
    pool.proxy.cut();
    let why = "stopped because its hub has not answered for";
    tokio::task::block_in_place(|| executor.running.wait_for(Stream::Stdout, why));
    let so_far = pool.platform().job(job).step_statuses();
    assert_eq!(so_far, [Status::Running], "it was given up before");
    pool.platform().until_job(job, Status::Failed).await;
    let before = pool.stage.history(job);
    pool.proxy.heal();
    let outcome = wait(executor).expect_code(1);
    assert!(outcome.log().contains("Interrupt received"), "{outcome}");
    assert!(
        pool.stage.resources(job).contains(&"first".to_owned()),
        "{outcome}"
    );
    let output = pool.stage.output(job, "terraformApply");
    assert!(output.contains("at-the-gate"), "{output}");
    assert_eq!(pool.platform().records().histories.len(), 1);
    let lines = pool.platform().streamed(job).await;
    assert!(
        lines
            .iter()
            .any(|line| line.output.contains("Interrupt received")),
        "{lines:#?}"
    );
    assert_eq!(pool.stage.history(job), before);
    // Which call learns it first depends on time: a heartbeat, or a look at the job.
    let calls = pool.calls(&lease, "").into_iter();
    let refused = calls.filter(|call| call.status == 409);
    assert_ne!(refused.count(), 0);
}

/// No real tool can be made to do this: the backends that lead elsewhere are refused before.
#[tokio::test(flavor = "multi_thread")]
async fn an_apply_whose_state_the_hub_does_not_have_has_failed_and_its_state_is_kept() {
    let pool = Pool::new().await;
    let state = r#"{"version":4,"serial":3,"lineage":"of-the-tool","outputs":{},"resources":[{}]}"#;
    let tool = FakeTool::new().on("state", &format!("echo '{state}'"));
    let flow = Flow::only("terraformApply");
    let job = pool.stage.start(Repository::fixture(), flow);
    let lease = pool.next_step().await;
    let executor = pool.executor(&lease).env("PATH", tool.path());
    let outcome = wait(executor.start()).expect_code(1);
    let words = "not where the platform reads it";
    assert!(outcome.error().contains(words), "{outcome}");
    assert_eq!(outcome.report().state, Some(StateStatus::Kept), "{outcome}");
    let task = &lease.task;
    let kept = ObjectKey::errored_state(
        &task.organization_id,
        &task.workspace_id,
        &task.job_id,
        &task.step_id,
    );
    let kept = std::fs::read_to_string(pool.stage.machine().object(&kept)).unwrap();
    assert_eq!(kept.trim_end(), state);
    pool.platform().until_job(job, Status::Failed).await;
    assert!(pool.platform().records().histories.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hub_that_is_away_during_an_apply_gets_its_state_when_it_is_back() {
    let mut pool = Pool::that_gives_up_after("300").await;
    let gate = pool.stage.machine().gate();
    let (job, lease, executor) = pool.at_the_gate(&gate).await;
    let hub = pool.hub.take().unwrap();
    tokio::task::block_in_place(|| hub.crash());
    let away = "the hub does not accept heartbeats";
    tokio::task::block_in_place(|| executor.running.wait_for(Stream::Stderr, away));
    gate.open().await;
    let made = "terraform_data.third: Creation complete";
    tokio::task::block_in_place(|| executor.running.wait_for(Stream::Stdout, made));
    assert_eq!(pool.platform().job(job).step_statuses(), [Status::Running]);
    pool.start_hub();
    wait(executor).expect_code(0);
    assert!(pool.stage.resources(job).contains(&"third".to_owned()));
    pool.assert_ended(&lease, LeaseCall::Complete, 0);
    let job = pool.platform().until_job(job, Status::Completed).await;
    let reports = pool.stage.history(job.id).into_iter();
    let ends = reports
        .filter(|(step, to, by)| *step == 100 && *to == Status::Completed && *by == Actor::Client);
    assert_eq!(ends.count(), 1);
    let lines = pool.platform().streamed(job.id).await;
    assert!(
        lines
            .iter()
            .any(|line| line.output.contains("Apply complete!")),
        "{lines:#?}"
    );
    pool.assert_nothing_refused();
}

/// As a gateway that wants a password sends them.
#[tokio::test(flavor = "multi_thread")]
async fn pages_with_status_200_are_no_answers() {
    let pool = Pool::that_gives_up_after("40").await;
    let gate = pool.stage.machine().gate();
    let job = pool
        .stage
        .start(gate.repository(), Flow::only("terraformApply"));
    let lease = pool.next_step().await;
    let pages = |method: &str, below: &str, count| {
        let class = format!("{method} {}{below}", LEASE.trim_start_matches("POST "));
        pool.proxy.rule(count, move |call| {
            let is_it = call.class == class && call.moment() == Moment::Sent;
            is_it.then(Fate::page)
        });
    };
    let of_job = "/platform/api/v1/organization/{}/job/{}";
    // Reading the job, the claim, and lines of the log.
    pages("GET", of_job, 1);
    pages("POST", "/accept", 2);
    pages("POST", "/platform/logs", 1);
    let executor = pool.executor(&lease).start();
    pool.platform().until_streamed(job, "at-the-gate").await;
    // Heartbeats, the status of the step, the record of the state, and the end.
    let before = pool.calls(&lease, "/heartbeat").len();
    pages("POST", "/heartbeat", 1);
    let beats = || {
        let beats = pool.calls(&lease, "/heartbeat").into_iter().skip(before);
        let mut statuses = beats.map(|call| call.status);
        statuses.any(|status| status == 200).then_some(())
    };
    pool.stage.until("a heartbeat after the page", beats).await;
    pages("PATCH", &format!("{of_job}/step/{{}}"), 1);
    let history = "/platform/api/v1/organization/{}/workspace/{}/history";
    pages("POST", history, 1);
    pages("POST", "/complete", 1);
    gate.open().await;
    wait(executor).expect_code(0);
    assert_eq!(pool.proxy.rules_left(), 0);
    pool.assert_nothing_refused();
    pool.assert_ended(&lease, LeaseCall::Complete, 0);
    pool.platform().until_job(job, Status::Completed).await;
    assert_eq!(pool.platform().records().histories.len(), 1);
}

/// The mode in which an executor has the platform's secret. What goes to the platform goes there straight.
#[tokio::test(flavor = "multi_thread")]
async fn with_the_platforms_secret_only_claim_heartbeats_and_end_go_to_the_hub() {
    let pool = Pool::that_gives_up_after("40").await;
    let gate = pool.stage.machine().gate();
    let job = pool
        .stage
        .start(gate.repository(), Flow::only("terraformApply"));
    let lease = pool.next_step().await;
    let settings = pool.stage.settings().into_iter();
    let run = settings.fold(pool.executor(&lease), |run, (name, value)| {
        run.env(name, value)
    });
    let executor = run.env(env::LOG_VIA_API, "true").start();
    pool.platform().until_streamed(job, "at-the-gate").await;
    let alive = || (!pool.calls(&lease, "/heartbeat").is_empty()).then_some(());
    pool.stage.until("a heartbeat", alive).await;
    gate.open().await;
    wait(executor).expect_code(0);
    pool.assert_ended(&lease, LeaseCall::Complete, 0);
    let calls = pool.proxy.calls().into_iter().map(|call| call.class);
    let relayed: Vec<_> = calls.filter(|class| class.contains("/platform/")).collect();
    assert!(relayed.is_empty(), "{relayed:?}");
    pool.platform().until_job(job, Status::Completed).await;
    pool.platform().assert_kept().await;
}

#[test]
fn a_lease_that_is_not_whole_is_an_error_of_the_configuration_that_is_named() {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = integration_tests::job::plan(&repository);
    let hub = Server::start(|_| Response::new(500, "")).unwrap();
    let outcome = machine
        .executor(&job)
        .env(env::LEASE_URL, hub.url())
        .env(env::PUBLIC_API_URL, PUBLIC)
        .run()
        .expect_code(64);
    let missing = "`MAYFLY_LEASE_TOKEN` is not set, and `MAYFLY_LEASE_URL` needs it";
    assert!(outcome.error().contains(missing), "{outcome}");
    assert!(hub.requests().is_empty());
}
