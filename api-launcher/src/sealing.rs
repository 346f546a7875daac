//! Seals and opens job documents with HPKE in base mode (RFC 9180). Only the agents of a pool can open them, and each
//! is bound to its task. Sealing protects the database of a hub and its backups. The process of the hub still sees each
//! document at its dispatch.

use std::io;
use std::path::Path;

use artifact_store::hex;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hpke::aead::ChaCha20Poly1305;
use hpke::kdf::HkdfSha256;
use hpke::kem::X25519HkdfSha256;
use hpke::{Deserializable as _, Kem as _, OpModeR, OpModeS, Serializable as _};
use job_contract::encoding::MAX_DOCUMENT_BYTES;
use pool_protocol::id::{PoolName, TaskId};
use pool_protocol::task::SealedPayload;
use runtime::regular_file;
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};

type Kem = X25519HkdfSha256;

const INFO: &[u8] = b"mayfly job data v1";
/// Length in bytes of a private key, a public key and an encapsulated key.
const KEY_BYTES: usize = 32;
/// Length in bytes of the digest that is the id of a key.
const ID_BYTES: usize = 4;
/// The largest key file that is read.
const MAX_FILE_BYTES: u64 = 1024;
const ZSTD_LEVEL: i32 = 3;

/// The task to which a sealed document is bound.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Envelope<'a> {
    pub(crate) pool: &'a PoolName,
    pub(crate) task: TaskId,
    pub(crate) job: &'a str,
    pub(crate) step: &'a str,
}

impl Envelope<'_> {
    fn text(&self) -> String {
        let Self {
            pool,
            task,
            job,
            step,
        } = self;
        format!("v1\n{pool}\n{task}\n{job}\n{step}")
    }
}

/// The public half of a pool's key. It seals documents.
#[derive(Clone, Debug)]
pub(crate) struct PublicKey {
    id: String,
    key: <Kem as hpke::Kem>::PublicKey,
}

/// A document could not be sealed.
#[derive(Debug, thiserror::Error)]
#[error("the job document could not be sealed to key `{0}`")]
pub(crate) struct SealError(String);

impl PublicKey {
    /// Parses a key: base64 of 32 bytes. The caller's error must not contain the text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let key = BASE64_STANDARD.decode(text.trim()).ok()?;
        let key = <Kem as hpke::Kem>::PublicKey::from_bytes(&key).ok()?;
        let key = Self {
            id: id(&key.to_bytes()),
            key,
        };
        // Some points are not valid keys. Only their use shows it.
        key.encrypt(b"", b"").is_ok().then_some(key)
    }

    /// Returns the id of the key.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Returns the text that [`parse`](Self::parse) reads.
    pub(crate) fn text(&self) -> String {
        BASE64_STANDARD.encode(self.key.to_bytes())
    }

    /// Seals a document. Returns the encapsulated key, followed by the ciphertext.
    pub(crate) fn seal(&self, envelope: &Envelope<'_>, json: &[u8]) -> Result<Vec<u8>, SealError> {
        let failed = || SealError(self.id.clone());
        let plaintext = zstd::bulk::compress(json, ZSTD_LEVEL).map_err(|_| failed())?;
        let sealed = self.encrypt(&plaintext, envelope.text().as_bytes());
        sealed.map_err(|_| failed())
    }

    fn encrypt(&self, plaintext: &[u8], aad: &[u8]) -> Result<Vec<u8>, hpke::HpkeError> {
        let (encapsulated, ciphertext) = hpke::single_shot_seal::<ChaCha20Poly1305, HkdfSha256, Kem>(
            &OpModeS::Base,
            &self.key,
            INFO,
            plaintext,
            aad,
        )?;
        Ok([encapsulated.to_bytes().as_slice(), ciphertext.as_slice()].concat())
    }
}

/// Returns a sealed document in the form of the protocol.
pub(crate) fn to_payload(key_id: String, sealed: &[u8]) -> SealedPayload {
    let (encapsulated, ciphertext) = sealed.split_at(KEY_BYTES.min(sealed.len()));
    SealedPayload {
        key_id,
        encapsulated_key: BASE64_STANDARD.encode(encapsulated),
        ciphertext: BASE64_STANDARD.encode(ciphertext),
    }
}

/// The private half of a pool's key. It opens documents.
pub(crate) struct PrivateKey {
    public: PublicKey,
    key: <Kem as hpke::Kem>::PrivateKey,
}

/// Why a sealed document was not opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("the agent has no key `{0}`: give it the private half in `private_key_dir`")]
    NoKey(String),
    #[error("the agent cannot use its key `{id}`: {reason}")]
    Key { id: String, reason: String },
    #[error("the sealed job document does not open: it was changed, or belongs to another task")]
    Changed,
}

impl PrivateKey {
    /// Returns a new key.
    pub(crate) fn new() -> Self {
        let (key, public) = Kem::gen_keypair();
        let id = id(&public.to_bytes());
        let public = PublicKey { id, key: public };
        Self { public, key }
    }

    /// Returns the public half.
    pub(crate) const fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Returns the content of the key file.
    pub(crate) fn text(&self) -> SecretString {
        BASE64_STANDARD.encode(self.key.to_bytes()).into()
    }

    /// Returns the name of the key file.
    pub(crate) fn file_name(&self) -> String {
        file_name(&self.public.id)
    }

    /// Reads the key with this id from a folder. Keys may be added to the folder at any time.
    fn find(folder: Option<&Path>, key_id: &str) -> Result<Self, OpenError> {
        let is_id = key_id.len() == 2 * ID_BYTES && key_id.bytes().all(|b| b.is_ascii_hexdigit());
        let no_key = || OpenError::NoKey(key_id.chars().take(2 * ID_BYTES).collect());
        let folder = folder.filter(|_| is_id).ok_or_else(no_key)?;
        let file = folder.join(file_name(key_id));
        let unusable = |reason: String| OpenError::Key {
            id: key_id.to_owned(),
            reason: format!("`{}` {reason}", file.display()),
        };
        let text = match regular_file::read_text(&file, MAX_FILE_BYTES) {
            Ok(text) => SecretString::from(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(no_key()),
            Err(error) => return Err(unusable(format!("cannot be read: {error}"))),
        };
        let key = BASE64_STANDARD.decode(text.expose_secret().trim()).ok();
        let key = key.and_then(|key| <Kem as hpke::Kem>::PrivateKey::from_bytes(&key).ok());
        let key = key.ok_or_else(|| unusable("has no private key".to_owned()))?;
        let public = Kem::sk_to_pk(&key);
        let id = id(&public.to_bytes());
        if id != key_id {
            return Err(unusable(format!("has the key `{id}`")));
        }
        let public = PublicKey { id, key: public };
        Ok(Self { public, key })
    }
}

/// Opens a document with the key in `folder` that the document names.
pub(crate) fn open(
    folder: Option<&Path>,
    envelope: &Envelope<'_>,
    sealed: &SealedPayload,
) -> Result<Vec<u8>, OpenError> {
    let key = PrivateKey::find(folder, &sealed.key_id)?;
    let opened = || {
        let encapsulated = BASE64_STANDARD.decode(&sealed.encapsulated_key).ok()?;
        let ciphertext = BASE64_STANDARD.decode(&sealed.ciphertext).ok()?;
        let plaintext = hpke::single_shot_open::<ChaCha20Poly1305, HkdfSha256, Kem>(
            &OpModeR::Base,
            &key.key,
            &<Kem as hpke::Kem>::EncappedKey::from_bytes(&encapsulated).ok()?,
            INFO,
            &ciphertext,
            envelope.text().as_bytes(),
        );
        zstd::bulk::decompress(&plaintext.ok()?, MAX_DOCUMENT_BYTES).ok()
    };
    opened().ok_or(OpenError::Changed)
}

fn file_name(id: &str) -> String {
    format!("{id}.key")
}

fn id(public: &[u8]) -> String {
    hex(&Sha256::digest(public)[..ID_BYTES])
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rstest::rstest;

    use super::*;

    const JSON: &[u8] = br#"{"jobId":"7"}"#;

    struct Keys {
        folder: tempfile::TempDir,
        key: PrivateKey,
        pool: PoolName,
        task: TaskId,
    }

    impl Keys {
        fn new() -> Self {
            let (folder, key) = (tempfile::tempdir().unwrap(), PrivateKey::new());
            let file = folder.path().join(key.file_name());
            fs::write(file, key.text().expose_secret()).unwrap();
            Self {
                folder,
                key,
                pool: "eu".parse().unwrap(),
                task: TaskId::new(),
            }
        }

        fn envelope(&self) -> Envelope<'_> {
            Envelope {
                pool: &self.pool,
                task: self.task,
                job: "7",
                step: "a",
            }
        }

        fn sealed(&self) -> SealedPayload {
            let public = PublicKey::parse(&self.key.public().text()).unwrap();
            let sealed = public.seal(&self.envelope(), JSON).unwrap();
            to_payload(public.id().to_owned(), &sealed)
        }

        fn open(
            &self,
            envelope: &Envelope<'_>,
            sealed: &SealedPayload,
        ) -> Result<Vec<u8>, OpenError> {
            open(Some(self.folder.path()), envelope, sealed)
        }
    }

    #[test]
    fn a_document_opens_only_for_its_own_task() {
        let keys = Keys::new();
        let (sealed, own) = (keys.sealed(), keys.envelope());
        assert_eq!(keys.open(&own, &sealed).unwrap(), JSON);
        let pool = "us".parse().unwrap();
        for other in [
            Envelope { pool: &pool, ..own },
            Envelope {
                task: TaskId::new(),
                ..own
            },
            Envelope { job: "8", ..own },
            Envelope { step: "b", ..own },
            Envelope {
                job: "7\na",
                step: "",
                ..own
            },
        ] {
            let opened = keys.open(&other, &sealed);
            assert!(matches!(opened, Err(OpenError::Changed)), "{other:?}");
        }
    }

    #[rstest]
    #[case(|sealed: &mut SealedPayload| sealed.ciphertext.insert(0, 'A'))]
    #[case(|sealed: &mut SealedPayload| sealed.ciphertext.clear())]
    #[case(|sealed: &mut SealedPayload| sealed.ciphertext = "!".to_owned())]
    #[case(|sealed: &mut SealedPayload| sealed.encapsulated_key.clear())]
    #[case(|sealed: &mut SealedPayload| sealed.encapsulated_key = BASE64_STANDARD.encode([0; KEY_BYTES]))]
    #[case(|sealed: &mut SealedPayload| std::mem::swap(&mut sealed.ciphertext, &mut sealed.encapsulated_key))]
    fn a_changed_document_does_not_open(#[case] change: fn(&mut SealedPayload)) {
        let keys = Keys::new();
        let mut sealed = keys.sealed();
        change(&mut sealed);
        let opened = keys.open(&keys.envelope(), &sealed);
        assert!(matches!(opened, Err(OpenError::Changed)));
    }

    #[test]
    fn the_error_names_the_missing_key() {
        let keys = Keys::new();
        let own = keys.envelope();
        let mut sealed = keys.sealed();
        let error = open(None, &own, &sealed).unwrap_err().to_string();
        assert!(error.contains(&sealed.key_id), "{error}");
        let file = keys.folder.path().join(keys.key.file_name());
        fs::write(&file, PrivateKey::new().text().expose_secret()).unwrap();
        assert!(matches!(
            keys.open(&own, &sealed),
            Err(OpenError::Key { .. })
        ));
        fs::write(&file, "planted").unwrap();
        let error = keys.open(&own, &sealed).unwrap_err().to_string();
        assert!(
            error.contains("has no private key") && !error.contains("planted"),
            "{error}"
        );
        for id in ["00000000", "../../key", ""] {
            sealed.key_id = id.to_owned();
            assert!(
                matches!(keys.open(&own, &sealed), Err(OpenError::NoKey(_))),
                "{id}"
            );
        }
    }

    #[rstest]
    #[case("")]
    #[case("c2hvcnQ=")]
    #[case("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=")]
    fn an_invalid_public_key_is_refused(#[case] text: &str) {
        assert!(PublicKey::parse(text).is_none());
    }
}
