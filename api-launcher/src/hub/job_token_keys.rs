//! The keys of job tokens and access tokens. The first one signs; each of them verifies, so that a key can be replaced while executors have
//! tokens of the old one.

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::secret;
use pool_protocol::token::{AccessGrant, JobGrant, JobTokenKey};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::watched_file::WatchedFile;

/// More are not needed to replace one.
const MOST: usize = 2;

/// One or two keys.
#[derive(Debug)]
pub(crate) struct JobTokenKeys(Vec<JobTokenKey>);

impl JobTokenKeys {
    /// Reads keys that stand between blanks or on lines of their own.
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
            1..=MOST => Ok(Self(keys)),
            many => Err(vec![format!("has {many} keys, and {MOST} are possible")]),
        }
    }

    /// Makes the token of a lease.
    pub(crate) fn sign(&self, grant: JobGrant) -> String {
        self.0
            .first()
            .map_or_else(String::new, |key| key.sign(grant))
    }

    /// Makes the token of a session at the status page.
    pub(crate) fn sign_session(&self, session: &str) -> String {
        self.0
            .first()
            .map_or_else(String::new, |key| key.sign_session(session))
    }

    /// Returns what the token of a session says, if one of the keys made it.
    pub(crate) fn verify_session<'t>(&self, token: &'t str) -> Option<&'t str> {
        self.0.iter().find_map(|key| key.verify_session(token))
    }

    /// Returns what a token is good for, if one of the keys made it.
    pub(crate) fn verify(&self, token: &str) -> Option<JobGrant> {
        self.0.iter().find_map(|key| key.verify(token))
    }

    /// Makes an access token.
    pub(crate) fn sign_access(&self, grant: &AccessGrant) -> String {
        self.0
            .first()
            .map_or_else(String::new, |key| key.sign_access(grant))
    }

    /// Returns what an access token is good for, if one of the keys made it.
    pub(crate) fn verify_access(&self, token: &str) -> Option<AccessGrant> {
        self.0.iter().find_map(|key| key.verify_access(token))
    }
}

/// Where the keys are.
#[derive(Debug)]
pub(crate) enum KeySource {
    Given(Arc<JobTokenKeys>),
    File(WatchedFile<JobTokenKeys>),
}

impl KeySource {
    /// Keys in a file.
    pub(crate) fn file(path: &Path) -> Result<Self, Vec<String>> {
        WatchedFile::open(path, JobTokenKeys::parse).map(Self::File)
    }

    /// The keys as they are now.
    pub(crate) fn current(&self) -> Arc<JobTokenKeys> {
        match self {
            Self::Given(keys) => Arc::clone(keys),
            Self::File(file) => file.current(),
        }
    }

    /// Why the file cannot be used any more.
    pub(crate) fn problem(&self) -> Option<String> {
        match self {
            Self::Given(_) => None,
            Self::File(file) => file.problem(),
        }
    }
}

/// Makes a file with a new key for its owner alone, unless there is a file. It is there as a whole or not at all.
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

/// 32 bytes of four version 4 UUIDs, which have 488 random bits.
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
    fn what_is_no_key_is_refused_and_not_quoted(#[case] text: &str, #[case] expected: &str) {
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
    fn a_key_is_made_once_for_its_owner_alone() {
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
