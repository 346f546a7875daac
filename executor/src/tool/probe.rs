//! The version of a binary found on PATH, asked of the binary itself and remembered.
//!
//! Starting the tool takes tens of milliseconds, a good part of a small run, so the answer is kept in the
//! cache directory for as long as the file stays the same.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write as _},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use runtime::regular_file;
use semver::Version;
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::reaper;

const TIME_LIMIT: Duration = Duration::from_secs(10);
const MEMORY: &str = "probe.json";
const MAX_MEMORY_BYTES: u64 = 1 << 20;

/// Version managers put a small script or proxy on PATH, which picks a version by working directory and
/// environment; what it said once says nothing about the next time. The tools are far larger.
const SMALLEST_TOOL: u64 = 16 << 20;

/// Why a binary did not tell its version.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    #[error("could not start it")]
    Start(#[source] io::Error),
    #[error("it did not answer within {} seconds", TIME_LIMIT.as_secs())]
    Silent,
    #[error("it ended with {0}")]
    Failed(std::process::ExitStatus),
    #[error("its answer to `version -json` is not understood")]
    Answer(#[source] serde_json::Error),
}

/// What identifies one state of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    size: u64,
    modified_ns: i128,
    inode: u64,
    device: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    identity: Identity,
    version: Version,
}

type Memory = BTreeMap<PathBuf, Remembered>;

/// The version of `binary`, from memory or by asking.
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
    let memory = cache_dir.join(MEMORY);
    let mut known = read(&memory);
    if let Some(found) = known.get(&file)
        && found.identity == identity
    {
        return Ok(found.version.clone());
    }
    let version = ask(binary).await?;
    if identity.size >= SMALLEST_TOOL {
        known.insert(
            file,
            Remembered {
                identity,
                version: version.clone(),
            },
        );
        if let Err(error) = write(&memory, &known) {
            tracing::debug!(%error, "could not remember the version of the tool on PATH");
        }
    }
    Ok(version)
}

#[derive(Deserialize)]
struct Answer {
    // OpenTofu kept the name.
    terraform_version: Version,
}

async fn ask(binary: &Path) -> Result<Version, ProbeError> {
    let mut command = Command::new(binary);
    command
        .args(["version", "-json"])
        .env_clear()
        // No call home, and no configuration file of the user's: only the version is asked for.
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
        .map_err(|_| ProbeError::Silent)?
        .map_err(ProbeError::Start)?;
    if !output.status.success() {
        return Err(ProbeError::Failed(output.status));
    }
    let answer: Answer = serde_json::from_slice(&output.stdout).map_err(ProbeError::Answer)?;
    Ok(answer.terraform_version)
}

/// Whatever is wrong with the memory, it is only a memory.
fn read(path: &Path) -> Memory {
    regular_file::read(path, MAX_MEMORY_BYTES)
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default()
}

/// Replaces the memory in one step. Two processes writing at once lose one answer, which is asked for again.
fn write(path: &Path, known: &Memory) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let mut file = tempfile::Builder::new()
        .prefix(".probe-")
        .tempfile_in(directory)?;
    file.write_all(&serde_json::to_vec(known)?)?;
    file.persist(path)?;
    Ok(())
}
