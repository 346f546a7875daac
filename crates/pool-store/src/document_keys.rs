//! Encrypts job documents at rest. A document is bound to its task. So neither the files of the
//! database nor its backups contain a document, and nobody without a key can store one.

use std::fmt;

use document_cipher::Cipher;
use pool_protocol::id::{PoolName, TaskId};
use sha2::{Digest as _, Sha256};

use crate::error::Error;
use crate::model::Payload;
use crate::state::Task;

/// Length in bytes of the digest that is the id of a key.
const ID: usize = 4;

/// What a document counts in addition to its bytes: its task, and the history of the task.
const BESIDE: usize = 4096;

/// The source of the current keys. They may change at any time.
pub trait DocumentKeySource: fmt::Debug + Send + Sync + 'static {
    /// Returns the current keys.
    fn document_keys(&self) -> DocumentKeys;
}

/// The keys of documents. The first one encrypts, and each decrypts.
#[derive(Clone)]
pub struct DocumentKeys(Vec<(String, Cipher)>);

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

    fn bound_to(&self) -> Vec<u8> {
        let Self {
            task,
            pool,
            job,
            step,
        } = self;
        let (task, pool) = (task.to_string(), pool.to_string());
        // The last place is that of a key of the pool, which earlier versions had.
        serde_json::json!(["mayfly document v1", task, pool, job, step, null])
            .to_string()
            .into_bytes()
    }
}

pub(crate) struct StoredDocument {
    /// The id of the key with which it is encrypted.
    pub(crate) key: String,
    /// The encrypted document, followed by the nonce.
    pub(crate) data: Vec<u8>,
}

impl StoredDocument {
    /// Returns what the document counts of the share of its pool, in bytes.
    pub(crate) fn size(&self) -> i64 {
        i64::try_from(self.data.len() + BESIDE).unwrap_or(i64::MAX)
    }
}

impl DocumentKeys {
    /// Returns keys with these bytes.
    pub fn new(keys: impl IntoIterator<Item = [u8; 32]>) -> Self {
        let key = |key: [u8; 32]| (id(&key), Cipher::new(key));
        Self(keys.into_iter().map(key).collect())
    }

    pub(crate) fn encrypt(
        &self,
        owner: &Owner<'_>,
        Payload(mut data): Payload,
    ) -> Result<StoredDocument, Error> {
        let failed =
            |why: &str| Error::Unavailable(format!("cannot encrypt a document: {why}").into());
        let (id, key) = self.0.first().ok_or_else(|| failed("there is no key"))?;
        key.encrypt(&owner.bound_to(), &mut data)
            .map_err(|why| failed(&why))?;
        Ok(StoredDocument {
            key: id.clone(),
            data,
        })
    }

    /// Decrypts a document. Returns why it cannot be read.
    pub(crate) fn decrypt(
        &self,
        owner: &Owner<'_>,
        stored: StoredDocument,
    ) -> Result<Payload, String> {
        let StoredDocument {
            key: key_id,
            mut data,
        } = stored;
        let mut keys = self.0.iter();
        let Some((_, key)) = keys.find(|(id, _)| *id == key_id) else {
            return Err(format!(
                "the job document is stored with key `{key_id}`, which the hub does not have: when you replace the key of job tokens, keep the old one until no run waits that was stored with it"
            ));
        };
        let opened = key.decrypt(&owner.bound_to(), &mut data);
        opened.ok_or("the job document in the store was changed, or is of another task")?;
        Ok(Payload(data))
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
        Payload(b"{\"jobId\":\"7\"}".to_vec())
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
        let (id, data) = (stored.key, stored.data);
        let stored_as = |data: &[u8]| StoredDocument {
            key: id.clone(),
            data: data.to_vec(),
        };
        let both = DocumentKeys::new([new, old]);
        let same = || stored_as(&data);
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
            (own, stored_as(&changed)),
            (own, stored_as(&data[..23])),
            (own, stored_as(&[])),
        ] {
            let error = both.decrypt(&owner, stored).unwrap_err();
            assert!(error.contains("was changed"), "{error}");
        }
        let again = both.encrypt(&own, document()).unwrap();
        assert_ne!(again.key, id, "the first key encrypts");
        assert_eq!(format!("{:?}", DocumentKeys::new([old])).len(), 12);
    }
}
