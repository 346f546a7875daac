//! The exchange of a token of an OpenID provider for an access token of a pool (RFC 8693). Requests are forms.

use serde::{Deserialize, Serialize};

/// The only `grant_type`.
pub const TOKEN_EXCHANGE: &str = "urn:ietf:params:oauth:grant-type:token-exchange";
/// The only `subject_token_type`.
pub const ID_TOKEN: &str = "urn:ietf:params:oauth:token-type:id_token";
/// The only `requested_token_type`.
pub const ACCESS_TOKEN: &str = "urn:ietf:params:oauth:token-type:access_token";
/// What `audience` begins with. The id of the organization follows.
pub const ORGANIZATION: &str = "urn:mayfly:org:";
/// What `scope` begins with. The name of the pool follows.
pub const POOL: &str = "pool:";
/// The only `token_type`.
pub const BEARER: &str = "Bearer";

/// The parameters of an exchange.
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TokenExchange {
    /// `urn:ietf:params:oauth:grant-type:token-exchange`
    pub grant_type: String,
    /// The token of the provider.
    pub subject_token: String,
    /// `urn:ietf:params:oauth:token-type:id_token`
    pub subject_token_type: String,
    /// `urn:ietf:params:oauth:token-type:access_token`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_token_type: Option<String>,
    /// `urn:mayfly:org:` and the id of an organization of the pool.
    pub audience: String,
    /// `pool:` and the name of the pool.
    pub scope: String,
    /// For how many seconds the access token is wanted. 43200 at most; without it, 3600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration: Option<u64>,
}

// The token is a secret.
impl std::fmt::Debug for TokenExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenExchange")
            .field("audience", &self.audience)
            .field("scope", &self.scope)
            .field("expiration", &self.expiration)
            .finish_non_exhaustive()
    }
}

/// The response to an exchange.
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct IssuedToken {
    /// Used as the token of a pool.
    pub access_token: String,
    /// `urn:ietf:params:oauth:token-type:access_token`
    pub issued_token_type: String,
    /// `Bearer`
    pub token_type: String,
    /// Seconds.
    pub expires_in: u64,
    /// As requested.
    pub scope: String,
}

// The token is a secret.
impl std::fmt::Debug for IssuedToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IssuedToken")
            .field("expires_in", &self.expires_in)
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}

/// Why a token was not exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExchangeCode {
    /// A parameter is missing or wrong, or the token of the provider is not accepted.
    InvalidRequest,
    /// The pool does not take runs of this organization.
    InvalidTarget,
    /// The pool does not exist, or trusts no provider.
    InvalidScope,
    /// The request is no token exchange.
    UnsupportedGrantType,
    /// The keys of the provider cannot be read now. Status 503; all others have 400.
    TemporarilyUnavailable,
}

/// The response to an exchange that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExchangeError {
    pub error: ExchangeCode,
    /// For people. Never a secret.
    #[serde(default)]
    pub error_description: String,
}
