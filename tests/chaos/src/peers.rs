//! The peers of a journey: the platform, Redis, an object store, and the side that runs the steps. Proxies between them
//! inject faults.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use job_contract::env;
use tempfile::TempDir;
use test_peers::proxy::Proxy;
use test_peers::redis::RedisServer;
use test_peers::s3::{self, S3};
use test_peers::wait::{Look, NotInTime, within};
use test_platform::{Outputs, Platform};

use crate::files::write_files;
use crate::hub::HubSide;
use crate::hub::front::StoreFront;
use crate::launchers::LauncherSide;
use crate::side::Side;

/// How long the answer to a dispatch may take. A hanging dispatch delays all others.
const ANSWER: Duration = Duration::from_secs(10);
/// Number of lines that a phase prints before the gate, and after it.
pub(crate) const LINES: u32 = 12;

/// All peers of the runs.
#[derive(Debug)]
pub(crate) struct Peers {
    folder: TempDir,
    began: Instant,
    pub(crate) platform: Platform,
    pub(crate) redis: tokio::sync::Mutex<RedisServer>,
    pub(crate) store: std::sync::Arc<S3>,
    /// The proxy between executors and the store.
    pub(crate) store_proxy: Proxy,
    pub(crate) side: Side,
    pub(crate) client: reqwest::Client,
    /// Locked while a peer has a fault.
    pub(crate) locks: Locks,
    /// Unfinished runs, and whether Redis has lost its data since their start.
    under_way: Mutex<BTreeMap<u32, bool>>,
    /// How often the store failed so far.
    pub(crate) store_outages: AtomicUsize,
}

/// Locks with which each peer has only one fault at a time.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    pub(crate) platform: tokio::sync::Mutex<()>,
    pub(crate) store: tokio::sync::Mutex<()>,
    pub(crate) api: tokio::sync::Mutex<()>,
    pub(crate) launchers: tokio::sync::Mutex<()>,
    pub(crate) apart: tokio::sync::Mutex<()>,
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
    /// Starts all peers, except the control plane. `program` is launcher or executor, depending on its name. With a
    /// kubeconfig, launchers run the steps in its cluster; without one, a hub and agents do.
    pub(crate) async fn start(
        program: &Path,
        seed: u64,
        kubeconfig: Option<&Path>,
    ) -> Result<Self> {
        // A TLS provider for the clients of this process. An earlier one stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir()?;
        write_files(folder.path(), program)?;
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
        let side = if let Some(kubeconfig) = kubeconfig {
            let side = LauncherSide::start(folder.path(), kubeconfig, settings).await?;
            Side::Launchers(Box::new(side))
        } else {
            let organization = platform.organization();
            let front = StoreFront::start(store.address())?;
            *store_proxy.servers() = vec![front.address()];
            let side = HubSide::start(folder.path(), seed, &organization, settings, front).await?;
            Side::Hub(Box::new(side))
        };
        platform.dispatch_to(&side.dispatch_url());
        Ok(Self {
            folder,
            began: Instant::now(),
            platform,
            redis: tokio::sync::Mutex::new(redis),
            store,
            store_proxy,
            side,
            client: reqwest::Client::builder()
                .no_proxy()
                .pool_max_idle_per_host(0)
                .timeout(Duration::from_mins(1))
                .build()?,
            locks: Locks::default(),
            under_way: Mutex::default(),
            store_outages: AtomicUsize::new(0),
        })
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
        let path = self.path("journal").join(run.to_string());
        let text = match fs::read_to_string(&path) {
            // Nothing of the run has begun.
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            text => text.unwrap_or_else(|error| panic!("{}: {error}", path.display())),
        };
        text.lines().map(str::to_owned).collect()
    }

    /// The resources of a run that exist.
    pub(crate) fn existing(&self, run: u32) -> BTreeSet<String> {
        let exists = |name: &&str| self.path("exists").join(format!("{run}-{name}")).exists();
        let existing = ["first", "second"].into_iter().filter(exists);
        existing.map(str::to_owned).collect()
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

    /// Begins a run.
    pub(crate) fn begin(&self, run: u32) {
        lock(&self.under_way).insert(run, false);
    }

    /// Whether Redis has lost its data since the start of an unfinished run.
    pub(crate) fn redis_lost_data(&self, run: u32) -> bool {
        lock(&self.under_way).get(&run) == Some(&true)
    }

    /// The live log of a job.
    pub(crate) async fn streamed(&self, job: u32) -> String {
        // Redis has to answer.
        let _redis = self.redis.lock().await;
        let entries = self.platform.streamed(job).await;
        let lines: Vec<_> = entries.into_iter().map(|entry| entry.output).collect();
        lines.join("\n")
    }

    /// Ends a run. Returns whether Redis lost its data during it.
    pub(crate) fn end(&self, run: u32) -> bool {
        lock(&self.under_way).remove(&run) == Some(true)
    }

    /// Records for all unfinished runs that Redis has lost its data.
    pub(crate) fn record_redis_data_loss(&self) {
        lock(&self.under_way)
            .values_mut()
            .for_each(|lost| *lost = true);
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until a condition holds. Returns whether it does within `limit`. If not, it prints what is there instead.
pub(crate) async fn holds<L: Look, F: Future<Output = L>>(
    limit: Duration,
    what: &str,
    look: impl FnMut() -> F,
) -> bool {
    found(within(limit, what, look).await).is_some()
}

/// What a wait has found. If that is nothing, it prints what is there instead.
#[expect(
    clippy::print_stderr,
    reason = "the summary says only that a fault did not happen"
)]
pub(crate) fn found<T, S: Display>(waited: Result<T, NotInTime<S>>) -> Option<T> {
    waited.inspect_err(|late| eprintln!("{late}")).ok()
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
