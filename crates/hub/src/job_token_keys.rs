//! The keys of job tokens, access tokens and sessions, and of the documents in the store. The first key signs and encrypts,
//! and every key verifies and decrypts. So a key can be replaced while tokens of the old one are in use.

use std::io::{self, Write as _};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::secret;
use pool_protocol::token::{JobTokenKeys, random_key};
use pool_store::{DocumentKeySource, DocumentKeys};

use super::watched_file::WatchedFile;

/// The largest number of keys. Two are enough to replace a key.
const MAX_KEYS: usize = 2;

/// What the keys of documents are derived for. Another text makes all stored documents unreadable.
const DOCUMENTS: &str = "mayfly documents v1";

/// Parses one or two keys that are separated by blanks or newlines.
pub(crate) fn parse(text: &str) -> Result<JobTokenKeys, Vec<String>> {
    let decode = |key| secret::decode(key).map_err(|error| vec![format!("has a key that {error}")]);
    let keys: Result<Vec<_>, _> = text.split_whitespace().map(decode).collect();
    let mut keys = keys?.into_iter();
    let Some(first) = keys.next() else {
        return Err(vec![
            "has no key: 32 random bytes or more, as base64".to_owned(),
        ]);
    };
    match keys.len() + 1 {
        ..=MAX_KEYS => Ok(JobTokenKeys::new(first, keys.collect())),
        many => Err(vec![format!(
            "has {many} keys, and {MAX_KEYS} are possible"
        )]),
    }
}

impl DocumentKeySource for WatchedFile<JobTokenKeys> {
    fn document_keys(&self) -> DocumentKeys {
        DocumentKeys::new(self.current().derive(DOCUMENTS))
    }
}

/// Creates a file with a new key, unless the file exists. Only its owner can read it. It appears with its whole
/// content.
pub(crate) fn create_file(path: &Path) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    writeln!(file, "{}", STANDARD.encode(random_key()))?;
    file.as_file().sync_all()?;
    match file.persist_noclobber(path) {
        Ok(_) => Ok(()),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error.error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use pool_protocol::id::{LeaseId, TaskId};
    use pool_protocol::lease::LeaseRef;
    use rstest::rstest;

    use super::*;

    fn grant() -> LeaseRef {
        LeaseRef {
            task: TaskId::new(),
            lease: LeaseId::new(),
            fencing_token: 1,
        }
    }

    #[test]
    fn the_first_key_signs_and_each_verifies() {
        let [old, new] = [(); 2].map(|()| STANDARD.encode(random_key()));
        let before = parse(&old).unwrap();
        let during = parse(&format!("{new}\n{old}\n")).unwrap();
        let after = parse(&new).unwrap();
        let grant = grant();
        let (first, second) = (before.sign(grant), during.sign(grant));
        assert_ne!(first, second);
        assert_eq!(during.verify(&first), Some(grant));
        assert_eq!(after.verify(&second), Some(grant));
        assert_eq!(after.verify(&first), None);
        assert_eq!(before.verify(&second), None);
    }

    #[rstest]
    #[case("", "has no key")]
    #[case("c2hvcnQ=", "has a key that holds 5 bytes")]
    #[case("no-base64!", "has a key that is not base64")]
    fn an_invalid_key_is_refused_and_not_quoted(#[case] text: &str, #[case] expected: &str) {
        let errors = parse(text).unwrap_err();
        assert!(errors[0].starts_with(expected), "{errors:?}");
        assert!(!errors[0].contains("no-base64!"));
    }

    #[test]
    fn a_third_key_is_refused() {
        let three = [(); 3].map(|()| STANDARD.encode(random_key())).join(" ");
        assert_eq!(
            parse(&three).unwrap_err(),
            ["has 3 keys, and 2 are possible"]
        );
    }

    #[test]
    fn a_key_is_created_once_and_only_its_owner_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        create_file(&path).unwrap();
        let first = fs::read_to_string(&path).unwrap();
        create_file(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), first);
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let source = WatchedFile::open(&path, parse).unwrap();
        let token = source.current().sign(grant());
        assert!(source.current().verify(&token).is_some());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
