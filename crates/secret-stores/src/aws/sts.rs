//! The security token service of AWS: sessions of roles.

use reqwest::Method;
use secrecy::{ExposeSecret as _, SecretString};

use super::request::{service_url, signed};
use super::sign::{Keys, Scope};
use crate::error::{ErrorClass, ReadError};
use crate::http::{Answer, Http, Request};
use crate::login::Obtained;
use crate::reference::StoreKind;

const SERVICE: &str = "sts";
const VERSION: &str = "2011-06-15";
const FORM: &str = "application/x-www-form-urlencoded";

/// Which role, and what its session is called.
#[derive(Clone, Debug)]
pub struct RoleSession {
    pub role_arn: String,
    pub session_name: String,
    pub duration_seconds: Option<u32>,
    pub external_id: Option<String>,
}

impl RoleSession {
    pub fn new(role_arn: impl Into<String>, session_name: &str) -> Self {
        Self {
            role_arn: role_arn.into(),
            session_name: session_name.to_owned(),
            duration_seconds: None,
            external_id: None,
        }
    }

    fn form(&self, action: &str, more: &[(&str, &str)]) -> String {
        let mut form = url::form_urlencoded::Serializer::new(String::new());
        form.append_pair("Action", action);
        form.append_pair("Version", VERSION);
        form.append_pair("RoleArn", &self.role_arn);
        form.append_pair("RoleSessionName", &self.session_name);
        if let Some(seconds) = self.duration_seconds {
            form.append_pair("DurationSeconds", &seconds.to_string());
        }
        form.extend_pairs(more).finish()
    }
}

/// Exchanges a token of another issuer for a session. The token is the proof, so nothing is signed.
pub async fn assume_role_with_web_identity(
    http: &Http,
    region: &str,
    role: &RoleSession,
    token: &SecretString,
) -> Obtained<Keys> {
    let body = role.form(
        "AssumeRoleWithWebIdentity",
        &[("WebIdentityToken", token.expose_secret())],
    );
    let request = Request::new(Method::POST, service_url(SERVICE, region)?).body(FORM, body);
    session(&http.send(StoreKind::Aws, &request).await?)
}

/// A session of a role that the holder of these keys may assume.
pub async fn assume_role(
    http: &Http,
    region: &str,
    role: &RoleSession,
    keys: &Keys,
) -> Obtained<Keys> {
    let external: Vec<(&str, &str)> = role
        .external_id
        .iter()
        .map(|id| ("ExternalId", id.as_str()))
        .collect();
    let request = by_keys(region, role.form("AssumeRole", &external), keys)?;
    session(&http.send(StoreKind::Aws, &request).await?)
}

/// Asks who the holder of these keys is, which proves them without a right. Returns the ARN.
pub async fn caller_identity(http: &Http, region: &str, keys: &Keys) -> Result<String, ReadError> {
    let body = format!("Action=GetCallerIdentity&Version={VERSION}");
    let request = by_keys(region, body, keys)?;
    let answer = http.send(StoreKind::Aws, &request).await?;
    let arn = element(&answer, "Arn").filter(|_| answer.is_success());
    arn.map(str::to_owned).ok_or_else(|| refused(&answer))
}

fn by_keys(region: &str, body: String, keys: &Keys) -> Result<Request, ReadError> {
    let scope = Scope {
        region,
        service: SERVICE,
    };
    signed(scope, FORM, &[], body, keys)
}

fn session(answer: &Answer) -> Obtained<Keys> {
    if !answer.is_success() {
        return Err(refused(answer));
    }
    let part = |name| element(answer, name).ok_or_else(|| answer.foreign(StoreKind::Aws));
    let ends = humantime::parse_rfc3339(part("Expiration")?).ok();
    let keys = Keys {
        access_key_id: part("AccessKeyId")?.to_owned(),
        secret_access_key: part("SecretAccessKey")?.into(),
        session_token: Some(part("SessionToken")?.into()),
    };
    Ok((keys, ends))
}

/// The text of an element. None of those that are read has characters that XML escapes.
fn element<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    let (_, rest) = answer.text()?.split_once(&format!("<{name}>"))?;
    let text = rest.split_once("</")?.0.trim();
    (!text.contains('&')).then_some(text)
}

fn refused(answer: &Answer) -> ReadError {
    let code = element(answer, "Code").unwrap_or_default();
    let class = match code {
        "Throttling" | "ThrottlingException" | "IDPCommunicationError" | "ServiceUnavailable" => {
            ErrorClass::Unavailable
        }
        _ if answer.status >= 500 => ErrorClass::Unavailable,
        _ => ErrorClass::CredentialsRejected,
    };
    answer.refused(StoreKind::Aws, class, code)
}
