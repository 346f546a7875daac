//! The version of a binary on PATH, which the binary itself reports. The answer is cached.
//!
//! Starting the tool takes tens of milliseconds, much of a small run. So the cache directory keeps the answer while the
//! file stays the same.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write as _},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use runtime::{reaper, regular_file};
use semver::Version;
use serde::{Deserialize, Serialize};
use tokio::process::Command;

const TIME_LIMIT: Duration = Duration::from_secs(10);
const CACHE_FILE: &str = "probe.json";
const MAX_CACHE_BYTES: u64 = 1 << 20;

/// The minimum size of a binary whose answer is cached. Version managers put a small script or proxy on PATH, whose
/// version depends on the working directory and the environment. The real tools are far larger.
const MIN_TOOL_BYTES: u64 = 16 << 20;

/// Why a binary did not report its version.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    #[error("could not start it")]
    Start(#[source] io::Error),
    #[error("it did not answer within {} seconds", TIME_LIMIT.as_secs())]
    TimedOut,
    #[error("it ended with {0}")]
    Failed(std::process::ExitStatus),
    #[error("its answer to `version -json` is not understood")]
    Answer(#[source] serde_json::Error),
}

/// The identity of one version of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    size: u64,
    modified_ns: i128,
    inode: u64,
    device: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct CachedVersion {
    identity: Identity,
    version: Version,
}

type VersionCache = BTreeMap<PathBuf, CachedVersion>;

/// The version of `binary`, from the cache or from the binary.
pub(crate) async fn version(binary: &Path, cache_dir: &Path) -> Result<Version, ProbeError> {
    let file = fs::canonicalize(binary).map_err(ProbeError::Start)?;
    let metadata = fs::metadata(&file).map_err(ProbeError::Start)?;
    let identity = Identity {
        size: metadata.size(),
        modified_ns: i128::from(metadata.mtime()) * 1_000_000_000
            + i128::from(metadata.mtime_nsec()),
        inode: metadata.ino(),
        device: metadata.dev(),
    };
    let cache_file = cache_dir.join(CACHE_FILE);
    let mut cache = read(&cache_file);
    if let Some(found) = cache.get(&file)
        && found.identity == identity
    {
        return Ok(found.version.clone());
    }
    let version = query_version(binary).await?;
    if identity.size >= MIN_TOOL_BYTES {
        cache.insert(
            file,
            CachedVersion {
                identity,
                version: version.clone(),
            },
        );
        if let Err(error) = write(&cache_file, &cache) {
            tracing::debug!(%error, "could not remember the version of the tool on PATH");
        }
    }
    Ok(version)
}

#[derive(Deserialize)]
struct Answer {
    // OpenTofu uses the same name.
    terraform_version: Version,
}

async fn query_version(binary: &Path) -> Result<Version, ProbeError> {
    let mut command = Command::new(binary);
    command
        .args(["version", "-json"])
        .env_clear()
        // The command only prints the version. So it needs no network call and no user's configuration file.
        .env("CHECKPOINT_DISABLE", "1")
        .env("TF_CLI_CONFIG_FILE", "/dev/null")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let child = reaper::spawn(&mut command).map_err(ProbeError::Start)?;
    let output = tokio::time::timeout(TIME_LIMIT, child.wait_with_output())
        .await
        .map_err(|_| ProbeError::TimedOut)?
        .map_err(ProbeError::Start)?;
    if !output.status.success() {
        return Err(ProbeError::Failed(output.status));
    }
    let answer: Answer = serde_json::from_slice(&output.stdout).map_err(ProbeError::Answer)?;
    Ok(answer.terraform_version)
}

/// Any error counts as an empty cache, because the version can be asked for again.
fn read(path: &Path) -> VersionCache {
    regular_file::read(path, MAX_CACHE_BYTES)
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default()
}

/// Replaces the cache file atomically. If two processes write at once, one answer is lost, and asked for again.
fn write(path: &Path, cache: &VersionCache) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let mut file = tempfile::Builder::new()
        .prefix(".probe-")
        .tempfile_in(directory)?;
    file.write_all(&serde_json::to_vec(cache)?)?;
    file.persist(path)?;
    Ok(())
}
