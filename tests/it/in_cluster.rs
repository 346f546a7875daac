//! The launcher serves, a cluster runs: dispatches over HTTP become Jobs, whose pods are the real executor.
//!
//! In every journey the launcher has the rights of `rbac/launcher.yaml` and no others, and is refused nothing.

mod cache;
pub(crate) mod chart;
mod commands;
mod disruptions;
mod endings;
mod faults;
mod identity;
mod images;
mod kept_states;
mod one_job;
mod recorded;
mod rights;
mod runs;
mod settings;
mod upgrades;
mod vault_login;
mod verdicts;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use integration_tests::{Machine, Repository, job};
use job_contract::{JobData, env};
use serde_json::Value;
use test_cluster::{Builder, Cluster, Fault, Recorded, Request, Rule, State};
use test_peers::skips::needed;
use test_peers::wait::{self, DEADLINE};
use test_platform::Secret;
use test_platform::launcher::{self, Endpoint, Launcher, READINESS};

use crate::machine;

/// What the names of namespaces of runs begin with.
const RUNS: &str = "runs";
/// What operators apply.
pub(crate) const ROLES: &str = include_str!("../../rbac/launcher.yaml");
/// Who the launcher is in the cluster.
pub(crate) const LAUNCHER: &str = "launcher";
pub(crate) const IMAGE: &str = "registry.example.test/mayfly-executor:1";
/// What final reports are sealed with.
const REPORT_KEY: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

/// A cluster, and a data directory its pods and the test share.
pub(crate) struct Fixture {
    pub(crate) cluster: Cluster,
    /// Namespace of the runs.
    pub(crate) runs: String,
    /// What the launcher may do there.
    pub(crate) rules: Vec<Rule>,
    /// The journey is about rights, and looks itself at what is refused.
    is_refused: bool,
    pub(crate) machine: Machine,
}

impl Fixture {
    /// A cluster whose pods run.
    pub(crate) async fn new() -> Option<Self> {
        Self::of(Cluster::builder(), &rules(ROLES)).await
    }

    /// A cluster where no pod of a run comes to anything.
    pub(crate) async fn without_pods() -> Option<Self> {
        let parts = Cluster::builder().without_kubelet();
        Self::of(parts, &rules(ROLES)).await
    }

    /// The launcher has these rights; without any rule all of them. Nothing where no cluster is given and the test has to
    /// return.
    pub(crate) async fn of(parts: Builder, rules: &[Rule]) -> Option<Self> {
        let kubeconfig = needed(test_cluster::kubeconfig())?;
        // The client of this test; an earlier one stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let cluster = parts.start(&kubeconfig).await.unwrap();
        let runs = cluster.fresh_namespace(RUNS).await.unwrap();
        if !rules.is_empty() {
            cluster.grant(LAUNCHER, &runs, rules).await.unwrap();
        }
        let fixture = Self {
            cluster,
            runs,
            rules: rules.to_vec(),
            is_refused: rules.is_empty(),
            machine: machine(),
        };
        fixture.image_that_first("");
        Some(fixture)
    }

    /// For a journey in which the launcher has fewer rights than it would use.
    pub(crate) fn where_it_is_refused(mut self) -> Self {
        self.is_refused = true;
        self
    }

    /// What the launcher asked of the cluster.
    pub(crate) fn asked(&self) -> Recorded {
        self.cluster.recorded().of(LAUNCHER)
    }

    /// The executor's image, with words of a shell before the executor.
    pub(crate) fn image_that_first(&self, words: &str) {
        self.cluster.image(IMAGE, &self.program_that_first(words));
    }

    pub(crate) fn program_that_first(&self, words: &str) -> PathBuf {
        // In a script, since the pod has its own `/tmp`, and a path in a variable would be one of the pod.
        let shared = self.machine.data_dir();
        self.program(&format!(
            "export {}='{}'\n{words}",
            env::DATA_DIR,
            shared.display()
        ))
    }

    /// The executor's image, whose pods share no folder with each other or with this test.
    pub(crate) fn image_that_shares_nothing(&self) {
        self.cluster.image(IMAGE, &self.program(""));
    }

    fn program(&self, words: &str) -> PathBuf {
        let path = self.machine.scratch("image");
        let script = format!(
            "#!/bin/sh\nexport {}={REPORT_KEY} {}=installed\n{words}\nexec '{}' \"$@\"\n",
            env::REPORT_KEY,
            env::TOOL_SELECTION,
            crate::EXECUTOR,
        );
        // Renamed over the old one, which may be running.
        let new = self.machine.scratch("image.new");
        fs::write(&new, script).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(new, &path).unwrap();
        path
    }

    /// The program of the launcher's image. In a cluster the account's token is where the client looks for it.
    pub(crate) fn program_of_launcher(&self) -> PathBuf {
        let path = self.machine.scratch("launcher");
        let kubeconfig = self.cluster.kubeconfig_file(LAUNCHER, &self.runs).unwrap();
        // In a script, since the pod has its own `/tmp`, and a path in a variable would be one of the pod.
        let script = format!(
            "#!/bin/sh\nexport KUBECONFIG='{}'\nexec '{}' \"$@\"\n",
            kubeconfig.display(),
            crate::LAUNCHER,
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    pub(crate) fn serve(&self) -> Launcher {
        self.serve_with(&[])
    }

    /// A launcher that listens on a free port.
    pub(crate) fn serve_with(&self, settings: &[(&str, &str)]) -> Launcher {
        let mut command = self.command(&[]);
        launcher::serve(&mut command, "kubernetes")
            .env(env::INTERNAL_SECRET, Secret::long().text())
            .envs(settings.iter().copied());
        Launcher::start(&mut command)
    }

    /// The launcher with these arguments and the configuration of this fixture.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let kubeconfig = self.cluster.kubeconfig_file(LAUNCHER, &self.runs);
        let mut command = launcher::command(crate::LAUNCHER, &self.machine.scratch("home"));
        command
            .args(args)
            .env("KUBECONFIG", kubeconfig.unwrap())
            .env("ExecutorEphemeralNamespace", &self.runs)
            .env("ExecutorEphemeralImage", IMAGE)
            .env("ExecutorEphemeralSecret", "")
            // What the image says; the launcher does not see it.
            .env(env::RECORDS, "shared")
            .env(env::REPORT_KEY, REPORT_KEY);
        command
    }

    pub(crate) async fn state(&self) -> State {
        self.cluster.state(&self.runs).await.unwrap()
    }

    /// What `look` finds in the namespace of the runs, at the latest when patience ends.
    pub(crate) async fn until<T>(&self, what: &str, look: impl Fn(&State) -> Option<T>) -> T {
        let found = self.cluster.wait_for(&self.runs, DEADLINE, what, look);
        let found = Box::pin(found).await;
        found.unwrap_or_else(|late| panic!("{late}"))
    }

    /// Dispatches a plan to a launcher that dies after it has created the Job, and before it has created the Secret.
    async fn cut_between_job_and_secret(&self) -> JobData {
        let plan = job::plan(&Repository::fixture());
        let doomed = self.serve();
        let faults = self.cluster.faults();
        faults.next_of(LAUNCHER, 1, "create", "secrets", Fault::Hang);
        let delivery = tokio::spawn(post_all(vec![(doomed.endpoint.clone(), plan.clone())]));
        let there = |state: &State| state.job(&name(&plan)).map(drop);
        self.until("the Job is there", there).await;
        doomed.crash();
        assert_eq!(delivery.await.unwrap(), [None]);
        plan
    }

    /// Fails as soon as it has ended otherwise.
    async fn until_over(&self, job: &JobData, condition: &str) {
        let name = name(job);
        let end = |state: &State| {
            let mut ends = ["Complete", "Failed"].into_iter();
            ends.find(|end| state.has_condition(&name, end))
        };
        let end = self.until(&format!("{name} is over"), end).await;
        let logs = self.cluster.container_logs();
        assert_eq!(end, condition, "{name}: {logs:#?}");
    }

    /// Fails unless there is one released Job for each run, with its own Secret, and nothing else.
    async fn assert_exactly_one_each(&self, jobs: &[JobData]) {
        let mut expected: Vec<String> = jobs.iter().map(name).collect();
        expected.sort();
        let released = |state: &State| {
            let mut held = state.jobs.iter().filter(|job| suspended(job));
            (state.jobs.len() >= expected.len() && held.next().is_none()).then_some(())
        };
        self.until("every Job is released", released).await;
        let state = self.state().await;
        let mut names: Vec<_> = state.jobs.iter().map(|job| &job.metadata.name).collect();
        names.sort();
        let names: Vec<String> = names.into_iter().flatten().cloned().collect();
        assert_eq!(names, expected);
        for job in &state.jobs {
            let name = job_data(job).expect("its job data is in a Secret");
            let mut secrets = state.secrets.iter().map(|secret| &secret.metadata);
            let secret = secrets.find(|secret| secret.name.as_deref() == Some(name));
            let owners = secret.and_then(|secret| secret.owner_references.as_deref());
            let owners = owners.unwrap_or_default().iter();
            let uids: Vec<&str> = owners.map(|owner| owner.uid.as_str()).collect();
            assert_eq!(uids, [job.metadata.uid.as_deref().unwrap()], "{name}");
        }
        assert_eq!(state.secrets.len(), expected.len(), "{:?}", state.secrets);
    }

    /// How many Jobs the API server has made for the launcher.
    fn jobs_created(&self) -> usize {
        let requests = self.asked();
        let made = |request: &&test_cluster::Request| {
            request.verb == "create" && request.resource == "jobs" && request.status == 201
        };
        requests.requests().iter().filter(made).count()
    }
}

impl Drop for Fixture {
    /// At the end of every journey, so that none forgets to ask.
    fn drop(&mut self) {
        if std::thread::panicking() || self.is_refused {
            return;
        }
        let asked = self.asked();
        let nothing = Vec::<String>::new();
        assert_eq!(rights(&asked.denied()), nothing, "denied");
        assert_eq!(rights(&asked.beyond(&self.rules)), nothing, "not granted");
    }
}

/// The rules of all Roles in a manifest.
pub(crate) fn rules(manifest: &str) -> Vec<Rule> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(manifest).unwrap();
    let rules: Vec<Rule> = documents
        .iter()
        .filter(|document| document["kind"] == "Role")
        .flat_map(|role| serde_json::from_value::<Vec<Rule>>(role["rules"].clone()).unwrap())
        .collect();
    assert!(!rules.is_empty(), "no Role in {manifest}");
    rules
}

/// Each right once, as a person would look for it in a Role.
fn rights(requests: &[&Request]) -> Vec<String> {
    let mut rights: Vec<String> = requests.iter().map(|request| request.right()).collect();
    rights.sort();
    rights.dedup();
    rights
}

pub(crate) fn suspended(job: &k8s_openapi::api::batch::v1::Job) -> bool {
    job.spec.as_ref().and_then(|spec| spec.suspend) == Some(true)
}

/// The Secret a Job's pod reads its job data from.
fn job_data(job: &k8s_openapi::api::batch::v1::Job) -> Option<&str> {
    let pod = job.spec.as_ref()?.template.spec.as_ref()?;
    let variables = pod.containers[0].env.iter().flatten();
    let sources = variables.filter_map(|variable| variable.value_from.as_ref());
    let mut names =
        sources.filter_map(|source| Some(source.secret_key_ref.as_ref()?.name.as_str()));
    names.next()
}

/// The name of a run's Job, as the contract writes it.
fn name(job: &JobData) -> String {
    format!("job-{}-{}", job.job_id, job.step_id)
}

/// Many jobs of one step.
fn many(job: &JobData, count: usize) -> Vec<JobData> {
    let numbered =
        |number: usize| integration_tests::job::in_job(job, &(1000 + number).to_string());
    (0..count).map(numbered).collect()
}

/// In seconds.
fn unix_time() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap().as_secs()
}

/// Waits until a launcher is ready. On a busy machine, the API server may not answer in the seconds that it has for that.
async fn until_ready(endpoint: &Endpoint) {
    let is_ready = async || match endpoint.get(READINESS).await {
        Ok(200) => Ok(()),
        other => Err(format!("{other:?}")),
    };
    wait::until("the launcher is ready", is_ready).await;
}

/// Delivers every job to one of the doors, and again as the platform does with what is for later, until all are accepted.
async fn deliver_all(doors: &[Endpoint], jobs: &[JobData]) {
    let mut left = jobs.to_vec();
    wait::until("all dispatches are accepted", async || {
        let posts = left.iter().zip(doors.iter().cycle());
        let posts = posts.map(|(job, endpoint)| (endpoint.clone(), job.clone()));
        let answers = post_all(posts.collect()).await;
        for answer in &answers {
            assert!(matches!(answer, Some(202 | 503)), "{answers:?}");
        }
        let mut answers = answers.into_iter();
        left.retain(|_| answers.next() != Some(Some(202)));
        match left.len() {
            0 => Ok(()),
            left => Err(format!("{left} are not")),
        }
    })
    .await;
}

/// Posts every job to an endpoint at the same time.
async fn post_all(posts: Vec<(Endpoint, JobData)>) -> Vec<Option<u16>> {
    let tasks: Vec<_> = posts
        .into_iter()
        .map(|(endpoint, job)| tokio::spawn(async move { endpoint.post(&job).await.ok() }))
        .collect();
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(task.await.unwrap());
    }
    answers
}
