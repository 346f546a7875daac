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
mod revision;
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

use git_address::AllowList;
use git_logins::Logins;
use job_contract::JobData;
use runtime::tree_removal;
use secrecy::ExposeSecret as _;
use tracing::info;

pub use self::archive::ArchiveLimits;
pub use self::azure::AzureEnvironment;
use self::credentials::{Credential, VcsAccess};
use self::download::Download;
pub use self::download::{ContentToken, Relay};
use self::git::Git;
pub(crate) use self::git::{ModuleAccess, ModuleStore, OpenModuleAccess};
use self::http::ProxySettings;
pub use self::layout::{Layout, LayoutConfig, Turn};
pub(crate) use self::layout::{remove_file_if_present, write_private_file};
use self::revision::{CheckedOut, Wanted};
use self::source::Source;
use crate::error::StepError;

/// Deployment settings that the workspace needs, and the environment of its processes.
#[derive(Clone, Debug)]
pub struct WorkspaceConfig {
    /// The file of accepted SSH server keys. Without it, every key is accepted, as the contract requires.
    pub known_hosts: Option<PathBuf>,
    /// The addresses that may be fetched; `None` is all of them.
    pub allowed: Option<Arc<AllowList>>,
    /// The operator's logins for git servers.
    pub logins: Option<Arc<Logins>>,
    pub archive_limits: ArchiveLimits,
    pub path: OsString,
    pub home: PathBuf,
    /// Further allow-listed environment of git: proxies, CA bundles.
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
    /// The commit to report: the requested one, else HEAD, else [`NO_COMMIT`](job_contract::job::NO_COMMIT) for a tarball.
    pub commit_id: String,
    /// The commit of the tree, by whatever name it was requested; `NO_COMMIT` for a tarball.
    pub head: String,
    /// The newest commit of the branch, for an apply that takes the commit of its plan. None if the branch is gone.
    pub branch_head: Option<String>,
    /// `GIT_SSH_COMMAND` of `init`, and of nothing else (contract 8.9).
    pub init_ssh_command: Option<String>,
    /// What git may do during `init`.
    pub(crate) modules: ModuleAccess,
    /// Environment of the tool and of scripts from dynamic credentials (contract 8.8).
    pub environment: BTreeMap<String, String>,
}

/// For `map_err`: adds the action and the path.
fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StepError {
    let text = format!("could not {action} `{}`", path.display());
    move |source| {
        let error = StepError::infrastructure(text).because(&source);
        if source.kind() == io::ErrorKind::StorageFull {
            error.with_hint("give the work directory more space")
        } else {
            error
        }
    }
}

/// The folder of the root module cannot be used.
fn bad_folder(text: String) -> StepError {
    StepError::user(text)
        .with_hint("set the folder of the workspace to the one that holds the root module")
}

const NETWORK_HINT: &str = "check the address, and the proxy and network policy of the executor";
const SPACE_HINT: &str = "check the free space of the work directory";
const TOO_LARGE_HINT: &str = "exclude what the run does not need with `.terraformignore`, or raise the limit of the executor";

/// The file with the commit id in the tree, for scripts (contract 8.1).
const COMMIT_FILE: &str = "commitHash.info";
const INIT_KEY_FILE: &str = "ssh/id";

/// Fetches the content of `job` into `layout`, and writes its credentials. `planned` is the commit of the plan that the step
/// applies.
///
/// Dropping the future kills git and its child processes.
pub async fn prepare(
    job: &JobData,
    planned: Option<&str>,
    layout: &Layout,
    config: &WorkspaceConfig,
) -> Result<Workspace, StepError> {
    let access = vcs_access(job);
    let (found, login) = if job.is_remote_content() {
        unpack_content(job, layout, config).await?;
        (CheckedOut::without_commit(), None)
    } else {
        clone_source(job, planned, access, layout, config).await?
    };
    let environment = dynamic::write_credentials(&job.environment_variables, layout.private())
        .map_err(io_error("write credentials to", layout.private()))?;
    let init_ssh_command = init_ssh_command(job, access, layout, config)?;
    let modules = ModuleAccess {
        allowed: config.allowed.clone(),
        is_own_identity: access.is_own_identity(),
        login,
        operators: config.logins.clone(),
        ssh_command: init_ssh_command
            .clone()
            .unwrap_or_else(|| ssh::ssh_command(None, config.known_hosts.as_deref())),
        store: None,
    };
    Ok(Workspace {
        root: layout.checkout().to_path_buf(),
        commit_id: found.commit_id,
        head: found.head,
        branch_head: found.branch_head,
        init_ssh_command,
        modules,
        environment,
    })
}

impl Workspace {
    /// The folder of the root module. It must be a folder within the tree, also after resolving links.
    pub fn working_dir(&self, job: &JobData) -> Result<PathBuf, StepError> {
        let folder = job.folder();
        let path = self.root.join(folder.trim_start_matches('/'));
        let found = fs::canonicalize(&path).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => io_error("open", &path)(error),
            _ => bad_folder(format!(
                "the folder `{folder}` does not exist in the source"
            )),
        })?;
        if !found.starts_with(&self.root) {
            return Err(outside_folder(folder));
        }
        if !found.is_dir() {
            return Err(bad_folder(format!(
                "`{folder}` in the source is not a folder"
            )));
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
) -> Result<(), StepError> {
    let value = |name: &str| environment.get(name).map(String::as_str);
    let access = VcsAccess {
        vcs_type: value("TERRAKUBE_PRIVATE_EXTENSION_REPO_TYPE").unwrap_or("PUBLIC"),
        connection_type: value("TERRAKUBE_PRIVATE_EXTENSION_REPO_TOKEN_TYPE"),
        token: value("TERRAKUBE_PRIVATE_EXTENSION_REPO_TOKEN"),
    };
    let source = allowed_source(repository, config)?;
    refuse_detour(layout.checkout(), target)?;
    remove_entry(target).map_err(io_error("replace", target))?;
    let credential = credential(access, &source, config).await?;
    let git = Git::open(config, layout.private(), &source, &credential).await?;
    git.clone(branch, target).await?;
    git.check_out_head(target).await?;
    Ok(())
}

/// Reads the address of a repository, and refuses what the operator does not allow, before anything asks for its host.
fn allowed_source(text: &str, config: &WorkspaceConfig) -> Result<Source, StepError> {
    let source = Source::parse(text)?;
    if let Some(allowed) = &config.allowed {
        allowed
            .judge(&source.address)
            .map_err(|refusal| StepError::user(refusal.to_string()).with_hint(refusal.hint()))?;
    }
    Ok(source)
}

/// A client that follows no redirects, with the proxies that git gets.
pub(crate) fn http_client(
    environment: &[(OsString, OsString)],
) -> Result<reqwest::Client, StepError> {
    ProxySettings::from_environment(environment).client()
}

async fn credential(
    access: VcsAccess<'_>,
    source: &Source,
    config: &WorkspaceConfig,
) -> Result<Credential, StepError> {
    access.refuse_foreign_server(source, config.allowed.is_some())?;
    let proxies = ProxySettings::from_environment(&config.environment);
    access.credential(&config.azure, &proxies).await
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
    planned: Option<&str>,
    access: VcsAccess<'_>,
    layout: &Layout,
    config: &WorkspaceConfig,
) -> Result<(CheckedOut, Option<git::Login>), StepError> {
    let source = allowed_source(job.source.as_deref().unwrap_or_default(), config)?;
    let credential = credential(access, &source, config).await?;
    let git = Git::open(config, layout.private(), &source, &credential).await?;
    let root = layout.checkout();

    info!("cloning {source} ({})", job.branch);
    let wanted = Wanted {
        source: &source,
        branch: &job.branch,
        named: job.commit(),
        planned,
    };
    let found = wanted.check_out(&git, root).await?;
    if git::has_submodules(root) {
        info!("fetching submodules");
        git.update_submodules(root).await?;
    }
    write_commit_file(&root.join(COMMIT_FILE), &found.commit_id)
        .map_err(io_error("write", &root.join(COMMIT_FILE)))?;
    Ok((found, git::login(&source, &credential)))
}

async fn unpack_content(
    job: &JobData,
    layout: &Layout,
    config: &WorkspaceConfig,
) -> Result<(), StepError> {
    let address = job.source.as_deref().unwrap_or_default();
    let limits = config.archive_limits;
    let download = Download {
        token: config.content_token.as_ref(),
        proxies: &ProxySettings::from_environment(&config.environment),
        max_bytes: limits.max_bytes,
        folder: layout.private(),
    };
    info!("fetching the content");
    let tarball = download.open(address).await?;

    let root = layout.checkout().to_path_buf();
    let stop = StopOnDrop::default();
    let stopped = stop.flag();
    let unpack = move || archive::unpack(tarball, &root, limits, &stopped);
    let unpacked = tokio::task::spawn_blocking(unpack)
        .await
        .map_err(|error| StepError::defect("unpacking ended unexpectedly").because(&error))??;
    let archive::Unpacked { entries, bytes } = unpacked;
    info!("unpacked {entries} entries, {bytes} bytes");
    Ok(())
}

/// Stops the blocking task when its caller is dropped.
#[derive(Default)]
pub(crate) struct StopOnDrop(Arc<AtomicBool>);

impl StopOnDrop {
    /// The flag that the task looks at.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

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
) -> Result<Option<String>, StepError> {
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
fn refuse_detour(root: &Path, target: &Path) -> Result<(), StepError> {
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
        Err(outside_folder(&target.display().to_string()))
    }
}

fn outside_folder(folder: &str) -> StepError {
    bad_folder(format!("the folder `{folder}` is outside the source"))
}
