//! The peers of a journey: a cluster, the platform, Redis, an object store, and two launchers as processes. Proxies
//! between them inject faults.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use job_contract::env;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::Value;
use tempfile::TempDir;
use test_cluster::{ADMIN, Cluster, Rule};
use test_peers::proxy::Proxy;
use test_peers::redis::RedisServer;
use test_peers::s3::{self, S3};
use test_platform::{Outputs, Platform};

/// Name of the launchers in the cluster.
pub(crate) const LAUNCHER: &str = "launcher";
/// The only Secret that exists before the first run.
pub(crate) const SETTINGS: &str = "terrakube-executor-secrets";
const IMAGE: &str = "registry.example.test/mayfly-executor:1";
const ROLES: &str = include_str!("../../../rbac/launcher.yaml");
const POLL: Duration = Duration::from_millis(25);
/// How long a launcher may take until it listens.
const LISTENING: Duration = Duration::from_mins(1);
/// How long the answer to a dispatch may take. A hanging dispatch delays all others.
const ANSWER: Duration = Duration::from_secs(10);
/// Jobs with a reported end are removed at once, other Jobs after this time.
const TTL_SECONDS: &str = "90";

/// Number of lines that a phase prints before the gate, and after it.
pub(crate) const LINES: u32 = 12;

/// All peers of the runs.
#[derive(Debug)]
pub(crate) struct Peers {
    folder: TempDir,
    began: Instant,
    pub(crate) cluster: Cluster,
    /// Namespace of the runs.
    pub(crate) runs: String,
    pub(crate) platform: Platform,
    pub(crate) redis: tokio::sync::Mutex<RedisServer>,
    pub(crate) store: std::sync::Arc<S3>,
    /// The proxy between executors and the store.
    pub(crate) store_proxy: Proxy,
    /// The proxy with the common address of both launchers.
    pub(crate) launcher_proxy: Proxy,
    pub(crate) launchers: tokio::sync::Mutex<Launchers>,
    pub(crate) client: reqwest::Client,
    /// Locked while a peer has a fault.
    pub(crate) locks: Locks,
    /// Unfinished runs, and the outages since their start.
    under_way: Mutex<BTreeMap<u32, Outages>>,
    store_outages: AtomicUsize,
}

/// Locks with which each peer has only one fault at a time.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    pub(crate) platform: tokio::sync::Mutex<()>,
    pub(crate) store: tokio::sync::Mutex<()>,
    pub(crate) api: tokio::sync::Mutex<()>,
    pub(crate) launchers: tokio::sync::Mutex<()>,
}

/// Outages during a run, from faults of any run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outages {
    pub(crate) store_failed: bool,
    pub(crate) redis_lost_data: bool,
}

/// A point at which a run can be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    Fetch,
    Work,
}

impl Gate {
    const fn name(self) -> &'static str {
        match self {
            Self::Fetch => "fetch",
            Self::Work => "work",
        }
    }
}

impl Peers {
    /// Starts all peers, except the control plane. `program` is launcher or executor, depending on its name.
    pub(crate) async fn start(program: &Path, kubeconfig: &Path) -> Result<Self> {
        // A TLS provider for the clients of this process. An earlier one stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir()?;
        write_files(folder.path(), program)?;
        let cluster = Cluster::builder().start(kubeconfig).await?;
        let runs = cluster.fresh_namespace("runs").await?;
        cluster.grant(LAUNCHER, &runs, &rules()?).await?;
        cluster.image(IMAGE, &folder.path().join("image"));
        let redis = RedisServer::start()?;
        let store = std::sync::Arc::new(S3::start_open()?);
        store.keep_versions()?;
        let store_proxy = Proxy::start(&[store.address()])?;
        let outputs = std::sync::Arc::clone(&store);
        let outputs = Outputs::from_fn(move |organization, job, step| {
            let key = format!("tfoutput/{organization}/{job}/{step}.tfoutput");
            outputs.object(&key).ok()?.map(String::into_bytes)
        });
        let platform = Platform::builder()
            .redis(&format!("redis://{}", redis.address()))
            .outputs(outputs)
            .answer_within(ANSWER)
            .start()
            .await?;
        let settings = settings(&platform, &redis, &store, store_proxy.address());
        make_settings_secret(&cluster, &runs, &settings).await?;
        let launchers = Launchers {
            folder: folder.path().to_owned(),
            kubeconfig: cluster.kubeconfig_file(LAUNCHER, &runs)?,
            runs: runs.clone(),
            settings,
            running: BTreeMap::new(),
            started: 0,
        };
        let launcher_proxy = Proxy::start(&[])?;
        platform.dispatch_to(&format!(
            "http://{}/api/v1/terraform-rs",
            launcher_proxy.address()
        ));
        let peers = Self {
            folder,
            began: Instant::now(),
            cluster,
            runs,
            platform,
            redis: tokio::sync::Mutex::new(redis),
            store,
            store_proxy,
            launcher_proxy,
            launchers: tokio::sync::Mutex::new(launchers),
            client: reqwest::Client::builder()
                .no_proxy()
                .pool_max_idle_per_host(0)
                .timeout(Duration::from_mins(1))
                .build()?,
            locks: Locks::default(),
            under_way: Mutex::default(),
            store_outages: AtomicUsize::new(0),
        };
        peers.start_launchers().await?;
        Ok(peers)
    }

    /// Time since the start.
    pub(crate) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// Folder of the journey.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Keeps the folder of the journey, and returns its path.
    pub(crate) fn keep(self) -> PathBuf {
        self.folder.keep()
    }

    /// Repository of a run; all have the same content.
    pub(crate) fn source(&self, run: u32) -> Result<String> {
        let path = self.path("source").join(run.to_string());
        symlink(self.path("repository"), &path)?;
        Ok(format!("file://{}", path.display()))
    }

    /// The shell command that does the work of a phase.
    pub(crate) fn work(&self, phase: &str) -> String {
        format!("sh {} {phase}", self.path("work.sh").display())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The journal of a run: lines of the tool and of scripts.
    pub(crate) fn journal(&self, run: u32) -> Vec<String> {
        let text = fs::read_to_string(self.path("journal").join(run.to_string()));
        text.unwrap_or_default()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// Makes the run stop at this gate.
    pub(crate) fn hold(&self, run: u32, gate: Gate) -> Result<()> {
        let name = format!("{run}-{}", gate.name());
        Ok(fs::write(self.path("hold").join(name), "")?)
    }

    /// Lets the run continue.
    pub(crate) fn release(&self, run: u32, gate: Gate) {
        let name = format!("{run}-{}", gate.name());
        // Without the file no run was held.
        let _ = fs::remove_file(self.path("hold").join(name));
    }

    /// Whether the run has stopped at this gate.
    pub(crate) fn is_held(&self, run: u32, gate: Gate) -> bool {
        let name = format!("{run}-{}", gate.name());
        self.path("held").join(name).exists()
    }

    /// The pods of a step's Job.
    pub(crate) async fn pods(&self, job: u32, step: &str) -> Vec<Pod> {
        let Ok(client) = self.cluster.client(ADMIN) else {
            return Vec::new();
        };
        let label = format!("batch.kubernetes.io/job-name=job-{job}-{step}");
        let pods = Api::<Pod>::namespaced(client, &self.runs);
        let list = pods.list(&ListParams::default().labels(&label)).await;
        list.map(|list| list.items).unwrap_or_default()
    }

    /// Begins a run.
    pub(crate) fn begin(&self, run: u32) {
        let mut under_way = lock(&self.under_way);
        let outages = Outages {
            store_failed: self.store_outages.load(Ordering::SeqCst) > 0,
            ..Outages::default()
        };
        under_way.insert(run, outages);
    }

    /// Ends a run, and returns the outages during it.
    pub(crate) fn end(&self, run: u32) -> Outages {
        lock(&self.under_way).remove(&run).unwrap_or_default()
    }

    /// Records for all unfinished runs that Redis has lost its data.
    pub(crate) fn record_redis_data_loss(&self) {
        for outages in lock(&self.under_way).values_mut() {
            outages.redis_lost_data = true;
        }
    }

    /// Records for unfinished and new runs that the store fails.
    pub(crate) fn begin_store_outage(&self) {
        self.store_outages.fetch_add(1, Ordering::SeqCst);
        for outages in lock(&self.under_way).values_mut() {
            outages.store_failed = true;
        }
    }

    /// Ends an outage of the store.
    pub(crate) fn end_store_outage(&self) {
        self.store_proxy.clear();
        self.store_outages.fetch_sub(1, Ordering::SeqCst);
    }

    /// Starts missing launchers, and points the proxy to them.
    pub(crate) async fn start_launchers(&self) -> Result<()> {
        let mut launchers = self.launchers.lock().await;
        launchers.start_missing().await?;
        self.launcher_proxy.pass_on_to(&launchers.addresses());
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until a condition holds. Returns whether it does within `limit`.
pub(crate) async fn until(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !is_so() {
        if Instant::now() > end {
            return false;
        }
        tokio::time::sleep(POLL).await;
    }
    true
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
    process: Child,
    address: SocketAddr,
}

impl Launchers {
    const REPLICAS: usize = 2;

    /// Kills one as a crash does.
    pub(crate) fn kill(&mut self, replica: usize) {
        if let Some(mut launcher) = self.running.remove(&(replica % Self::REPLICAS)) {
            // An error means that the process has ended already.
            let _ = launcher.process.kill();
            let _ = launcher.process.wait();
        }
    }

    pub(crate) fn kill_all(&mut self) {
        (0..Self::REPLICAS).for_each(|replica| self.kill(replica));
    }

    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        let running = self.running.values();
        running.map(|launcher| launcher.address).collect()
    }

    /// How many were started so far.
    pub(crate) const fn started(&self) -> u32 {
        self.started
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
        let process = Command::new(self.folder.join("programs/launcher"))
            .args(["serve", "--target", "kubernetes"])
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.folder.join("home"))
            .env("KUBECONFIG", &self.kubeconfig)
            .env(env::NAMESPACE, &self.runs)
            .env(env::IMAGE, IMAGE)
            .env(env::ENV_SECRETS, SETTINGS)
            .env(env::LISTEN, "127.0.0.1:0")
            .env(env::LOG_FORMAT, "json")
            .env(env::HISTORY_SUCCEEDED, "0")
            .env(env::HISTORY_FAILED, "0")
            .env(env::TTL_SECONDS_AFTER_FINISHED, TTL_SECONDS)
            .envs(&self.settings)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .spawn()?;
        // The process now ends when this value is dropped.
        let mut launcher = Launcher {
            process,
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
        };
        let mut address = None;
        until(LISTENING, || {
            address = address_in(&fs::read_to_string(&log).unwrap_or_default());
            address.is_some()
        })
        .await;
        let said = || fs::read_to_string(&log).unwrap_or_default();
        launcher.address = address.with_context(|| format!("no launcher:\n{}", said()))?;
        Ok(launcher)
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The listen address in a launcher's log.
fn address_in(log: &str) -> Option<SocketAddr> {
    let mut lines = log.split_inclusive('\n');
    let line = lines.find(|line| line.ends_with('\n') && line.contains("\"listening\""))?;
    let line: Value = serde_json::from_str(line).ok()?;
    line["address"].as_str()?.parse().ok()
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

/// The settings of launchers and executors.
fn settings(
    platform: &Platform,
    redis: &RedisServer,
    store: &S3,
    store_proxy: SocketAddr,
) -> BTreeMap<String, String> {
    [
        (env::API_URL, platform.url()),
        (env::PUBLIC_API_URL, platform.url()),
        (env::INTERNAL_SECRET, platform.secret()),
        (env::ENABLE_SECURITY, "true".to_owned()),
        (env::REGISTRY_DOMAIN, "registry.example.test".to_owned()),
        (env::COLOR_OUTPUT, "false".to_owned()),
        (env::TERRAFORM_RELEASES_URL, String::new()),
        (env::REDIS_HOSTNAME, "127.0.0.1".to_owned()),
        (env::REDIS_PORT, redis.port().to_string()),
        (env::STATE_TYPE, "AwsTerraformStateImpl".to_owned()),
        (env::AWS_BUCKET, s3::BUCKET.to_owned()),
        (env::AWS_REGION, s3::REGION.to_owned()),
        (env::AWS_ENDPOINT, format!("http://{store_proxy}")),
        (env::AWS_ACCESS_KEY, store.access_key().to_owned()),
        (env::AWS_SECRET_KEY, store.secret_key().to_owned()),
        (env::AWS_USE_LOCKFILE, "true".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
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

/// Programs, repository and scripts of a journey.
fn write_files(base: &Path, program: &Path) -> Result<()> {
    for folder in [
        "bin",
        "data",
        "held",
        "hold",
        "home",
        "journal",
        "programs",
        "repository",
        "source",
    ] {
        fs::create_dir(base.join(folder))?;
    }
    for name in ["launcher", "executor"] {
        symlink(program, base.join("programs").join(name))?;
    }
    let here = base.display();
    write_script(
        &base.join("image"),
        &format!(
            "export {}='{here}/data' {}=installed {}=1 PATH='{here}/bin':\"$PATH\"\n\
             exec '{here}/programs/executor'\n",
            env::DATA_DIR,
            env::TOOL_SELECTION,
            env::STATUS_POLL_SECONDS,
        ),
    )?;
    // A wrapper of the tool writes the start of every apply and destroy to the journal.
    let tool = which::which("terraform").context("`terraform` is missing: cargo xtask setup")?;
    write_script(
        &base.join("bin/terraform"),
        &format!(
            "case \"$1\" in apply|destroy) echo \"tool $1\" >> '{here}/journal/'\"$RUN\" ;; esac\n\
             exec '{}' \"$@\"\n",
            tool.display()
        ),
    )?;
    let git = which::which("git")?;
    write_script(
        &base.join("bin/git"),
        &format!(
            "for word; do case \"$word\" in file://{here}/source/*) run=\"${{word##*/}}-fetch\" ;; esac; done\n\
             if test -n \"$run\" && test -e '{here}/hold/'\"$run\"; then\n\
             : > '{here}/held/'\"$run\"\n\
             while test -e '{here}/hold/'\"$run\"; do sleep 0.05; done\nfi\n\
             exec '{}' \"$@\"\n",
            git.display()
        ),
    )?;
    fs::write(base.join("work.sh"), work_script(base))?;
    repository(base, &git)
}

/// A script that prints lines, stops at the gate, and prints more lines. It writes its begin and end to the journal.
fn work_script(base: &Path) -> String {
    let here = base.display();
    format!(
        "phase=$1\n\
         say() {{ n=$1; while test $n -le $2; do echo \"mark/$RUN/$phase/$n;\"; n=$((n+1)); done; }}\n\
         echo \"begin $phase\" >> '{here}/journal/'\"$RUN\"\n\
         say 1 {LINES}\n\
         if test -e '{here}/hold/'\"$RUN-work\"; then case $phase in second|script|gone)\n\
         : > '{here}/held/'\"$RUN-work\"\n\
         while test -e '{here}/hold/'\"$RUN-work\"; do sleep 0.05; done\n;; esac; fi\n\
         say {} {}\n\
         echo \"end $phase\" >> '{here}/journal/'\"$RUN\"\n\
         test \"$FAIL\" != \"$phase\"\n",
        LINES + 1,
        2 * LINES
    )
}

fn repository(base: &Path, git: &Path) -> Result<()> {
    let folder = base.join("repository");
    let work = |phase: &str| format!("sh {}/work.sh {phase}", base.display());
    let module = format!(
        "resource \"terraform_data\" \"first\" {{\n  provisioner \"local-exec\" {{\n    command = \"{}\"\n  }}\n}}\n\
         resource \"terraform_data\" \"second\" {{\n  depends_on = [terraform_data.first]\n  \
         provisioner \"local-exec\" {{\n    command = \"{}\"\n  }}\n  \
         provisioner \"local-exec\" {{\n    when    = destroy\n    command = \"{}\"\n  }}\n}}\n",
        work("first"),
        work("second"),
        work("gone"),
    );
    let wrong = "resource \"terraform_data\" \"first\" {\n  input = var.missing\n}\n";
    for (name, text) in [("good", module.as_str()), ("wrong", wrong)] {
        fs::create_dir(folder.join(name))?;
        fs::write(folder.join(name).join("main.tf"), text)?;
    }
    for words in [
        &["init", "--quiet", "--initial-branch=main"][..],
        &["add", "--all"],
        &["commit", "--quiet", "--message=fixture"],
    ] {
        let done = Command::new(git)
            .current_dir(&folder)
            .args([
                "-c",
                "user.name=Fixture",
                "-c",
                "user.email=fixture@example.test",
            ])
            .args(words)
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .status()?;
        ensure!(done.success(), "git {words:?} failed");
    }
    Ok(())
}

fn write_script(path: &Path, text: &str) -> Result<()> {
    fs::write(path, format!("#!/bin/sh\n{text}"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
