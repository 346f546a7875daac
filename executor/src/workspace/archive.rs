//! Unpacks a gzip-compressed tar archive from an untrusted source. This module does not know the source.
//!
//! Nothing is ever written outside the target. Names are split into plain components. A folder on the path must be a
//! real folder, and files are always new. A link is kept only if it leads into the target. No other process may write to the
//! target meanwhile. An entry replaces a file or link that is there. Only where the caller says so, it also replaces a folder that
//! was there before, and a folder replaces a file or link.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, symlink};
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use flate2::bufread::GzDecoder;
use job_contract::chain;
use runtime::tree_removal;
use tar::{Entry, EntryType};

use super::{SPACE_HINT, TOO_LARGE_HINT};
use crate::error::StepError;
use crate::metered::{self, Metered};

/// How much content may be unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchiveLimits {
    /// Limit of bytes of all files together, and of the download.
    pub max_bytes: u64,
    /// Limit of files, folders and links together. It includes folders that only occur in paths of other entries.
    pub max_entries: u64,
}

impl Default for ArchiveLimits {
    fn default() -> Self {
        Self {
            max_bytes: 2 * 1024 * 1024 * 1024,
            max_entries: 200_000,
        }
    }
}

/// The counts of unpacked content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    pub entries: u64,
    pub bytes: u64,
}

/// Why an entry was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("its path is absolute")]
    Absolute,
    #[error("its path contains `..`")]
    Parent,
    #[error("its path is too long")]
    TooLong,
    /// The path is empty or `.` although the entry is no folder, or it contains NUL.
    #[error("its path is no file name")]
    NoName,
    /// A folder on its path is a link or a file.
    #[error("a part of its path is not a folder")]
    NotAFolder,
    #[error("a folder of this name exists already")]
    ReplacesFolder,
    #[error("it links to a place outside the archive")]
    OutwardLink,
    #[error("it links to a file that is not in the archive")]
    DanglingHardLink,
    #[error("it is neither a file, a folder nor a link")]
    Kind,
}

/// Why one entry was not unpacked.
enum EntryError {
    Refused(Refusal),
    Write(io::Error),
    Archive(StepError),
}

impl From<Refusal> for EntryError {
    fn from(reason: Refusal) -> Self {
        Self::Refused(reason)
    }
}

impl From<io::Error> for EntryError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl From<StepError> for EntryError {
    fn from(error: StepError) -> Self {
        Self::Archive(error)
    }
}

impl EntryError {
    fn of(self, name: &[u8]) -> StepError {
        let name: String = String::from_utf8_lossy(name).chars().take(200).collect();
        let name = name.escape_debug();
        match self {
            Self::Refused(reason) => StepError::user(format!(
                "the archive entry `{name}` is not accepted: {reason}"
            ))
            .with_hint("pack plain files, folders and links within the configuration"),
            Self::Write(source) => {
                StepError::infrastructure(format!("could not write the archive entry `{name}`"))
                    .because(&source)
                    .with_hint(SPACE_HINT)
            }
            Self::Archive(error) => error,
        }
    }
}

const UPLOAD_AGAIN: &str = "upload the configuration again";

/// Linux's `PATH_MAX` and `NAME_MAX`, minus space for the target's own path.
const MAX_PATH_BYTES: usize = 3072;
const MAX_NAME_BYTES: usize = 255;
/// The limit of long names and extended headers, because the reader holds them in memory.
const MAX_METADATA_BYTES: u64 = 1024 * 1024;
const COPY_BYTES: usize = 64 * 1024;

/// Unpacks `archive` into `target` until done or `stop` is set.
pub fn unpack(
    archive: impl Read,
    target: &Path,
    limits: ArchiveLimits,
    stop: &AtomicBool,
) -> Result<Unpacked, StepError> {
    unpack_with(archive, target, limits, stop, false)
}

/// The same over a folder that has content already: what the archive has of another kind takes the place of what is there.
pub(crate) fn unpack_over(
    archive: impl Read,
    target: &Path,
    limits: ArchiveLimits,
    stop: &AtomicBool,
) -> Result<Unpacked, StepError> {
    unpack_with(archive, target, limits, stop, true)
}

fn unpack_with(
    archive: impl Read,
    target: &Path,
    limits: ArchiveLimits,
    stop: &AtomicBool,
    replaces: bool,
) -> Result<Unpacked, StepError> {
    let mut archive = BufReader::with_capacity(COPY_BYTES, archive);
    if !archive
        .fill_buf()
        .map_err(read_error)?
        .starts_with(&GZIP_MAGIC[..1])
    {
        let text = "the content is not a gzip-compressed tar archive";
        return Err(StepError::user(text).with_hint(UPLOAD_AGAIN));
    }
    let (metered, allowance) = Metered::new(Members::new(archive), MAX_METADATA_BYTES);
    let mut archive = tar::Archive::new(metered);
    let mut unpacker = Unpacker {
        target,
        limits,
        stop,
        replaces,
        allowance,
        folders: HashSet::new(),
        implied_folders: 0,
        unpacked: Unpacked::default(),
    };
    for entry in archive.entries().map_err(read_error)? {
        let entry = entry.map_err(read_error)?;
        let name = entry.path_bytes().into_owned();
        let entry = unpacker.entry(entry, &name);
        entry.map_err(|error| error.of(&name))?;
    }
    let total = unpacker.unpacked;
    drain(&mut archive.into_inner())?;
    Ok(total)
}

/// Reads to the end of the gzip stream, so that a truncated or damaged trailer is noticed. It stops if the padding is
/// longer than usual.
fn drain(rest: &mut impl Read) -> Result<(), StepError> {
    let mut buffer = [0; 8192];
    loop {
        match rest.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if metered::is_too_much(&error) => return Ok(()),
            Err(error) => return Err(read_error(error)),
        }
    }
}

struct Unpacker<'a> {
    target: &'a Path,
    limits: ArchiveLimits,
    stop: &'a AtomicBool,
    /// Whether what was there before may be of another kind.
    replaces: bool,
    /// See [`Metered`].
    allowance: Rc<Cell<u64>>,
    /// Folders that are known to be real. They are never replaced.
    folders: HashSet<PathBuf>,
    /// The number of folders that were created without an entry of their own.
    implied_folders: u64,
    unpacked: Unpacked,
}

impl Unpacker<'_> {
    fn entry<R: Read>(&mut self, mut entry: Entry<'_, R>, name: &[u8]) -> Result<(), EntryError> {
        self.unpacked.entries += 1;
        self.check_entries()?;
        let kind = entry.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            // `git archive` begins with such an entry. The reader passes its content on and does not use it.
            self.allowance.set(MAX_METADATA_BYTES);
            return Ok(());
        }
        let path = plain_path(name)?;
        // The target folder itself may have an entry, `./`.
        if path.as_os_str().is_empty() && kind != EntryType::Directory {
            return Err(Refusal::NoName.into());
        }
        let link = entry.link_name_bytes().unwrap_or_default().into_owned();
        match kind {
            EntryType::Directory => self.folder(&path)?,
            // Very old archives have no folder entries, and mark folders by their names.
            EntryType::Regular if name.ends_with(b"/") => self.folder(&path)?,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.clear_path(&path)?;
                self.file(&mut entry, &path)?;
            }
            EntryType::Symlink => {
                let link = inner_link(&path, &link)?;
                self.clear_path(&path)?;
                symlink(link, self.target.join(&path))?;
            }
            EntryType::Link => self.hard_link(&path, &link)?,
            _ => return Err(Refusal::Kind.into()),
        }
        self.allowance.set(MAX_METADATA_BYTES);
        Ok(())
    }

    fn check_entries(&self) -> Result<(), StepError> {
        let limit = self.limits.max_entries;
        if self.unpacked.entries + self.implied_folders > limit {
            let text = format!("the archive has more than {limit} entries");
            return Err(StepError::user(text).with_hint(TOO_LARGE_HINT));
        }
        Ok(())
    }

    /// Creates a folder and its parents. Each of them must be new or a real folder, or replace what is there.
    fn folder(&mut self, path: &Path) -> Result<(), EntryError> {
        if path.as_os_str().is_empty() || self.folders.contains(path) {
            return Ok(());
        }
        self.folders_above(path)?;
        let full = self.target.join(path);
        match fs::symlink_metadata(&full) {
            Ok(found) if found.is_dir() => {}
            Ok(_) if self.replaces => {
                fs::remove_file(&full)?;
                DirBuilder::new().mode(0o755).create(&full)?;
            }
            Ok(_) => return Err(Refusal::NotAFolder.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().mode(0o755).create(&full)?;
            }
            Err(error) => return Err(error.into()),
        }
        self.folders.insert(path.to_path_buf());
        Ok(())
    }

    /// These folders count, because one path of 3 KB can contain more folders than a real archive has.
    fn folders_above(&mut self, path: &Path) -> Result<(), EntryError> {
        let Some(parent) = path.parent() else {
            return Ok(());
        };
        if parent.as_os_str().is_empty() || self.folders.contains(parent) {
            return Ok(());
        }
        self.implied_folders += 1;
        self.check_entries()?;
        self.folder(parent)
    }

    /// Creates the folders above `path`, and removes what has that name and may be replaced: the last entry counts.
    fn clear_path(&mut self, path: &Path) -> Result<(), EntryError> {
        if path.as_os_str().is_empty() {
            return Err(Refusal::NoName.into());
        }
        self.folders_above(path)?;
        let full = self.target.join(path);
        match fs::symlink_metadata(&full) {
            // Not one of this archive.
            Ok(found) if found.is_dir() && self.replaces && !self.folders.contains(path) => {
                Ok(tree_removal::remove(&full)?)
            }
            Ok(found) if found.is_dir() => Err(Refusal::ReplacesFolder.into()),
            Ok(_) => Ok(fs::remove_file(full)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn file<R: Read>(&mut self, entry: &mut Entry<'_, R>, path: &Path) -> Result<(), EntryError> {
        self.check_bytes(self.unpacked.bytes.saturating_add(entry.size()))?;
        let executable = entry.header().mode().unwrap_or(0o644) & 0o100 != 0;
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(if executable { 0o755 } else { 0o644 })
            .open(self.target.join(path))?;
        self.allowance.set(u64::MAX);
        let mut buffer = vec![0; COPY_BYTES];
        let mut remaining = entry.size();
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(StepError::infrastructure("unpacking was stopped").into());
            }
            let read = entry.read(&mut buffer).map_err(read_error)?;
            if read == 0 {
                break;
            }
            remaining = remaining.saturating_sub(read as u64);
            self.unpacked.bytes += read as u64;
            self.check_bytes(self.unpacked.bytes)?;
            file.write_all(&buffer[..read])?;
        }
        // The reader treats the end of the archive as the end of the entry.
        if remaining > 0 {
            return Err(truncated().into());
        }
        Ok(())
    }

    /// A hard link to a file of this archive. The link's path starts at the archive's root.
    fn hard_link(&mut self, path: &Path, link: &[u8]) -> Result<(), EntryError> {
        let existing = plain_path(link).map_err(|_| Refusal::OutwardLink)?;
        if existing == path {
            return Err(Refusal::DanglingHardLink.into());
        }
        if let Some(parent) = existing.parent() {
            let real = parent.as_os_str().is_empty() || self.folders.contains(parent);
            if !real {
                return Err(Refusal::DanglingHardLink.into());
            }
        }
        let full = self.target.join(&existing);
        if !fs::symlink_metadata(&full).is_ok_and(|found| found.is_file()) {
            return Err(Refusal::DanglingHardLink.into());
        }
        self.clear_path(path)?;
        Ok(fs::hard_link(full, self.target.join(path))?)
    }

    fn check_bytes(&self, bytes: u64) -> Result<(), StepError> {
        let limit = self.limits.max_bytes;
        if bytes > limit {
            let text = format!("the archive unpacks to more than {limit} bytes");
            return Err(StepError::user(text).with_hint(TOO_LARGE_HINT));
        }
        Ok(())
    }
}

/// Splits a name into components that only lead further down.
fn plain_path(name: &[u8]) -> Result<PathBuf, Refusal> {
    if name.contains(&0) {
        return Err(Refusal::NoName);
    }
    if name.len() > MAX_PATH_BYTES {
        return Err(Refusal::TooLong);
    }
    let mut path = PathBuf::new();
    for component in Path::new(OsStr::from_bytes(name)).components() {
        match component {
            Component::Normal(part) if part.len() > MAX_NAME_BYTES => return Err(Refusal::TooLong),
            Component::Normal(part) => path.push(part),
            Component::CurDir => {}
            Component::ParentDir => return Err(Refusal::Parent),
            Component::RootDir | Component::Prefix(_) => return Err(Refusal::Absolute),
        }
    }
    Ok(path)
}

/// The target of a symbolic link at `path`, if it stays inside.
///
/// The result has `..` only at the front. The link's own folder is real, so each `..` leads to a real folder. The other
/// components lead down, through links with the same property. So no chain of such links leaves the root.
fn inner_link(path: &Path, link: &[u8]) -> Result<PathBuf, Refusal> {
    if link.is_empty() || link.contains(&0) {
        return Err(Refusal::NoName);
    }
    if link.len() > MAX_PATH_BYTES {
        return Err(Refusal::TooLong);
    }
    let depth = path.components().count().saturating_sub(1);
    let mut up = 0;
    let mut down: Vec<&OsStr> = Vec::new();
    for component in Path::new(OsStr::from_bytes(link)).components() {
        match component {
            Component::Normal(part) => down.push(part),
            Component::CurDir => {}
            Component::ParentDir => {
                if down.pop().is_none() {
                    up += 1;
                }
                if up > depth {
                    return Err(Refusal::OutwardLink);
                }
            }
            Component::RootDir | Component::Prefix(_) => return Err(Refusal::OutwardLink),
        }
    }
    let kept: PathBuf = std::iter::repeat_n(OsStr::new(".."), up)
        .chain(down)
        .collect();
    Ok(if kept.as_os_str().is_empty() {
        PathBuf::from(".")
    } else {
        kept
    })
}

/// Whether a symbolic link at `path` stays inside the archive.
pub(crate) fn leads_inside(path: &Path, link: &[u8]) -> bool {
    inner_link(path, link).is_ok()
}

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The members of a gzip file, one after the other. Everything after the last one is ignored, as in gzip.
struct Members<R: BufRead> {
    current: Option<GzDecoder<R>>,
}

impl<R: BufRead> Members<R> {
    fn new(reader: R) -> Self {
        Self {
            current: Some(GzDecoder::new(reader)),
        }
    }
}

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.current {
            let read = member.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let Some(mut rest) = self.current.take().map(GzDecoder::into_inner) else {
                break;
            };
            if rest.fill_buf()?.starts_with(&GZIP_MAGIC) {
                self.current = Some(GzDecoder::new(rest));
            }
        }
        Ok(0)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn read_error(error: io::Error) -> StepError {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return truncated();
    }
    // The reader quotes names of entries.
    let cause = chain(&error).escape_debug().to_string();
    StepError::infrastructure(format!("the archive is damaged: {cause}")).with_hint(UPLOAD_AGAIN)
}

fn truncated() -> StepError {
    StepError::infrastructure("the archive is truncated").with_hint(UPLOAD_AGAIN)
}

#[cfg(test)]
mod tests;
