//! Objects of repositories of modules that runs share: `modules/v1/<repository>/<commit>.bundle`, a bundle of git with everything
//! that the commit needs. Whoever takes one lets git check it: the id of a commit is a digest of all of that.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use runtime::regular_file;

use super::{Archive, ProviderStore, absent_is_none, is_hex, new_file, sha256_of};
use crate::folder::Folder;

pub(crate) const MODULES: &str = "modules/v1";
const EXTENSION: &str = ".bundle";
/// Bytes of a bundle. What is larger is neither kept nor used.
pub const LARGEST_BUNDLE: u64 = 512 * 1024 * 1024;
/// Bytes of the name of a folder, which file systems limit.
const LONGEST_NAME: usize = 200;
const NAME: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// What the store has of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// The id, in hex.
    pub commit: String,
    pub size_bytes: u64,
}

impl ProviderStore {
    fn modules(&self, repository: &str) -> io::Result<Option<Folder>> {
        let relative = relative(repository)?;
        self.progress.step();
        let opened = Folder::open(&self.root).and_then(|root| root.below(&relative));
        self.progress.step();
        absent_is_none(opened)
    }

    /// What there is of a repository, given by its address. What was used last comes first.
    pub fn bundles(&self, repository: &str) -> io::Result<Vec<Bundle>> {
        let Some(folder) = self.modules(repository)? else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for (name, kind) in folder.entries()? {
            self.progress.step();
            if let Some(commit) = commit_in(&name)
                && kind.is_file()
                && let Some(metadata) = absent_is_none(fs::symlink_metadata(folder.at(&name)))?
                && metadata.len() <= LARGEST_BUNDLE
            {
                let bundle = Bundle {
                    commit: commit.to_owned(),
                    size_bytes: metadata.len(),
                };
                found.push((metadata.modified()?, bundle));
            }
        }
        found.sort_by_key(|(used, _)| std::cmp::Reverse(*used));
        Ok(found.into_iter().map(|(_, bundle)| bundle).collect())
    }

    /// Copies a bundle into a new file. `false` if there is none. Nothing says that the copy is what its name says.
    pub fn copy_bundle(&self, repository: &str, commit: &str, target: &Path) -> io::Result<bool> {
        let Some(folder) = self.modules(repository)? else {
            return Ok(false);
        };
        // Code of a run may have put a link or a FIFO in its place.
        let opened = regular_file::open_unlinked(&folder.at(file_name(commit)));
        let Some(file) = absent_is_none(opened)? else {
            return Ok(false);
        };
        let source = Archive {
            file,
            progress: self.progress.clone(),
        };
        let used = source.try_clone()?;
        let mut copy = new_file(target)?;
        if let Err(error) = io::copy(&mut source.take(LARGEST_BUNDLE), &mut copy) {
            fs::remove_file(target)?;
            return Err(error);
        }
        used.note_use();
        Ok(true)
    }

    /// Adds a bundle. It is no error if another run has added it.
    pub fn publish_bundle(&self, repository: &str, commit: &str, bundle: &Path) -> io::Result<()> {
        if !is_commit(commit) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let sha256 = sha256_of(bundle)?;
        self.add(&relative(repository)?, &file_name(commit), bundle, &sha256)
    }

    /// Removes a bundle. It is no error if it is gone.
    pub fn remove_bundle(&self, repository: &str, commit: &str) -> io::Result<()> {
        if let Some(folder) = self.modules(repository)? {
            absent_is_none(fs::remove_file(folder.at(file_name(commit))))?;
        }
        Ok(())
    }
}

fn relative(repository: &str) -> io::Result<PathBuf> {
    let name = utf8_percent_encode(repository, NAME).to_string();
    // A scheme comes first, so it begins with no dot.
    if (1..=LONGEST_NAME).contains(&name.len()) && !name.starts_with('.') {
        Ok(Path::new(MODULES).join(name))
    } else {
        Err(io::ErrorKind::InvalidInput.into())
    }
}

/// The address of the repository that has this folder.
pub(crate) fn repository_of(folder: &str) -> Option<String> {
    let repository = percent_decode_str(folder).decode_utf8().ok()?;
    relative(&repository)
        .is_ok_and(|relative| relative.ends_with(folder))
        .then(|| repository.into_owned())
}

fn file_name(commit: &str) -> String {
    format!("{commit}{EXTENSION}")
}

/// The id in the name of a bundle.
pub(crate) fn commit_in(name: &str) -> Option<&str> {
    name.strip_suffix(EXTENSION).filter(|id| is_commit(id))
}

fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}
