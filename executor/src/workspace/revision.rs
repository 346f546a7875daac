//! The commit of a repository that a step takes: the one of its plan, else the one that its document names, else the newest of its
//! branch.
//!
//! What an apply runs is what was reviewed. If its document names another commit than its plan, the apply is refused.

use std::path::Path;

use job_contract::Exit;
use job_contract::job::NO_COMMIT;
use tracing::info;

use super::git::Git;
use super::source::Source;
use crate::error::{PLAN_AGAIN, StepError};

/// What a step asks for.
#[derive(Debug)]
pub(super) struct Wanted<'w> {
    pub(super) source: &'w Source,
    /// A branch or tag. Empty means the server's own branch.
    pub(super) branch: &'w str,
    /// The commit, or the name, in the document.
    pub(super) named: Option<&'w str>,
    /// The commit of the plan that the step applies.
    pub(super) planned: Option<&'w str>,
}

/// What was checked out.
#[derive(Debug)]
pub(super) struct CheckedOut {
    /// The commit to report: the one that the document names, else that of the tree.
    pub(super) commit_id: String,
    /// The commit of the tree.
    pub(super) head: String,
    /// The newest commit of the branch, if the step applies a plan. None if the branch is gone.
    pub(super) branch_head: Option<String>,
}

impl CheckedOut {
    /// A tree that comes from no repository.
    pub(super) fn without_commit() -> Self {
        Self {
            commit_id: NO_COMMIT.to_owned(),
            head: NO_COMMIT.to_owned(),
            branch_head: None,
        }
    }
}

impl Wanted<'_> {
    /// Clones the branch into `root`, and checks the commit out.
    pub(super) async fn check_out(
        &self,
        git: &Git<'_>,
        root: &Path,
    ) -> Result<CheckedOut, StepError> {
        let branch_head = self.clone_branch(git, root).await?;
        // On the branch itself, as in the plan step, if the branch has not moved.
        let planned = || {
            self.planned
                .filter(|planned| branch_head.as_deref() != Some(*planned))
        };
        match self.named.or_else(planned) {
            None => git.check_out_head(root).await?,
            Some(commit) => {
                info!("checking out commit {commit}");
                if !git.check_out_commit(root, commit).await? {
                    return Err(self.not_found(commit));
                }
            }
        }
        let head = git.head(root).await?;
        self.refuse_other(&head)?;
        Ok(CheckedOut {
            commit_id: self.named.unwrap_or(&head).to_owned(),
            head,
            branch_head,
        })
    }

    /// Clones the branch. Returns its newest commit, if the step applies a plan. The commit of a plan may still be there without
    /// its branch.
    async fn clone_branch(&self, git: &Git<'_>, root: &Path) -> Result<Option<String>, StepError> {
        if self.planned.is_none() {
            git.clone(self.branch, root).await?;
            return Ok(None);
        }
        if git.clone_if_there(self.branch, root).await? {
            return git.head(root).await.map(Some);
        }
        git.clone("", root).await?;
        Ok(None)
    }

    /// Refuses a tree that is not the one of the plan. Records of earlier versions have the text of the document instead of a
    /// commit.
    fn refuse_other(&self, head: &str) -> Result<(), StepError> {
        let Some(planned) = self.planned else {
            return Ok(());
        };
        if planned == head || self.named == Some(planned) {
            return Ok(());
        }
        let named = self.named.unwrap_or(head);
        let text = format!(
            "the job data name the commit `{named}`, but the reviewed plan was made of the commit `{planned}`"
        );
        Err(StepError::new(Exit::StepFailed, text).with_hint(PLAN_AGAIN))
    }

    fn not_found(&self, commit: &str) -> StepError {
        let (repository, branch) = (self.source, self.branch);
        if self.planned.is_none() {
            return StepError::user(format!("the commit `{commit}` was not found in `{repository}`"))
                .with_hint("it may have been removed by a forced push; start a new run to use the newest commit");
        }
        let text = format!(
            "the commit `{commit}` of the reviewed plan was not found in `{repository}`, and the branch `{branch}` does not contain it"
        );
        let hint = format!("it may have been removed by a forced push; {PLAN_AGAIN}");
        StepError::new(Exit::StepFailed, text).with_hint(hint)
    }
}
