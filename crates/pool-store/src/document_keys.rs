//! Encrypts job documents at rest, with XChaCha20-Poly1305. A document is bound to its task. So neither the files of the
//! database nor its backups contain a document, and nobody without a key can store one.

use std::fmt;

use chacha20poly1305::aead::{AeadInOut as _, Generate as _, KeyInit as _};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use pool_protocol::id::{PoolName, TaskId};
use sha2::{Digest as _, Sha256};

use crate::error::Error;
use crate::model::Payload;
use crate::state::Task;

/// Length in bytes of a nonce, which is stored behind the document.
const NONCE: usize = 24;
/// Length in bytes of the digest that is the id of a key.
const ID: usize = 4;

/// The source of the current keys. They may change at any time.
pub trait DocumentKeySource: fmt::Debug + Send + Sync + 'static {
    /// Returns the current keys.
    fn document_keys(&self) -> DocumentKeys;
}

/// The keys of documents. The first one encrypts, and each decrypts.
#[derive(Clone)]
pub struct DocumentKeys(Vec<(String, XChaCha20Poly1305)>);

/// Whose document it is. It opens for no other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner<'a> {
    pub(crate) task: TaskId,
    pub(crate) pool: &'a PoolName,
    pub(crate) job: &'a str,
    pub(crate) step: &'a str,
}

impl<'a> Owner<'a> {
    pub(crate) fn of(task: &'a Task) -> Self {
        Self {
            task: task.id,
            pool: &task.pool,
            job: &task.job,
            step: &task.step,
        }
    }

    fn bound_to(&self, payload: &Payload) -> Vec<u8> {
        let Self {
            task,
            pool,
            job,
            step,
        } = self;
        let (task, pool) = (task.to_string(), pool.to_string());
        serde_json::json!(["mayfly document v1", task, pool, job, step, payload.key_id])
            .to_string()
            .into_bytes()
    }
}

/// A document as it is stored.
#[derive(Debug)]
pub(crate) struct StoredDocument {
    /// The id of the key with which it is encrypted.
    pub(crate) stored_key: String,
    pub(crate) payload: Payload,
}

impl DocumentKeys {
    /// Returns keys with these bytes.
    pub fn new(keys: impl IntoIterator<Item = [u8; 32]>) -> Self {
        let key = |key: [u8; 32]| (id(&key), XChaCha20Poly1305::new(&key.into()));
        Self(keys.into_iter().map(key).collect())
    }

    /// Encrypts a document.
    pub(crate) fn encrypt(
        &self,
        owner: &Owner<'_>,
        payload: Payload,
    ) -> Result<StoredDocument, Error> {
        let failed =
            |why: &str| Error::Unavailable(format!("cannot encrypt a document: {why}").into());
        let (id, key) = self.0.first().ok_or_else(|| failed("there is no key"))?;
        let nonce = XNonce::try_generate().map_err(|error| failed(&error.to_string()))?;
        let bound_to = owner.bound_to(&payload);
        let Payload { key_id, mut data } = payload;
        key.encrypt_in_place(&nonce, &bound_to, &mut data)
            .map_err(|_| failed("it is too long"))?;
        data.extend_from_slice(&nonce);
        Ok(StoredDocument {
            stored_key: id.clone(),
            payload: Payload { key_id, data },
        })
    }

    /// Decrypts a document. Returns why it cannot be read.
    pub(crate) fn decrypt(
        &self,
        owner: &Owner<'_>,
        stored: StoredDocument,
    ) -> Result<Payload, String> {
        let StoredDocument {
            stored_key,
            payload,
        } = stored;
        let mut keys = self.0.iter();
        let Some((_, key)) = keys.find(|(id, _)| *id == stored_key) else {
            return Err(format!(
                "the job document is stored with key `{stored_key}`, which the hub does not have: when you replace the key of job tokens, keep the old one until no run waits that was stored with it"
            ));
        };
        let changed =
            || "the job document in the store was changed, or is of another task".to_owned();
        let bound_to = owner.bound_to(&payload);
        let Payload { key_id, mut data } = payload;
        let length = data.len().checked_sub(NONCE).ok_or_else(changed)?;
        let nonce = data.split_off(length);
        let nonce = XNonce::try_from(nonce.as_slice()).map_err(|_| changed())?;
        key.decrypt_in_place(&nonce, &bound_to, &mut data)
            .map_err(|_| changed())?;
        Ok(Payload { key_id, data })
    }
}

impl DocumentKeySource for DocumentKeys {
    fn document_keys(&self) -> DocumentKeys {
        self.clone()
    }
}

impl fmt::Debug for DocumentKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|(id, _)| id))
            .finish()
    }
}

fn id(key: &[u8]) -> String {
    let digest = Sha256::new()
        .chain_update(b"mayfly document key")
        .chain_update(key);
    let digest = digest.finalize();
    let digits = digest.iter().take(ID);
    digits.fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Payload {
        Payload {
            key_id: None,
            data: b"{\"jobId\":\"7\"}".to_vec(),
        }
    }

    #[test]
    fn a_document_opens_with_its_key_for_its_task_alone() {
        let (old, new) = ([1; 32], [2; 32]);
        let (eu, us) = ("eu".parse().unwrap(), "us".parse().unwrap());
        let own = Owner {
            task: TaskId::new(),
            pool: &eu,
            job: "7",
            step: "a",
        };
        let stored = DocumentKeys::new([old]).encrypt(&own, document()).unwrap();
        let (id, data) = (stored.stored_key, stored.payload.data);
        let stored_as = |key_id: Option<&str>, data: &[u8]| StoredDocument {
            stored_key: id.clone(),
            payload: Payload {
                key_id: key_id.map(str::to_owned),
                data: data.to_vec(),
            },
        };
        let both = DocumentKeys::new([new, old]);
        let same = || stored_as(None, &data);
        assert_eq!(both.decrypt(&own, same()), Ok(document()));
        let gone = DocumentKeys::new([new]).decrypt(&own, same());
        assert!(gone.unwrap_err().contains(&format!("key `{id}`")));
        let mut changed = data.clone();
        changed[0] ^= 1;
        let other = Owner {
            task: TaskId::new(),
            ..own
        };
        for (owner, stored) in [
            (other, same()),
            (Owner { pool: &us, ..own }, same()),
            (Owner { job: "8", ..own }, same()),
            (Owner { step: "b", ..own }, same()),
            (own, stored_as(Some("9f31c2aa"), &data)),
            (own, stored_as(None, &changed)),
            (own, stored_as(None, &data[..NONCE - 1])),
            (own, stored_as(None, &[])),
        ] {
            let error = both.decrypt(&owner, stored).unwrap_err();
            assert!(error.contains("was changed"), "{error}");
        }
        let again = both.encrypt(&own, document()).unwrap();
        assert_ne!(again.stored_key, id, "the first key encrypts");
        assert_eq!(format!("{:?}", DocumentKeys::new([old])).len(), 12);
    }
}
