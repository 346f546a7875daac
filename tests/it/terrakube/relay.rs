//! Executors with the lease of a hub: they reach the platform through its relay alone, and have no secret of the platform.

use flate2::Compression;
use flate2::write::GzEncoder;
use integration_tests::hub::{LeasedStep, Task};
use integration_tests::machine::files_below;
use integration_tests::process::Stream;
use integration_tests::repository::ROOT_MODULE;
use integration_tests::{ExecutorRun, Hub, Outcome, Repository};
use job_contract::env;
use pool_protocol::task::TaskState;
use pool_protocol::version::Versions;
use test_peers::http::{Response, Server};
use test_platform::{Actor, Flow, NewJob, Platform, Status, Workspace};

use super::{Gate, RunTarget, Stage};
use crate::machine;

/// As users know the platform. Executors of a pool cannot reach it.
const PUBLIC: &str = "https://terrakube.example.test";

/// A platform, a hub before it, and a machine in another network.
struct Pool {
    stage: Stage,
    hub: Hub,
}

impl Pool {
    async fn new() -> Self {
        let run_target = RunTarget::Machine(machine());
        let stage = Stage::of(run_target, Platform::builder(), None).await;
        let hub = Hub::start(&stage.platform.url(), &stage.platform.secret());
        stage.platform.dispatch_to(&hub.dispatch_url());
        Self { stage, hub }
    }

    fn platform(&self) -> &Platform {
        &self.stage.platform
    }

    /// The executor of an agent.
    fn executor(&self, step: &LeasedStep) -> ExecutorRun<'_> {
        let run = self.stage.machine().executor(&step.data);
        run.env(env::LEASE_URL, &step.url)
            .env(env::LEASE_TOKEN, &step.token)
            .env(env::PUBLIC_API_URL, PUBLIC)
            .env(env::POD_NAME, "agent-pod")
            .env(env::POD_UID, "uid-of-the-pod")
            .env(env::STATUS_POLL_SECONDS, "1")
    }

    fn run(&self, step: &LeasedStep) -> Outcome {
        tokio::task::block_in_place(|| self.executor(step).run())
    }

    /// Waits for the next step.
    fn next_step(&self) -> LeasedStep {
        tokio::task::block_in_place(|| self.hub.next_step())
    }

    /// Waits until `look` finds something in the task.
    async fn until_task<T>(
        &self,
        what: &str,
        step: &LeasedStep,
        look: impl Fn(&Task) -> Option<T>,
    ) -> T {
        let look = || look(&self.hub.task(step.lease));
        self.stage.until(what, look).await
    }

    /// An apply that waits at the gate, and its job.
    async fn at_the_gate(
        &self,
        gate: &Gate,
    ) -> (u32, LeasedStep, integration_tests::machine::RunningExecutor) {
        let job = self
            .stage
            .start(gate.module(), Flow::only("terraformApply"));
        let step = self.next_step();
        let executor = self.executor(&step).start();
        self.platform().until_streamed(job, "at-the-gate").await;
        (job, step, executor)
    }

    /// Requests that change something at the platform.
    fn changes(&self) -> Vec<String> {
        let relayed = self.hub.relayed().into_iter();
        let changes = relayed.filter(|request| request.method != "GET");
        changes
            .map(|request| format!("{} {}", request.method, request.path))
            .collect()
    }
}

fn wait(executor: integration_tests::machine::RunningExecutor) -> Outcome {
    tokio::task::block_in_place(|| executor.wait())
}

#[track_caller]
fn assert_ended(task: &Task, state: TaskState, exit_code: i32) {
    let end = task
        .end
        .as_ref()
        .unwrap_or_else(|| panic!("no end: {task:?}"));
    assert_eq!(task.state, state, "{task:?}");
    assert_eq!(
        (end.reported, end.exit_code),
        (true, Some(exit_code)),
        "{end:?}"
    );
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
        let step = pool.next_step();
        let outcome = pool.run(&step).expect_code(0);
        assert_ended(&pool.hub.task(step.lease), TaskState::Completed, 0);
        assert!(!outcome.to_string().contains(&step.token), "{outcome}");
        assert!(!outcome.log().contains(env::LEASE_TOKEN), "{outcome}");
        for path in files_below(pool.stage.machine().folder()) {
            let text = std::fs::read(&path).unwrap();
            let found = text
                .windows(step.token.len())
                .any(|part| part == step.token.as_bytes());
            assert!(!found, "the token is in {}", path.display());
        }
    }
    let job = platform.until_job(job, Status::Completed).await;
    assert_eq!(job.step_statuses(), [Status::Completed; 3]);
    assert_eq!(pool.stage.resources(job.id), ["greeting"]);
    assert_eq!(platform.records().histories.len(), 1);

    // Records name the address that users know.
    let step = job.step_of("terraformPlan");
    let output = step.output.as_deref().unwrap_or_default();
    assert!(
        output.starts_with(&format!("{PUBLIC}/tfoutput/v1/")),
        "{output}"
    );
    let output = pool.stage.output(job.id, "customScripts");
    assert!(
        output.contains(&format!("token=[] at {PUBLIC}")),
        "{output}"
    );
    assert_eq!(
        output.matches("`terrakubeToken` is empty").count(),
        1,
        "{output}"
    );
    let lines = platform.streamed(job.id).await;
    assert!(
        lines
            .iter()
            .any(|line| line.output.contains("Apply complete!")),
        "{lines:#?}"
    );
    pool.hub.assert_nothing_refused();
}

#[tokio::test(flavor = "multi_thread")]
async fn uploaded_content_comes_through_the_relay() {
    let pool = Pool::new().await;
    let platform = pool.platform();
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    let mut head = tar::Header::new_gnu();
    head.set_size(ROOT_MODULE.len() as u64);
    head.set_mode(0o644);
    archive
        .append_data(&mut head, "main.tf", ROOT_MODULE.as_bytes())
        .unwrap();
    let archive = archive.into_inner().unwrap().finish().unwrap();
    let upload = platform.upload(archive).replace(&platform.url(), PUBLIC);
    let workspace = platform.workspace(Workspace::new("https://git.example.test/none.git"));
    let template = Flow::only("terraformPlan");
    let job = platform.start_job(NewJob::new(&workspace, template).from_upload(&upload));
    pool.run(&pool.next_step()).expect_code(0);
    platform.until_job(job, Status::Completed).await;
    let content = |path: &str| path.ends_with("terraformContent.tar.gz");
    assert!(
        pool.hub
            .relayed()
            .iter()
            .any(|request| content(&request.path))
    );
    pool.hub.assert_nothing_refused();
}

/// Of a plan too, which could be run twice.
#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_is_not_the_holder_ends_with_76_and_changes_nothing() {
    let pool = Pool::new().await;
    for kind in ["terraformPlan", "terraformApply"] {
        let job = pool.stage.start(Repository::fixture(), Flow::only(kind));
        let step = pool.next_step();
        pool.hub.accept_as(step.lease, "another-pod");
        let outcome = pool.run(&step).expect_code(76);
        assert!(
            outcome
                .error()
                .contains("another pod has accepted the task"),
            "{outcome}"
        );
        assert_eq!(pool.changes(), Vec::<String>::new());
        assert_eq!(pool.platform().job(job).step_statuses(), [Status::Pending]);
        let task = pool.hub.task(step.lease);
        assert_eq!((task.state, task.heartbeats), (TaskState::Running, 0));
        assert!(task.end.is_none() && task.holder.as_deref() == Some("another-pod"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_whose_lease_was_given_to_another_ends_with_76_and_changes_nothing() {
    let pool = Pool::new().await;
    let job = pool
        .stage
        .start(Repository::fixture(), Flow::only("terraformApply"));
    let step = pool.next_step();
    pool.hub.supersede(step.lease);
    let outcome = pool.run(&step).expect_code(76);
    assert!(
        outcome.error().contains("leased to another instance"),
        "{outcome}"
    );
    assert_eq!(pool.changes(), Vec::<String>::new());
    assert_eq!(pool.platform().job(job).step_statuses(), [Status::Pending]);
    assert_eq!(pool.hub.task(step.lease).state, TaskState::Leased);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hub_of_other_versions_is_an_error_of_the_configuration_with_both() {
    let pool = Pool::new().await;
    pool.stage
        .start(Repository::fixture(), Flow::only("terraformPlan"));
    let step = pool.next_step();
    pool.hub.support_versions(Versions {
        current_version: 3,
        min_version: 2,
        max_version: 3,
    });
    let outcome = pool.run(&step).expect_code(64);
    let both = "the hub speaks versions 2 to 3 of the protocol, this executor version 1";
    assert!(outcome.error().contains(both), "{outcome}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_brings_the_order_to_stop_and_the_state_is_stored() {
    let pool = Pool::new().await;
    let gate = Gate::new(pool.stage.machine());
    let (job, step, executor) = pool.at_the_gate(&gate).await;
    pool.hub.cancel(step.lease);
    let outcome = wait(executor).expect_code(1);
    assert!(
        outcome
            .log()
            .contains("stopped because the job is cancelled"),
        "{outcome}"
    );
    assert!(outcome.log().contains("Interrupt received"), "{outcome}");
    assert!(
        pool.stage.resources(job).contains(&"first".to_owned()),
        "{outcome}"
    );
    let task = pool.hub.task(step.lease);
    assert_ended(&task, TaskState::Cancelled, 1);
    assert!(task.heartbeats > 0, "{task:?}");
    pool.platform().until_job(job, Status::Failed).await;
    assert_eq!(pool.platform().records().histories.len(), 1);
    pool.hub.assert_nothing_refused();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancellation_of_the_job_is_seen_through_the_relay() {
    let pool = Pool::new().await;
    let gate = Gate::new(pool.stage.machine());
    let (job, step, executor) = pool.at_the_gate(&gate).await;
    pool.platform().cancel(job).await;
    let outcome = wait(executor).expect_code(1);
    assert!(outcome.log().contains("Interrupt received"), "{outcome}");
    let resources = pool.stage.resources(job);
    assert!(resources.contains(&"first".to_owned()), "{outcome}");
    assert_ended(&pool.hub.task(step.lease), TaskState::Cancelled, 1);
    assert_eq!(pool.platform().job(job).status, Status::Cancelled);
    pool.hub.assert_nothing_refused();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_the_hub_has_given_up_stores_its_state_and_leaves_all_statuses_alone() {
    let pool = Pool::new().await;
    let gate = Gate::new(pool.stage.machine());
    let (job, step, executor) = pool.at_the_gate(&gate).await;
    let before = pool.stage.history(job);
    pool.hub.give_up(step.lease);
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
    assert!(pool.hub.task(step.lease).end.is_none());
    let refused = pool.hub.relayed().into_iter();
    let statuses = refused.filter(|one| one.refused.is_some() && one.method == "PATCH");
    assert_eq!(statuses.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hub_that_is_away_during_an_apply_holds_nothing_up() {
    let mut pool = Pool::new().await;
    let gate = Gate::new(pool.stage.machine());
    let (job, step, executor) = pool.at_the_gate(&gate).await;
    pool.hub.go_down();
    let away = "the hub does not accept heartbeats";
    tokio::task::block_in_place(|| executor.running.wait_for(Stream::Stderr, away));
    gate.open().await;
    let made = || {
        pool.stage
            .resources(job)
            .contains(&"third".to_owned())
            .then_some(())
    };
    pool.stage.until("the apply is through", made).await;
    assert_eq!(pool.platform().job(job).step_statuses(), [Status::Running]);
    pool.hub.come_up();
    wait(executor).expect_code(0);
    assert_ended(&pool.hub.task(step.lease), TaskState::Completed, 0);
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
    pool.hub.assert_nothing_refused();
}

/// As a gateway that wants a password sends them.
#[tokio::test(flavor = "multi_thread")]
async fn pages_with_status_200_are_no_answers() {
    let pool = Pool::new().await;
    let gate = Gate::new(pool.stage.machine());
    let job = pool
        .stage
        .start(gate.module(), Flow::only("terraformApply"));
    let step = pool.next_step();
    let (of_job, of_step) = (step.data.job_id.clone(), step.data.step_id.clone());
    // Reading the job, the claim, and lines of the log.
    pool.hub.answer_with_pages(of_job.leak(), 1);
    pool.hub.answer_with_pages("/accept", 2);
    pool.hub.answer_with_pages("/platform/logs", 1);
    let executor = pool.executor(&step).start();
    pool.platform().until_streamed(job, "at-the-gate").await;
    // Heartbeats, the status of the step, the record of the state, and the end.
    let before = pool.hub.task(step.lease).heartbeats;
    pool.hub.answer_with_pages("/heartbeat", 1);
    let beats = |task: &Task| (task.heartbeats > before).then_some(());
    pool.until_task("a heartbeat after the page", &step, beats)
        .await;
    pool.hub.answer_with_pages(of_step.leak(), 1);
    pool.hub.answer_with_pages("/history", 1);
    pool.hub.answer_with_pages("/complete", 1);
    gate.open().await;
    wait(executor).expect_code(0);
    assert_eq!(pool.hub.pages_left(), 0);
    pool.hub.assert_nothing_refused();
    assert_ended(&pool.hub.task(step.lease), TaskState::Completed, 0);
    pool.platform().until_job(job, Status::Completed).await;
    assert_eq!(pool.platform().records().histories.len(), 1);
}

/// The mode in which an executor has the platform's secret. What goes to the platform goes there straight.
#[tokio::test(flavor = "multi_thread")]
async fn with_the_platforms_secret_only_claim_heartbeats_and_end_go_to_the_hub() {
    let pool = Pool::new().await;
    let gate = Gate::new(pool.stage.machine());
    let job = pool
        .stage
        .start(gate.module(), Flow::only("terraformApply"));
    let step = pool.next_step();
    let settings = pool.stage.settings().into_iter();
    let run = settings.fold(pool.executor(&step), |run, (name, value)| {
        run.env(name, value)
    });
    let executor = run.env(env::LOG_VIA_API, "true").start();
    pool.platform().until_streamed(job, "at-the-gate").await;
    let alive = |task: &Task| (task.heartbeats > 0).then_some(());
    pool.until_task("a heartbeat", &step, alive).await;
    gate.open().await;
    wait(executor).expect_code(0);
    assert_ended(&pool.hub.task(step.lease), TaskState::Completed, 0);
    assert!(pool.hub.relayed().is_empty(), "{:?}", pool.hub.relayed());
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
