//! `executor fill`: fetches packages of providers into the store that runs only read. A Job of the operator runs it. It has nothing of
//! a run, and executes nothing of what it fetches.

use std::ffi::OsString;
use std::fs::File;
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
use crate::providers::package::{self, PackageError};
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
    #[error(transparent)]
    Package(#[from] PackageError),
    #[error("the store could not be read or written")]
    Store(#[from] io::Error),
}

/// What became of a package.
#[derive(Debug, PartialEq, Eq)]
enum Filled {
    Published,
    /// It was there already.
    Present,
    /// With these bytes more, the store would be larger than it may be.
    NoSpace {
        bytes: u64,
        kept_bytes: u64,
    },
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

/// Why some packages are not in the store now. Empty: all are, or have no space there, so that to try again would be in vain.
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
            Ok(Filled::Published) => info!(package = %wanted, "published"),
            Ok(Filled::Present) => info!(package = %wanted, "it is there already"),
            Ok(Filled::NoSpace { bytes, kept_bytes }) => warn!(
                package = %wanted, bytes, kept_bytes, max_bytes = args.max_bytes,
                "not published: the store has no space for it; make `{}` larger",
                env::PROVIDER_CACHE_MAX_BYTES
            ),
            Err(failure) => {
                let error = chain(&failure);
                warn!(package = %wanted, error, "not fetched");
                failures.push(format!("{wanted}: {error}"));
            }
        }
    }
    Ok(failures)
}

async fn fill_one(
    args: &FillArgs,
    store: &ProviderStore,
    registry: &Registry,
    wanted: &WantedPackage,
    scratch: &Path,
) -> Result<Filled, FillError> {
    let host = wanted.host();
    if !args.registries.iter().any(|allowed| allowed == host) {
        return Err(FillError::NotAllowed(host.to_owned()));
    }
    let (address, version, platform) = wanted.coordinates();
    let package = Package::new(address, version, platform).ok_or(FillError::Name)?;
    let archive = scratch.join("archive.zip");
    let filled = fetch_and_publish(args.max_bytes, store, registry, &package, &archive).await;
    match std::fs::remove_file(&archive) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    filled
}

/// `archive` is a path for the archive.
async fn fetch_and_publish(
    max_bytes: u64,
    store: &ProviderStore,
    registry: &Registry,
    package: &Package,
    archive: &Path,
) -> Result<Filled, FillError> {
    if let Some(sha256) = stored(store, package, archive)? {
        return publish(max_bytes, store, package, archive, &sha256, 0);
    }
    let sha256 = registry.fetch_signed(package, archive).await?;
    let size = std::fs::metadata(archive)?.len();
    publish(max_bytes, store, package, archive, &sha256, size)
}

/// Publishes what the store lacks of a package. `new_bytes`: those of its archive, if that is not in the store.
fn publish(
    max_bytes: u64,
    store: &ProviderStore,
    package: &Package,
    archive: &Path,
    sha256: &str,
    new_bytes: u64,
) -> Result<Filled, FillError> {
    std::fs::create_dir_all(store.root())?;
    // What somebody else has unpacked there counts only if it is what the archive has.
    let unpacked = if store.is_on_disk_of_node()? {
        let contents = package::contents(File::open(archive)?)?;
        let is_there = store.has_unpacked(package, sha256, &contents.h1);
        // What cannot be read is damaged.
        (!is_there.unwrap_or(false)).then_some(contents)
    } else {
        None
    };
    if new_bytes == 0 && unpacked.is_none() {
        return Ok(Filled::Present);
    }
    // Before anything is written, so that the volume does not become full.
    let bytes = new_bytes + unpacked.as_ref().map_or(0, |contents| contents.bytes);
    let kept_bytes = match max_bytes.checked_sub(bytes) {
        Some(left) => store.prune(left, None)?.kept_bytes,
        // Nothing has to go for what has no space in any case.
        None => max_bytes,
    };
    if kept_bytes + bytes > max_bytes {
        return Ok(Filled::NoSpace { bytes, kept_bytes });
    }
    if new_bytes > 0 {
        store.publish(package, archive, sha256)?;
    }
    if let Some(contents) = unpacked {
        store.publish_unpacked(package, sha256, &contents.h1, |target| {
            unpack(archive, target)
        })?;
    }
    Ok(Filled::Published)
}

/// Unpacks an archive for runs that link to its files.
fn unpack(archive: &Path, target: &Path) -> io::Result<()> {
    let archive = File::open(archive)?;
    let unpacked = package::unpack(archive, target, &AtomicBool::new(false));
    unpacked.map(drop).map_err(io::Error::other)
}

/// Copies the archive of a package that the store has, and returns its digest. What is there and is not what its name says is removed:
/// runs that only read cannot do that.
fn stored(store: &ProviderStore, package: &Package, copy: &Path) -> io::Result<Option<String>> {
    for sha256 in store.digests(package) {
        if store.copy(package, &sha256, copy)? {
            return Ok(Some(sha256));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use provider_store::{Item, sha256_of};
    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    const CONTENT: usize = 100_000;

    /// An archive with this program.
    fn zip(path: &Path, program: &[u8]) {
        let mut zip = ZipWriter::new(File::create(path).unwrap());
        let name = "terraform-provider-null_v1.0.0";
        zip.start_file(name, SimpleFileOptions::default()).unwrap();
        zip.write_all(program).unwrap();
        zip.finish().unwrap();
    }

    struct Fixture {
        folder: tempfile::TempDir,
        store: ProviderStore,
        package: Package,
        archive: PathBuf,
        sha256: String,
    }

    impl Fixture {
        /// A package whose files are much larger than its archive.
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let archive = folder.path().join("fetched.zip");
            zip(&archive, &vec![0; CONTENT]);
            let address = "registry.example.test/acme/null";
            Self {
                store: ProviderStore::new(folder.path().join("store")),
                package: Package::new(address, "1.0.0", "linux_amd64").unwrap(),
                sha256: sha256_of(&archive).unwrap(),
                archive,
                folder,
            }
        }

        fn size(&self) -> u64 {
            std::fs::metadata(&self.archive).unwrap().len()
        }

        fn publish(&self, max_bytes: u64) -> Filled {
            let (archive, sha256) = (&self.archive, &self.sha256);
            let size = self.size();
            publish(max_bytes, &self.store, &self.package, archive, sha256, size).unwrap()
        }

        /// What a Job does that finds an archive.
        fn again(&self) -> Filled {
            let copy = self.folder.path().join("copy.zip");
            let sha256 = stored(&self.store, &self.package, &copy).unwrap().unwrap();
            let filled = publish(u64::MAX, &self.store, &self.package, &copy, &sha256, 0);
            std::fs::remove_file(copy).unwrap();
            filled.unwrap()
        }

        fn unpacked(&self) -> PathBuf {
            let archive = self.store.path(&self.package, &self.sha256);
            archive.with_extension("")
        }

        fn is_verified(&self) -> bool {
            let entries = self.store.list().unwrap();
            let mut unpacked = entries
                .iter()
                .filter(|entry| matches!(entry.item, Item::Unpacked { .. }));
            let entry = unpacked.next().unwrap();
            self.store.verify(entry, package::h1_of_archive).unwrap()
        }
    }

    #[test]
    fn the_store_does_not_become_larger_than_it_may_be() {
        let it = Fixture::new();
        let both = it.size() + CONTENT as u64;
        let no_space = |kept_bytes| Filled::NoSpace {
            bytes: both,
            kept_bytes,
        };
        assert_eq!(it.publish(both - 1), no_space(both - 1));
        assert_eq!(it.store.list().unwrap(), []);
        // What is young stays, and counts.
        let young = it.folder.path().join("young");
        std::fs::write(&young, "0123456789").unwrap();
        let other = Package::new("registry.example.test/acme/other", "1.0.0", "linux_amd64");
        let (other, sha256) = (other.unwrap(), sha256_of(&young).unwrap());
        it.store.publish(&other, &young, &sha256).unwrap();
        assert_eq!(it.publish(both + 9), no_space(10));
        assert_eq!(it.store.list().unwrap().len(), 1);
        assert_eq!(it.publish(both + 10), Filled::Published);
        // The digest beside the files does not count.
        let bytes: u64 = it
            .store
            .list()
            .unwrap()
            .iter()
            .map(|one| one.size_bytes)
            .sum();
        assert!((both + 10..both + 100).contains(&bytes), "{bytes}");
    }

    #[test]
    fn what_is_missing_or_forged_is_unpacked_again_without_a_registry() {
        let it = Fixture::new();
        assert_eq!(it.publish(u64::MAX), Filled::Published);
        assert_eq!(it.again(), Filled::Present);
        // A Job was killed between archive and files, or the files alone were evicted.
        std::fs::remove_dir_all(it.unpacked()).unwrap();
        assert_eq!(it.again(), Filled::Published);
        assert!(it.is_verified());
        assert_eq!(it.again(), Filled::Present);

        // A run of another mode has forged the files, and the digest beside them.
        let evil = it.folder.path().join("evil.zip");
        zip(&evil, b"evil");
        let h1 = package::h1_of_archive(File::open(&evil).unwrap()).unwrap();
        std::fs::remove_dir_all(it.unpacked()).unwrap();
        let place = |target: &Path| unpack(&evil, target);
        it.store
            .publish_unpacked(&it.package, &it.sha256, &h1, place)
            .unwrap();
        assert!(!it.is_verified());
        assert_eq!(it.again(), Filled::Published);
        assert!(it.is_verified());
    }

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
