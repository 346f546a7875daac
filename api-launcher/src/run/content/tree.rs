//! The walk over the folders a run needs: every file and link below them, without what is left out, and with
//! the targets of links that point elsewhere.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

use job_contract::Exit;
use runtime::lexical;

use super::ignores::Ignores;
use crate::failure::Failure;

/// Far above any configuration, and low enough that a link to a home folder is noticed before it is packed.
const MAX_ENTRIES: usize = 200_000;
const MAX_BYTES: u64 = 2 * 1024 * 1024 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Where it is read from.
    pub(crate) path: PathBuf,
    /// Its name in the archive, relative to the packed root.
    pub(crate) name: PathBuf,
    pub(crate) kind: Kind,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Folder,
    File,
    /// A symbolic link with this text.
    Link(PathBuf),
}

enum Found {
    Folder,
    File,
    Link,
}

/// A walk in progress. Paths are kept sorted, so that the same tree always packs the same way.
pub(super) struct Walk<'a> {
    dir: &'a Path,
    left_out: &'a [PathBuf],
    ignores: Ignores,
    /// Folders and files asked for, in the order they were.
    needed: Vec<PathBuf>,
    found: BTreeMap<PathBuf, Found>,
    bytes: u64,
    notes: Vec<String>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(dir: &'a Path, left_out: &'a [PathBuf]) -> Self {
        Self {
            dir,
            left_out,
            ignores: Ignores::default(),
            needed: Vec::new(),
            found: BTreeMap::new(),
            bytes: 0,
            notes: Vec::new(),
        }
    }

    /// Adds everything below `root`, and the ignore rules it carries.
    pub(super) fn add_fixed(&mut self, root: &Path) -> Result<(), Failure> {
        self.ignores.add(root)?;
        self.add(root)
    }

    /// Adds a folder with everything below it, or a single file.
    pub(super) fn add(&mut self, path: &Path) -> Result<(), Failure> {
        if self.needed.iter().any(|known| path.starts_with(known)) {
            return Ok(());
        }
        self.ignores.add(self.dir)?;
        self.needed.push(path.to_owned());
        if path.is_dir() {
            self.walk(path)
        } else {
            self.note_file(path.to_owned())
        }
    }

    fn walk(&mut self, top: &Path) -> Result<(), Failure> {
        self.found.insert(top.to_owned(), Found::Folder);
        let mut waiting = vec![top.to_owned()];
        while let Some(folder) = waiting.pop() {
            let fail = Failure::unreadable(&folder);
            for entry in fs::read_dir(&folder).map_err(&fail)? {
                let entry = entry.map_err(&fail)?;
                let (path, kind) = (entry.path(), entry.file_type().map_err(&fail)?);
                if self.left_out.contains(&path) || self.ignores.leave_out(&path, kind.is_dir()) {
                    continue;
                }
                if kind.is_dir() {
                    self.insert(path.clone(), Found::Folder)?;
                    waiting.push(path);
                } else if kind.is_symlink() {
                    self.insert(path, Found::Link)?;
                } else if kind.is_file() {
                    self.note_file(path)?;
                } else {
                    self.notes.push(format!(
                        "`{}` is no file, folder or link and is left out",
                        path.display()
                    ));
                }
            }
        }
        Ok(())
    }

    fn note_file(&mut self, path: PathBuf) -> Result<(), Failure> {
        let metadata = fs::metadata(&path).map_err(Failure::unreadable(&path))?;
        let size = metadata.len();
        self.bytes = self.bytes.saturating_add(size);
        self.insert(path, Found::File)
    }

    fn insert(&mut self, path: PathBuf, found: Found) -> Result<(), Failure> {
        self.found.insert(path, found);
        let limit = if self.found.len() > MAX_ENTRIES {
            format!("{MAX_ENTRIES} entries")
        } else if self.bytes > MAX_BYTES {
            format!("{} GiB", MAX_BYTES >> 30)
        } else {
            return Ok(());
        };
        let text = format!(
            "`{}` holds more than {limit}",
            self.common_ancestor().display()
        );
        Err(Failure::new(Exit::BadJobData, text)
            .with_hint("leave out what the run does not need, in a .terraformignore file"))
    }

    /// Adds what links refer to and is not there yet, until nothing is missing.
    pub(super) fn follow_links(&mut self) -> Result<(), Failure> {
        loop {
            let missing: Vec<PathBuf> = self
                .found
                .iter()
                .filter(|(_, found)| matches!(found, Found::Link))
                .filter_map(|(link, _)| link.canonicalize().ok())
                .filter(|target| !self.is_settled(target))
                .collect();
            let Some(target) = missing.first() else {
                return Ok(());
            };
            self.add(target)?;
        }
    }

    /// Whether `target` is packed already, or is a folder around the root module: a link back up is a
    /// convenience for people, and packing through it would take in a whole repository, or a home folder.
    fn is_settled(&self, target: &Path) -> bool {
        self.dir.starts_with(target) || self.needed.iter().any(|known| target.starts_with(known))
    }

    /// The smallest folder that holds all that is needed.
    pub(super) fn common_ancestor(&self) -> PathBuf {
        let mut ancestor = self.needed.first().cloned().unwrap_or_default();
        for path in &self.needed {
            while !path.starts_with(&ancestor) || (ancestor == *path && !path.is_dir()) {
                ancestor.pop();
            }
        }
        ancestor
    }

    /// What was found, with the names it has below `root`.
    pub(super) fn finish(mut self, root: &Path) -> Result<(Vec<Entry>, Vec<String>), Failure> {
        let mut entries = Vec::with_capacity(self.found.len());
        for (path, found) in std::mem::take(&mut self.found) {
            let kind = match found {
                Found::Folder => Kind::Folder,
                Found::File => Kind::File,
                Found::Link => {
                    let Some(text) = link_text(&path, root)? else {
                        self.notes.push(format!(
                            "the link `{}` leads nowhere inside `{}` and is left out",
                            path.display(),
                            root.display()
                        ));
                        continue;
                    };
                    Kind::Link(text)
                }
            };
            let name = path
                .strip_prefix(root)
                .expect("everything needed lies below the root")
                .to_owned();
            if !name.as_os_str().is_empty() {
                entries.push(Entry { path, name, kind });
            }
        }
        Ok((entries, self.notes))
    }
}

/// The text a link needs in the archive: its own where that works below any root, else the relative way to
/// its target. `None` when the target does not exist or lies outside.
fn link_text(link: &Path, root: &Path) -> Result<Option<PathBuf>, Failure> {
    let text = fs::read_link(link).map_err(Failure::unreadable(link))?;
    let Ok(target) = link.canonicalize() else {
        return Ok(None);
    };
    if !target.starts_with(root) {
        return Ok(None);
    }
    let parent = link.parent().unwrap_or(root);
    let by_text = lexical(&parent.join(&text));
    let works_as_it_is = text.is_relative()
        && by_text.starts_with(root)
        && by_text.canonicalize().is_ok_and(|found| found == target);
    Ok(Some(if works_as_it_is {
        text
    } else {
        relative(parent, &target)
    }))
}

fn relative(from: &Path, to: &Path) -> PathBuf {
    let shared = from
        .components()
        .zip(to.components())
        .take_while(|(a, b)| a == b)
        .count();
    let up = from.components().skip(shared).map(|_| Component::ParentDir);
    let text: PathBuf = up.chain(to.components().skip(shared)).collect();
    if text.as_os_str().is_empty() {
        PathBuf::from(".")
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_lead_up_and_down() {
        for (from, to, expected) in [
            ("/a/b", "/a/c/d", "../c/d"),
            ("/a", "/a/b", "b"),
            ("/a/b", "/a", ".."),
            ("/a", "/a", "."),
        ] {
            assert_eq!(
                relative(Path::new(from), Path::new(to)),
                Path::new(expected)
            );
        }
    }
}
