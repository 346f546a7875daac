//! Prepares the work tree of a run (contract 8): a git checkout or an unpacked tarball, its credentials, and the folder
//! of the root module. This module knows nothing of tools, phases or the platform.
//!
//! It writes secrets below [`Layout::private`] only, never into the tree.

pub mod archive;
pub mod azure;
pub mod credentials;
pub mod download;
mod dynamic;
pub mod git;
mod http;
pub mod layout;
pub mod source;
mod ssh;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use job_contract::JobData;
use job_contract::job::NO_COMMIT;
use runtime::tree_removal;
use secrecy::ExposeSecret as _;

pub use self::archive::{ArchiveError, ArchiveLimits};
pub use self::azure::AzureEnvironment;
pub use self::credentials::CredentialError;
use self::credentials::VcsAccess;
use self::download::Download;
pub use self::download::{ContentToken, DownloadError, Relay};
use self::git::Git;
pub use self::git::GitError;
use self::http::ProxySettings;
use self::layout::remove_file_if_present;
pub(crate) use self::layout::write_private_file;
pub use self::layout::{Layout, LayoutConfig};
use self::source::Source;
pub use self::source::SourceError;

/// Deployment settings that the workspace needs, and the environment of its processes.
#[derive(Clone, Debug)]
pub struct WorkspaceConfig {
    /// The file of accepted SSH server keys. Without it, every key is accepted, as the contract requires.
    pub known_hosts: Option<PathBuf>,
    /// Limits on tarballs.
    pub archive_limits: ArchiveLimits,
    /// `PATH` of git.
    pub path: OsString,
    /// `HOME` of git.
    pub home: PathBuf,
    /// Further allow-listed environment of git: proxies, CA bundles. Downloads use its proxies too.
    pub environment: Vec<(OsString, OsString)>,
    /// The platform's token, and the host that may receive it with tarball downloads.
    pub content_token: Option<ContentToken>,
    /// The executor's own Azure identity, for `AZURE_SP_MI` connections.
    pub azure: AzureEnvironment,
}

/// A prepared tree.
#[derive(Clone, Debug)]
pub struct Workspace {
    /// The clone root, in canonical form.
    pub root: PathBuf,
    /// The commit to report: the requested one, else HEAD, else [`NO_COMMIT`] for a tarball.
    pub commit_id: String,
    /// `GIT_SSH_COMMAND` of `init`, and of nothing else (contract 8.9).
    pub init_ssh_command: Option<String>,
    /// Environment of the tool and of scripts from dynamic credentials (contract 8.8).
    pub environment: BTreeMap<String, String>,
}

use crate::error::{ErrorKind, StepError};

/// Why there is no workspace.
#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    /// The address in the job data is unusable.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// There is no credential for the VCS.
    #[error(transparent)]
    Credential(#[from] CredentialError),
    /// Git failed.
    #[error(transparent)]
    Git(#[from] GitError),
    /// The tarball could not be fetched.
    #[error(transparent)]
    Download(#[from] DownloadError),
    /// The tarball could not be unpacked.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// The folder of the root module does not exist.
    #[error("the folder `{folder}` does not exist in the source")]
    NoFolder { folder: String },
    /// The folder of the root module is a file.
    #[error("`{folder}` in the source is not a folder")]
    NotAFolder { folder: String },
    /// The folder of the root module is outside the tree.
    #[error("the folder `{folder}` is outside the source")]
    OutsideFolder { folder: String },
    /// A file system operation of this module failed.
    #[error("could not {action} `{}`", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The unpacking task ended without a result.
    #[error("unpacking ended unexpectedly")]
    Unpacking(#[source] tokio::task::JoinError),
}

impl WorkspaceError {
    /// The kind of the error, which decides about retries.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Credential(error) => error.kind(),
            Self::Git(error) => error.kind(),
            Self::Download(error) => error.kind(),
            Self::Archive(error) => error.kind(),
            Self::Source(_)
            | Self::NoFolder { .. }
            | Self::NotAFolder { .. }
            | Self::OutsideFolder { .. } => ErrorKind::User,
            Self::Io { .. } => ErrorKind::Infrastructure,
            Self::Unpacking(_) => ErrorKind::Defect,
        }
    }

    /// The hint for users, if there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Source(error) => Some(error.hint().to_owned()),
            Self::Credential(error) => error.hint(),
            Self::Git(error) => error.hint(),
            Self::Download(error) => error.hint(),
            Self::Archive(error) => error.hint(),
            Self::NoFolder { .. } | Self::NotAFolder { .. } | Self::OutsideFolder { .. } => Some(
                "set the folder of the workspace to the one that holds the root module".to_owned(),
            ),
            Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Some("give the work directory more space".to_owned())
            }
            Self::Io { .. } | Self::Unpacking(_) => None,
        }
    }
}

impl From<WorkspaceError> for StepError {
    fn from(error: WorkspaceError) -> Self {
        let hint = error.hint();
        Self::new(error.kind().exit(), error).with_hint(hint)
    }
}

/// For `map_err`: adds the action and the path.
fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WorkspaceError {
    let path = path.to_path_buf();
    move |source| WorkspaceError::Io {
        action,
        path,
        source,
    }
}

/// The file with the commit id in the tree, for scripts (contract 8.1).
const COMMIT_FILE: &str = "commitHash.info";
const INIT_KEY_FILE: &str = "ssh/id";

/// Fetches the content of `job` into `layout`, and writes its credentials. `notify` gets progress messages of one line.
///
/// Dropping the future kills git and its child processes.
pub async fn prepare(
    job: &JobData,
    layout: &Layout,
    config: &WorkspaceConfig,
    notify: &(dyn Fn(&str) + Send + Sync),
) -> Result<Workspace, WorkspaceError> {
    let access = vcs_access(job);
    let commit_id = if job.is_remote_content() {
        unpack_content(job, layout, config, notify).await?;
        NO_COMMIT.to_owned()
    } else {
        clone_source(job, access, layout, config, notify).await?
    };
    let environment = dynamic::write_credentials(&job.environment_variables, layout.private())
        .map_err(io_error("write credentials to", layout.private()))?;
    Ok(Workspace {
        root: layout.checkout().to_path_buf(),
        commit_id,
        init_ssh_command: init_ssh_command(job, access, layout, config)?,
        environment,
    })
}

impl Workspace {
    /// The folder of the root module. It must be a folder within the tree, also after resolving links.
    pub fn working_dir(&self, job: &JobData) -> Result<PathBuf, WorkspaceError> {
        let folder = job.folder();
        let named = || folder.to_owned();
        let path = self.root.join(folder.trim_start_matches('/'));
        let found = fs::canonicalize(&path).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => io_error("open", &path)(error),
            _ => WorkspaceError::NoFolder { folder: named() },
        })?;
        if !found.starts_with(&self.root) {
            return Err(WorkspaceError::OutsideFolder { folder: named() });
        }
        if !found.is_dir() {
            return Err(WorkspaceError::NotAFolder { folder: named() });
        }
        Ok(found)
    }
}

/// Clones the tools repository of scripts into `target` (contract 4.4). It replaces an earlier clone. The run's
/// environment variables contain its credentials.
pub async fn clone_tools_repository(
    repository: &str,
    branch: &str,
    target: &Path,
    environment: &BTreeMap<String, String>,
    layout: &Layout,
    config: &WorkspaceConfig,
) -> Result<(), WorkspaceError> {
    let value = |name: &str| environment.get(name).map(String::as_str);
    let access = VcsAccess {
        vcs_type: value("TERRAKUBE_PRIVATE_EXTENSION_REPO_TYPE").unwrap_or("PUBLIC"),
        connection_type: value("TERRAKUBE_PRIVATE_EXTENSION_REPO_TOKEN_TYPE"),
        token: value("TERRAKUBE_PRIVATE_EXTENSION_REPO_TOKEN"),
    };
    let source = Source::parse(repository)?;
    refuse_detour(layout.checkout(), target)?;
    remove_entry(target).map_err(io_error("replace", target))?;
    let proxies = ProxySettings::from_environment(&config.environment);
    let credential = access.credential(&config.azure, &proxies).await?;
    let git = Git::open(config, layout.private(), &source, &credential)?;
    git.clone(branch, target).await?;
    git.check_out_head(target).await?;
    Ok(())
}

fn vcs_access(job: &JobData) -> VcsAccess<'_> {
    VcsAccess {
        vcs_type: job.vcs_type.as_deref().unwrap_or_default(),
        connection_type: job.connection_type.as_deref(),
        token: job.access_token.as_deref(),
    }
}

async fn clone_source(
    job: &JobData,
    access: VcsAccess<'_>,
    layout: &Layout,
    config: &WorkspaceConfig,
    notify: &(dyn Fn(&str) + Send + Sync),
) -> Result<String, WorkspaceError> {
    let source = Source::parse(job.source.as_deref().unwrap_or_default())?;
    let proxies = ProxySettings::from_environment(&config.environment);
    let credential = access.credential(&config.azure, &proxies).await?;
    let git = Git::open(config, layout.private(), &source, &credential)?;
    let root = layout.checkout();

    notify(&format!("cloning {source} ({})", job.branch));
    git.clone(&job.branch, root).await?;
    let commit_id = match job.commit() {
        Some(commit) => {
            notify(&format!("checking out commit {commit}"));
            git.check_out_commit(root, commit).await?;
            commit.to_owned()
        }
        None => git.check_out_head(root).await?,
    };
    if git::has_submodules(root) {
        notify("fetching submodules");
        git.update_submodules(root).await?;
    }
    write_commit_file(&root.join(COMMIT_FILE), &commit_id)
        .map_err(io_error("write", &root.join(COMMIT_FILE)))?;
    Ok(commit_id)
}

async fn unpack_content(
    job: &JobData,
    layout: &Layout,
    config: &WorkspaceConfig,
    notify: &(dyn Fn(&str) + Send + Sync),
) -> Result<(), WorkspaceError> {
    let address = job.source.as_deref().unwrap_or_default();
    let proxies = ProxySettings::from_environment(&config.environment);
    let limits = config.archive_limits;
    let download = Download {
        token: config.content_token.as_ref(),
        proxies: &proxies,
        max_bytes: limits.max_bytes,
        folder: layout.private(),
    };
    notify("fetching the content");
    let tarball = download.open(address).await?;

    let root = layout.checkout().to_path_buf();
    let stop = StopOnDrop::default();
    let stopped = Arc::clone(&stop.0);
    let unpack = move || archive::unpack(tarball, &root, limits, &stopped);
    let unpacked = tokio::task::spawn_blocking(unpack)
        .await
        .map_err(WorkspaceError::Unpacking)??;
    notify(&format!(
        "unpacked {} entries, {} bytes",
        unpacked.entries, unpacked.bytes
    ));
    Ok(())
}

/// Stops the blocking task when its caller is dropped.
#[derive(Default)]
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn init_ssh_command(
    job: &JobData,
    access: VcsAccess<'_>,
    layout: &Layout,
    config: &WorkspaceConfig,
) -> Result<Option<String>, WorkspaceError> {
    let Some(key) = ssh::module_key(job, access) else {
        return Ok(None);
    };
    let file = layout.private().join(INIT_KEY_FILE);
    let content = ssh::key_file_content(&key);
    write_private_file(&file, content.expose_secret().as_bytes())
        .map_err(io_error("write the SSH key to", &file))?;
    let known_hosts = config.known_hosts.as_deref();
    Ok(Some(ssh::ssh_command(Some(&file), known_hosts)))
}

/// Writes a new file, never through a link of this name in the repository.
fn write_commit_file(path: &Path, commit_id: &str) -> io::Result<()> {
    remove_entry(path)?;
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .and_then(|mut file| io::Write::write_all(&mut file, commit_id.as_bytes()))
}

/// Removes a file, link or tree of this name.
fn remove_entry(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => tree_removal::remove(path),
        _ => remove_file_if_present(path),
    }
}

/// Refuses a target below the tree if links in its path lead out of the tree.
fn refuse_detour(root: &Path, target: &Path) -> Result<(), WorkspaceError> {
    if !target.starts_with(root) {
        return Ok(());
    }
    let existing = target
        .ancestors()
        .skip(1)
        .find_map(|folder| fs::canonicalize(folder).ok());
    if existing.is_some_and(|folder| folder.starts_with(root)) {
        Ok(())
    } else {
        Err(WorkspaceError::OutsideFolder {
            folder: target.display().to_string(),
        })
    }
}
