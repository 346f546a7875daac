//! The token of a lease. The hub may replace it with each response.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use secrecy::{ExposeSecret as _, SecretString};

/// The token of a lease. Clones share it.
#[derive(Clone)]
pub struct JobToken(Arc<RwLock<SecretString>>);

impl JobToken {
    /// Returns the first token of a lease.
    pub fn new(token: SecretString) -> Self {
        Self(Arc::new(RwLock::new(token)))
    }

    /// Returns the token for the next request.
    pub fn current(&self) -> SecretString {
        let token = self.0.read().unwrap_or_else(PoisonError::into_inner);
        token.clone()
    }

    /// Uses another token from now on, unless it is empty.
    pub fn replace(&self, token: &str) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if !token.is_empty() && known.expose_secret() != token {
            *known = token.into();
        }
    }
}

impl fmt::Debug for JobToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobToken")
    }
}
