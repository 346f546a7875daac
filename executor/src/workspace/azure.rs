//! Tokens for Azure DevOps from the executor's own identity: client secret, workload identity or managed identity, in
//! this order (contract 8.2, `AZURE_SP_MI`). This module knows nothing of git.

use std::path::PathBuf;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable as _};
use reqwest::{RequestBuilder, StatusCode};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use url::Url;
use url::form_urlencoded::Serializer;

use super::ErrorKind;
use super::http::{ProxySettings, direct_client};

/// The application id of Azure DevOps. It is the same in every tenant.
const DEVOPS: &str = "499b84ac-1321-427f-aa17-267ca6975798";
const PUBLIC_AUTHORITY: &str = "https://login.microsoftonline.com";
const METADATA_ENDPOINT: &str = "http://169.254.169.254";
const METADATA_PATH: &str = "metadata/identity/oauth2/token";
const ASSERTION_TYPE: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
/// Outside Azure the metadata address does not answer. Inside, it is the next hop.
const METADATA_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The variables of Azure's own libraries, from the executor's environment.
#[derive(Clone, Debug, Default)]
pub struct AzureEnvironment {
    /// `AZURE_TENANT_ID`
    pub tenant_id: Option<String>,
    /// `AZURE_CLIENT_ID`
    pub client_id: Option<String>,
    /// `AZURE_CLIENT_SECRET`
    pub client_secret: Option<SecretString>,
    /// `AZURE_FEDERATED_TOKEN_FILE`
    pub federated_token_file: Option<PathBuf>,
    /// `AZURE_AUTHORITY_HOST`
    pub authority_host: Option<String>,
    /// `IDENTITY_ENDPOINT`
    pub identity_endpoint: Option<String>,
    /// `IDENTITY_HEADER`
    pub identity_header: Option<SecretString>,
    /// `AZURE_POD_IDENTITY_AUTHORITY_HOST`: replaces the well-known address of the metadata service.
    pub metadata_endpoint: Option<String>,
}

impl AzureEnvironment {
    /// Reads the variables through `lookup`; empty ones count as not set.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Self {
        let value = |name: &str| lookup(name).filter(|text| !text.is_empty());
        Self {
            tenant_id: value("AZURE_TENANT_ID"),
            client_id: value("AZURE_CLIENT_ID"),
            client_secret: value("AZURE_CLIENT_SECRET").map(Into::into),
            federated_token_file: value("AZURE_FEDERATED_TOKEN_FILE").map(Into::into),
            authority_host: value("AZURE_AUTHORITY_HOST"),
            identity_endpoint: value("IDENTITY_ENDPOINT"),
            identity_header: value("IDENTITY_HEADER").map(Into::into),
            metadata_endpoint: value("AZURE_POD_IDENTITY_AUTHORITY_HOST"),
        }
    }

    /// A token for Azure DevOps.
    pub(super) async fn devops_token(
        &self,
        proxies: &ProxySettings,
    ) -> Result<SecretString, AzureError> {
        match (&self.tenant_id, &self.client_id) {
            (Some(tenant), Some(client)) if self.client_secret.is_some() => {
                let secret = self.client_secret.clone().unwrap_or_default();
                let proof = [("client_secret", secret.expose_secret())];
                self.authority_token(Identity::ClientSecret, tenant, client, &proof, proxies)
                    .await
            }
            (Some(tenant), Some(client)) if self.federated_token_file.is_some() => {
                let assertion = self.federated_token().await?;
                let proof = [
                    ("client_assertion_type", ASSERTION_TYPE),
                    ("client_assertion", assertion.expose_secret()),
                ];
                self.authority_token(Identity::Workload, tenant, client, &proof, proxies)
                    .await
            }
            _ => self.managed_identity_token().await,
        }
    }

    async fn federated_token(&self) -> Result<SecretString, AzureError> {
        let path = self.federated_token_file.clone().unwrap_or_default();
        match tokio::fs::read_to_string(&path).await {
            Ok(text) => Ok(text.trim().into()),
            Err(source) => Err(AzureError::TokenFile { path, source }),
        }
    }

    async fn authority_token(
        &self,
        identity: Identity,
        tenant: &str,
        client_id: &str,
        proof: &[(&str, &str)],
        proxies: &ProxySettings,
    ) -> Result<SecretString, AzureError> {
        let authority = self.authority_host.as_deref().unwrap_or(PUBLIC_AUTHORITY);
        let mut url = parse_url(authority)?;
        url.path_segments_mut()
            .map_err(|()| AzureError::BadAddress {
                address: authority.to_owned(),
            })?
            .pop_if_empty()
            .extend([tenant, "oauth2", "v2.0", "token"]);
        let body = Serializer::new(String::new())
            .append_pair("grant_type", "client_credentials")
            .append_pair("scope", &format!("{DEVOPS}/.default"))
            .append_pair("client_id", client_id)
            .extend_pairs(proof)
            .finish();
        let client = proxies.client().map_err(|e| unreachable(identity, e))?;
        request_token(identity, || {
            client
                .post(url.clone())
                .header("content-type", "application/x-www-form-urlencoded")
                .body(body.clone())
        })
        .await
    }

    async fn managed_identity_token(&self) -> Result<SecretString, AzureError> {
        let client = direct_client(METADATA_CONNECT_TIMEOUT)
            .map_err(|e| unreachable(Identity::Managed, e))?;
        if let (Some(endpoint), Some(header)) = (&self.identity_endpoint, &self.identity_header) {
            let url = self.managed_url(parse_url(endpoint)?, "2019-08-01");
            return request_token(Identity::Managed, || {
                client
                    .get(url.clone())
                    .header("x-identity-header", header.expose_secret())
            })
            .await;
        }
        let base = self
            .metadata_endpoint
            .as_deref()
            .unwrap_or(METADATA_ENDPOINT);
        let mut url = parse_url(base)?;
        url.set_path(METADATA_PATH);
        let url = self.managed_url(url, "2018-02-01");
        request_token(Identity::Managed, || {
            client.get(url.clone()).header("metadata", "true")
        })
        .await
        .map_err(|error| match error {
            AzureError::Unreachable { source, .. } => AzureError::NoIdentity { source },
            other => other,
        })
    }

    fn managed_url(&self, mut url: Url, api_version: &str) -> Url {
        url.query_pairs_mut()
            .append_pair("api-version", api_version)
            .append_pair("resource", DEVOPS);
        if let Some(client_id) = &self.client_id {
            url.query_pairs_mut().append_pair("client_id", client_id);
        }
        url
    }
}

/// The identity that requested a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A service principal with a client secret.
    ClientSecret,
    /// A federated token of the pod's service account.
    Workload,
    /// The identity of the node or of the hosting service.
    Managed,
}

impl std::fmt::Display for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ClientSecret => "client secret",
            Self::Workload => "workload identity",
            Self::Managed => "managed identity",
        })
    }
}

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum AzureError {
    /// The environment contains no identity, and there is no metadata service.
    #[error("the environment names no Azure identity and no metadata service answers")]
    NoIdentity {
        #[source]
        source: reqwest::Error,
    },
    /// The federated token cannot be read.
    #[error("could not read the federated token `{}`", path.display())]
    TokenFile {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// A configured address is no URL.
    #[error("`{address}` is not the address of an Azure token service")]
    BadAddress { address: String },
    /// The service refused the request.
    #[error("the {identity} was refused with status {status}: {detail}")]
    Refused {
        identity: Identity,
        status: StatusCode,
        detail: String,
    },
    /// The service could not be reached.
    #[error("the token service for the {identity} could not be reached")]
    Unreachable {
        identity: Identity,
        #[source]
        source: reqwest::Error,
    },
}

impl AzureError {
    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            Self::NoIdentity { .. } | Self::TokenFile { .. } | Self::BadAddress { .. } => {
                ErrorKind::User
            }
            Self::Refused { .. } if !self.is_transient() => ErrorKind::User,
            Self::Refused { .. } | Self::Unreachable { .. } => ErrorKind::Infrastructure,
        }
    }

    pub(super) fn hint(&self) -> Option<String> {
        match self {
            Self::NoIdentity { .. } => Some(
                "give the executor AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, a workload \
                 identity, or a managed identity"
                    .to_owned(),
            ),
            Self::Refused { .. } => Some(
                "check that the identity exists, is valid and was added to the Azure DevOps organization"
                    .to_owned(),
            ),
            Self::BadAddress { .. } | Self::TokenFile { .. } | Self::Unreachable { .. } => None,
        }
    }

    /// While a service of managed identities starts, it asks clients to retry.
    fn is_transient(&self) -> bool {
        match self {
            Self::Refused { status, .. } => {
                status.is_server_error()
                    || matches!(
                        *status,
                        StatusCode::TOO_MANY_REQUESTS | StatusCode::GONE | StatusCode::NOT_FOUND
                    )
            }
            // A refused connection is final: outside Azure, no service listens at the metadata address.
            Self::Unreachable { source, .. } => !source.is_connect() && !source.is_decode(),
            _ => false,
        }
    }
}

#[derive(Deserialize)]
struct TokenAnswer {
    access_token: String,
}

#[derive(Default, Deserialize)]
struct ErrorAnswer {
    #[serde(default)]
    error: String,
    #[serde(default)]
    error_description: String,
}

async fn request_token(
    identity: Identity,
    request: impl Fn() -> RequestBuilder,
) -> Result<SecretString, AzureError> {
    let attempt = async || {
        let answer = request()
            .send()
            .await
            .map_err(|e| unreachable(identity, e))?;
        let status = answer.status();
        if status.is_success() {
            let token: TokenAnswer = answer.json().await.map_err(|e| unreachable(identity, e))?;
            return Ok(token.access_token.into());
        }
        let error: ErrorAnswer = answer.json().await.unwrap_or_default();
        Err(AzureError::Refused {
            identity,
            status,
            detail: describe(&error),
        })
    };
    attempt
        .retry(
            ExponentialBuilder::default()
                .with_min_delay(Duration::from_millis(200))
                .with_max_times(3),
        )
        .when(AzureError::is_transient)
        .await
}

/// The first line describes the error. The lines after it are trace ids.
fn describe(error: &ErrorAnswer) -> String {
    let description = error.error_description.lines().next().unwrap_or_default();
    match (error.error.as_str(), description) {
        ("", "") => "no reason given".to_owned(),
        (code, "") => code.to_owned(),
        ("", description) => description.to_owned(),
        (code, description) => format!("{code}: {description}"),
    }
}

fn parse_url(text: &str) -> Result<Url, AzureError> {
    let bad = || AzureError::BadAddress {
        address: text.to_owned(),
    };
    let with_scheme = if text.contains("://") {
        text.to_owned()
    } else {
        format!("https://{text}")
    };
    Url::parse(&with_scheme).map_err(|_| bad())
}

/// Omits the URL, because a query or an endpoint path may be secret. The identity already tells which service it was.
fn unreachable(identity: Identity, source: reqwest::Error) -> AzureError {
    AzureError::Unreachable {
        identity,
        source: source.without_url(),
    }
}
