//! Both programs with the test platform, which dispatches jobs, sweeps them and enforces the contract.

mod away;
mod content;
mod endings;
mod in_cluster;
mod logs;
mod recorded;
mod relay;
mod runs;
mod switch;
mod turns;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;

use integration_tests::{Gate, Machine, Repository};
use job_contract::env;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::PostParams;
use test_cluster::ADMIN;
use test_peers::evidence;
use test_peers::redis::RedisServer;
use test_peers::terraform;
use test_peers::wait;
use test_platform::launcher::{self, DISPATCH, Launcher};
use test_platform::{
    Actor, Builder, Flow, Job, NewJob, Outputs, Platform, Release, Status, Variable, Workspace,
};

use crate::in_cluster::Fixture;
use crate::machine;

/// Name of the Secret every pod of a stock installation gets its settings from.
const SETTINGS: &str = "terrakube-executor-secrets";

type Settings = BTreeMap<String, String>;

/// A platform with its Redis, and a target for runs.
struct Stage {
    platform: Platform,
    redis: Option<RedisServer>,
    run_target: RunTarget,
    /// Settings that extend or replace the usual ones.
    more: Settings,
    /// Repositories must exist while runs may fetch them.
    repositories: Mutex<Vec<Repository>>,
}

/// Where runs happen.
enum RunTarget {
    Cluster(Box<Fixture>),
    Machine(Machine),
}

impl RunTarget {
    fn machine(&self) -> &Machine {
        match self {
            Self::Cluster(fixture) => &fixture.machine,
            Self::Machine(machine) => machine,
        }
    }
}

impl Stage {
    /// Runs are Jobs in a cluster.
    async fn in_cluster() -> Option<Self> {
        let run_target = RunTarget::Cluster(Box::new(Fixture::new().await?));
        Some(Self::on(run_target, Platform::builder()).await)
    }

    /// Runs are processes of this machine.
    async fn on_this_machine() -> Self {
        Self::under(Release::Newest).await
    }

    /// Runs are processes of this machine, under a platform with the rules of this release.
    async fn under(release: Release) -> Self {
        let platform = Platform::builder().release(release);
        Self::on(RunTarget::Machine(machine()), platform).await
    }

    /// A platform like this, with a Redis of its own.
    async fn on(run_target: RunTarget, platform: Builder) -> Self {
        let redis = RedisServer::start().unwrap();
        let platform = platform.redis(&format!("redis://{}", redis.address()));
        Self::of(run_target, platform, Some(redis)).await
    }

    async fn of(run_target: RunTarget, platform: Builder, redis: Option<RedisServer>) -> Self {
        Self::with(run_target, platform, redis, Settings::new()).await
    }

    async fn with(
        run_target: RunTarget,
        platform: Builder,
        redis: Option<RedisServer>,
        more: Settings,
    ) -> Self {
        let outputs = run_target.machine().data_dir().join("local/output");
        let platform = platform
            .outputs(Outputs::folder(&outputs))
            .start()
            .await
            .unwrap();
        // Of executors that are processes.
        evidence::keep_files(run_target.machine().folder(), &["/log", "/diagnostics"]);
        let stage = Self {
            platform,
            redis,
            run_target,
            more,
            repositories: Mutex::default(),
        };
        if let RunTarget::Cluster(fixture) = &stage.run_target {
            fixture.image_that_first(&quick());
            stage.make_settings_secret(fixture).await;
        }
        stage
    }

    fn machine(&self) -> &Machine {
        self.run_target.machine()
    }

    /// The cluster. Fails without one.
    fn fixture(&self) -> &Fixture {
        match &self.run_target {
            RunTarget::Cluster(fixture) => fixture,
            RunTarget::Machine(_) => panic!("this stage has no cluster"),
        }
    }

    /// The settings of executors in a stock installation.
    fn settings(&self) -> Settings {
        let mut settings = vec![
            (env::API_URL, self.platform.url()),
            (env::PUBLIC_API_URL, self.platform.url()),
            (env::INTERNAL_SECRET, self.platform.secret()),
            (env::STATE_TYPE, "LocalTerraformStateImpl".to_owned()),
            (env::COLOR_OUTPUT, "false".to_owned()),
            (env::TERRAFORM_RELEASES_URL, String::new()),
            (env::ENABLE_SECURITY, "true".to_owned()),
            (
                "TerrakubeRegistryDomain",
                "registry.example.test".to_owned(),
            ),
        ];
        if let Some(redis) = &self.redis {
            settings.push((env::REDIS_HOSTNAME, "127.0.0.1".to_owned()));
            settings.push((env::REDIS_PORT, redis.port().to_string()));
        }
        let owned = |(name, value): (&str, String)| (name.to_owned(), value);
        let mut settings: Settings = settings.into_iter().map(owned).collect();
        settings.extend(self.more.clone());
        settings
    }

    async fn make_settings_secret(&self, fixture: &Fixture) {
        let mut secret = Secret::default();
        secret.metadata.name = Some(SETTINGS.to_owned());
        let bytes = |(name, value): (String, String)| (name, ByteString(value.into_bytes()));
        secret.data = Some(self.settings().into_iter().map(bytes).collect());
        let client = fixture.cluster.client(ADMIN).unwrap();
        let secrets = Api::<Secret>::namespaced(client, &fixture.runs);
        secrets
            .create(&PostParams::default(), &secret)
            .await
            .unwrap();
    }

    /// Starts a launcher. The platform dispatches to it.
    fn serve(&self) -> Launcher {
        self.serve_with(&[])
    }

    fn serve_with(&self, more: &[(&str, &str)]) -> Launcher {
        let mut settings = self.settings();
        settings.insert(env::ENV_SECRETS.to_owned(), SETTINGS.to_owned());
        settings.insert(
            env::DATA_DIR.to_owned(),
            self.machine().data_dir().display().to_string(),
        );
        settings.extend(
            more.iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
        );
        let launcher = match &self.run_target {
            RunTarget::Cluster(fixture) => {
                let settings: Vec<_> = settings
                    .iter()
                    .map(|(name, value)| (name.as_str(), value.as_str()))
                    .collect();
                fixture.serve_with(&settings)
            }
            RunTarget::Machine(machine) => {
                let mut command = launcher::command(crate::LAUNCHER, &machine.scratch("home"));
                launcher::serve(&mut command, "process")
                    .env(env::TOOL_SELECTION, "installed")
                    .envs(quick_settings())
                    .envs(settings);
                Launcher::start(&mut command)
            }
        };
        let url = launcher.endpoint.url(DISPATCH);
        self.platform.dispatch_to(&url);
        launcher
    }

    /// Waits until `look` finds something.
    async fn until<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let look = async || look().ok_or_else(|| self.platform.report());
        wait::until(what, look).await
    }

    /// Starts a job of this template in a new workspace of the repository.
    fn start(&self, repository: Repository, template: Vec<Flow>) -> u32 {
        let workspace = Workspace::new(&repository.url());
        self.repositories.lock().unwrap().push(repository);
        let workspace = self.platform.workspace(workspace);
        self.platform.start_job(NewJob::new(&workspace, template))
    }

    /// The stored output of the step of this type.
    fn output(&self, job: u32, kind: &str) -> String {
        let step = self.platform.job(job).step_of(kind).id.clone();
        let found = self.platform.step_output(job, &step);
        let found =
            found.unwrap_or_else(|| panic!("no output of {kind}\n{}", self.platform.report()));
        terraform::whole(&found, Gate::says)
    }

    /// State of the job's workspace, as the backend holds it. Null if there is none.
    fn state(&self, job: u32) -> serde_json::Value {
        let workspace = self.platform.job(job).workspace;
        let path =
            job_contract::keys::local_backend_state(&self.platform.organization(), &workspace);
        let text = fs::read(self.machine().data_dir().join(path)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Names of the resources in the state of the job's workspace.
    fn resources(&self, job: u32) -> Vec<String> {
        let raw = self.state(job);
        let resources = raw["resources"].as_array().cloned().unwrap_or_default();
        resources
            .iter()
            .map(|resource| resource["name"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Every change of the job: step, status and author. Step 0 is the job itself.
    fn history(&self, job: u32) -> Vec<(u32, Status, Actor)> {
        let records = self.platform.records();
        let of_job = records
            .transitions
            .iter()
            .filter(|change| change.job == job);
        of_job
            .map(|change| (change.step.unwrap_or(0), change.to, change.by))
            .collect()
    }
}

/// Short intervals, so that tests do not wait.
fn quick_settings() -> Vec<(&'static str, &'static str)> {
    vec![(env::STATUS_POLL_SECONDS, "1")]
}

/// The same as shell commands.
fn quick() -> String {
    let mut words = String::new();
    for (name, value) in quick_settings() {
        words.extend(["export ", name, "=", value, "\n"]);
    }
    words
}

/// Runs a job of the default template with plan, approval and apply, and checks all its results.
async fn default_template(stage: &Stage) -> Job {
    let (platform, repository) = (&stage.platform, Repository::fixture());
    let workspace = Workspace::new(&repository.url())
        .with(Variable::terraform("greeting", "good day"))
        .with(Variable::env("STAGE", "dev"));
    let workspace = platform.workspace(workspace);
    let id = platform.start_job(NewJob::new(&workspace, Flow::plan_approve_apply()));

    let planned = platform.until_job(id, Status::WaitingApproval).await;
    assert!(planned.plan_changes);
    assert_eq!(planned.commit_id, Some(repository.head()));
    let plan = PathBuf::from(planned.terraform_plan.expect("the plan is stored"));
    assert!(
        plan.ends_with("terraformLibrary.tfPlan") && plan.is_file(),
        "{}",
        plan.display()
    );
    assert!(stage.state(id).is_null());

    platform.approve(id).await;
    let job = platform.until_job(id, Status::Completed).await;
    assert_eq!(
        job.step_statuses(),
        [Status::Completed; 3],
        "{}",
        platform.report()
    );
    assert_eq!(stage.resources(id), ["greeting"]);
    let raw = stage.state(id);
    assert_eq!(raw["outputs"]["greeting"]["value"], "good day");

    let by_the_book = |step: u32| {
        [
            (0, Status::Queue, Actor::Scheduler),
            (0, Status::Running, Actor::Client),
            (step, Status::Running, Actor::Client),
            (step, Status::Completed, Actor::Client),
            (0, Status::Pending, Actor::Client),
        ]
    };
    let mut expected = by_the_book(100).to_vec();
    expected.push((0, Status::WaitingApproval, Actor::Scheduler));
    expected.push((0, Status::Approved, Actor::User));
    expected.extend(by_the_book(150));
    expected.extend(by_the_book(200));
    expected.push((0, Status::Completed, Actor::Scheduler));
    assert_eq!(stage.history(id), expected, "{}", platform.report());

    let records = platform.records();
    let [history] = records.histories.as_slice() else {
        panic!("{:?}", records.histories);
    };
    assert_eq!(history.job_reference, id.to_string());
    assert_eq!(raw["serial"], history.serial);
    assert_eq!(raw["lineage"], history.lineage);
    assert_eq!(history.md5.len(), 32, "{}", history.md5);
    let context = &records.contexts[&id];
    let stored = serde_json::json!({"state": "PERSISTED"});
    assert_eq!(context["structuredOutputStatus"], stored, "{context:#?}");

    assert!(
        stage
            .output(id, "terraformPlan")
            .contains("Plan: 1 to add, 0 to change, 0 to destroy.")
    );
    let applied = stage.output(id, "terraformApply");
    assert!(
        applied.contains("Apply complete! Resources: 1 added"),
        "{applied}"
    );
    job
}
