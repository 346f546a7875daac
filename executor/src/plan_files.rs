//! The files that a plan step leaves to the apply of its plan: what its scripts and its tool have created or changed in the
//! work tree. A plan often refers to such files, and the apply's pod has none of them.
//!
//! This module compares the tree with its state before the step, packs the difference, and unpacks it again. It does not know
//! where the archive is stored.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use artifact_store::Digest;
use flate2::Compression;
use flate2::write::GzEncoder;
use glob::{MatchOptions, Pattern};
use job_contract::keys::PLAN_FILE;
use runtime::regular_file;
use serde::{Deserialize, Serialize};
use tar::{EntryType, Header};

use crate::error::StepError;
use crate::providers::lock_file;
use crate::terraform::backend;
use crate::workspace::archive::{self, ArchiveLimits, Unpacked};

/// What each step makes anew: the clone, the folder of the tool, the plan, and a state that the tool could not store.
const OWN: [&str; 4] = [".git", ".terraform", PLAN_FILE, "errored.tfstate"];
/// How many names a line of the log has.
const NAMES: usize = 10;

/// What a plan's record says of the files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanFilesRecord {
    /// Where they are stored; none if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub archive: Option<StoredFiles>,
    /// Why there are none, although the step has changed files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<String>,
    /// The versions of the providers that the plan was made with, by address.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub providers: BTreeMap<String, String>,
}

/// A stored archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredFiles {
    pub reference: String,
    pub sha256: String,
    pub size_bytes: u64,
}

impl StoredFiles {
    pub(crate) fn is(&self, digest: &Digest) -> bool {
        (self.sha256.as_str(), self.size_bytes) == (digest.sha256.as_str(), digest.size_bytes)
    }
}

/// Which files are left to the apply.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    /// The work tree, in canonical form.
    pub(crate) root: PathBuf,
    /// The name of the folder of the tool, if it is another one.
    pub(crate) data_dir: Option<String>,
    /// Patterns of paths. If there are any, only files that match are taken.
    pub(crate) only: Vec<String>,
    /// Patterns of paths.
    pub(crate) exclude: Vec<String>,
    pub(crate) limits: ArchiveLimits,
}

/// The state of a file, so that a change of it is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Folder,
    Other {
        inode: u64,
        size: u64,
        mode: u32,
        modified: (i64, i64),
        changed: (i64, i64),
    },
}

impl Mark {
    fn of(found: &Metadata) -> Self {
        if found.is_dir() {
            return Self::Folder;
        }
        Self::Other {
            inode: found.ino(),
            size: found.size(),
            mode: found.mode(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }
    }
}

/// The files of a work tree at one time.
#[derive(Debug)]
pub(crate) struct Snapshot(HashMap<PathBuf, Mark>);

/// Why files are not left to the apply.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PackError {
    #[error("the step has changed more than {0} files")]
    TooMany(u64),
    #[error("the files that the step has changed have more than {0} bytes")]
    TooLarge(u64),
    #[error("`{pattern}` is not a pattern of paths: {source}")]
    Pattern {
        pattern: String,
        source: glob::PatternError,
    },
    #[error("`{}` changed while it was packed", path.display())]
    Changed { path: PathBuf },
    #[error("`{}` could not be read: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the archive could not be written: {0}")]
    Write(io::Error),
    #[error("the step was stopped")]
    Stopped,
}

/// What was packed.
#[derive(Debug, Default)]
pub(crate) struct Packed {
    /// The paths of files and links.
    pub(crate) paths: Vec<PathBuf>,
    /// The bytes of all files.
    pub(crate) bytes: u64,
    /// Links that lead out of the tree, and what is neither file nor link.
    pub(crate) refused: Vec<PathBuf>,
}

impl Choice {
    pub(crate) fn snapshot(&self, stop: &AtomicBool) -> Result<Snapshot, PackError> {
        let mut marks = HashMap::new();
        self.walk(stop, |path, found| {
            marks.insert(path.to_owned(), Mark::of(found));
            Ok(())
        })?;
        Ok(Snapshot(marks))
    }

    /// Packs what differs from the snapshot into `target`. There is no file if nothing does.
    pub(crate) fn pack(
        &self,
        before: &Snapshot,
        target: &Path,
        stop: &AtomicBool,
    ) -> Result<Packed, PackError> {
        let (only, exclude) = (patterns(&self.only)?, patterns(&self.exclude)?);
        let mut found = Vec::new();
        self.walk(stop, |path, metadata| {
            let is_chosen = only.is_empty()
                || matches(&only, path)
                || path.file_name() == Some(OsStr::new(lock_file::NAME));
            if before.0.get(path) != Some(&Mark::of(metadata))
                && is_chosen
                && !matches(&exclude, path)
            {
                found.push((path.to_owned(), metadata.clone()));
            }
            if found.len() as u64 > self.limits.max_entries {
                return Err(PackError::TooMany(self.limits.max_entries));
            }
            Ok(())
        })?;
        // The same files make the same archive.
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        let mut packed = Packed::default();
        if found.is_empty() {
            return Ok(packed);
        }
        let file = File::create_new(target).map_err(PackError::Write)?;
        let archive = GzEncoder::new(BufWriter::new(file), Compression::fast());
        let mut archive = tar::Builder::new(archive);
        for (path, metadata) in found {
            if stop.load(Ordering::Relaxed) {
                return Err(PackError::Stopped);
            }
            self.add(&mut archive, &path, &metadata, &mut packed)?;
        }
        archive
            .into_inner()
            .and_then(GzEncoder::finish)
            .and_then(|mut file| file.flush())
            .map_err(PackError::Write)?;
        Ok(packed)
    }

    fn add<W: io::Write>(
        &self,
        archive: &mut tar::Builder<W>,
        path: &Path,
        metadata: &Metadata,
        packed: &mut Packed,
    ) -> Result<(), PackError> {
        let full = self.root.join(path);
        let read = |source| PackError::Read {
            path: path.to_owned(),
            source,
        };
        let mut header = Header::new_gnu();
        header.set_mode(metadata.mode() & 0o777);
        header.set_size(0);
        if metadata.is_dir() {
            header.set_entry_type(EntryType::Directory);
            return archive
                .append_data(&mut header, path, io::empty())
                .map_err(PackError::Write);
        }
        if metadata.is_symlink() {
            let link = fs::read_link(&full).map_err(read)?;
            if !archive::leads_inside(path, link.as_os_str().as_bytes()) {
                packed.refused.push(path.to_owned());
                return Ok(());
            }
            header.set_entry_type(EntryType::Symlink);
            archive
                .append_link(&mut header, path, link)
                .map_err(PackError::Write)?;
        } else if metadata.is_file() {
            packed.bytes = packed.bytes.saturating_add(metadata.size());
            if packed.bytes > self.limits.max_bytes {
                return Err(PackError::TooLarge(self.limits.max_bytes));
            }
            // A process that a script has left may have put a link or a FIFO in its place.
            let file = regular_file::open_unlinked(&full).map_err(read)?;
            header.set_size(metadata.size());
            let mut content = Counted {
                file: file.take(metadata.size()),
                bytes: 0,
            };
            let added = archive.append_data(&mut header, path, &mut content);
            if content.bytes != metadata.size() {
                return Err(PackError::Changed {
                    path: path.to_owned(),
                });
            }
            added.map_err(PackError::Write)?;
        } else {
            packed.refused.push(path.to_owned());
            return Ok(());
        }
        packed.paths.push(path.to_owned());
        Ok(())
    }

    /// Visits everything below the root that may be left to an apply. Follows no link.
    fn walk(
        &self,
        stop: &AtomicBool,
        mut visit: impl FnMut(&Path, &Metadata) -> Result<(), PackError>,
    ) -> Result<(), PackError> {
        let mut folders = vec![PathBuf::new()];
        while let Some(folder) = folders.pop() {
            if stop.load(Ordering::Relaxed) {
                return Err(PackError::Stopped);
            }
            let read = |path: &Path| {
                let path = path.to_owned();
                move |source| PackError::Read { path, source }
            };
            let entries = fs::read_dir(self.root.join(&folder)).map_err(read(&folder))?;
            for entry in entries {
                let entry = entry.map_err(read(&folder))?;
                let path = folder.join(entry.file_name());
                let metadata = match entry.metadata() {
                    Ok(metadata) => metadata,
                    // A process that a script has left removes it.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(read(&path)(error)),
                };
                if self.is_own(&entry.file_name(), metadata.is_dir()) {
                    continue;
                }
                visit(&path, &metadata)?;
                if metadata.is_dir() {
                    folders.push(path);
                }
            }
        }
        Ok(())
    }

    /// Whether each step makes it anew.
    fn is_own(&self, name: &OsStr, is_folder: bool) -> bool {
        let is = |own: &str| name == OsStr::new(own);
        OWN.into_iter().chain(backend::FILES).any(is)
            || is_folder && self.data_dir.as_deref().is_some_and(is)
    }
}

/// A file that counts what is read of it.
struct Counted {
    file: io::Take<File>,
    bytes: u64,
}

impl io::Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.bytes += read as u64;
        Ok(read)
    }
}

/// Reads patterns. Each also matches what is below a folder that it matches.
fn patterns(texts: &[String]) -> Result<Vec<Pattern>, PackError> {
    let mut patterns = Vec::new();
    for text in texts {
        let plain = text.trim_start_matches('/').trim_end_matches('/');
        for pattern in [plain.to_owned(), format!("{plain}/**")] {
            let read = Pattern::new(&pattern);
            patterns.push(read.map_err(|source| PackError::Pattern {
                pattern: text.clone(),
                source,
            })?);
        }
    }
    Ok(patterns)
}

/// Whether one of the patterns matches. `*` stands for any part of a path.
fn matches(patterns: &[Pattern], path: &Path) -> bool {
    let options = MatchOptions {
        require_literal_separator: false,
        ..MatchOptions::default()
    };
    let mut patterns = patterns.iter();
    patterns.any(|pattern| pattern.matches_path_with(path, options))
}

/// Unpacks an archive over the work tree. Nothing is written outside it. Code of the plan may have made a link of a folder.
pub(crate) fn unpack(
    archive: File,
    root: &Path,
    limits: ArchiveLimits,
    stop: &AtomicBool,
) -> Result<Unpacked, StepError> {
    archive::unpack_over(archive, root, limits, stop)
}

/// The versions of the providers in the lock file of a folder, by address. Empty if the tool has written none that can be read.
pub(crate) fn providers(working_dir: &Path) -> BTreeMap<String, String> {
    let body = lock_file::read(working_dir).unwrap_or_default();
    lock_file::versions(&body).collect()
}

/// Says which providers differ from those of the plan.
pub(crate) fn differences(
    plan: &BTreeMap<String, String>,
    now: &BTreeMap<String, String>,
) -> Vec<String> {
    plan.iter()
        .filter(|(address, version)| now.get(*address) != Some(version))
        .map(|(address, version)| match now.get(address) {
            Some(now) => format!("{address} {now} (plan: {version})"),
            None => format!("{address} is missing (plan: {version})"),
        })
        .collect()
}

/// Some of the names, and how many there are.
pub(crate) fn listed(paths: &[PathBuf]) -> String {
    let names: Vec<_> = paths
        .iter()
        .take(NAMES)
        .map(|path| path.display().to_string().escape_debug().to_string())
        .collect();
    let more = paths.len().saturating_sub(NAMES);
    match more {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;
    use tempfile::TempDir;

    use super::*;

    static NEVER: AtomicBool = AtomicBool::new(false);

    struct Tree(TempDir);

    impl Tree {
        fn new(files: &[(&str, &str)]) -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            for (name, content) in files {
                tree.write(name, content);
            }
            tree
        }

        fn root(&self) -> PathBuf {
            self.0.path().canonicalize().unwrap()
        }

        fn path(&self, name: &str) -> PathBuf {
            self.root().join(name)
        }

        fn write(&self, name: &str, content: &str) {
            let path = self.path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }

        fn choice(&self) -> Choice {
            Choice {
                root: self.root(),
                data_dir: Some("data".into()),
                only: Vec::new(),
                exclude: Vec::new(),
                limits: ArchiveLimits {
                    max_bytes: 100,
                    max_entries: 10,
                },
            }
        }

        fn snapshot(&self) -> Snapshot {
            self.choice().snapshot(&NEVER).unwrap()
        }
    }

    fn names(packed: &[PathBuf]) -> Vec<&str> {
        packed.iter().map(|path| path.to_str().unwrap()).collect()
    }

    /// Packs with this choice; returns what was packed, and the archive.
    fn pack(choice: &Choice, before: &Snapshot) -> Result<(Packed, TempDir), PackError> {
        let folder = tempfile::tempdir().unwrap();
        let packed = choice.pack(before, &folder.path().join("archive"), &NEVER)?;
        Ok((packed, folder))
    }

    #[test]
    fn what_a_step_changes_is_there_in_another_clone() {
        let files = [
            ("main.tf", "x"),
            ("run.sh", "old"),
            ("same.txt", "same"),
            (".git/HEAD", "x"),
        ];
        let (tree, other) = (Tree::new(&files), Tree::new(&files));
        let before = tree.snapshot();
        tree.write("build/a/lambda.zip", "zip");
        fs::create_dir(tree.path("empty")).unwrap();
        symlink("a/lambda.zip", tree.path("build/link")).unwrap();
        // A change that keeps size and time.
        let modified = fs::metadata(tree.path("run.sh"))
            .unwrap()
            .modified()
            .unwrap();
        tree.write("run.sh", "new");
        let script = File::options()
            .write(true)
            .open(tree.path("run.sh"))
            .unwrap();
        script.set_modified(modified).unwrap();
        fs::set_permissions(tree.path("run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
        for own in [
            ".git/index",
            ".terraform/providers/p",
            "modules/a/.terraform/m",
            "data/providers/p",
            PLAN_FILE,
            "errored.tfstate",
            "aws_backend_override.tf",
            "GCP_CREDENTIALS_FILE.json",
        ] {
            tree.write(own, "own");
        }
        let (packed, archive) = pack(&tree.choice(), &before).unwrap();
        assert_eq!(
            names(&packed.paths),
            ["build/a/lambda.zip", "build/link", "run.sh"]
        );
        assert_eq!((packed.bytes, packed.refused.len()), (6, 0));

        let archive = File::open(archive.path().join("archive")).unwrap();
        unpack(archive, &other.root(), tree.choice().limits, &NEVER).unwrap();
        let read = |name| fs::read_to_string(other.path(name)).unwrap();
        assert_eq!(
            (read("build/link"), read("run.sh")),
            ("zip".into(), "new".into())
        );
        let mode = fs::metadata(other.path("run.sh"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o111, 0o111);
        assert!(other.path("empty").is_dir());
        assert!(!other.path("errored.tfstate").exists() && !other.path("data").exists());
    }

    #[test]
    fn nothing_changed_is_no_archive() {
        let tree = Tree::new(&[("main.tf", "x")]);
        let (packed, archive) = pack(&tree.choice(), &tree.snapshot()).unwrap();
        assert!(packed.paths.is_empty());
        assert!(!archive.path().join("archive").exists());
    }

    #[test]
    fn links_that_lead_out_and_pipes_are_named_and_stay() {
        let tree = Tree::new(&[]);
        let before = tree.snapshot();
        symlink("/etc/passwd", tree.path("absolute")).unwrap();
        symlink("../../etc/passwd", tree.path("outward")).unwrap();
        mkfifo(&tree.path("pipe"), Mode::S_IRWXU).unwrap();
        let (packed, _archive) = pack(&tree.choice(), &before).unwrap();
        assert_eq!(names(&packed.refused), ["absolute", "outward", "pipe"]);
        assert!(packed.paths.is_empty());
    }

    #[test]
    fn what_is_too_large_or_too_much_is_refused() {
        let tree = Tree::new(&[]);
        let before = tree.snapshot();
        tree.write("large", &"x".repeat(101));
        let error = pack(&tree.choice(), &before).unwrap_err();
        assert!(matches!(error, PackError::TooLarge(100)), "{error}");
        for number in 0..11 {
            tree.write(&number.to_string(), "");
        }
        let error = pack(&tree.choice(), &before).unwrap_err();
        assert!(matches!(error, PackError::TooMany(10)), "{error}");
    }

    #[test]
    fn patterns_choose_and_exclude_and_the_lock_file_comes_along() {
        let tree = Tree::new(&[]);
        let before = tree.snapshot();
        for name in [
            "dist/a.zip",
            "dist/a.log",
            "b.zip",
            "secret/c.zip",
            lock_file::NAME,
        ] {
            tree.write(name, "x");
        }
        let choice = Choice {
            only: vec!["*.zip".into()],
            exclude: vec!["/secret/".into(), "x".into()],
            ..tree.choice()
        };
        let (packed, _archive) = pack(&choice, &before).unwrap();
        assert_eq!(
            names(&packed.paths),
            [lock_file::NAME, "b.zip", "dist/a.zip"]
        );
        let wrong = Choice {
            exclude: vec!["a***".into()],
            ..tree.choice()
        };
        let error = pack(&wrong, &before).unwrap_err();
        assert!(
            error.to_string().contains("`a***` is not a pattern"),
            "{error}"
        );
    }

    #[test]
    fn an_archive_leaves_no_tree_by_links_of_the_clone() {
        let (tree, outside) = (Tree::new(&[]), Tree::new(&[]));
        let before = tree.snapshot();
        tree.write("folder/file", "x");
        let (_packed, archive) = pack(&tree.choice(), &before).unwrap();
        // The commit of the apply has a link in this place.
        let other = Tree::new(&[]);
        symlink(outside.root(), other.path("folder")).unwrap();
        let archive = File::open(archive.path().join("archive")).unwrap();
        unpack(archive, &other.root(), tree.choice().limits, &NEVER).unwrap();
        assert!(other.path("folder").symlink_metadata().unwrap().is_dir());
        assert!(!outside.path("file").exists());
    }

    #[test]
    fn providers_that_differ_are_named() {
        let lock = r#"
provider "registry.example.test/acme/one" {
  version     = "1.2.3"
  constraints = "~> 1.2"
  hashes = ["h1:x"]
}
"#;
        let tree = Tree::new(&[(lock_file::NAME, lock)]);
        let plan = providers(&tree.root());
        assert_eq!(plan["registry.example.test/acme/one"], "1.2.3");
        assert_eq!(differences(&plan, &plan), Vec::<String>::new());
        let other = BTreeMap::from([("registry.example.test/acme/one".into(), "1.3.0".into())]);
        let differences = differences(&plan, &other);
        assert_eq!(
            differences,
            ["registry.example.test/acme/one 1.3.0 (plan: 1.2.3)"]
        );
        assert!(providers(Tree::new(&[(lock_file::NAME, "{")]).0.path()).is_empty());
    }
}
