//! Why a secret could not be read. An error never has text of a response, because a response may hold a secret.

use std::fmt;
use std::time::Duration;

use crate::reference::StoreKind;

/// What kind of failure it is. The class decides about retries and about the hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    NotFound,
    Denied,
    /// It is disabled, or it will be deleted.
    Disabled,
    CannotDecrypt,
    CredentialsRejected,
    /// The store is overloaded, sealed or defective.
    Unavailable,
    /// No connection, no valid certificate, or no response in time.
    Unreachable,
    /// The value is not text, too large, or lacks the key.
    Unusable,
    /// The operator has not configured this store, or not completely.
    NotConfigured,
}

impl ErrorClass {
    /// Whether another attempt may succeed.
    pub const fn is_transient(self) -> bool {
        matches!(self, Self::Unavailable | Self::Unreachable)
    }

    const fn text(self) -> &'static str {
        match self {
            Self::NotFound => "not found",
            Self::Denied => "access denied",
            Self::Disabled => "disabled or deleted",
            Self::CannotDecrypt => "cannot be decrypted",
            Self::CredentialsRejected => "the login was refused",
            Self::Unavailable => "the store is unavailable",
            Self::Unreachable => "the store cannot be reached",
            Self::Unusable => "unusable",
            Self::NotConfigured => "the store is not configured",
        }
    }
}

/// Why a secret could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadError {
    pub class: ErrorClass,
    pub store: StoreKind,
    /// What is known beside the class: a code of the store, a status. Empty if there is nothing.
    pub detail: String,
    /// When the store wants to be asked again.
    pub retry_after: Option<Duration>,
}

impl ReadError {
    pub fn new(store: StoreKind, class: ErrorClass, detail: impl Into<String>) -> Self {
        Self {
            class,
            store,
            detail: detail.into(),
            retry_after: None,
        }
    }

    /// What to do next.
    pub const fn hint(&self) -> &'static str {
        match (self.class, self.store) {
            (ErrorClass::NotFound, StoreKind::Aws) => {
                "`ssm` means AWS Secrets Manager, not the Parameter Store of Systems Manager: check name, region and version"
            }
            (ErrorClass::NotFound, _) => "check the name, the version and the key",
            (ErrorClass::Denied, StoreKind::Aws) => {
                "grant the executor's identity `secretsmanager:GetSecretValue`, and `kms:Decrypt` on a key of your own"
            }
            (ErrorClass::Denied, StoreKind::Gcp) => {
                "grant the executor's identity the role Secret Manager Secret Accessor"
            }
            (ErrorClass::Denied, StoreKind::Azure) => {
                "grant the executor's identity the right to get secrets, and let the vault's firewall pass it"
            }
            (ErrorClass::Denied, StoreKind::Vault) => {
                "give the token's policy the capability `read` on this path"
            }
            (ErrorClass::Disabled, _) => "enable or restore the secret, or name another version",
            (ErrorClass::CannotDecrypt, _) => "check the key that encrypts the secret",
            (ErrorClass::CredentialsRejected, _) => {
                "the operator must check the executor's login for this store, and its clock"
            }
            (ErrorClass::Unavailable | ErrorClass::Unreachable, _) => {
                "start the run again when the store can be reached from the executor"
            }
            (ErrorClass::Unusable, _) => "store the value as text, and check the key",
            (ErrorClass::NotConfigured, _) => {
                "the operator must configure this store: see docs/secrets.md"
            }
        }
    }
}

impl std::error::Error for ReadError {}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.class.text(), self.store)?;
        if !self.detail.is_empty() {
            write!(f, " ({})", self.detail)?;
        }
        Ok(())
    }
}
