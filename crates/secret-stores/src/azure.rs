//! Azure Key Vault, with tokens of a client, of a workload identity or of a node.

use std::path::PathBuf;
use std::sync::Arc;

use reqwest::{Method, Url};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;

use crate::error::{ErrorClass, ReadError};
use crate::http::{Answer, Http, Request};
use crate::login::{Login, Obtained, in_seconds};
use crate::reference::StoreKind;
use crate::token_file::token_of_file;
use crate::value::SecretValue;

const API_VERSION: &str = "2025-07-01";
const ASSERTION: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
const STORE: StoreKind = StoreKind::Azure;

/// Who the executor is.
#[derive(Clone, Debug)]
pub(crate) enum AzureLogin {
    Secret {
        tenant: String,
        client: String,
        secret: SecretString,
    },
    Federated {
        tenant: String,
        client: String,
        token_file: PathBuf,
    },
    /// The identity of the node, from its metadata service.
    Managed { base: Url, client: Option<String> },
}

#[derive(Clone, Debug)]
pub(crate) struct AzureSettings {
    pub(crate) login: AzureLogin,
    pub(crate) authority: Url,
    /// The domain of all vaults of this cloud. No reference can name another.
    pub(crate) suffix: String,
}

/// Reads secrets of Azure.
#[derive(Debug)]
pub(crate) struct KeyVault {
    settings: AzureSettings,
    token: Login<SecretString>,
}

#[derive(Deserialize)]
struct Token {
    access_token: SecretString,
    /// A number, or a text with a number.
    expires_in: serde_json::Value,
}

#[derive(Deserialize)]
struct Value {
    value: SecretString,
}

impl KeyVault {
    pub(crate) fn new(settings: AzureSettings) -> Self {
        Self {
            settings,
            token: Login::default(),
        }
    }

    pub(crate) async fn read(
        &self,
        http: &Http,
        vault: &str,
        name: &str,
        version: Option<&str>,
    ) -> Result<SecretValue, ReadError> {
        let suffix = &self.settings.suffix;
        let version = version
            .map(|version| format!("/{version}"))
            .unwrap_or_default();
        let url =
            format!("https://{vault}.{suffix}/secrets/{name}{version}?api-version={API_VERSION}");
        let url = Url::parse(&url).map_err(|_| {
            ReadError::new(
                STORE,
                ErrorClass::NotConfigured,
                "the domain of vaults is no domain",
            )
        })?;
        let obtain = async || self.obtain(http).await;
        let attempt = async |token: &Arc<SecretString>| {
            let request = Request::new(Method::GET, url.clone()).bearer(token);
            let answer = http.send(STORE, &request).await?;
            if !answer.is_success() {
                return Err(refused(&answer));
            }
            let found: Value = answer.json(STORE)?;
            Ok(SecretValue::Text(found.value))
        };
        self.token.with(obtain, attempt).await
    }

    /// Proves the login without reading a secret.
    pub(crate) async fn check(&self, http: &Http) -> Result<String, ReadError> {
        self.token.get(self.obtain(http)).await?;
        Ok(match &self.settings.login {
            AzureLogin::Secret { client, .. } => format!("client {client}"),
            AzureLogin::Federated { client, .. } => format!("workload identity {client}"),
            AzureLogin::Managed { .. } => "identity of the node".to_owned(),
        })
    }

    async fn obtain(&self, http: &Http) -> Obtained<SecretString> {
        let resource = format!("https://{}", self.settings.suffix);
        let scope = format!("{resource}/.default");
        let (tenant, client, proof) = match &self.settings.login {
            AzureLogin::Secret {
                tenant,
                client,
                secret,
            } => (tenant, client, vec![("client_secret", secret.clone())]),
            AzureLogin::Federated {
                tenant,
                client,
                token_file,
            } => {
                let assertion = token_of_file(token_file, STORE).await?;
                let proof = vec![
                    ("client_assertion_type", ASSERTION.into()),
                    ("client_assertion", assertion),
                ];
                (tenant, client, proof)
            }
            AzureLogin::Managed { base, client } => {
                let mut url = base.clone();
                url.set_path("metadata/identity/oauth2/token");
                url.query_pairs_mut()
                    .append_pair("api-version", "2018-02-01")
                    .append_pair("resource", &resource)
                    .extend_pairs(client.iter().map(|client| ("client_id", client)));
                let request = Request::new(Method::GET, url).header("metadata", "true");
                return token(&http.send(STORE, &request).await?);
            }
        };
        let mut url = self.settings.authority.clone();
        url.path_segments_mut()
            .map_err(|()| {
                ReadError::new(
                    STORE,
                    ErrorClass::NotConfigured,
                    "the authority is no address",
                )
            })?
            .pop_if_empty()
            .extend([tenant, "oauth2", "v2.0", "token"]);
        let mut form = vec![
            ("grant_type", "client_credentials"),
            ("client_id", client),
            ("scope", &scope),
        ];
        form.extend(
            proof
                .iter()
                .map(|(name, value)| (*name, value.expose_secret())),
        );
        token(
            &http
                .send(STORE, &Request::new(Method::POST, url).form(&form))
                .await?,
        )
    }
}

fn token(answer: &Answer) -> Obtained<SecretString> {
    if answer.is_success() {
        let token: Token = answer.json(STORE)?;
        let seconds = match &token.expires_in {
            serde_json::Value::String(text) => text.parse().ok(),
            number => number.as_u64(),
        };
        return Ok((token.access_token, in_seconds(seconds.unwrap_or_default())));
    }
    // Of the description, only its code is safe to show.
    let document = answer.document().unwrap_or_default();
    let text = document["error_description"].as_str().unwrap_or_default();
    let code = text
        .split(':')
        .next()
        .filter(|code| code.starts_with("AADSTS"));
    Err(answer.login_refused(STORE, code.unwrap_or_default()))
}

fn refused(answer: &Answer) -> ReadError {
    let document = answer.document().unwrap_or_default();
    let error = &document["error"];
    let inner = error["innererror"]["code"].as_str();
    let code = inner.or_else(|| error["code"].as_str()).unwrap_or_default();
    let class = match (answer.status, code) {
        (403, "SecretDisabled" | "SecretNotYetValid" | "SecretExpired") => ErrorClass::Disabled,
        _ => answer.usual_class(),
    };
    answer.refused(STORE, class, code)
}
