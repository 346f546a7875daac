//! Where plans, states and step output are kept (contract 6). One store today; object stores take its place
//! behind the same calls.

use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use job_contract::keys::{self, ObjectKey};
use sha2::{Digest as _, Sha256};

/// An artifact that could not be stored or fetched.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// Writing failed; a full disk ends here.
    #[error("could not store `{}`", path.display())]
    Store {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Reading failed.
    #[error("could not fetch `{}`", path.display())]
    Fetch {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A reference that points outside the store.
    #[error("`{reference}` does not lie in this store")]
    Foreign { reference: String },
}

/// Files below the data directory, written whole or not at all and readable by their owner alone: plans and
/// states hold secrets.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// The store below a data directory.
    pub fn local(data_dir: &Path) -> Self {
        Self {
            root: data_dir.to_owned(),
        }
    }

    /// The reference under which an object is known to the platform.
    pub fn reference(&self, key: &ObjectKey) -> String {
        self.path(key).display().to_string()
    }

    /// Stores bytes.
    pub fn put(&self, key: &ObjectKey, bytes: &[u8]) -> Result<String, ArtifactError> {
        self.write(key, |file| file.write_all(bytes))
    }

    /// Stores a file's content.
    pub fn put_file(&self, key: &ObjectKey, source: &Path) -> Result<String, ArtifactError> {
        self.write(key, |file| {
            io::copy(&mut File::open(source)?, file).map(drop)
        })
    }

    /// An object's content, if there is one.
    pub fn read(&self, key: &ObjectKey) -> Result<Option<Vec<u8>>, ArtifactError> {
        let path = self.path(key);
        match fs::read(&path) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(ArtifactError::Fetch { path, source }),
        }
    }

    /// Copies the object behind a reference into a new file and returns its size and digest.
    pub fn fetch(&self, reference: &str, target: &Path) -> Result<Digest, ArtifactError> {
        let path = self.resolve(reference)?;
        let fail = |source| ArtifactError::Fetch {
            path: path.clone(),
            source,
        };
        let mut source = File::open(&path).map_err(fail)?;
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(target)
            .map_err(fail)?;
        copy_digesting(&mut source, &mut file).map_err(fail)
    }

    /// State file of the local backend.
    pub fn backend_state(&self, organization: &str, workspace: &str) -> PathBuf {
        self.root
            .join(keys::local_backend_state(organization, workspace))
    }

    fn path(&self, key: &ObjectKey) -> PathBuf {
        self.root.join(key.area.local_folder()).join(&key.path)
    }

    fn write(
        &self,
        key: &ObjectKey,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<String, ArtifactError> {
        let path = self.path(key);
        let store = || {
            let folder = private_folder(path.parent().expect("keys have a folder"))?;
            let mut draft = tempfile::NamedTempFile::new_in(folder)?;
            write(draft.as_file_mut())?;
            draft.as_file().sync_all()?;
            draft.persist(&path)?;
            File::open(folder)?.sync_all()
        };
        store().map_err(|source| ArtifactError::Store {
            path: path.clone(),
            source,
        })?;
        Ok(path.display().to_string())
    }

    /// A reference is a path; it must lie below this store, so that a record cannot name any other file.
    fn resolve(&self, reference: &str) -> Result<PathBuf, ArtifactError> {
        let foreign = || ArtifactError::Foreign {
            reference: reference.to_owned(),
        };
        let path = Path::new(reference);
        let fetch = |source| ArtifactError::Fetch {
            path: path.to_owned(),
            source,
        };
        let root = self.root.canonicalize().map_err(fetch)?;
        let resolved = path.canonicalize().map_err(fetch)?;
        if resolved.starts_with(root) {
            Ok(resolved)
        } else {
            Err(foreign())
        }
    }
}

/// Makes a folder and its parents for their owner alone.
pub fn private_folder(folder: &Path) -> io::Result<&Path> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    Ok(folder)
}

/// Size and SHA-256 of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digest {
    pub size_bytes: u64,
    /// Lower-case hex.
    pub sha256: String,
}

impl Digest {
    /// Reads a file through.
    pub fn of(path: &Path) -> io::Result<Self> {
        copy_digesting(&mut File::open(path)?, &mut io::sink())
    }
}

fn copy_digesting(source: &mut impl Read, target: &mut impl io::Write) -> io::Result<Digest> {
    let mut hasher = Sha256::new();
    let mut size_bytes = 0;
    let mut chunk = vec![0; 64 * 1024];
    loop {
        let length = match source.read(&mut chunk) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hasher.update(&chunk[..length]);
        target.write_all(&chunk[..length])?;
        size_bytes += length as u64;
    }
    Ok(Digest {
        size_bytes,
        sha256: hex(&hasher.finalize()),
    })
}

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            write!(text, "{byte:02x}").expect("writing to a string cannot fail");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn objects_come_back_as_they_were_and_are_private() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::local(folder.path());
        let key = ObjectKey::plan("o", "w", "1", "s");
        let reference = store.put(&key, b"plan").unwrap();
        assert_eq!(reference, store.reference(&key));
        let mode = fs::metadata(&reference).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let target = folder.path().join("copy");
        let digest = store.fetch(&reference, &target).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"plan");
        assert_eq!(digest, Digest::of(&target).unwrap());
        assert_eq!(
            digest.sha256,
            "64879f7d6b960a01909762d911a32d4582c20010c5641ee90278b644a9e3b525"
        );
    }

    #[test]
    fn references_outside_the_store_are_refused() {
        let (folder, outside) = (
            tempfile::tempdir().unwrap(),
            tempfile::NamedTempFile::new().unwrap(),
        );
        let store = Store::local(folder.path());
        let target = folder.path().join("copy");
        let error = store
            .fetch(outside.path().to_str().unwrap(), &target)
            .unwrap_err();
        assert!(matches!(error, ArtifactError::Foreign { .. }), "{error}");
        assert!(matches!(
            store.fetch("/nonexistent", &target),
            Err(ArtifactError::Fetch { .. })
        ));
        assert!(!target.exists());
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::local(folder.path());
        let key = ObjectKey::plan("o", "w", "1", "s");
        let error = store.put_file(&key, Path::new("/nonexistent")).unwrap_err();
        assert!(matches!(error, ArtifactError::Store { .. }));
        let left = fs::read_dir(folder.path().join("local/state/o/w/1/s"))
            .unwrap()
            .count();
        assert_eq!(left, 0);
    }
}
