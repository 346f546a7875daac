//! `executor fill`: fetches packages of providers into the store that runs only read. A Job of the operator runs it. It has nothing of
//! a run, and executes nothing of what it fetches.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use clap::Parser;
use job_contract::provider_cache::{DEFAULT_REGISTRIES, WantedPackage};
use job_contract::{Exit, chain, env};
use provider_store::{Package, ProviderStore};
use runtime::setting::parse_over_environment;
use tracing::{debug, error, info, warn};

use crate::config::{PROVIDER_CACHE_BYTES, TelemetryConfig};
use crate::error::StepError;
use crate::providers::package;
use crate::providers::registry::{Registry, RegistryError};
use crate::tool::{Fetcher, RETRY_FOR};
use crate::{final_report, jvm_settings, resolver, telemetry};

/// The argument that selects this program.
pub(crate) const COMMAND: &str = "fill";

/// Fetches packages of providers into the store that runs share.
#[derive(Debug, Parser)]
#[command(name = "executor fill")]
struct FillArgs {
    /// Each as `HOST/NAMESPACE/TYPE/VERSION/OS_ARCH`.
    #[arg(required = true, value_name = "PACKAGE")]
    packages: Vec<WantedPackage>,
    /// Folder of the store.
    #[arg(long, env = env::PROVIDER_CACHE_DIR)]
    store: PathBuf,
    /// Size of the store, in bytes, above which packages are removed that were not used for the longest time.
    #[arg(long, env = env::PROVIDER_CACHE_MAX_BYTES, default_value_t = PROVIDER_CACHE_BYTES)]
    max_bytes: u64,
    /// Registries that are asked. Packages of others are not fetched.
    #[arg(long, env = env::PROVIDER_CACHE_REGISTRIES, value_delimiter = ',', default_values = DEFAULT_REGISTRIES)]
    registries: Vec<String>,
    /// Folder for downloads [default: the system's].
    #[arg(long, env = env::WORK_DIR)]
    work_dir: Option<PathBuf>,
    #[command(flatten)]
    telemetry: TelemetryConfig,
}

/// Kubernetes keeps 4096 bytes of what a program says at its end.
const MOST_SAID: usize = 4000;

/// Why a package is not in the store.
#[derive(Debug, thiserror::Error)]
enum FillError {
    #[error("`{0}` is no registry that the operator allows")]
    NotAllowed(String),
    #[error("its name cannot be the name of a folder")]
    Name,
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error("the store could not be read or written")]
    Store(#[from] io::Error),
}

/// Runs as a process. `args` has the name of the program and of the command.
pub(crate) fn main(args: Vec<OsString>) -> ExitCode {
    let args = args.into_iter().skip(1);
    let args = match parse_over_environment::<FillArgs>(args, |_| true) {
        Ok(args) => args,
        Err(usage) => {
            // A write error means that the reader has closed the pipe. That is no failure.
            let _ = usage.print();
            let is_error = usage.use_stderr();
            let code = if is_error {
                Exit::BadConfiguration
            } else {
                Exit::Done
            };
            return ExitCode::from(code.code());
        }
    };
    let (exit, failures) = match run(&args) {
        Ok(failures) if failures.is_empty() => return ExitCode::from(Exit::Done.code()),
        Ok(failures) => (Exit::Infrastructure, failures),
        Err(failure) => {
            error!(error = %failure, "the store was not filled");
            (failure.exit(), vec![failure.to_string()])
        }
    };
    say(&final_report::default_path(), &failures);
    ExitCode::from(exit.code())
}

/// Leaves the reasons as the termination message, which `explain` shows.
fn say(path: &Path, failures: &[String]) {
    let mut text = failures.join("\n");
    text.truncate(text.floor_char_boundary(MOST_SAID));
    if let Err(error) = final_report::write_file(path, &text) {
        debug!(%error, path = %path.display(), "the termination message could not be written");
    }
}

/// Why some packages are not in the store now. Empty: all are.
fn run(args: &FillArgs) -> Result<Vec<String>, StepError> {
    let variables = jvm_settings::variables(|name| std::env::var_os(name))
        .map_err(|wrong| StepError::new(Exit::BadConfiguration, wrong))?;
    resolver::restart_if_needed(&variables)
        .map_err(|source| StepError::infrastructure("could not start").because(&source))?;
    telemetry::install(&args.telemetry).map_err(|error| {
        let text = format!("`{}` is not a log filter: {error}", env::LOG_FILTER);
        StepError::new(Exit::BadConfiguration, text)
    })?;
    // A second installation, as in a test, fails, and the first stays in force.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| StepError::infrastructure("could not start").because(&source))?;
    runtime.block_on(fill(args))
}

/// Fetches one after another, so that there is space for one archive beside the store. What one lacks keeps none from the others.
async fn fill(args: &FillArgs) -> Result<Vec<String>, StepError> {
    let registry = Registry::new(Fetcher::new(RETRY_FOR)?);
    let store = ProviderStore::new(&args.store);
    let mut builder = tempfile::Builder::new();
    let scratch = match &args.work_dir {
        Some(folder) => std::fs::create_dir_all(folder)
            .and_then(|()| builder.prefix("fill-").tempdir_in(folder)),
        None => builder.prefix("fill-").tempdir(),
    };
    let scratch = scratch
        .map_err(|source| StepError::infrastructure("no folder for downloads").because(&source))?;
    let mut failures = Vec::new();
    for wanted in &args.packages {
        match fill_one(args, &store, &registry, wanted, scratch.path()).await {
            Ok(true) => info!(package = %wanted, "published"),
            Ok(false) => info!(package = %wanted, "it is there already"),
            Err(failure) => {
                let error = chain(&failure);
                warn!(package = %wanted, error, "not fetched");
                failures.push(format!("{wanted}: {error}"));
            }
        }
    }
    Ok(failures)
}

/// Whether the package was fetched. It may be there already.
async fn fill_one(
    args: &FillArgs,
    store: &ProviderStore,
    registry: &Registry,
    wanted: &WantedPackage,
    scratch: &Path,
) -> Result<bool, FillError> {
    let host = wanted.host();
    if !args.registries.iter().any(|allowed| allowed == host) {
        return Err(FillError::NotAllowed(host.to_owned()));
    }
    let (address, version, platform) = wanted.coordinates();
    let package = Package::new(address, version, platform).ok_or(FillError::Name)?;
    if has(store, &package, scratch)? {
        return Ok(false);
    }
    let archive = scratch.join("archive.zip");
    let fetched = registry.fetch_signed(&package, &archive).await;
    let published = fetched.map_err(FillError::from).and_then(|sha256| {
        // Before the archive comes, so that the volume does not become full.
        let size = std::fs::metadata(&archive)?.len();
        store.prune(args.max_bytes.saturating_sub(size), None)?;
        store.publish(&package, &archive, &sha256)?;
        if store.is_on_disk_of_node()? {
            store.publish_unpacked(&package, &sha256, |target| unpack(&archive, target))?;
        }
        Ok(())
    });
    match std::fs::remove_file(&archive) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    published.map(|()| true)
}

/// Unpacks an archive for runs that link to its files.
fn unpack(archive: &Path, target: &Path) -> io::Result<String> {
    let archive = std::fs::File::open(archive)?;
    package::unpack(archive, target, &AtomicBool::new(false)).map_err(io::Error::other)
}

/// Whether the store has a package. What is there and is not what its name says is removed: runs that only read cannot do that.
fn has(store: &ProviderStore, package: &Package, scratch: &Path) -> io::Result<bool> {
    let copy = scratch.join("stored.zip");
    for sha256 in store.digests(package) {
        if store.copy(package, &sha256, &copy)? {
            std::fs::remove_file(&copy)?;
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_cut_at_a_whole_character() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("message");
        say(&path, &["a: \u{e9}".repeat(1000), "b: c".to_owned()]);
        let said = std::fs::read_to_string(&path).unwrap();
        assert!(said.len() > MOST_SAID - 4 && said.len() <= MOST_SAID);
        say(&path, &["a: b".to_owned(), "c: d".to_owned()]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a: b\nc: d");
    }
}
