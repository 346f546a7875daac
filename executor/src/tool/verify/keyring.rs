//! The OpenPGP signatures over checksum lists. Only this module knows `pgp`. A build without the feature `full` has `no_keyring` in
//! its place.

use std::{fs, io, path::Path};

use job_contract::job::Tool;
use pgp::{
    composed::{Deserializable, DetachedSignature, SignedPublicKey, SignedPublicSubKey},
    crypto::hash::HashAlgorithm,
    packet::{Signature, SignatureType},
    types::{Fingerprint, KeyDetails, KeyId, Tag},
};

/// HashiCorp's security key, C874 011F 0AB4 0511 0D02 1055 3436 5D94 72D7 468F, published at
/// <https://www.hashicorp.com/security>. Releases are signed by its signing subkeys.
const HASHICORP: &str = include_str!("../keys/hashicorp.asc");

/// OpenTofu's key, E3E6 E43D 84CB 852E ADB0 051D 0C0A F313 E5FD 9F80, published at
/// <https://get.opentofu.org/opentofu.asc>.
const OPENTOFU: &str = include_str!("../keys/opentofu.asc");

/// Whether this build checks signatures.
pub(crate) const IS_BUILT: bool = true;

/// Why a signature was not accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SignatureError {
    #[error("it does not match the signed file")]
    Bad(#[source] pgp::errors::Error),
    #[error("it was made by {signer}, which is not trusted here")]
    UnknownSigner { signer: String },
    #[error("it uses {0}, which is too weak")]
    WeakHash(HashAlgorithm),
    #[error("it is no OpenPGP signature over a file")]
    NotASignature,
    #[error("it cannot be read as OpenPGP data")]
    Unreadable(#[source] pgp::errors::Error),
    #[error("it cannot be read")]
    Io(#[from] io::Error),
    #[error("it holds no key that may sign")]
    NoKeys,
}

impl SignatureError {
    /// Whether another signature may be by a key that is trusted.
    pub(crate) const fn is_by_unknown_signer(&self) -> bool {
        matches!(self, Self::UnknownSigner { .. })
    }
}

/// Keys whose signatures are trusted.
///
/// A key that has expired since is still accepted. The keys are pinned here or by the operator, and old releases keep
/// their signatures by subkeys that expired years ago. A revoked key is refused.
#[derive(Debug)]
pub(crate) struct Keyring {
    certificates: Vec<SignedPublicKey>,
}

impl Keyring {
    /// The publisher's keys. A publisher is not trusted for the other's tool.
    pub(crate) fn publisher(tool: Tool) -> Result<Self, SignatureError> {
        let armoured = match tool {
            Tool::Terraform => HASHICORP,
            Tool::OpenTofu => OPENTOFU,
        };
        Self::of(armoured.as_bytes())
    }

    /// The keys of this text, armoured or binary.
    pub(crate) fn of(keys: &[u8]) -> Result<Self, SignatureError> {
        Ok(Self {
            certificates: parse_keys(keys)?,
        })
    }

    /// Adds the keys of a file, armoured or binary.
    pub(crate) fn add_file(&mut self, path: &Path) -> Result<(), SignatureError> {
        self.certificates.extend(parse_keys(&fs::read(path)?)?);
        Ok(())
    }

    /// Checks a detached signature, armoured or binary, over `document`.
    ///
    /// If one file has several signatures, one by a trusted key is enough. But all signatures by trusted keys must be
    /// valid.
    pub(crate) fn check(&self, document: &[u8], signature: &[u8]) -> Result<(), SignatureError> {
        let (signatures, _) =
            DetachedSignature::from_reader_many(signature).map_err(SignatureError::Unreadable)?;
        let mut accepted = false;
        let mut unknown = None;
        for signature in signatures {
            let signature = signature.map_err(SignatureError::Unreadable)?.signature;
            match self.check_one(document, &signature) {
                Ok(()) => accepted = true,
                Err(error @ SignatureError::UnknownSigner { .. }) => unknown = Some(error),
                Err(error) => return Err(error),
            }
        }
        match (accepted, unknown) {
            (true, _) => Ok(()),
            (false, Some(error)) => Err(error),
            (false, None) => Err(SignatureError::NotASignature),
        }
    }

    fn check_one(&self, document: &[u8], signature: &Signature) -> Result<(), SignatureError> {
        if signature.typ() != Some(SignatureType::Binary) {
            return Err(SignatureError::NotASignature);
        }
        let hash = signature.hash_alg().ok_or(SignatureError::NotASignature)?;
        if !is_strong(hash) {
            return Err(SignatureError::WeakHash(hash));
        }
        let mut bad = None;
        for certificate in &self.certificates {
            match check_with(certificate, document, signature) {
                Some(Ok(())) => return Ok(()),
                Some(Err(error)) => bad = Some(error),
                None => {}
            }
        }
        Err(match bad {
            Some(error) => SignatureError::Bad(error),
            None => SignatureError::UnknownSigner {
                signer: signer(signature),
            },
        })
    }
}

/// `None` if the signer is none of this certificate's keys that may sign.
fn check_with(
    certificate: &SignedPublicKey,
    document: &[u8],
    signature: &Signature,
) -> Option<Result<(), pgp::errors::Error>> {
    let names = |fingerprint: Fingerprint, id: KeyId| {
        let (fingerprints, ids) = (signature.issuer_fingerprint(), signature.issuer_key_id());
        (fingerprints.is_empty() && ids.is_empty())
            || fingerprints.contains(&&fingerprint)
            || ids.contains(&&id)
    };
    let primary = &certificate.primary_key;
    let mut verdict = None;
    if primary_may_sign(certificate) && names(primary.fingerprint(), primary.legacy_key_id()) {
        verdict = Some(signature.verify(primary, document));
    }
    for subkey in &certificate.public_subkeys {
        if matches!(verdict, Some(Ok(()))) {
            break;
        }
        if names(subkey.fingerprint(), subkey.legacy_key_id())
            && subkey_may_sign(certificate, subkey)
        {
            verdict = Some(signature.verify(&subkey.key, document));
        }
    }
    verdict
}

/// The primary key certifies. It may also sign files, if its own certifications permit that or contain no rule.
fn primary_may_sign(certificate: &SignedPublicKey) -> bool {
    let primary = &certificate.primary_key;
    let mut flags = certificate
        .details
        .users
        .iter()
        .flat_map(|user| {
            user.signatures.iter().filter(|signature| {
                signature.is_certification()
                    && signature
                        .verify_certification(primary, Tag::UserId, &user.id)
                        .is_ok()
            })
        })
        .map(Signature::key_flags)
        .peekable();
    flags.peek().is_none() || flags.any(|flags| flags.sign())
}

/// A subkey may sign if the primary key permits it, the subkey agrees, and the primary key has not revoked it.
fn subkey_may_sign(certificate: &SignedPublicKey, subkey: &SignedPublicSubKey) -> bool {
    let primary = &certificate.primary_key;
    let own = |signature: &&Signature| {
        signature
            .verify_subkey_binding(primary, &subkey.key)
            .is_ok()
    };
    let revoked = subkey
        .signatures
        .iter()
        .filter(|signature| signature.typ() == Some(SignatureType::SubkeyRevocation))
        .any(|signature| own(&signature));
    !revoked
        && subkey
            .signatures
            .iter()
            .filter(|signature| signature.typ() == Some(SignatureType::SubkeyBinding))
            .filter(own)
            .any(|binding| {
                binding.key_flags().sign()
                    && binding.embedded_signature().is_some_and(|back| {
                        back.verify_primary_key_binding(&subkey.key, primary)
                            .is_ok()
                    })
            })
}

fn is_revoked(certificate: &SignedPublicKey) -> bool {
    certificate
        .details
        .revocation_signatures
        .iter()
        .any(|signature| signature.verify_key(&certificate.primary_key).is_ok())
}

fn parse_keys(bytes: &[u8]) -> Result<Vec<SignedPublicKey>, SignatureError> {
    let (keys, _) = SignedPublicKey::from_reader_many(bytes).map_err(SignatureError::Unreadable)?;
    let mut certificates = keys
        .collect::<Result<Vec<_>, _>>()
        .map_err(SignatureError::Unreadable)?;
    certificates.retain(|certificate| !is_revoked(certificate));
    if certificates.is_empty() {
        return Err(SignatureError::NoKeys);
    }
    Ok(certificates)
}

fn is_strong(hash: HashAlgorithm) -> bool {
    matches!(
        hash,
        HashAlgorithm::Sha256
            | HashAlgorithm::Sha384
            | HashAlgorithm::Sha512
            | HashAlgorithm::Sha3_256
            | HashAlgorithm::Sha3_512
    )
}

fn signer(signature: &Signature) -> String {
    if let Some(fingerprint) = signature.issuer_fingerprint().first() {
        return format!("key {fingerprint:X}");
    }
    match signature.issuer_key_id().first() {
        Some(id) => format!("key {id}"),
        None => "an unnamed key".into(),
    }
}

#[cfg(test)]
mod tests;
