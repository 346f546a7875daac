//! Provides the packages of providers for `init`: those of the lock file before it, from the store that runs share or by several
//! downloads at a time, and all others while it runs, by a registry on loopback.
//!
//! `providers` knows how. This phase decides whether, and where the store is. Whatever goes wrong, the tool downloads the package
//! itself.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use hcl_edit::structure::Body;
use job_contract::provider_cache::CacheMode;
use job_contract::{Tool, chain};
use provider_store::{Access, Package, Progress, ProviderStore};
use runtime::lock;
use runtime::private_file::private_folder;
use secrecy::ExposeSecret as _;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::child_env::ChildEnv;
use crate::context::{PLUGIN_CACHE, RunContext};
use crate::error::StepError;
use crate::operation::OperationContext;
use crate::providers::lock_file;
use crate::providers::registry::Registry;
use crate::providers::registry_server::{Host, Patience, RegistryServer, Served, Setup};
use crate::providers::shared_store::SharedStore;
use crate::providers::{Origin, ProvideError, Provided, Sources};
use crate::terraform::credentials::{self, ForcedHost, Overlay};
use crate::terraform::requirements;
use crate::tool::Fetcher;
use crate::workspace::ModuleStore;

const TERRAFORMS: &str = "registry.terraform.io";
const HANGS: &str = "The volume of the provider store hangs. This run goes on without it.";
/// Variables with which a run decides itself where its providers come from.
const OWN_SETTINGS: [&str; 2] = ["TF_CLI_CONFIG_FILE", PLUGIN_CACHE];
/// Variables with arguments of the tool, and the arguments that decide about providers.
const ARGUMENTS: [&str; 2] = ["TF_CLI_ARGS", "TF_CLI_ARGS_init"];
const DECIDING_ARGUMENTS: [&str; 3] = ["-upgrade", "-plugin-dir", "-lockfile"];
/// Folders that the tool uses as mirrors if its configuration says nothing about them: below the home folder, and others.
const MIRRORS_AT_HOME: [&str; 3] = [
    ".terraform.d/plugins",
    ".local/share/terraform/plugins",
    ".local/share/opentofu/plugins",
];
const MIRRORS: [&str; 4] = [
    "/usr/local/share/terraform/plugins",
    "/usr/share/terraform/plugins",
    "/usr/local/share/opentofu/plugins",
    "/usr/share/opentofu/plugins",
];
const MIRROR_OF_MODULE: &str = "terraform.d/plugins";

/// What `init` finds instead of the registries. The default: nothing, so the tool downloads everything.
#[derive(Debug, Default)]
pub(crate) struct ProvidedForInit {
    /// The packages of locked providers.
    pub(crate) overlay: Option<Overlay>,
    /// Gives the tool what the lock file does not have.
    registries: Option<(RegistryServer, SharedStore)>,
}

impl ProvidedForInit {
    /// The hosts whose providers the tool asks for here.
    pub(crate) fn forced_hosts(&self) -> Vec<ForcedHost> {
        let server = self.registries.as_ref();
        server.map_or_else(Vec::new, |(server, _)| server.hosts())
    }

    /// Leaves packages out that the tool uses where they are in the store and that are damaged there. Returns whether there was one:
    /// then another `init` downloads it. The run names them as wanted, so that a Job puts them right.
    pub(crate) async fn leave_out_damaged(&mut self, run: &RunContext<'_>) -> bool {
        let held = lock(&run.held_packages).clone();
        let Some(overlay) = self.overlay.as_mut().filter(|_| !held.is_empty()) else {
            return false;
        };
        let progress = Progress::default();
        let moving = progress.clone();
        let checked: Vec<_> = held.iter().map(|one| one.package.clone()).collect();
        let looked = run.store_volume.in_time(&progress, move || {
            let damaged = held.iter().filter(|one| !one.is_intact(&moving));
            Ok(damaged.map(|one| one.package.clone()).collect())
        });
        let damaged: Vec<Package> = looked.await.unwrap_or_else(|error| {
            warn!(%error, "packages in the provider store cannot be read");
            checked
        });
        let log = run.log.writer();
        for package in &damaged {
            run.wanted.note(package);
            let address = package.address();
            overlay.providers.retain(|one| *one != address);
            let text = format!(
                "{address} {} is damaged in the provider store, or cannot be read there. Init runs again without it.",
                package.version
            );
            log.line(&text).await;
        }
        if overlay.providers.is_empty() {
            self.overlay = None;
        }
        !damaged.is_empty()
    }

    /// Ends after `init`. What it has downloaded is in the store then.
    pub(crate) async fn finish(self, run: &RunContext<'_>) -> Result<(), StepError> {
        let finished = self.finish_registries(run).await;
        report_hanging_volume(run).await;
        report_wanted(run).await;
        finished
    }

    async fn finish_registries(self, run: &RunContext<'_>) -> Result<(), StepError> {
        let Some((registries, store)) = self.registries else {
            return Ok(());
        };
        let finishing = async {
            let served = registries.finish().await;
            if served.fetched > 0 {
                store.prune(run.config.tools.provider_cache_max_bytes).await;
            }
            Ok(served)
        };
        let Served {
            stored,
            fetched,
            failures,
        } = run.unless_stopped(finishing).await?;
        let log = run.log.writer();
        for failure in failures {
            log.line(&format!("Not fetched by the executor: {failure}"))
                .await;
        }
        if stored + fetched > 0 {
            let text = format!(
                "Providers without a lock entry: {stored} from the store, {fetched} downloaded."
            );
            log.line(&text).await;
        }
        Ok(())
    }
}

/// Says what a run lacked in a store that it only reads.
async fn report_wanted(run: &RunContext<'_>) {
    let lacked = run.wanted.names().len();
    if lacked > 0 {
        let text = format!(
            "Not in the store, which this run only reads: {lacked}. A Job of the operator may fetch them for later runs; \
             `api-launcher explain` shows it."
        );
        run.log.writer().line(&text).await;
    }
}

/// Provides packages for `init`. The tool may send tokens to `platforms`, so these are left to it.
pub(crate) async fn provide_providers(
    context: &OperationContext<'_, '_>,
    env: &mut ChildEnv,
    platforms: &[String],
) -> Result<ProvidedForInit, StepError> {
    let run = context.run;
    let working_dir = &context.prepared.working_dir;
    let fetches = run.config.tools.provider_fetches;
    let store = store_of(run, env);
    let lock = lock_file::read(working_dir);
    let mut locked = lock
        .as_ref()
        .map_or_else(Vec::new, |lock| lock_file::packages(lock, &platform()));
    // Without a store, the tool gets nothing here that it does not get by itself.
    let mut hosts = match &store {
        Some(_) => hosts_of_unlocked(run.job.tool(), working_dir, lock.as_ref()),
        None => BTreeSet::new(),
    };
    if fetches == 0 || (locked.is_empty() && hosts.is_empty()) {
        return Ok(ProvidedForInit::default());
    }
    if let Some(name) = decided_by_run(run, env) {
        let text = format!("Providers are not fetched before init: `{name}` is set.");
        run.log.writer().line(&text).await;
        return Ok(ProvidedForInit::default());
    }
    if let Some(why) = decided_by_operator(run, env, working_dir) {
        info!("providers are not fetched before init: {why}");
        return Ok(ProvidedForInit::default());
    }
    let is_platform = |host: &str| platforms.iter().any(|platform| platform == host);
    locked.retain(|locked| {
        let host = &locked.package.host;
        // OpenTofu takes its packages from a registry of its own, also with a lock file of Terraform.
        let is_of_other = run.job.tool() == Tool::OpenTofu && host == TERRAFORMS;
        let host = without_usual_port(host);
        // The tool has the credentials.
        !is_of_other && !is_platform(host) && !credentials::brings_token(env, host)
    });
    hosts.retain(|host| {
        // A token of the tool must not come to this process, and no setting of the operator may be replaced.
        let (home, tool) = (&run.folders.home, run.job.tool());
        let host = without_usual_port(host);
        !is_platform(host) && !credentials::has_settings_of(env, home, tool, host)
    });
    let Some(sources) = sources(run, store, fetches) else {
        return Ok(ProvidedForInit::default());
    };
    let both = async {
        let providing = sources.provide(locked);
        let serving = serve_registries(&sources, hosts, Patience::of_tool(env));
        Ok(tokio::join!(providing, serving))
    };
    let (results, server) = run.unless_stopped(both).await?;
    if let Some(server) = &server {
        run.log.add_secrets([server.secret().expose_secret()]);
    }
    let provided = report(run, results).await;
    report_hanging_volume(run).await;
    Ok(ProvidedForInit {
        overlay: match lock {
            Some(lock) => overlay(context, &sources, lock, &provided).await?,
            None => None,
        },
        registries: server.zip(sources.store),
    })
}

/// The folder that the tool uses as a mirror, after the lock file has all digests of what is there.
async fn overlay(
    context: &OperationContext<'_, '_>,
    sources: &Sources,
    mut lock: Body,
    provided: &[Provided],
) -> Result<Option<Overlay>, StepError> {
    if provided.is_empty() {
        return Ok(None);
    }
    let working_dir = &context.prepared.working_dir;
    let digests: Vec<_> = provided
        .iter()
        .map(|provided| (provided.package.address(), provided.h1.clone()))
        .collect();
    if lock_file::add(&mut lock, &digests) {
        lock_file::write(working_dir, &lock).map_err(|source| {
            StepError::working_dir(&working_dir.join(lock_file::NAME), &source)
        })?;
    }
    let max_bytes = context.run.config.tools.provider_cache_max_bytes;
    if provided.iter().any(|one| one.from == Origin::Registry)
        && let Some(store) = &sources.store
    {
        store.prune(max_bytes).await;
    }
    Ok(Some(Overlay {
        folder: sources.overlay.clone(),
        providers: digests.into_iter().map(|(address, _)| address).collect(),
    }))
}

/// The name by which settings know a host. The tool takes both for one.
fn without_usual_port(host: &str) -> &str {
    host.strip_suffix(":443").unwrap_or(host)
}

/// The hosts of providers that the module needs and its lock file does not have.
fn hosts_of_unlocked(tool: Tool, working_dir: &Path, lock: Option<&Body>) -> BTreeSet<String> {
    let needed = requirements::read(working_dir, tool);
    let locked: BTreeSet<_> = lock
        .into_iter()
        .flat_map(lock_file::versions)
        .map(|(address, _)| address)
        .collect();
    let unlocked = needed.difference(&locked);
    unlocked
        .filter_map(|address| address.split('/').next().map(str::to_owned))
        .collect()
}

/// Starts a server for these hosts. A host that does not say what it has is left to the tool.
async fn serve_registries(
    sources: &Sources,
    hosts: BTreeSet<String>,
    patience: Patience,
) -> Option<RegistryServer> {
    let store = sources.store.clone()?;
    let asked = hosts.into_iter().map(async |name| {
        let asked = timeout(patience.services, sources.registry.services(&name)).await;
        Some(Host {
            services: asked.ok()?.ok()?,
            name,
        })
    });
    let hosts: Vec<_> = join_all(asked).await.into_iter().flatten().collect();
    if hosts.is_empty() {
        return None;
    }
    let start = || {
        RegistryServer::start(Setup {
            hosts,
            patience,
            platform: platform(),
            store,
            fetcher: Fetcher::patient()?,
            scratch: sources.scratch.clone(),
        })
        .map_err(|source| {
            StepError::infrastructure("could not serve a registry on loopback").because(&source)
        })
    };
    start()
        .inspect_err(|error| warn!(%error, "providers without a lock entry are left to the tool"))
        .ok()
}

/// The platform of this process, as registries name it.
fn platform() -> String {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("{}_{architecture}", std::env::consts::OS)
}

/// The store that runs share. In a pod, the folder of the plugin cache is a volume that the launcher has mounted. No two runs can
/// use it as such a cache at a time, so the tool does not see it.
fn store_of(run: &RunContext<'_>, env: &mut ChildEnv) -> Option<SharedStore> {
    if run.mounted_cache.is_some() {
        env.unset(PLUGIN_CACHE);
    }
    let store = ProviderStore::new(shared_folder(run)?);
    let store = match run.config.tools.provider_cache_mode {
        CacheMode::Runs => SharedStore::new(store),
        CacheMode::Fill => SharedStore::read_only(store, run.wanted.clone()),
    };
    let access = run.config.tools.provider_cache_access;
    Some(store.on(run.store_volume.clone(), access))
}

fn shared_folder(run: &RunContext<'_>) -> Option<PathBuf> {
    let configured = run.folders.provider_cache.clone();
    configured.or_else(|| run.mounted_cache.clone())
}

/// The store of modules that runs share. Whoever can read it can read all modules there, so in pods the operator decides.
pub(crate) fn module_store(run: &RunContext<'_>) -> Option<ModuleStore> {
    let tools = &run.config.tools;
    let is_wanted = tools.module_cache.unwrap_or(!run.config.is_in_pod());
    if !is_wanted || tools.provider_cache_mode == CacheMode::Fill {
        return None;
    }
    Some(ModuleStore {
        store: ProviderStore::new(shared_folder(run)?),
        volume: run.store_volume.clone(),
    })
}

/// Removes what nobody uses from the store, if it has become too large.
pub(crate) async fn prune_store(run: &RunContext<'_>) {
    if let Some(folder) = shared_folder(run) {
        let store = SharedStore::new(ProviderStore::new(folder));
        let store = store.on(run.store_volume.clone(), Access::default());
        store.prune(run.config.tools.provider_cache_max_bytes).await;
    }
}

/// The variable of the run that decides where its providers come from.
fn decided_by_run(run: &RunContext<'_>, env: &ChildEnv) -> Option<&'static str> {
    let of_run = &run.child_job().environment_variables;
    let is_own = |name: &&str| of_run.contains_key(*name) && env.get(name).is_some();
    let decides = |name: &&str| {
        let arguments = of_run.get(*name).map_or("", String::as_str);
        let mut words = DECIDING_ARGUMENTS.iter();
        words.any(|word| arguments.contains(word))
    };
    let own = OWN_SETTINGS.into_iter().find(is_own);
    own.or_else(|| ARGUMENTS.into_iter().find(decides))
}

/// Why it is the operator who decides that.
fn decided_by_operator(run: &RunContext<'_>, env: &ChildEnv, working_dir: &Path) -> Option<String> {
    let (home, tool) = (&run.folders.home, run.job.tool());
    if let Some(name) = OWN_SETTINGS
        .into_iter()
        .find(|name| env.get(name).is_some())
    {
        return Some(format!("`{name}` is set"));
    }
    if credentials::decides_on_providers(home, tool) {
        return Some(format!(
            "the configuration of {tool} says where they come from"
        ));
    }
    let mirrors = MIRRORS_AT_HOME.iter().map(|below| home.join(below));
    let mirrors = mirrors.chain(MIRRORS.iter().map(PathBuf::from));
    let mut mirrors = mirrors.chain([working_dir.join(MIRROR_OF_MODULE)]);
    let mirror = mirrors.find(|mirror| mirror.is_dir())?;
    Some(format!("`{}` has some", mirror.display()))
}

fn sources(run: &RunContext<'_>, store: Option<SharedStore>, at_a_time: usize) -> Option<Sources> {
    let folder = run.layout.private().join("providers");
    let (overlay, scratch) = (folder.join("overlay"), folder.join("archives"));
    for folder in [&overlay, &scratch] {
        if let Err(error) = private_folder(folder) {
            warn!(%error, "providers are left to the tool");
            return None;
        }
    }
    // Whatever cannot be had at once is left to the tool, which tries again itself.
    let fetcher = Fetcher::new(Duration::ZERO)
        .inspect_err(|error| warn!(%error, "providers are left to the tool"))
        .ok()?;
    Some(Sources {
        store,
        registry: Arc::new(Registry::new(fetcher)),
        overlay,
        scratch,
        at_a_time,
    })
}

async fn report_hanging_volume(run: &RunContext<'_>) {
    if run.store_volume.hangs_since_last_look() {
        run.log.writer().line(HANGS).await;
    }
}

/// Says in the log what came from where. Returns what is there.
async fn report(
    run: &RunContext<'_>,
    results: Vec<(Package, Result<Provided, ProvideError>)>,
) -> Vec<Provided> {
    let mut provided = Vec::new();
    for (package, result) in results {
        match result {
            Ok(mut one) => {
                if let Some(held) = one.held.take() {
                    lock(&run.held_packages).push(Arc::new(held));
                }
                info!(%package, from = ?one.from, "provided");
                if let Some(error) = &one.not_published {
                    warn!(%package, %error, "it is not in the provider store");
                }
                provided.push(one);
            }
            Err(error) => {
                let error = chain(&error);
                info!(%package, error, "left to the tool");
            }
        }
    }
    let stored = provided
        .iter()
        .filter(|one| one.from == Origin::Store)
        .count();
    if !provided.is_empty() {
        let fetched = provided.len() - stored;
        let text = format!("Providers: {stored} from the store, {fetched} downloaded.");
        run.log.writer().line(&text).await;
    }
    provided
}
