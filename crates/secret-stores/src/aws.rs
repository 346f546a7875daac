//! AWS Secrets Manager. Its credentials and its signatures are in modules that need no secret.

pub mod credentials;
pub mod request;
pub mod sign;
pub mod sts;

use std::sync::Arc;

use base64::engine::general_purpose::STANDARD;
use secrecy::SecretString;
use serde::Deserialize;
use serde_json::json;

use self::credentials::AwsLogin;
use self::request::signed;
use self::sign::{Keys, Scope, digest};
use crate::error::{ErrorClass, ReadError};
use crate::http::{Answer, Http};
use crate::login::Login;
use crate::reference::StoreKind;
use crate::value::SecretValue;

const MEDIA_TYPE: &str = "application/x-amz-json-1.1";
const TARGET: &str = "secretsmanager.GetSecretValue";
const STORE: StoreKind = StoreKind::Aws;

/// Reads secrets of AWS.
#[derive(Debug)]
pub(crate) struct SecretsManager {
    login: AwsLogin,
    keys: Login<Keys>,
}

/// Which secret is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AwsSecret<'a> {
    pub(crate) id: &'a str,
    pub(crate) region: Option<&'a str>,
    pub(crate) stage: Option<&'a str>,
    pub(crate) version: Option<&'a str>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Value {
    secret_string: Option<SecretString>,
    secret_binary: Option<SecretString>,
}

impl SecretsManager {
    pub(crate) fn new(login: AwsLogin) -> Self {
        Self {
            login,
            keys: Login::default(),
        }
    }

    pub(crate) async fn read(
        &self,
        http: &Http,
        secret: AwsSecret<'_>,
    ) -> Result<SecretValue, ReadError> {
        let obtain = async || self.login.obtain(http).await;
        let attempt = async |keys: &Arc<Keys>| self.read_with(http, secret, keys).await;
        self.keys.with(obtain, attempt).await
    }

    async fn read_with(
        &self,
        http: &Http,
        secret: AwsSecret<'_>,
        keys: &Keys,
    ) -> Result<SecretValue, ReadError> {
        let region = secret.region.unwrap_or(&self.login.region);
        let mut document = json!({ "SecretId": secret.id });
        for (name, value) in [
            ("VersionStage", secret.stage),
            ("VersionId", secret.version),
        ] {
            if let Some(value) = value {
                document[name] = value.into();
            }
        }
        let body = document.to_string();
        let scope = Scope {
            region,
            service: "secretsmanager",
        };
        let digest = digest(body.as_bytes());
        let headers = [("x-amz-content-sha256", &*digest), ("x-amz-target", TARGET)];
        let request = signed(scope, MEDIA_TYPE, &headers, body, keys)?;
        let answer = http.send(STORE, &request).await?;
        if !answer.is_success() {
            return Err(refused(&answer));
        }
        let value: Value = answer.json(STORE)?;
        match (value.secret_string, value.secret_binary) {
            (Some(text), _) => Ok(SecretValue::Text(text)),
            (None, Some(binary)) => SecretValue::of_base64(STORE, &STANDARD, &binary),
            (None, None) => Err(answer.foreign(STORE)),
        }
    }

    /// Proves the login without reading a secret.
    pub(crate) async fn check(&self, http: &Http) -> Result<String, ReadError> {
        let keys = self.keys.get(self.login.obtain(http)).await?;
        sts::caller_identity(http, &self.login.region, &keys).await
    }
}

/// The type of an error is in the document or in a header. The status differs between implementations.
fn refused(answer: &Answer) -> ReadError {
    let document = answer.document();
    let in_document = document
        .as_ref()
        .and_then(|document| document["__type"].as_str());
    let code = in_document
        .or_else(|| answer.header("x-amzn-errortype"))
        .unwrap_or_default();
    let code = code.rsplit('#').next().unwrap_or_default();
    let code = code.split(':').next().unwrap_or_default();
    let class = match code {
        "ResourceNotFoundException" => ErrorClass::NotFound,
        "AccessDeniedException" | "AccessDenied" => ErrorClass::Denied,
        "InvalidRequestException" => ErrorClass::Disabled,
        "DecryptionFailure" => ErrorClass::CannotDecrypt,
        "UnrecognizedClientException"
        | "InvalidSignatureException"
        | "SignatureDoesNotMatch"
        | "InvalidClientTokenId"
        | "IncompleteSignature"
        | "ExpiredToken"
        | "ExpiredTokenException" => ErrorClass::CredentialsRejected,
        "ThrottlingException" | "InternalServiceError" => ErrorClass::Unavailable,
        _ => answer.usual_class(),
    };
    answer.refused(STORE, class, code)
}
