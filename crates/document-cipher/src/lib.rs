//! Encrypts documents at rest, with XChaCha20-Poly1305. It must not know what a document is, or whose.
//!
//! This is a crate of its own so that it is optimised in every profile: the code of a cipher is compiled where it is called, and
//! unoptimised it takes seconds for a document of megabytes.

use std::fmt;

use chacha20poly1305::aead::{AeadInOut as _, Generate as _, KeyInit as _};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};

/// Length in bytes of a nonce, which is stored behind the document.
const NONCE: usize = 24;

/// One key.
#[derive(Clone)]
pub struct Cipher(XChaCha20Poly1305);

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cipher")
    }
}

impl Cipher {
    /// Returns the cipher of a key.
    pub fn new(key: [u8; 32]) -> Self {
        Self(XChaCha20Poly1305::new(&key.into()))
    }

    /// Replaces a document by its ciphertext and a new nonce. It opens for the same `owner` alone.
    ///
    /// # Errors
    /// Fails without random numbers, or if the document is too long.
    pub fn encrypt(&self, owner: &[u8], document: &mut Vec<u8>) -> Result<(), String> {
        let nonce = XNonce::try_generate().map_err(|error| error.to_string())?;
        let encrypted = self.0.encrypt_in_place(&nonce, owner, document);
        encrypted.map_err(|_| "it is too long".to_owned())?;
        document.extend_from_slice(&nonce);
        Ok(())
    }

    /// Replaces a ciphertext and its nonce by the document. Returns `None` if it was changed, or has another key or owner. What is
    /// in `document` then has no meaning.
    #[must_use]
    pub fn decrypt(&self, owner: &[u8], document: &mut Vec<u8>) -> Option<()> {
        let length = document.len().checked_sub(NONCE)?;
        let nonce = document.split_off(length);
        let nonce = XNonce::try_from(nonce.as_slice()).ok()?;
        self.0.decrypt_in_place(&nonce, owner, document).ok()
    }
}
