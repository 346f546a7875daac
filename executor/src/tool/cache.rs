//! The tool cache on disk, shared by any number of executors.
//!
//! A binary appears by one rename under a per-version lock, so a visible binary is complete. If all wanted tools are
//! present, nothing is written, so a read-only cache works. Layout (contract 9.3): `terraform/<version>/terraform` and
//! `tofu/v<version>/tofu`.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read as _, Write as _},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use job_contract::Exit;
use job_contract::job::Tool;
use runtime::setting::is_wrong_place;
use semver::Version;
use tempfile::NamedTempFile;

use super::verify;
use crate::error::StepError;

const LOCK: &str = ".lock";
/// The prefix of unfinished files. The next install of the same version removes them.
const UNFINISHED: &str = ".unfinished-";
const MAX_BINARY_MIB: u64 = 512;
/// How often the executor tries to take a lock that another has. A wait in the kernel could not be cancelled.
const LOCK_POLL: Duration = Duration::from_millis(100);

/// The folder of one version in the cache.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    directory: PathBuf,
    binary: &'static str,
}

impl Slot {
    pub(crate) fn new(cache: &Path, tool: Tool, version: &Version) -> Self {
        let name = Self::folder_name(tool, version);
        Self {
            directory: cache.join(tool.binary()).join(name),
            binary: tool.binary(),
        }
    }

    pub(super) fn folder_name(tool: Tool, version: &Version) -> String {
        match tool {
            Tool::Terraform => version.to_string(),
            Tool::OpenTofu => format!("v{version}"),
        }
    }

    /// The version in the name of a folder.
    pub(super) fn version(tool: Tool, folder_name: &str) -> Option<Version> {
        let version = match tool {
            Tool::Terraform => folder_name,
            Tool::OpenTofu => folder_name.strip_prefix('v')?,
        };
        Version::parse(version).ok()
    }

    /// The binary, if it is installed.
    pub(crate) fn installed(&self) -> Option<PathBuf> {
        let path = self.directory.join(self.binary);
        let metadata = fs::metadata(&path).ok()?;
        let usable =
            metadata.is_file() && metadata.len() > 0 && metadata.permissions().mode() & 0o111 != 0;
        usable.then_some(path)
    }

    /// Waits until no other executor installs this version. If one does, `waiting` is called once.
    pub(crate) async fn lock(&self, waiting: impl FnOnce()) -> Result<Lock, StepError> {
        fs::create_dir_all(&self.directory)
            .map_err(|error| cache_error(&self.directory, &error))?;
        let path = self.directory.join(LOCK);
        let file = File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|error| cache_error(&path, &error))?;
        let mut waiting = Some(waiting);
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Lock { _file: file }),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(source)) => {
                    let text = format!("could not lock `{}`", path.display());
                    let hint = "the file system must support file locks; set a cache directory on another one";
                    return Err(unusable(text, &source).with_hint(hint));
                }
            }
            if let Some(waiting) = waiting.take() {
                waiting();
            }
            tokio::time::sleep(LOCK_POLL).await;
        }
    }

    /// Removes files of unfinished installs. The caller holds the lock, so no install is in progress.
    pub(crate) fn sweep(&self, _lock: &Lock) {
        let Ok(entries) = fs::read_dir(&self.directory) else {
            return;
        };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                // A file that cannot be removed only costs space.
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// A temporary file on the same file system.
    pub(crate) fn unfinished(&self) -> Result<NamedTempFile, StepError> {
        fs::create_dir_all(&self.directory)
            .and_then(|()| {
                tempfile::Builder::new()
                    .prefix(UNFINISHED)
                    .tempfile_in(&self.directory)
            })
            .map_err(|error| cache_error(&self.directory, &error))
    }

    /// Notes the digest of the binary that was just installed, for people who check the cache later. Blocks.
    pub(super) fn note_digest(&self, _lock: &Lock) -> io::Result<()> {
        let binary = File::open(self.directory.join(self.binary))?;
        let digest = verify::file_digest(&binary)?;
        let mut note = tempfile::Builder::new()
            .prefix(UNFINISHED)
            .tempfile_in(&self.directory)?;
        writeln!(note, "{digest}  {}", self.binary)?;
        note.as_file()
            .set_permissions(fs::Permissions::from_mode(0o644))?;
        note.persist(self.directory.join(noted_digest_name(self.binary)))?;
        Ok(())
    }

    /// Unpacks the tool's binary from a verified archive, and makes it visible. Blocks.
    pub(crate) fn install(&self, archive: &File, shown_url: &str) -> Result<PathBuf, StepError> {
        let broken = |problem: String| {
            let hint = "the file has the published checksum, so the release itself is broken; choose another version";
            StepError::infrastructure(format!("could not unpack `{shown_url}`: {problem}"))
                .with_hint(hint)
        };
        let unreadable = |error| broken(format!("not a readable zip archive: {error}"));
        let mut zip = zip::ZipArchive::new(archive).map_err(unreadable)?;
        // Only the entry with exactly this name is read, and names never become paths.
        let mut entry = match zip.by_name(self.binary) {
            Ok(entry) if entry.is_file() => entry,
            Ok(_) | Err(zip::result::ZipError::FileNotFound) => {
                return Err(broken(format!("it has no file `{}`", self.binary)));
            }
            Err(error) => return Err(unreadable(error)),
        };
        let mut unfinished = self.unfinished()?;
        match copy(&mut entry, unfinished.as_file_mut()) {
            Ok(()) => {}
            Err(CopyError::Write(error)) => return Err(cache_error(unfinished.path(), &error)),
            Err(CopyError::Read(problem)) => return Err(broken(problem)),
        }
        let path = self.directory.join(self.binary);
        publish(unfinished, &path).map_err(|error| cache_error(&path, &error))?;
        Ok(path)
    }
}

/// The file beside a program that has its digest, as `sha256sum --check` reads it.
pub(super) fn noted_digest_name(binary: &str) -> String {
    format!("{binary}.sha256")
}

/// Puts the binary of a local archive into the cache. The caller verifies checksum and signature first, because this
/// function does not. Hostile archives are fuzz inputs. Blocks.
pub fn install_archive(
    cache: &Path,
    tool: Tool,
    version: &Version,
    archive: &File,
) -> Result<PathBuf, StepError> {
    let slot = Slot::new(cache, tool, version);
    fs::create_dir_all(&slot.directory).map_err(|error| cache_error(&slot.directory, &error))?;
    slot.install(archive, "a local archive")
}

/// The lock of an install. Dropping it releases it, and so does the kernel if the process dies.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// The versions of `tool` in the cache.
pub(crate) fn versions(cache: &Path, tool: Tool) -> Vec<Version> {
    let Ok(entries) = fs::read_dir(cache.join(tool.binary())) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let version = Slot::version(tool, name.to_str()?)?;
            Slot::new(cache, tool, &version).installed()?;
            Some(version)
        })
        .collect()
}

enum CopyError {
    Read(String),
    Write(io::Error),
}

/// Like `io::copy`, but it reports which side failed, and its limit does not depend on headers.
fn copy(from: &mut impl io::Read, to: &mut impl io::Write) -> Result<(), CopyError> {
    let limit = MAX_BINARY_MIB << 20;
    let mut from = from.take(limit + 1);
    let mut total = 0;
    let mut buffer = vec![0; 256 << 10];
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                let problem = format!("its binary cannot be read: {error}");
                return Err(CopyError::Read(problem));
            }
        };
        total += read as u64;
        if total > limit {
            let problem = format!("its binary is larger than {MAX_BINARY_MIB} MiB");
            return Err(CopyError::Read(problem));
        }
        to.write_all(&buffer[..read]).map_err(CopyError::Write)?;
    }
}

/// Makes the file complete and executable before it becomes visible. A crash-safe rename needs both syncs.
fn publish(file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.as_file()
        .set_permissions(fs::Permissions::from_mode(0o755))?;
    file.as_file().sync_all()?;
    // It is closed before the rename, because a file that is open for writing cannot be executed.
    file.into_temp_path().persist(path)?;
    if let Some(directory) = path.parent() {
        File::open(directory)?.sync_all()?;
    }
    Ok(())
}

/// Classifies an I/O error in the cache by its remedy.
pub(super) fn cache_error(path: &Path, source: &io::Error) -> StepError {
    let path = path.display();
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            unusable(format!("the tool cache is full, writing `{path}`"), source)
                .with_hint("free space on its volume, or set another cache directory")
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => unusable(
            format!("the tool cache is not writable at `{path}`"),
            source,
        )
        .with_hint("make it writable, or put the wanted version there beforehand"),
        _ => unusable(format!("could not use the tool cache at `{path}`"), source)
            .with_hint("check the directory and its file system"),
    }
}

fn unusable(text: String, source: &io::Error) -> StepError {
    let exit = if is_wrong_place(source) {
        Exit::BadConfiguration
    } else {
        Exit::Infrastructure
    };
    StepError::new(exit, text).because(source)
}
