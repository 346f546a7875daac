//! The exchange of an OpenID provider's token for an access token of a pool (RFC 8693). Requests are forms.

use serde::{Deserialize, Serialize};

/// The only `grant_type`.
pub const TOKEN_EXCHANGE: &str = "urn:ietf:params:oauth:grant-type:token-exchange";
/// The only `subject_token_type`.
pub const ID_TOKEN: &str = "urn:ietf:params:oauth:token-type:id_token";
/// The only `requested_token_type`.
pub const ACCESS_TOKEN: &str = "urn:ietf:params:oauth:token-type:access_token";
/// The prefix of `audience`. The id of the organization follows.
pub const ORGANIZATION: &str = "urn:mayfly:org:";
/// The prefix of `scope`. The name of the pool follows.
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
    /// Requested lifetime of the access token in seconds, at most 43200. The default is 3600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration: Option<u64>,
}

// The output contains no token, because tokens are secrets.
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
    /// The access token. It is used like a pool token.
    pub access_token: String,
    /// `urn:ietf:params:oauth:token-type:access_token`
    pub issued_token_type: String,
    /// `Bearer`
    pub token_type: String,
    /// Lifetime in seconds.
    pub expires_in: u64,
    /// The `scope` of the request.
    pub scope: String,
}

// The output contains no token, because tokens are secrets.
impl std::fmt::Debug for IssuedToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IssuedToken")
            .field("expires_in", &self.expires_in)
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}

/// Why an exchange failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExchangeCode {
    /// A parameter is missing or wrong, or the token of the provider is not accepted.
    InvalidRequest,
    /// The pool does not take runs of this organization.
    InvalidTarget,
    /// The pool does not exist or trusts no provider.
    InvalidScope,
    /// The request is not a token exchange.
    UnsupportedGrantType,
    /// The keys of the provider cannot be read now. The status is 503. All other codes have 400.
    TemporarilyUnavailable,
}

/// The response to an exchange that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExchangeError {
    pub error: ExchangeCode,
    /// An explanation for people. It never contains a secret.
    #[serde(default)]
    pub error_description: String,
}
