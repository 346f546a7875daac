//! Provides the packages of locked providers before `init`: from the store that runs share, or by several downloads at a time.
//!
//! `providers` knows how. This phase decides whether, and where the store is. Whatever goes wrong, the tool downloads the package
//! itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use job_contract::{Tool, chain};
use provider_store::{Package, ProviderStore};
use runtime::private_file::private_folder;
use tracing::{info, warn};

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::error::StepError;
use crate::operation::OperationContext;
use crate::providers::lock_file;
use crate::providers::registry::Registry;
use crate::providers::shared_store::SharedStore;
use crate::providers::{Origin, ProvideError, Provided, Sources};
use crate::terraform::credentials::{self, Overlay};
use crate::tool::Fetcher;

const TERRAFORMS: &str = "registry.terraform.io";
const PLUGIN_CACHE: &str = "TF_PLUGIN_CACHE_DIR";
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

/// Puts the packages of locked providers into a folder of the run. `None`: the tool downloads all of them.
pub(crate) async fn provide_providers(
    context: &OperationContext<'_, '_>,
    env: &mut ChildEnv,
) -> Result<Option<Overlay>, StepError> {
    let run = context.run;
    let working_dir = &context.prepared.working_dir;
    let fetches = run.config.tools.provider_fetches;
    let store = store_of(run, env);
    let Some(mut lock) = lock_file::read(working_dir).filter(|_| fetches > 0) else {
        return Ok(None);
    };
    let mut locked = lock_file::packages(&lock, &platform());
    if locked.is_empty() {
        return Ok(None);
    }
    if let Some(name) = decided_by_run(run, env) {
        let text = format!("Providers are not fetched before init: `{name}` is set.");
        run.log.writer().line(&text).await;
        return Ok(None);
    }
    if let Some(why) = decided_by_operator(run, env, working_dir) {
        info!("providers are not fetched before init: {why}");
        return Ok(None);
    }
    let platforms = run.connections.tool_hosts();
    locked.retain(|locked| {
        let host = &locked.package.host;
        // OpenTofu takes its packages from a registry of its own, also with a lock file of Terraform.
        let is_of_other = run.job.tool() == Tool::OpenTofu && host == TERRAFORMS;
        // The tool has the credentials.
        !is_of_other && !platforms.contains(host) && !credentials::brings_token(env, host)
    });
    let Some(sources) = sources(run, store, fetches) else {
        return Ok(None);
    };
    let providing = async { Ok(sources.provide(locked).await) };
    let results = run.unless_stopped(providing).await?;
    let provided = report(run, results).await;
    if provided.is_empty() {
        return Ok(None);
    }
    let digests: Vec<_> = provided
        .iter()
        .map(|provided| (provided.package.address(), provided.h1.clone()))
        .collect();
    if lock_file::add(&mut lock, &digests) {
        lock_file::write(working_dir, &lock).map_err(|source| {
            StepError::working_dir(&working_dir.join(lock_file::NAME), &source)
        })?;
    }
    if provided
        .iter()
        .any(|provided| provided.from == Origin::Registry)
        && let Some(store) = &sources.store
    {
        store.prune(run.config.tools.provider_cache_max_bytes).await;
    }
    Ok(Some(Overlay {
        folder: sources.overlay,
        providers: digests.into_iter().map(|(address, _)| address).collect(),
    }))
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
    let configured = run.folders.provider_cache.clone();
    let mounted = env
        .get(PLUGIN_CACHE)
        .filter(|_| run.config.is_in_pod())
        .map(PathBuf::from);
    if mounted.is_some() {
        env.unset(PLUGIN_CACHE);
    }
    let folder = configured.or(mounted)?;
    Some(SharedStore::new(ProviderStore::new(folder)))
}

/// The variable of the run that decides where its providers come from.
fn decided_by_run(run: &RunContext<'_>, env: &ChildEnv) -> Option<&'static str> {
    let of_run = &run.job.environment_variables;
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

/// Says in the log what came from where. Returns what is there.
async fn report(
    run: &RunContext<'_>,
    results: Vec<(Package, Result<Provided, ProvideError>)>,
) -> Vec<Provided> {
    let mut provided = Vec::new();
    for (package, result) in results {
        match result {
            Ok(one) => {
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
