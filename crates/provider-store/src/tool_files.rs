//! Files of tools that runs share where others can write. Whoever takes one checks it.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use runtime::regular_file;

use super::{Archive, ProviderStore, absent_is_none};
use crate::folder::Folder;

const LONGEST_NAME: usize = 200;

impl ProviderStore {
    fn tool_folder(tool: &str, version: &str) -> io::Result<PathBuf> {
        if is_name(tool) && is_name(version) {
            Ok(Path::new(tool).join(version))
        } else {
            Err(io::ErrorKind::InvalidInput.into())
        }
    }

    /// The versions of a tool of which there is a folder.
    pub fn tool_versions(&self, tool: &str) -> io::Result<Vec<String>> {
        self.progress.step();
        let folder = Folder::open(&self.root).and_then(|root| root.below(Path::new(tool)));
        let Some(folder) = absent_is_none(folder)? else {
            return Ok(Vec::new());
        };
        let entries = folder.entries()?;
        self.progress.step();
        Ok(entries.into_iter().map(|(name, _)| name).collect())
    }

    /// Opens a file of a tool's version. `None` if there is none.
    pub fn open_tool_file(
        &self,
        tool: &str,
        version: &str,
        name: &str,
    ) -> io::Result<Option<Archive>> {
        self.progress.step();
        let relative = Self::tool_folder(tool, version)?;
        let folder = Folder::open(&self.root).and_then(|root| root.below(&relative));
        let Some(folder) = absent_is_none(folder)? else {
            return Ok(None);
        };
        let opened = absent_is_none(regular_file::open_unlinked(&folder.at(name)))?;
        self.progress.step();
        Ok(opened.map(|file| Archive {
            file,
            progress: self.progress.clone(),
        }))
    }

    /// Adds files of a tool's version, in this order. Each appears by a rename.
    pub fn publish_tool_files(
        &self,
        tool: &str,
        version: &str,
        files: &[(&str, &Path)],
    ) -> io::Result<()> {
        self.progress.step();
        fs::create_dir_all(&self.root)?;
        let relative = Self::tool_folder(tool, version)?;
        let folder = Folder::open(&self.root)?.make_below(&relative)?;
        let tmp = self.tmp()?;
        for (name, source) in files {
            let mut unfinished = tempfile::Builder::new().tempfile_in(tmp.path())?;
            self.progress.step();
            self.write(&mut regular_file::open(source)?, unfinished.as_file_mut())?;
            unfinished
                .as_file()
                .set_permissions(Permissions::from_mode(0o444))?;
            unfinished.as_file().sync_all()?;
            self.progress.step();
            Self::persist(unfinished, &folder.at(name), &tmp)?;
            self.progress.step();
        }
        folder.sync()
    }
}

/// Whether a text is the name of a folder, and nothing else.
fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_+".contains(&byte);
    (1..=LONGEST_NAME).contains(&text.len()) && !text.starts_with('.') && text.bytes().all(is_plain)
}
