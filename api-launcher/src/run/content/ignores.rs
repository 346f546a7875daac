//! What is never worth sending, and what `.terraformignore` leaves out. `.gitignore` has no say: variable files
//! are often kept out of git and still needed.

use std::path::Path;

use ignore::gitignore::{Gitignore, GitignoreBuilder};
use job_contract::Exit;
use runtime::regular_file;

use crate::failure::Failure;

const FILE: &str = ".terraformignore";
const MAX_BYTES: u64 = 1 << 20;

/// Rules of the folders that may carry an ignore file, the widest first.
#[derive(Debug, Default)]
pub(super) struct Ignores {
    rules: Vec<Gitignore>,
}

impl Ignores {
    /// Adds the rules of `folder`, if it has any.
    pub(super) fn add(&mut self, folder: &Path) -> Result<(), Failure> {
        let path = folder.join(FILE);
        if !path.is_file() || self.rules.iter().any(|rules| rules.path() == folder) {
            return Ok(());
        }
        let fail = |error: ignore::Error| {
            let text = format!("`{}` cannot be used as ignore rules", path.display());
            Failure::new(Exit::BadJobData, text).because(error)
        };
        let text = regular_file::read_text(&path, MAX_BYTES).map_err(Failure::unreadable(&path))?;
        let mut builder = GitignoreBuilder::new(folder);
        for line in text.trim_start_matches('\u{feff}').lines() {
            builder.add_line(Some(path.clone()), line).map_err(fail)?;
        }
        self.rules.push(builder.build().map_err(fail)?);
        Ok(())
    }

    /// Whether `path` stays behind.
    pub(super) fn leave_out(&self, path: &Path, is_folder: bool) -> bool {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(is_leftover)
            || self.rules.iter().any(|rules| {
                path.starts_with(rules.path()) && rules.matched(path, is_folder).is_ignore()
            })
    }
}

/// `crash.log`, `crash.<time>.log`.
fn is_crash_log(name: &str) -> bool {
    name.strip_prefix("crash.").is_some_and(|rest| {
        rest == "log" || Path::new(rest).extension().is_some_and(|end| end == "log")
    })
}

/// Caches, local state and crash logs: large or secret, and never read by a run that keeps its own state.
fn is_leftover(name: &str) -> bool {
    name == ".git"
        || name == ".terraform"
        || name.starts_with("terraform.tfstate")
        || name == ".terraform.tfstate.lock.info"
        || is_crash_log(name)
}
