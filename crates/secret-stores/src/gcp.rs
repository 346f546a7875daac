//! Google Secret Manager, with tokens of a service account, of a federated account or of the metadata server.

mod key;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use job_contract::google::is_service_host;
use reqwest::{Method, Url};
use secrecy::{ExposeSecret as _, SecretString};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::json;
use tokio::time::{Instant, sleep};

pub(crate) use self::key::ServiceAccountKey;
pub use self::key::signed_token;
use crate::error::{ErrorClass, ReadError};
use crate::http::{Answer, Http, Request};
use crate::login::{Login, Obtained, in_seconds};
use crate::reference::StoreKind;
use crate::token_file::token_of_file;
use crate::value::SecretValue;

const SCOPE: &str = "https://www.googleapis.com/auth/cloud-platform";
const TOKENS: &str = "https://oauth2.googleapis.com/token";
const METADATA: &str = "http://metadata.google.internal";
const METADATA_PATH: &str = "computeMetadata/v1/instance/service-accounts/default/token";
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
/// The metadata server of GKE does not answer in the first seconds of a pod.
const METADATA_PATIENCE: Duration = Duration::from_secs(20);
const METADATA_PAUSE: Duration = Duration::from_millis(500);
const STORE: StoreKind = StoreKind::Gcp;

/// Who the executor is.
#[derive(Clone, Debug)]
pub(crate) enum GoogleLogin {
    Key(ServiceAccountKey),
    External(ExternalAccount),
    Metadata { base: Url },
}

/// An account of another issuer, whose token Google exchanges.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ExternalAccount {
    audience: String,
    subject_token_type: String,
    #[serde(deserialize_with = "google_url")]
    token_url: Url,
    #[serde(default, deserialize_with = "optional_google_url")]
    service_account_impersonation_url: Option<Url>,
    credential_source: CredentialSource,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CredentialSource {
    file: PathBuf,
    #[serde(default)]
    format: TokenFormat,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct TokenFormat {
    subject_token_field_name: Option<String>,
}

#[derive(Clone, Debug)]
pub(crate) struct GcpSettings {
    pub(crate) login: GoogleLogin,
    pub(crate) project: Option<String>,
}

/// Reads secrets of Google.
#[derive(Debug)]
pub(crate) struct SecretManager {
    settings: GcpSettings,
    token: Login<SecretString>,
}

/// Which secret is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GoogleSecret<'a> {
    pub(crate) project: Option<&'a str>,
    pub(crate) location: Option<&'a str>,
    pub(crate) secret: &'a str,
    pub(crate) version: Option<&'a str>,
}

#[derive(Deserialize)]
struct Token {
    access_token: SecretString,
    expires_in: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Impersonated {
    access_token: SecretString,
    expire_time: String,
}

#[derive(Deserialize)]
struct Version {
    payload: Payload,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Payload {
    data: Option<SecretString>,
    data_crc32c: Option<String>,
}

impl GoogleLogin {
    /// The login of a document with a key or a federated account.
    pub(crate) fn of_document(document: &SecretString) -> Result<Self, String> {
        let name = job_contract::env::CUSTOMER_GOOGLE_CREDENTIALS;
        let wrong = || {
            format!(
                "the document of `{name}` is neither the key of a service account nor a federated account with a token file and addresses of `googleapis.com`"
            )
        };
        let value: serde_json::Value =
            serde_json::from_str(document.expose_secret()).map_err(|_| wrong())?;
        if value["type"] == "service_account" {
            return serde_json::from_value(value)
                .map(Self::Key)
                .map_err(|_| wrong());
        }
        match value["type"].as_str() {
            Some("external_account") => serde_json::from_value(value)
                .map(Self::External)
                .map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }

    /// The login of the metadata server, which may be another one in tests and on premises.
    pub(crate) fn of_metadata(host: Option<&str>) -> Result<Self, String> {
        let base = host.map_or_else(|| METADATA.to_owned(), |host| format!("http://{host}"));
        let base = Url::parse(&base).map_err(|_| "`GCE_METADATA_HOST` is no host".to_owned())?;
        Ok(Self::Metadata { base })
    }

    pub(crate) fn project(&self) -> Option<String> {
        match self {
            Self::Key(key) => key.project_id.clone(),
            Self::External(_) | Self::Metadata { .. } => None,
        }
    }

    async fn obtain(&self, http: &Http) -> Obtained<SecretString> {
        match self {
            Self::Key(key) => {
                let assertion = key.assertion(TOKENS, SCOPE)?;
                let form = [
                    ("grant_type", "urn:ietf:params:oauth:grant-type:jwt-bearer"),
                    ("assertion", assertion.expose_secret()),
                ];
                let url = Url::parse(TOKENS).expect("an address");
                token(
                    &http
                        .send(STORE, &Request::new(Method::POST, url).form(&form))
                        .await?,
                )
            }
            Self::External(account) => account.obtain(http).await,
            Self::Metadata { base } => {
                let mut url = base.clone();
                url.set_path(METADATA_PATH);
                let request = Request::new(Method::GET, url).header("metadata-flavor", "Google");
                let end = Instant::now() + METADATA_PATIENCE;
                loop {
                    match http.send_at_most(STORE, &request, METADATA_TIMEOUT).await {
                        Err(error)
                            if error.class == ErrorClass::Unreachable && Instant::now() < end =>
                        {
                            sleep(METADATA_PAUSE).await;
                        }
                        answer => return token(&answer?),
                    }
                }
            }
        }
    }
}

impl ExternalAccount {
    async fn obtain(&self, http: &Http) -> Obtained<SecretString> {
        let content = token_of_file(&self.credential_source.file, STORE).await?;
        let subject: SecretString = match &self.credential_source.format.subject_token_field_name {
            None => content,
            Some(field) => {
                let document: Option<serde_json::Value> =
                    serde_json::from_str(content.expose_secret()).ok();
                let token = document
                    .as_ref()
                    .and_then(|document| document[field].as_str());
                let missing = || {
                    ReadError::new(
                        STORE,
                        ErrorClass::CredentialsRejected,
                        "the token file lacks the field with the token",
                    )
                };
                token.ok_or_else(missing)?.into()
            }
        };
        let form = [
            (
                "grant_type",
                "urn:ietf:params:oauth:grant-type:token-exchange",
            ),
            ("audience", &*self.audience),
            ("scope", SCOPE),
            (
                "requested_token_type",
                "urn:ietf:params:oauth:token-type:access_token",
            ),
            ("subject_token_type", &*self.subject_token_type),
            ("subject_token", subject.expose_secret()),
        ];
        let request = Request::new(Method::POST, self.token_url.clone()).form(&form);
        let exchanged = token(&http.send(STORE, &request).await?)?;
        let Some(url) = &self.service_account_impersonation_url else {
            return Ok(exchanged);
        };
        let request = Request::new(Method::POST, url.clone())
            .json(&json!({ "scope": [SCOPE] }))
            .bearer(&exchanged.0);
        let answer = http.send(STORE, &request).await?;
        if !answer.is_success() {
            return Err(login_refused(&answer));
        }
        let token: Impersonated = answer.json(STORE)?;
        let ends = humantime::parse_rfc3339(&token.expire_time).ok();
        Ok((token.access_token, ends))
    }
}

/// An address of Google. Nobody else gets tokens.
fn google_url<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Url, D::Error> {
    let url = Url::parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)?;
    if url.scheme() == "https" && is_service_host(url.host_str().unwrap_or_default()) {
        Ok(url)
    } else {
        Err(D::Error::custom("an address outside of `googleapis.com`"))
    }
}

fn optional_google_url<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Url>, D::Error> {
    google_url(deserializer).map(Some)
}

impl SecretManager {
    pub(crate) fn new(settings: GcpSettings) -> Self {
        Self {
            settings,
            token: Login::default(),
        }
    }

    pub(crate) async fn read(
        &self,
        http: &Http,
        secret: GoogleSecret<'_>,
    ) -> Result<SecretValue, ReadError> {
        let project = secret.project.or(self.settings.project.as_deref());
        let no_project = || {
            let name = job_contract::env::CUSTOMER_GOOGLE_PROJECT;
            ReadError::new(
                STORE,
                ErrorClass::NotConfigured,
                format!("`{name}` is not set"),
            )
        };
        let project = project.ok_or_else(no_project)?;
        let host = match secret.location {
            Some(location) => format!("secretmanager.{location}.rep.googleapis.com"),
            None => "secretmanager.googleapis.com".to_owned(),
        };
        let place = secret
            .location
            .map(|location| format!("/locations/{location}"));
        let name = secret.secret;
        let version = secret.version.unwrap_or("latest");
        let url = format!(
            "https://{host}/v1/projects/{project}{}/secrets/{name}/versions/{version}:access",
            place.unwrap_or_default()
        );
        let url = Url::parse(&url).map_err(|_| no_project())?;
        let obtain = async || self.settings.login.obtain(http).await;
        let attempt = async |token: &Arc<SecretString>| {
            let request = Request::new(Method::GET, url.clone()).bearer(token);
            let answer = http.send(STORE, &request).await?;
            if answer.is_success() {
                value(&answer)
            } else {
                Err(refused(&answer))
            }
        };
        self.token.with(obtain, attempt).await
    }

    /// Proves the login without reading a secret.
    pub(crate) async fn check(&self, http: &Http) -> Result<String, ReadError> {
        self.token.get(self.settings.login.obtain(http)).await?;
        Ok(match &self.settings.login {
            GoogleLogin::Key(key) => key.client_email.clone(),
            GoogleLogin::External(account) => format!("federated account of {}", account.audience),
            GoogleLogin::Metadata { .. } => "account of the metadata server".to_owned(),
        })
    }
}

fn value(answer: &Answer) -> Result<SecretValue, ReadError> {
    let version: Version = answer.json(STORE)?;
    let data = version.payload.data.unwrap_or_default();
    // The interface is defined with one alphabet, and proxies of Google have been seen with the other.
    let encoded = data.expose_secret();
    let bytes = STANDARD
        .decode(encoded)
        .or_else(|_| URL_SAFE.decode(encoded));
    let unusable = |detail| ReadError::new(STORE, ErrorClass::Unusable, detail);
    let bytes = bytes.map_err(|_| unusable("it is no base64"))?;
    if let Some(expected) = version.payload.data_crc32c
        && expected != crc32c(&bytes).to_string()
    {
        return Err(unusable("its checksum is wrong"));
    }
    SecretValue::of_base64(STORE, &STANDARD, &STANDARD.encode(bytes).into())
}

/// The checksum of Castagnoli. Secrets are small, so bit by bit is fast enough.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut sum = u32::MAX;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = if sum & 1 == 1 {
                (sum >> 1) ^ 0x82f6_3b78
            } else {
                sum >> 1
            };
        }
    }
    !sum
}

fn token(answer: &Answer) -> Obtained<SecretString> {
    if !answer.is_success() {
        return Err(login_refused(answer));
    }
    let token: Token = answer.json(STORE)?;
    Ok((
        token.access_token,
        in_seconds(token.expires_in.unwrap_or_default()),
    ))
}

fn login_refused(answer: &Answer) -> ReadError {
    let document = answer.document().unwrap_or_default();
    answer.login_refused(STORE, document["error"].as_str().unwrap_or_default())
}

fn refused(answer: &Answer) -> ReadError {
    let document = answer.document().unwrap_or_default();
    let code = document["error"]["status"].as_str().unwrap_or_default();
    let class = match code {
        "FAILED_PRECONDITION" => ErrorClass::Disabled,
        _ => answer.usual_class(),
    };
    answer.refused(STORE, class, code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_castagnoli() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_federated_account_leads_to_google_only_and_starts_nothing() {
        let document = |token_url: &str, source: &str| {
            let text = format!(
                r#"{{"type":"external_account","audience":"//iam","subject_token_type":"jwt","token_url":"{token_url}","credential_source":{source}}}"#
            );
            GoogleLogin::of_document(&text.into()).map(drop)
        };
        let google = "https://sts.googleapis.com/v1/token";
        document(google, r#"{"file":"/t"}"#).unwrap();
        document("https://sts.googleapis.com.evil.com/", r#"{"file":"/t"}"#).unwrap_err();
        document("http://sts.googleapis.com/", r#"{"file":"/t"}"#).unwrap_err();
        document(google, r#"{"executable":{"command":"x"}}"#).unwrap_err();
        document(google, r#"{"url":"http://169.254.169.254"}"#).unwrap_err();
    }
}
