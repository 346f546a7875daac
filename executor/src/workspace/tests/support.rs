//! Repositories, configurations and searches that the tests share.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use job_contract::JobData;
use tempfile::TempDir;
pub(super) use test_peers::repository::{commit_all, git};

use super::super::git::GitFailure;
use super::super::*;

/// A repository with three commits on `main`. No reference names the second, and a tag names the first. One name is
/// both a branch and a tag.
pub(super) struct Repository {
    folder: TempDir,
    pub(super) first: String,
    pub(super) between: String,
    pub(super) last: String,
}

impl Repository {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("tree");
        fs::create_dir(&tree).unwrap();
        git(&tree, &["init", "-q", "-b", "main"]);
        fs::create_dir(tree.join("modules")).unwrap();
        fs::write(tree.join("modules/m.tf"), "# module").unwrap();
        let first = commit_file(&tree, "main.tf", "# one");
        git(&tree, &["tag", "v1"]);
        git(&tree, &["tag", "both"]);
        let between = commit_file(&tree, "main.tf", "# between");
        let last = commit_file(&tree, "main.tf", "# two");
        git(&tree, &["branch", "both"]);
        let repository = Self {
            folder,
            first,
            between,
            last,
        };
        repository.publish();
        repository
    }

    /// The clone with which tests commit.
    pub(super) fn tree(&self) -> PathBuf {
        self.folder.path().join("tree")
    }

    /// The folder of the bare repository `repo.git`.
    pub(super) fn served(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn bare(&self) -> PathBuf {
        self.folder.path().join("repo.git")
    }

    /// Makes commits visible to clients.
    pub(super) fn publish(&self) {
        let bare = self.bare();
        if bare.exists() {
            fs::remove_dir_all(&bare).unwrap();
        }
        git(
            self.folder.path(),
            &["clone", "-q", "--bare", "tree", "repo.git"],
        );
    }
}

pub(super) fn commit_file(tree: &Path, name: &str, content: &str) -> String {
    fs::write(tree.join(name), content).unwrap();
    commit_all(tree)
}

/// A work dir, a configuration for it, and a record of every command line git ran.
pub(super) struct Fixture {
    pub(super) work: TempDir,
    pub(super) layout: Layout,
    pub(super) config: WorkspaceConfig,
}

impl Fixture {
    pub(super) fn new() -> Self {
        // It fails if another test was first.
        drop(rustls::crypto::ring::default_provider().install_default());
        let work = tempfile::tempdir().unwrap();
        let work_dir = work.path().join("a work dir");
        let layout = Layout::create(LayoutConfig {
            work_dir: &work_dir,
            checkouts: &work_dir.join("workspaces"),
            name: "o_w",
        })
        .unwrap();
        assert_eq!(layout.try_take_turn("").unwrap(), Turn::Taken);
        let home = work.path().join("home");
        fs::create_dir(&home).unwrap();
        let trace = work.path().join("commands");
        let config = WorkspaceConfig {
            known_hosts: None,
            allowed: None,
            logins: None,
            archive_limits: ArchiveLimits::default(),
            path: std::env::var_os("PATH").unwrap_or_default(),
            home,
            environment: vec![(OsString::from("GIT_TRACE2_EVENT"), trace.into())],
            content_token: None,
            azure: AzureEnvironment::default(),
        };
        Self {
            work,
            layout,
            config,
        }
    }

    pub(super) async fn prepare(&self, job: &JobData) -> Result<Workspace, StepError> {
        prepare(job, None, &self.layout, &self.config).await
    }

    /// Prepares the apply of a plan that was made of this commit.
    pub(super) async fn prepare_apply(
        &self,
        job: &JobData,
        planned: &str,
    ) -> Result<Workspace, StepError> {
        prepare(job, Some(planned), &self.layout, &self.config).await
    }

    pub(super) fn set(&mut self, name: &str, value: impl Into<OsString>) {
        self.config.environment.push((name.into(), value.into()));
    }

    /// Every command line of git and of its child processes.
    pub(super) fn commands(&self) -> String {
        fs::read_to_string(self.work.path().join("commands")).unwrap()
    }

    /// The files below the checkout that hold `secret`.
    pub(super) fn leaks(&self, secret: &str) -> Vec<PathBuf> {
        files_holding(self.layout.checkout(), secret)
    }

    pub(super) fn main_tf(&self) -> String {
        fs::read_to_string(self.layout.checkout().join("main.tf")).unwrap()
    }

    pub(super) fn commit_count(&self) -> String {
        git(self.layout.checkout(), &["rev-list", "--count", "HEAD"])
    }
}

pub(super) fn files_holding(folder: &Path, text: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(files_holding(&entry.path(), text));
        } else if kind.is_file() {
            let content = fs::read(entry.path()).unwrap();
            if content.windows(text.len()).any(|w| w == text.as_bytes()) {
                found.push(entry.path());
            }
        }
    }
    found
}

pub(super) fn job(source: &str, branch: &str) -> JobData {
    JobData {
        source: Some(source.to_owned()),
        branch: branch.to_owned(),
        vcs_type: Some("PUBLIC".to_owned()),
        ..JobData::default()
    }
}

pub(super) fn github(source: &str, token: &str) -> JobData {
    JobData {
        vcs_type: Some("GITHUB".to_owned()),
        access_token: Some(token.to_owned()),
        ..job(source, "main")
    }
}

/// Checks the summary of the failure in the error.
pub(super) fn assert_failure(error: &StepError, failure: GitFailure) {
    let summary = format!("`: {}: ", failure.summary());
    assert!(error.to_string().contains(&summary), "{error}");
}
