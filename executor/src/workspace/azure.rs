//! Tokens for Azure DevOps from the executor's own identity: client secret, workload identity or managed identity, in
//! this order (contract 8.2, `AZURE_SP_MI`). This module knows nothing of git.

use std::path::PathBuf;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable as _};
use job_contract::Exit;
use reqwest::{RequestBuilder, StatusCode};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use url::Url;
use url::form_urlencoded::Serializer;

use super::http::{ProxySettings, direct_client};
use super::source::{Source, Transport};
use crate::error::StepError;

/// The application id of Azure DevOps. It is the same in every tenant.
const DEVOPS: &str = "499b84ac-1321-427f-aa17-267ca6975798";
const PUBLIC_AUTHORITY: &str = "https://login.microsoftonline.com";
const METADATA_ENDPOINT: &str = "http://169.254.169.254";
const METADATA_PATH: &str = "metadata/identity/oauth2/token";
const ASSERTION_TYPE: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
/// Outside Azure the metadata address does not answer. Inside, it is the next hop.
const METADATA_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether the source is on Azure DevOps, reached with TLS.
pub(super) fn is_azure_devops(source: &Source) -> bool {
    let Transport::Http { origin } = &source.transport else {
        return false;
    };
    let host = origin.strip_prefix("https://").unwrap_or_default();
    host == "dev.azure.com" || host.ends_with(".visualstudio.com")
}

/// The variables of Azure's own libraries, from the executor's environment.
#[derive(Clone, Debug, Default)]
pub struct AzureEnvironment {
    pub tenant_id: Option<String>,
    pub client_id: Option<String>,
    pub client_secret: Option<SecretString>,
    pub federated_token_file: Option<PathBuf>,
    pub authority_host: Option<String>,
    pub identity_endpoint: Option<String>,
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
    ) -> Result<SecretString, StepError> {
        let (Some(tenant), Some(client)) = (&self.tenant_id, &self.client_id) else {
            return self.managed_identity_token().await;
        };
        if let Some(secret) = &self.client_secret {
            let proof = [("client_secret", secret.expose_secret())];
            return self
                .authority_token("client secret", tenant, client, &proof, proxies)
                .await;
        }
        let Some(path) = &self.federated_token_file else {
            return self.managed_identity_token().await;
        };
        let assertion = tokio::fs::read_to_string(path).await.map_err(|source| {
            let path = path.display();
            StepError::user(no_token(format!(
                "could not read the federated token `{path}`"
            )))
            .because(&source)
        })?;
        let assertion = SecretString::from(assertion.trim());
        let proof = [
            ("client_assertion_type", ASSERTION_TYPE),
            ("client_assertion", assertion.expose_secret()),
        ];
        self.authority_token("workload identity", tenant, client, &proof, proxies)
            .await
    }

    async fn authority_token(
        &self,
        identity: &str,
        tenant: &str,
        client_id: &str,
        proof: &[(&str, &str)],
        proxies: &ProxySettings,
    ) -> Result<SecretString, StepError> {
        let authority = self.authority_host.as_deref().unwrap_or(PUBLIC_AUTHORITY);
        let mut url = parse_url(authority)?;
        url.path_segments_mut()
            .map_err(|()| bad_address(authority))?
            .pop_if_empty()
            .extend([tenant, "oauth2", "v2.0", "token"]);
        let body = Serializer::new(String::new())
            .append_pair("grant_type", "client_credentials")
            .append_pair("scope", &format!("{DEVOPS}/.default"))
            .append_pair("client_id", client_id)
            .extend_pairs(proof)
            .finish();
        let client = proxies.client()?;
        let token = request_token(|| {
            client
                .post(url.clone())
                .header("content-type", "application/x-www-form-urlencoded")
                .body(body.clone())
        });
        token.await.map_err(|error| error.of(identity))
    }

    async fn managed_identity_token(&self) -> Result<SecretString, StepError> {
        const IDENTITY: &str = "managed identity";
        let client = direct_client(METADATA_CONNECT_TIMEOUT)
            .map_err(|error| RequestError::from(error).of(IDENTITY))?;
        if let (Some(endpoint), Some(header)) = (&self.identity_endpoint, &self.identity_header) {
            let url = self.managed_url(parse_url(endpoint)?, "2019-08-01");
            let token = request_token(|| {
                client
                    .get(url.clone())
                    .header("x-identity-header", header.expose_secret())
            });
            return token.await.map_err(|error| error.of(IDENTITY));
        }
        let base = self
            .metadata_endpoint
            .as_deref()
            .unwrap_or(METADATA_ENDPOINT);
        let mut url = parse_url(base)?;
        url.set_path(METADATA_PATH);
        let url = self.managed_url(url, "2018-02-01");
        let token = request_token(|| client.get(url.clone()).header("metadata", "true"));
        token.await.map_err(|error| match error {
            RequestError::Unreachable(source) => {
                let text = "the environment names no Azure identity and no metadata service answers";
                StepError::user(no_token(text)).because(&source).with_hint(
                    "give the executor AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, a workload identity, or a \
                     managed identity",
                )
            }
            RequestError::Refused { .. } => error.of(IDENTITY),
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

fn no_token(reason: impl std::fmt::Display) -> String {
    format!("could not acquire a token for Azure DevOps: {reason}")
}

/// Why a request has no token as its answer.
enum RequestError {
    Refused { status: StatusCode, detail: String },
    Unreachable(reqwest::Error),
}

impl From<reqwest::Error> for RequestError {
    /// Omits the URL, because a query or an endpoint path may be secret. The identity already tells which service it was.
    fn from(error: reqwest::Error) -> Self {
        Self::Unreachable(error.without_url())
    }
}

impl RequestError {
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
            Self::Unreachable(source) => !source.is_connect() && !source.is_decode(),
        }
    }

    /// The error of a step that has this identity.
    fn of(self, identity: &str) -> StepError {
        let is_transient = self.is_transient();
        match self {
            Self::Unreachable(source) => {
                let text = format!("the token service for the {identity} could not be reached");
                StepError::infrastructure(no_token(text)).because(&source)
            }
            Self::Refused { status, detail } => {
                let exit = if is_transient {
                    Exit::Infrastructure
                } else {
                    Exit::BadJobData
                };
                let text = format!("the {identity} was refused with status {status}: {detail}");
                StepError::new(exit, no_token(text)).with_hint(
                    "check that the identity exists, is valid and was added to the Azure DevOps organization",
                )
            }
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

async fn request_token(request: impl Fn() -> RequestBuilder) -> Result<SecretString, RequestError> {
    let attempt = async || {
        let answer = request().send().await?;
        let status = answer.status();
        if status.is_success() {
            let token: TokenAnswer = answer.json().await?;
            return Ok(token.access_token.into());
        }
        let error: ErrorAnswer = answer.json().await.unwrap_or_default();
        let detail = describe(&error);
        Err(RequestError::Refused { status, detail })
    };
    attempt
        .retry(
            ExponentialBuilder::default()
                .with_min_delay(Duration::from_millis(200))
                .with_max_times(3),
        )
        .when(RequestError::is_transient)
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

fn parse_url(text: &str) -> Result<Url, StepError> {
    let with_scheme = if text.contains("://") {
        text.to_owned()
    } else {
        format!("https://{text}")
    };
    Url::parse(&with_scheme).map_err(|_| bad_address(text))
}

fn bad_address(address: &str) -> StepError {
    let text = format!("`{address}` is not the address of an Azure token service");
    StepError::user(no_token(text))
}
