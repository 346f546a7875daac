//! Two launchers in front of a test cluster, whose pods are executors.

mod faults;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use job_contract::env;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::Value;
use test_cluster::{ADMIN, Cluster, Rule, Seen, State};
use test_peers::proxy::Proxy;
use test_peers::wait::NotInTime;
use test_platform::launcher::{self, DISPATCH};

use crate::facts::lines_with;
use crate::process::{Process, listening};

/// Name of the launchers in the cluster.
const LAUNCHER: &str = "launcher";
/// The only Secret that exists before the first run.
const SETTINGS: &str = "terrakube-executor-secrets";
const IMAGE: &str = "registry.example.test/mayfly-executor:1";
const ROLES: &str = include_str!("../../../rbac/launcher.yaml");
/// Jobs with a reported end are removed at once, other Jobs after this time.
const TTL_SECONDS: &str = "90";

/// The launchers and their cluster.
#[derive(Debug)]
pub(crate) struct LauncherSide {
    folder: PathBuf,
    cluster: Cluster,
    /// Namespace of the runs.
    runs: String,
    /// The proxy with the common address of both launchers.
    proxy: Proxy,
    launchers: tokio::sync::Mutex<Launchers>,
}

impl LauncherSide {
    /// Starts the launchers, in the cluster of a kubeconfig.
    pub(crate) async fn start(
        folder: &Path,
        kubeconfig: &Path,
        settings: BTreeMap<String, String>,
    ) -> Result<Self> {
        let cluster = Cluster::builder().start(kubeconfig).await?;
        let runs = cluster.fresh_namespace("runs").await?;
        cluster.grant(LAUNCHER, &runs, &rules()?).await?;
        cluster.image(IMAGE, &folder.join("image"));
        make_settings_secret(&cluster, &runs, &settings).await?;
        let launchers = Launchers {
            folder: folder.to_owned(),
            kubeconfig: cluster.kubeconfig_file(LAUNCHER, &runs)?,
            runs: runs.clone(),
            settings,
            running: BTreeMap::new(),
            started: 0,
        };
        let side = Self {
            folder: folder.to_owned(),
            cluster,
            runs,
            proxy: Proxy::start(&[])?,
            launchers: tokio::sync::Mutex::new(launchers),
        };
        side.start_missing().await?;
        Ok(side)
    }

    /// The URL to which the platform dispatches.
    pub(crate) fn dispatch_url(&self) -> String {
        format!("{}{DISPATCH}", self.proxy.url())
    }

    /// The URLs of all that take dispatches.
    pub(crate) async fn dispatch_urls(&self) -> Vec<String> {
        let addresses = self.launchers.lock().await.addresses();
        let urls = addresses.iter();
        urls.map(|address| format!("http://{address}{DISPATCH}"))
            .collect()
    }

    /// How many launchers were started so far.
    pub(crate) async fn started(&self) -> u32 {
        self.launchers.lock().await.started
    }

    /// Starts missing launchers, and points the proxy to them.
    pub(crate) async fn start_missing(&self) -> Result<()> {
        let mut launchers = self.launchers.lock().await;
        launchers.start_missing().await?;
        *self.proxy.servers() = launchers.addresses();
        Ok(())
    }

    /// Ends all faults.
    pub(crate) fn clear_faults(&self) {
        self.cluster.faults().clear();
    }

    /// What containers wrote.
    pub(crate) fn logs(&self) -> Vec<String> {
        self.cluster.container_logs()
    }

    /// The rights that were missing.
    pub(crate) fn denied(&self) -> Vec<String> {
        let denied = self.cluster.recorded().of(LAUNCHER);
        denied
            .denied()
            .into_iter()
            .map(test_cluster::Request::right)
            .collect()
    }

    /// Waits until the objects of the runs are removed, and returns the objects that are left.
    pub(crate) async fn until_empty(&self, limit: Duration) -> Result<Vec<String>> {
        let nothing = |state: &State| remaining_objects(state).is_empty().then_some(());
        let waited = self
            .cluster
            .wait_for(&self.runs, limit, "nothing is left", nothing);
        match waited.await {
            Ok(()) => Ok(Vec::new()),
            Err(NotInTime {
                seen: Some(Seen::State(state)),
                ..
            }) => Ok(remaining_objects(&state)),
            Err(error) => Err(error).context("what is left in the cluster is not known"),
        }
    }

    /// The evidence of a job: final reports of its executors, and log lines of the launchers.
    pub(crate) fn evidence(&self, job: u32) -> Result<String> {
        let mut text = String::new();
        for report in final_reports(self.cluster.folder(), job)? {
            let _ = writeln!(
                text,
                "--- final report of an executor of job {job}\n{report}"
            );
        }
        let names = [format!("\"job_id\":\"{job}\""), format!("job-{job}-")];
        let lines = lines_with(&self.folder, &names)?;
        let _ = writeln!(text, "--- launchers on job {job}\n{}", lines.trim_end());
        Ok(text)
    }

    /// The pods of a step's Job.
    async fn pods(&self, job: u32, step: &str) -> Result<Vec<Pod>> {
        let label = format!("batch.kubernetes.io/job-name=job-{job}-{step}");
        let pods = Api::<Pod>::namespaced(self.cluster.client(ADMIN)?, &self.runs);
        let list = pods.list(&ListParams::default().labels(&label)).await?;
        Ok(list.items)
    }
}

/// Two replicas behind one address.
#[derive(Debug)]
pub(crate) struct Launchers {
    folder: PathBuf,
    kubeconfig: PathBuf,
    runs: String,
    settings: BTreeMap<String, String>,
    running: BTreeMap<usize, Launcher>,
    started: u32,
}

#[derive(Debug)]
struct Launcher {
    _process: Process,
    address: SocketAddr,
}

impl Launchers {
    const REPLICAS: usize = 2;

    /// Kills one as a crash does.
    pub(crate) fn kill(&mut self, replica: usize) {
        self.running.remove(&(replica % Self::REPLICAS));
    }

    pub(crate) fn kill_all(&mut self) {
        (0..Self::REPLICAS).for_each(|replica| self.kill(replica));
    }

    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        let running = self.running.values();
        running.map(|launcher| launcher.address).collect()
    }

    async fn start_missing(&mut self) -> Result<()> {
        for replica in 0..Self::REPLICAS {
            if !self.running.contains_key(&replica) {
                let launcher = self.start().await?;
                self.running.insert(replica, launcher);
            }
        }
        Ok(())
    }

    async fn start(&mut self) -> Result<Launcher> {
        self.started += 1;
        let log = self.folder.join(format!("launcher-{}.log", self.started));
        let program = self.folder.join("programs/launcher");
        let mut command = launcher::command(program, &self.folder.join("home"));
        launcher::serve(&mut command, "kubernetes")
            .env("KUBECONFIG", &self.kubeconfig)
            .env(env::NAMESPACE, &self.runs)
            .env(env::IMAGE, IMAGE)
            .env(env::ENV_SECRETS, SETTINGS)
            .env(env::HISTORY_SUCCEEDED, "0")
            .env(env::HISTORY_FAILED, "0")
            .env(env::TTL_SECONDS_AFTER_FINISHED, TTL_SECONDS)
            .envs(&self.settings);
        let process = Process::start(&mut command, &log)?;
        Ok(Launcher {
            address: listening(&log).await?,
            _process: process,
        })
    }
}

fn remaining_objects(state: &State) -> Vec<String> {
    let name = |name: &Option<String>| name.clone().unwrap_or_default();
    let jobs = state
        .jobs
        .iter()
        .map(|job| format!("Job {}", name(&job.metadata.name)));
    let pods = state
        .pods
        .iter()
        .map(|pod| format!("pod {}", name(&pod.metadata.name)));
    let secrets = state
        .secrets
        .iter()
        .map(|secret| name(&secret.metadata.name))
        .filter(|name| name != SETTINGS)
        .map(|name| format!("Secret {name}"));
    jobs.chain(pods).chain(secrets).collect()
}

/// The termination messages with this job's id, also of deleted pods.
fn final_reports(nodes: &Path, job: u32) -> Result<Vec<String>> {
    let named = format!("\"jobId\":\"{job}\"");
    let mut reports = Vec::new();
    let mut folders = vec![nodes.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "termination") {
                let message = String::from_utf8_lossy(&fs::read(path)?).into_owned();
                if message.contains(&named) {
                    reports.push(message);
                }
            }
        }
    }
    Ok(reports)
}

fn rules() -> Result<Vec<Rule>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(ROLES)?;
    let mut rules = Vec::new();
    for role in documents.iter().filter(|found| found["kind"] == "Role") {
        rules.extend(serde_json::from_value::<Vec<Rule>>(role["rules"].clone())?);
    }
    ensure!(!rules.is_empty(), "no Role in the launcher's manifest");
    Ok(rules)
}

async fn make_settings_secret(
    cluster: &Cluster,
    runs: &str,
    settings: &BTreeMap<String, String>,
) -> Result<()> {
    let mut secret = Secret::default();
    secret.metadata.name = Some(SETTINGS.to_owned());
    let bytes =
        |(name, value): (&String, &String)| (name.clone(), ByteString(value.clone().into_bytes()));
    secret.data = Some(settings.iter().map(bytes).collect());
    let secrets = Api::<Secret>::namespaced(cluster.client(ADMIN)?, runs);
    secrets.create(&PostParams::default(), &secret).await?;
    Ok(())
}
