//! Unpacks a gzip-compressed tar archive from an untrusted source. This module does not know the source.
//!
//! Nothing is ever written outside the target. Names are split into plain components. A folder on the path must be a
//! real folder, and files are always new. A link is kept only if it leads into the target. The target must be an empty
//! folder, and no other process may write to it meanwhile.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, symlink};
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use flate2::bufread::GzDecoder;
use tar::{Entry, EntryType};

use super::ErrorKind;

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

/// Why an archive could not be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// It is not gzip.
    #[error("the content is not a gzip-compressed tar archive")]
    NotGzip,
    /// It ends in the middle.
    #[error("the archive is truncated")]
    Truncated,
    /// A checksum or header is wrong.
    #[error("the archive is damaged")]
    Damaged(#[source] io::Error),
    /// More bytes than allowed.
    #[error("the archive unpacks to more than {limit} bytes")]
    TooManyBytes { limit: u64 },
    /// More entries than allowed.
    #[error("the archive has more than {limit} entries")]
    TooManyEntries { limit: u64 },
    /// An entry was refused.
    #[error("the archive entry `{entry}` is not accepted: {reason}")]
    Refused { entry: String, reason: Refusal },
    /// The target could not be written.
    #[error("could not write the archive entry `{entry}`")]
    Write {
        entry: String,
        #[source]
        source: io::Error,
    },
    /// The run ended meanwhile.
    #[error("unpacking was stopped")]
    Stopped,
}

/// Why an entry was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// `/etc/passwd`
    #[error("its path is absolute")]
    Absolute,
    /// `a/../../b`
    #[error("its path contains `..`")]
    Parent,
    /// Longer than file systems allow.
    #[error("its path is too long")]
    TooLong,
    /// The path is empty or `.` although the entry is no folder, or it contains NUL.
    #[error("its path is no file name")]
    NoName,
    /// A folder on its path is a link or a file.
    #[error("a part of its path is not a folder")]
    NotAFolder,
    /// It would replace a folder.
    #[error("a folder of this name exists already")]
    ReplacesFolder,
    /// A link that leads out of the archive.
    #[error("it links to a place outside the archive")]
    OutwardLink,
    /// A hard link to something else than a file of this archive.
    #[error("it links to a file that is not in the archive")]
    DanglingHardLink,
    /// Devices, FIFOs and unknown kinds.
    #[error("it is neither a file, a folder nor a link")]
    Kind,
}

impl ArchiveError {
    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            Self::NotGzip
            | Self::TooManyBytes { .. }
            | Self::TooManyEntries { .. }
            | Self::Refused { .. } => ErrorKind::User,
            Self::Truncated | Self::Damaged(_) | Self::Write { .. } | Self::Stopped => {
                ErrorKind::Infrastructure
            }
        }
    }

    pub(super) fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::NotGzip | Self::Truncated | Self::Damaged(_) => "upload the configuration again",
            Self::TooManyBytes { .. } | Self::TooManyEntries { .. } => {
                "exclude what the run does not need with `.terraformignore`, or raise the limit of the executor"
            }
            Self::Refused { .. } => "pack plain files, folders and links within the configuration",
            Self::Write { .. } => "check the free space of the work directory",
            Self::Stopped => return None,
        };
        Some(hint.to_owned())
    }
}

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
) -> Result<Unpacked, ArchiveError> {
    let mut archive = BufReader::with_capacity(COPY_BYTES, archive);
    if !archive
        .fill_buf()
        .map_err(read_error)?
        .starts_with(&GZIP_MAGIC[..1])
    {
        return Err(ArchiveError::NotGzip);
    }
    let allowance = Rc::new(Cell::new(MAX_METADATA_BYTES));
    let metered = Metered {
        inner: Members::new(archive),
        allowance: Rc::clone(&allowance),
    };
    let mut archive = tar::Archive::new(metered);
    let mut unpacker = Unpacker {
        target,
        limits,
        stop,
        allowance,
        folders: HashSet::new(),
        implied_folders: 0,
        unpacked: Unpacked::default(),
    };
    for entry in archive.entries().map_err(read_error)? {
        unpacker.entry(entry.map_err(read_error)?)?;
    }
    let total = unpacker.unpacked;
    drain(&mut archive.into_inner())?;
    Ok(total)
}

/// Reads to the end of the gzip stream, so that a truncated or damaged trailer is noticed. It stops if the padding is
/// longer than usual.
fn drain(rest: &mut impl Read) -> Result<(), ArchiveError> {
    let mut buffer = [0; 8192];
    loop {
        match rest.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if is_too_much_metadata(&error) => return Ok(()),
            Err(error) => return Err(read_error(error)),
        }
    }
}

struct Unpacker<'a> {
    target: &'a Path,
    limits: ArchiveLimits,
    stop: &'a AtomicBool,
    /// See [`Metered`].
    allowance: Rc<Cell<u64>>,
    /// Folders that are known to be real. They are never replaced.
    folders: HashSet<PathBuf>,
    /// The number of folders that were created without an entry of their own.
    implied_folders: u64,
    unpacked: Unpacked,
}

impl Unpacker<'_> {
    fn entry<R: Read>(&mut self, mut entry: Entry<'_, R>) -> Result<(), ArchiveError> {
        self.unpacked.entries += 1;
        self.check_entries()?;
        let kind = entry.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            // `git archive` begins with such an entry. The reader passes its content on and does not use it.
            self.allowance.set(MAX_METADATA_BYTES);
            return Ok(());
        }
        let name = entry.path_bytes().into_owned();
        let entry_name = EntryName { name: &name, kind };
        let path = entry_name.path()?;
        match kind {
            EntryType::Directory => self.folder(&path).map_err(|e| entry_name.at(e))?,
            // Very old archives have no folder entries, and mark folders by their names.
            EntryType::Regular if name.ends_with(b"/") => {
                self.folder(&path).map_err(|e| entry_name.at(e))?;
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.clear_path(&path).map_err(|e| entry_name.at(e))?;
                self.file(&mut entry, &path, &entry_name)?;
            }
            EntryType::Symlink => {
                let text = entry.link_name_bytes().unwrap_or_default().into_owned();
                let link = inner_link(&path, &text).map_err(|e| entry_name.refuse(e))?;
                self.clear_path(&path).map_err(|e| entry_name.at(e))?;
                symlink(link, self.target.join(&path)).map_err(|e| entry_name.at(e.into()))?;
            }
            EntryType::Link => {
                let text = entry.link_name_bytes().unwrap_or_default().into_owned();
                self.hard_link(&path, &text).map_err(|e| entry_name.at(e))?;
            }
            _ => return Err(entry_name.refuse(Refusal::Kind)),
        }
        self.allowance.set(MAX_METADATA_BYTES);
        Ok(())
    }

    fn check_entries(&self) -> Result<(), TooManyEntries> {
        let limit = self.limits.max_entries;
        if self.unpacked.entries + self.implied_folders > limit {
            return Err(TooManyEntries { limit });
        }
        Ok(())
    }

    /// Creates a folder and its parents. Each of them must be new or a real folder.
    fn folder(&mut self, path: &Path) -> Result<(), EntryError> {
        if path.as_os_str().is_empty() || self.folders.contains(path) {
            return Ok(());
        }
        self.folders_above(path)?;
        let full = self.target.join(path);
        match fs::symlink_metadata(&full) {
            Ok(found) if found.is_dir() => {}
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

    /// Creates the folders above `path`, and removes an earlier file or link of that name: the last entry counts.
    fn clear_path(&mut self, path: &Path) -> Result<(), EntryError> {
        if path.as_os_str().is_empty() {
            return Err(Refusal::NoName.into());
        }
        self.folders_above(path)?;
        let full = self.target.join(path);
        match fs::symlink_metadata(&full) {
            Ok(found) if found.is_dir() => Err(Refusal::ReplacesFolder.into()),
            Ok(_) => Ok(fs::remove_file(full)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn file<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        path: &Path,
        entry_name: &EntryName<'_>,
    ) -> Result<(), ArchiveError> {
        if entry.size() > self.limits.max_bytes.saturating_sub(self.unpacked.bytes) {
            return Err(self.too_many_bytes());
        }
        let executable = entry.header().mode().unwrap_or(0o644) & 0o100 != 0;
        let mut file = create_file(&self.target.join(path), executable)
            .map_err(|e| entry_name.at(e.into()))?;
        self.allowance.set(u64::MAX);
        let mut buffer = vec![0; COPY_BYTES];
        let mut remaining = entry.size();
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(ArchiveError::Stopped);
            }
            let read = entry.read(&mut buffer).map_err(read_error)?;
            if read == 0 {
                break;
            }
            remaining = remaining.saturating_sub(read as u64);
            self.unpacked.bytes += read as u64;
            if self.unpacked.bytes > self.limits.max_bytes {
                return Err(self.too_many_bytes());
            }
            file.write_all(&buffer[..read])
                .map_err(|e| entry_name.at(e.into()))?;
        }
        // The reader treats the end of the archive as the end of the entry.
        if remaining > 0 {
            return Err(ArchiveError::Truncated);
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

    fn too_many_bytes(&self) -> ArchiveError {
        ArchiveError::TooManyBytes {
            limit: self.limits.max_bytes,
        }
    }
}

/// Why one entry failed, without its name.
enum EntryError {
    Refused(Refusal),
    Io(io::Error),
    TooMany(TooManyEntries),
}

/// The number of entries and folders is over the limit.
struct TooManyEntries {
    limit: u64,
}

impl From<TooManyEntries> for ArchiveError {
    fn from(TooManyEntries { limit }: TooManyEntries) -> Self {
        Self::TooManyEntries { limit }
    }
}

impl From<TooManyEntries> for EntryError {
    fn from(error: TooManyEntries) -> Self {
        Self::TooMany(error)
    }
}

impl From<Refusal> for EntryError {
    fn from(reason: Refusal) -> Self {
        Self::Refused(reason)
    }
}

impl From<io::Error> for EntryError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The name of an entry, from its header.
struct EntryName<'a> {
    name: &'a [u8],
    kind: EntryType,
}

impl EntryName<'_> {
    fn path(&self) -> Result<PathBuf, ArchiveError> {
        let path = plain_path(self.name).map_err(|reason| self.refuse(reason))?;
        // The target folder itself may have an entry, `./`.
        if path.as_os_str().is_empty() && self.kind != EntryType::Directory {
            return Err(self.refuse(Refusal::NoName));
        }
        Ok(path)
    }

    fn display(&self) -> String {
        let name = String::from_utf8_lossy(self.name);
        let shown: String = name.chars().take(200).collect();
        shown.escape_debug().to_string()
    }

    fn refuse(&self, reason: Refusal) -> ArchiveError {
        ArchiveError::Refused {
            entry: self.display(),
            reason,
        }
    }

    fn at(&self, error: EntryError) -> ArchiveError {
        match error {
            EntryError::Refused(reason) => self.refuse(reason),
            EntryError::Io(source) => ArchiveError::Write {
                entry: self.display(),
                source,
            },
            EntryError::TooMany(error) => error.into(),
        }
    }
}

fn create_file(path: &Path, executable: bool) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(if executable { 0o755 } else { 0o644 })
        .open(path)
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

/// Keeps the reader of tar headers from loading an endless name or header into memory. The bytes that it reads between
/// two entries reduce an allowance.
struct Metered<R> {
    inner: R,
    allowance: Rc<Cell<u64>>,
}

#[derive(Debug, thiserror::Error)]
#[error("the description of an entry is too large")]
struct MetadataTooLarge;

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        let remaining = self
            .allowance
            .get()
            .checked_sub(read as u64)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, MetadataTooLarge))?;
        self.allowance.set(remaining);
        Ok(read)
    }
}

fn is_too_much_metadata(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(<dyn std::error::Error + Send + Sync>::is::<MetadataTooLarge>)
}

fn read_error(error: io::Error) -> ArchiveError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => ArchiveError::Truncated,
        _ => ArchiveError::Damaged(error),
    }
}

#[cfg(test)]
mod tests;
