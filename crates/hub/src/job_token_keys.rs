//! The keys of job tokens, access tokens and sessions, and of the documents in the store. The first key signs and encrypts,
//! and every key verifies and decrypts. So a key can be replaced while tokens of the old one are in use.

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::secret;
use pool_protocol::token::{AccessGrant, JobGrant, JobTokenKey};
use pool_store::{DocumentKeySource, DocumentKeys};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::watched_file::WatchedFile;

/// The largest number of keys. Two are enough to replace a key.
const MAX_KEYS: usize = 2;

/// What the keys of documents are derived for. Another text makes all stored documents unreadable.
const DOCUMENTS: &str = "mayfly documents v1";

/// One or two keys.
#[derive(Debug)]
pub(crate) struct JobTokenKeys(Vec<JobTokenKey>);

impl JobTokenKeys {
    /// Parses keys that are separated by blanks or newlines.
    pub(crate) fn parse(text: &str) -> Result<Self, Vec<String>> {
        let keys: Result<Vec<JobTokenKey>, Vec<String>> = text
            .split_whitespace()
            .map(|key| match secret::decode(key) {
                Ok(bytes) => Ok(JobTokenKey::new(bytes)),
                Err(error) => Err(vec![format!("has a key that {error}")]),
            })
            .collect();
        let keys = keys?;
        match keys.len() {
            0 => Err(vec![
                "has no key: 32 random bytes or more, as base64".to_owned(),
            ]),
            1..=MAX_KEYS => Ok(Self(keys)),
            many => Err(vec![format!(
                "has {many} keys, and {MAX_KEYS} are possible"
            )]),
        }
    }

    /// Returns the token of a lease.
    pub(crate) fn sign(&self, grant: JobGrant) -> String {
        self.0
            .first()
            .map_or_else(String::new, |key| key.sign(grant))
    }

    /// Returns the token of a session at the status page. It contains `session`.
    pub(crate) fn sign_session(&self, session: &str) -> String {
        self.0
            .first()
            .map_or_else(String::new, |key| key.sign_session(session))
    }

    /// Returns the content of a session token, if one of the keys made it.
    pub(crate) fn verify_session<'t>(&self, token: &'t str) -> Option<&'t str> {
        self.0.iter().find_map(|key| key.verify_session(token))
    }

    /// Returns the rights of a job token, if one of the keys made it.
    pub(crate) fn verify(&self, token: &str) -> Option<JobGrant> {
        self.0.iter().find_map(|key| key.verify(token))
    }

    /// Returns an access token.
    pub(crate) fn sign_access(&self, grant: &AccessGrant) -> String {
        self.0
            .first()
            .map_or_else(String::new, |key| key.sign_access(grant))
    }

    /// Returns the rights of an access token, if one of the keys made it.
    pub(crate) fn verify_access(&self, token: &str) -> Option<AccessGrant> {
        self.0.iter().find_map(|key| key.verify_access(token))
    }
}

/// The source of the keys.
#[derive(Debug)]
pub(crate) enum KeySource {
    Given(Arc<JobTokenKeys>),
    File(WatchedFile<JobTokenKeys>),
}

impl KeySource {
    /// Reads the keys in a file.
    pub(crate) fn file(path: &Path) -> Result<Self, Vec<String>> {
        WatchedFile::open(path, JobTokenKeys::parse).map(Self::File)
    }

    /// Returns the current keys.
    pub(crate) fn current(&self) -> Arc<JobTokenKeys> {
        match self {
            Self::Given(keys) => Arc::clone(keys),
            Self::File(file) => file.current(),
        }
    }

    /// Returns why the file can no longer be used.
    pub(crate) fn problem(&self) -> Option<String> {
        match self {
            Self::Given(_) => None,
            Self::File(file) => file.problem(),
        }
    }
}

impl DocumentKeySource for KeySource {
    fn document_keys(&self) -> DocumentKeys {
        let keys = self.current();
        DocumentKeys::new(keys.0.iter().map(|key| key.derive(DOCUMENTS)))
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

/// Returns 32 bytes from four UUIDs of version 4, which have 488 random bits.
fn random_key() -> [u8; 32] {
    let mut key = Sha256::new();
    for _ in 0..4 {
        key.update(Uuid::new_v4());
    }
    key.finalize().into()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use pool_protocol::id::{LeaseId, TaskId};
    use rstest::rstest;

    use super::*;

    fn grant() -> JobGrant {
        JobGrant {
            task: TaskId::new(),
            lease: LeaseId::new(),
            fencing_token: 1,
        }
    }

    #[test]
    fn the_first_key_signs_and_each_verifies() {
        let [old, new] = [(); 2].map(|()| STANDARD.encode(random_key()));
        let before = JobTokenKeys::parse(&old).unwrap();
        let during = JobTokenKeys::parse(&format!("{new}\n{old}\n")).unwrap();
        let after = JobTokenKeys::parse(&new).unwrap();
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
        let errors = JobTokenKeys::parse(text).unwrap_err();
        assert!(errors[0].starts_with(expected), "{errors:?}");
        assert!(!errors[0].contains("no-base64!"));
    }

    #[test]
    fn a_third_key_is_refused() {
        let three = [(); 3].map(|()| STANDARD.encode(random_key())).join(" ");
        assert_eq!(
            JobTokenKeys::parse(&three).unwrap_err(),
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
        let source = KeySource::file(&path).unwrap();
        let token = source.current().sign(grant());
        assert!(source.current().verify(&token).is_some());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
