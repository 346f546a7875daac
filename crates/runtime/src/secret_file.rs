//! A secret in a file that a variable names, in the place of a variable with the secret itself. Knows no names of its own.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use crate::regular_file;
use crate::setting_text::{SettingError, meant};

/// More than any secret needs.
const MAX_BYTES: u64 = 64 * 1024;

/// A file with a secret.
pub(crate) struct SecretFile {
    path: PathBuf,
    /// `None` if the secret itself is set. The file was not read then.
    pub(crate) text: Option<String>,
}

impl SecretFile {
    /// The file that `variable` names. It is read unless `secret` is set. `lookup` looks variables up.
    pub(crate) fn read(
        secret: &str,
        variable: &str,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, SettingError> {
        let given = |name: &str| Some(meant(name.as_ref(), &lookup(name)?)?.to_owned());
        let Some(path) = given(variable).map(PathBuf::from) else {
            return Ok(None);
        };
        if given(secret).is_some() {
            return Ok(Some(Self { path, text: None }));
        }
        let reject = |why: String| {
            let text = format!("names `{}`, which {why}", path.display());
            SettingError::new(variable, text)
        };
        // What `remove` leaves behind.
        let used = |what: &str, how: &str| {
            reject(format!(
                "{what}: an earlier start may have {how} it. Write the secret into it before each start, or set `{secret}`"
            ))
        };
        let text =
            regular_file::read_text(&path, MAX_BYTES).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => used("does not exist", "removed"),
                _ => reject(format!("cannot be read: {error}")),
            })?;
        if text.contains('\0') {
            return Err(used("contains NUL bytes", "overwritten"));
        }
        let text = text.trim().to_owned();
        if text.is_empty() {
            return Err(reject(format!(
                "is empty: write the secret into it, or set `{secret}`"
            )));
        }
        let text = Some(text);
        Ok(Some(Self { path, text }))
    }

    /// Overwrites the file and removes it. A file that is gone already is no error.
    pub(crate) fn remove(&self) -> io::Result<()> {
        // A file that cannot be written can still be removed.
        let _ = overwrite(&self.path);
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let path = self.path.display();
                let text = format!("could not remove the secret in `{path}`: {error}");
                Err(io::Error::new(error.kind(), text))
            }
            _ => Ok(()),
        }
    }
}

fn overwrite(path: &Path) -> io::Result<()> {
    let size = fs::metadata(path)?.len().min(MAX_BYTES);
    let mut file = OpenOptions::new()
        .write(true)
        // Otherwise opening a FIFO that has taken the place of the file waits for a reader.
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)?;
    file.write_all(&vec![0; usize::try_from(size).unwrap_or_default()])?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;
    use crate::memory_file;

    const SECRET: &str = "Secret";
    const FILE: &str = "SecretFile";

    fn find(variables: &[(&str, &str)]) -> Result<Option<SecretFile>, SettingError> {
        SecretFile::read(SECRET, FILE, |name| {
            let mut found = variables.iter().filter(|(known, _)| *known == name);
            found.next().map(|(_, value)| (*value).to_owned())
        })
    }

    fn read(variables: &[(&str, &str)]) -> Result<Option<String>, String> {
        let text = |file: Option<SecretFile>| file.and_then(|file| file.text);
        find(variables).map(text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_is_read_unless_the_secret_itself_is_set() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        fs::write(&path, " hunter2\n").unwrap();
        let named = (FILE, path.to_str().unwrap());
        let found = Ok(Some("hunter2".to_owned()));
        assert_eq!(read(&[named]), found);
        for unset in ["", " ", "${Secret}"] {
            assert_eq!(read(&[named, (SECRET, unset)]), found, "{unset:?}");
        }
        assert_eq!(read(&[named, (SECRET, "set")]), Ok(None));
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[(FILE, "${SecretFile}")]), Ok(None));
    }

    #[test]
    fn a_file_without_a_secret_is_named_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let name = path.to_str().unwrap();
        let refusal = || read(&[(FILE, name)]).unwrap_err();
        let which = |rest: &str| format!("`SecretFile` names `{name}`, which {rest}");
        let again = "Write the secret into it before each start, or set `Secret`";
        let gone = format!("does not exist: an earlier start may have removed it. {again}");
        assert_eq!(refusal(), which(&gone));
        for nothing in ["", " \n\t"] {
            fs::write(&path, nothing).unwrap();
            let empty = "is empty: write the secret into it, or set `Secret`";
            assert_eq!(refusal(), which(empty), "{nothing:?}");
        }
        let zeros =
            format!("contains NUL bytes: an earlier start may have overwritten it. {again}");
        for content in ["\0\0\0", "hunter2\0"] {
            fs::write(&path, content).unwrap();
            assert_eq!(refusal(), which(&zeros), "{content:?}");
        }
        fs::write(&path, b"hunter2\xff").unwrap();
        let no_text = refusal();
        assert!(no_text.starts_with(&which("cannot be read: ")), "{no_text}");
        assert!(!no_text.contains("hunter2"), "{no_text}");
    }

    #[test]
    fn a_file_that_was_overwritten_and_stays_is_named_at_the_next_start() {
        // A file in memory can be written, but `/proc` lets nobody remove it.
        let mut memory = memory_file::data("secret").unwrap();
        memory.write_all(b"hunter2").unwrap();
        let name = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let named = (FILE, name.as_str());
        let file = find(&[named]).ok().flatten().unwrap();
        let stays = file.remove().unwrap_err().to_string();
        let begin = format!("could not remove the secret in `{name}`: ");
        assert!(stays.starts_with(&begin), "{stays}");
        let refusal = read(&[named]).unwrap_err();
        assert!(refusal.contains("which contains NUL bytes"), "{refusal}");
    }

    #[test]
    fn a_removed_file_has_nothing_of_the_secret_left() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("secret"), folder.path().join("link"));
        fs::write(&path, "hunter2").unwrap();
        fs::hard_link(&path, &link).unwrap();
        // The variable with the secret leaves the file unread, but not in place.
        let named = (FILE, path.to_str().unwrap());
        let file = find(&[named, (SECRET, "set")]).ok().flatten().unwrap();
        file.remove().unwrap();
        assert!(!path.exists());
        assert_eq!(fs::read(&link).unwrap(), [0; 7]);
        file.remove().unwrap();
    }
}
